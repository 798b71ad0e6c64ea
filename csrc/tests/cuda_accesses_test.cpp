// Every access of the kernels to shared workspaces, compared with the table protocol/accesses.h:
// what each thread does, in which order, and whether it does it once an operation has failed.
//
// The kernels run over fibers (tests/shim), whose verbs report themselves as the rows of the table
// that they are. Every thread has one row of x at most. What it does is then one of the lists that
// the table has for a thread of its kind; polls are one access however often they are made, and so
// are accesses to several peers and words one after the other.
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "protocol/accesses.h"
#include "tests/cuda_ranks.h"

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

constexpr int kRanks = 2;
constexpr uint32_t kFirstOp = 40;

struct Row {
  std::string part, place, verb, number, when;
};
#define ROW(part, place, verb, number, when, partner) \
  {#part, #place, ALLNORM_PTX(ALLNORM_##verb), #number, #when},
const std::vector<Row> kRows = {ALLNORM_ACCESSES(ROW)};
#undef ROW

enum class State { kHealthy, kFailedNow, kFailedBefore };
const char* name_of(State state) {
  return state == State::kHealthy     ? "nothing has failed"
         : state == State::kFailedNow ? "this operation has failed"
                                      : "an operation before has failed";
}

// One operation of all ranks, by one kernel.
struct Case {
  std::string name;
  std::vector<std::string> send, own, receive;  // parts
  AllnormCall call = {};
  void (*kernel)(const OwnedRowsParams&);
  int64_t workspace_bytes = kWorkspaceBytes;
  uint32_t nan_word = 0;  // that a second hop stores after a failure; 0: NaN of 16 bits
  int operations = 1;
};

bool is_load(const std::string& verb) { return verb.rfind("ld.", 0) == 0; }

// Where an access is. A slot's place follows from its offset in the slots of the operation.
class Places {
 public:
  Places(const FiberGroup& group, const OwnedRowsParams& params, const AllnormCall& call)
      : group_(group), params_(params), call_(call) {}

  // The rank whose workspace it is in, or -1.
  int rank_of(const void* address) const {
    for (size_t rank = 0; rank < group_.workspaces.size(); ++rank) {
      const int64_t at = offset(address, static_cast<int>(rank));
      if (at >= 0 && at < group_.configs[rank].workspace_bytes) return static_cast<int>(rank);
    }
    return -1;
  }
  int64_t offset(const void* address, int rank) const {
    return static_cast<const char*>(address) -
           reinterpret_cast<const char*>(group_.workspaces[static_cast<size_t>(rank)].data());
  }
  // "" where no other rank comes.
  std::string place_of(int64_t at, int64_t slots_begin) const {
    if (at < PushControl::kTags) return "";
    if (at < PushControl::kReleased) return (at - PushControl::kTags) % 16 == 0 ? "tag0" : "tag1";
    if (at < PushControl::kLeft) return "released";
    if (at < PushControl::kBytes) return "probe";
    return slot_place(at - slots_begin);
  }

 private:
  std::string slot_place(int64_t at) const {
    const FusedParams& fused = params_.fused;
    if (call_.op != ALLNORM_ALL_GATHER_ROWS && call_.algorithm == ALLNORM_ONE_SHOT) {
      return "partial";
    }
    if (call_.op != ALLNORM_ALL_GATHER_ROWS && !is_sharded(call_) && !owners_) {
      const PushLayout layout = {kRanks, fused.packs, fused.num_tokens};
      return at < layout.two_shot_sum(0, 0) ? "partial" : "finished";
    }
    const bool gathered = call_.op == ALLNORM_ALL_GATHER_ROWS;
    const bool packed = is_quantized(call_);
    const int scales = packed && !is_nvfp4(call_) ? fused.epilogue.quant.groups : 0;
    const ShardedLayout layout = {kRanks, fused.packs, packed ? 8 : kPackBytes, scales,
                                  (fused.num_tokens + kRanks - 1) / kRanks};
    const int64_t begin = layout.finished(0, 0, gathered);
    if (at < begin) return "partial";
    return (at - begin) % layout.finished_bytes() < layout.finished_scale(0) ? "finished" : "scale";
  }

  const FiberGroup& group_;
  const OwnedRowsParams& params_;
  const AllnormCall& call_;

 public:
  bool owners_ = false;
};

// What one thread has done: "place verb" of each.
using List = std::vector<std::string>;

std::string text_of(const List& list) {
  std::string text;
  for (const std::string& access : list) text += (text.empty() ? "" : ", ") + access;
  return text.empty() ? "nothing" : text;
}

// Adds an access, unless it is another poll, or the same to another peer or word.
void add(List& list, const std::string& place, const std::string& verb) {
  const std::string access = place + " " + verb;
  for (auto last = list.rbegin(); last != list.rend(); ++last) {
    if (*last == access) return;
    if (!is_load(verb) || last->find(" ld.") == std::string::npos) break;
  }
  list.push_back(access);
}

class Expected {
 public:
  Expected(State state, bool large, bool hands_back)
      : state_(state), large_(large), hands_back_(hands_back) {}

  List of(const std::vector<std::string>& parts, bool scales = true,
          bool head_waits = false) const {
    List list;
    add_part(list, "begin", scales);
    for (const Row& row : kRows) {
      const bool waits = row.place == "released";
      if (row.part == "head" && happens(row) && (head_waits || !waits)) add(list, row);
    }
    for (const std::string& part : parts) add_part(list, part, scales);
    return list;
  }

 private:
  void add_part(List& list, const std::string& part, bool scales) const {
    for (const Row& row : kRows) {
      if (row.part != part || !happens(row) || (row.place == "scale" && !scales)) continue;
      add(list, row);
    }
  }
  static void add(List& list, const Row& row) { allnorm::add(list, row.place, row.verb); }
  bool happens(const Row& row) const {
    if (row.when == "large" && !large_) return false;
    if (row.when == "hands_back" && (!hands_back_ || state_ != State::kHealthy)) return false;
    if (row.when == "unless_failed" && state_ != State::kHealthy) return false;
    if (row.when == "unless_failed_before" && state_ == State::kFailedBefore) return false;
    return state_ == State::kHealthy || !is_load(row.verb);
  }

  State state_;
  bool large_, hands_back_;
};

struct Thread {
  List list;
  uint32_t seen_number = 0;  // the last that it has loaded from `released`
};

void test_case(const Case& of, State state, uint64_t seed) {
  Random random(seed);
  FiberGroup group(kRanks, kFirstOp, /*timeout_ns=*/int64_t{1} << 60, of.workspace_bytes);
  Operation op = make_operation(kRanks, random, of.call, !is_quantized(of.call));
  op.cluster_size = 1;
  op.num_blocks = static_cast<int>(of.call.num_tokens) + 1;
  const AllnormCall call = call_of(op, 0);
  if (state != State::kHealthy) {
    const uint64_t failed = 1ull << 32 | (kFirstOp - (state == State::kFailedBefore ? 1 : 0));
    for (auto& workspace : group.workspaces) {
      memcpy(reinterpret_cast<char*>(workspace.data()) + PushControl::kPoisoned, &failed,
             sizeof(failed));
    }
  }

  std::vector<OwnedRowsParams> params;
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto r = static_cast<size_t>(rank);
    params.push_back(owned_rows_params(group.configs[r], call_of(op, rank), 0, call.num_tokens,
                                       &group.faults[r]));
  }
  const FusedParams& fused = params[0].fused;
  Places places(group, params[0], call);
  places.owners_ = of.name.find("owners") != std::string::npos;

  // By operation, rank, block and thread.
  std::map<std::tuple<uint64_t, int, uint32_t, uint32_t>, Thread> threads;
  std::vector<SlotPlace> turns = {{0, fused.units, fused.large != 0}};
  while (static_cast<int>(turns.size()) < of.operations) {
    turns.push_back({turns.back().next(), turns.back().units, turns.back().large});
  }
  uint64_t first_grid = ~uint64_t{0};
  shim::Machine machine(kRanks, seed,
                        seed % 2 == 0 ? shim::Schedule::kRandom : shim::Schedule::kHandBackHeld);
  group.share_with(machine);
  shim::trace([&](const shim::Access& access) {
    first_grid = std::min(first_grid, access.operation);
    const auto index = static_cast<size_t>(access.operation - first_grid);
    const SlotPlace& turn = turns[index];
    const uint32_t number = kFirstOp + static_cast<uint32_t>(index);
    Thread& thread = threads[{index, access.rank, access.block, access.thread}];
    const std::string verb = access.verb;
    if (access.address == nullptr) {
      // Of the barriers of the block the table has the first of a large operation.
      const bool is_barrier = verb == ALLNORM_PTX(ALLNORM_BLOCK_BARRIER);
      const size_t before = thread.list.size();
      const bool at_head = before == 1 || (before == 2 && thread.list[1].rfind("released", 0) == 0);
      if (!is_barrier || (turn.large && at_head)) add(thread.list, "none", verb);
      return;
    }
    const int owner = places.rank_of(access.address);
    if (owner < 0) return;
    const int64_t slots = fused.phases.at(turn.large ? turn.large_phase() : turn.unit());
    const std::string place = places.place_of(places.offset(access.address, owner), slots);
    if (place.empty()) return;
    // Whoever waits for long looks at announcements.
    const bool calls_roll = access.block == 0 && access.thread < 32;
    if (place.rfind("tag", 0) == 0 && is_load(verb) && !calls_roll) return;
    add(thread.list, place, verb);
    const bool goes_to_peer = verb.rfind("st.relaxed", 0) == 0;
    check((owner != access.rank) == goes_to_peer, "%s: rank %d, %s %s, of rank %d", of.name.c_str(),
          access.rank, place.c_str(), verb.c_str(), owner);
    if (place == "released" && goes_to_peer) {
      check(access.value == number, "%s: %llu is handed back in operation %u", of.name.c_str(),
            static_cast<unsigned long long>(access.value), number);
    }
    if (place == "released" && !goes_to_peer) {
      thread.seen_number = static_cast<uint32_t>(access.value);
    }
    if (place == "tag0" || place == "tag1") {
      const auto word = static_cast<uint32_t>(access.value >> (place == "tag0" ? 32 : 56));
      const bool is_own = place == "tag0" ? word == number : word == (number & 0xff);
      check(!goes_to_peer || is_own, "%s: another number is announced", of.name.c_str());
    }
    // Rows that are given are sent as they are.
    const bool second_hop = (place == "scale" || place == "finished") && !of.send.empty();
    if (state == State::kFailedNow && goes_to_peer && second_hop) {
      const auto word = static_cast<uint32_t>(access.value);
      const uint32_t wanted = place == "scale" ? 0x7fff0000u : of.nan_word;
      const bool is_nan = (word & 0x7fff) > 0x7f80 && (word >> 16 & 0x7fff) > 0x7f80;
      check(wanted == 0 ? is_nan : word == wanted, "%s: %s after a failure is %08x, expected %08x",
            of.name.c_str(), place.c_str(), word, wanted);
    }
  });
  for (int i = 0; i < of.operations; ++i) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const OwnedRowsParams& mine = params[static_cast<size_t>(rank)];
      machine.launch(rank, {.num_blocks = static_cast<uint32_t>(op.num_blocks),
                            .num_threads = static_cast<uint32_t>(threads_of(fused.packs, 1)),
                            .kernel = [&mine, &of] { of.kernel(mine); }});
    }
  }
  const bool ended = machine.run(kMaxTurns);
  shim::trace(nullptr);
  if (!check(ended, "%s, %s: does not end", of.name.c_str(), name_of(state))) {
    std::_Exit(result());
  }

  std::map<size_t, std::set<List>> seen_lists;
  for (const auto& [where, thread] : threads) {
    const auto& [index, rank, block, number] = where;
    const SlotPlace& turn = turns[index];
    const Expected expected(state, turn.large, turn.hands_back());
    const bool has_peer = number % 32 >= 1 && number % 32 < kRanks;
    std::vector<List> allowed;
    if (block == 0) {
      const bool serves = has_peer && number < 64;
      const std::vector<std::string> parts = !serves       ? std::vector<std::string>{}
                                             : number < 32 ? std::vector<std::string>{"roll_call"}
                                                           : std::vector<std::string>{"hand_back"};
      allowed = {expected.of(parts, true, number < 32 && has_peer)};
    } else {
      const bool head_waits = number < 32 && has_peer;
      std::vector<std::string> sends_and_receives = of.send;
      sends_and_receives.insert(sends_and_receives.end(), of.receive.begin(), of.receive.end());
      for (const bool scales : {false, true}) {
        // one_shot: everybody sums what everybody sends.
        std::vector<std::string> sums = of.receive.empty() ? of.send : std::vector<std::string>{};
        sums.insert(sums.end(), of.own.begin(), of.own.end());
        allowed.push_back(expected.of(sums, scales, head_waits));
        if (!of.receive.empty()) {
          allowed.push_back(expected.of(sends_and_receives, scales, head_waits));
        }
      }
      for (const List& list : allowed) {
        if (list == thread.list) seen_lists[block == 0 ? 0 : 1].insert(list);
      }
    }
    const bool known = std::find(allowed.begin(), allowed.end(), thread.list) != allowed.end();
    if (!check(known, "%s, %s: rank %d, block %u, thread %u: expected\n  %s\nseen\n  %s",
               of.name.c_str(), name_of(state), rank, block, number,
               text_of(allowed.back()).c_str(), text_of(thread.list).c_str())) {
      return;
    }
    // The wait has ended with the number of the last operation that handed back, or a later one.
    const uint32_t last = kFirstOp + static_cast<uint32_t>(index) - 1 - turn.since();
    const bool waited = state == State::kHealthy && has_peer &&
                        (number / 32 == (block == 0 ? 1 : 0)) && (block == 0 || turn.large);
    if (waited) {
      check(has_reached(thread.seen_number, last), "%s: goes on with the number %u, expected %u",
            of.name.c_str(), thread.seen_number, last);
    }
  }
  // Each kind of thread of a row was there: with scales or, where there are none, without.
  const size_t kinds = of.receive.empty() ? 1 : 2;
  if (state == State::kHealthy) {
    check(seen_lists[1].size() >= kinds, "%s: %zu kinds of threads", of.name.c_str(),
          seen_lists[1].size());
  }
}

AllnormCall call_of_kind(int algorithm, int flags = 0, int quant = ALLNORM_QUANT_NONE) {
  AllnormCall call = {};
  call.struct_bytes = sizeof(call);
  call.op = ALLNORM_ADD_RMS_NORM;
  call.algorithm = algorithm;
  call.flags = flags;
  call.dtype = call.weight_dtype = ALLNORM_BFLOAT16;
  call.eps = 1e-5f;
  call.hidden_size = 512;
  call.num_tokens = 4;
  call.quant = quant;
  if (quant == ALLNORM_QUANT_PER_GROUP) {
    call.group_size = 16;
    call.scale_format = ALLNORM_SCALE_FLOAT32;
  }
  static const float global = 70.0f;
  if (quant == ALLNORM_QUANT_NVFP4) call.global_scale = &global;
  return call;
}

template <template <class, int> class Transport, class Schedule, Grid kGrid,
          template <class> class Source = DenseRows, Features kFeatures = kBasic>
void fused(const OwnedRowsParams& params) {
  run_fused<FusedKernel<Bfloat16, kRanks, Source, Transport, Schedule, kGrid, kFeatures, Plain>>(
      params.fused);
}
template <Owned kOwned, template <class> class Format, Features kFeatures = kBasic>
void owned(const OwnedRowsParams& params) {
  run_owned_rows<OwnedKernel<Bfloat16, kRanks, DenseRows, kOwned, false, kFeatures, Format>>(
      params);
}

std::vector<Case> cases() {
  const std::vector<std::string> send = {"one_shot_send"}, own = {"one_shot_own"};
  const AllnormCall one_shot = call_of_kind(ALLNORM_ONE_SHOT);
  const AllnormCall two_shot = call_of_kind(ALLNORM_TWO_SHOT);
  const int sharded = ALLNORM_RESIDUAL_SHARDED;
  AllnormCall gather = call_of_kind(ALLNORM_TWO_SHOT);
  gather.op = ALLNORM_ALL_GATHER_ROWS;
  const std::vector<std::string> to_owners = {"owners_send"};
  std::vector<Case> all = {
      {"one_shot", send, own, {}, one_shot, &fused<OneShot, OneRowAhead, Grid::kSparse>},
      {"one_shot, paced", send, own, {}, one_shot, &fused<OneShot, Paced, Grid::kDense>},
      {"one_shot, prefetched",
       send,
       own,
       {},
       one_shot,
       &fused<OneShot, Prefetched, Grid::kDense, PrefetchedExpertRows, kExtended>},
      {"one_shot, few blocks", send, own, {}, one_shot, &fused<OneShot, FewBlocks, Grid::kFew>},
      {"two_shot",
       {"two_shot_send"},
       {"two_shot_own"},
       {"two_shot_receive"},
       two_shot,
       &fused<TwoShot, Relayed, Grid::kSparse>},
      {"sums of owners",
       to_owners,
       {"owners_own", "rows_own"},
       {"rows_receive"},
       two_shot,
       &owned<Owned::kSum, Plain>},
      {"finished rows of owners",
       to_owners,
       {"owners_own", "rows_own"},
       {"rows_receive"},
       call_of_kind(ALLNORM_TWO_SHOT, sharded),
       &owned<Owned::kFinished, Plain>},
      {"packed rows of owners",
       to_owners,
       {"owners_own", "packed_own"},
       {"packed_receive"},
       call_of_kind(ALLNORM_TWO_SHOT, sharded, ALLNORM_QUANT_PER_GROUP),
       &owned<Owned::kFinished, E4m3>},
      {"NVFP4 rows of owners",
       to_owners,
       {"owners_own", "packed_own"},
       {"packed_receive"},
       call_of_kind(ALLNORM_TWO_SHOT, sharded, ALLNORM_QUANT_NVFP4),
       &owned<Owned::kFinished, AnyQuantized, kExtendedDense>},
      {"given rows of owners",
       {},
       {"rows_own"},
       {"rows_receive"},
       gather,
       &owned<Owned::kGiven, Plain>},
  };
  for (Case& of : all) {
    if (of.name.rfind("packed", 0) == 0) of.nan_word = kNanE4m3 * 0x01010101u;
    if (of.name.rfind("NVFP4", 0) == 0) of.nan_word = uint32_t{kNanE4m3} << 16;
  }
  // Of an operation that takes a unit, half of a half, a large phase: the first hands slots back,
  // of the first the next does not.
  Case small = all[0], medium = all[0], large = all[0], large_owned = all[6];
  small.name = "small operations", small.operations = 3;
  medium.name = "larger operations", medium.operations = 5, medium.workspace_bytes = 256 << 10;
  large.name = "large operations", large.operations = 3, large.workspace_bytes = 48 << 10;
  large_owned.name += ", large", large_owned.workspace_bytes = 64 << 10;
  for (const Case& of : {small, medium, large, large_owned}) all.push_back(of);
  return all;
}

}  // namespace
}  // namespace allnorm

int main() {
  using namespace allnorm;
  for (const Case& of : cases()) {
    for (uint64_t seed = 1; seed <= 4; ++seed) test_case(of, State::kHealthy, seed);
    // A peek comes before anything is known of a failure.
    if (of.operations > 1 || of.name == "one_shot, few blocks") continue;
    test_case(of, State::kFailedNow, 1);
    test_case(of, State::kFailedBefore, 1);
  }
  return testing::result();
}
