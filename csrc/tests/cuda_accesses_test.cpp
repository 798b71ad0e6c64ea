// Compares the accesses of the CUDA kernels to shared workspaces with the table
// protocol/accesses.h: each thread's accesses in order, and those it skips after a failure.
//
// The kernels run on simulated GPUs (tests/shim), which record every access. Each thread handles at
// most one row. Repeated polls count once, as do consecutive accesses to multiple peers or words.
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "protocol/accesses.h"
#include "tests/cuda_ranks.h"

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test
using List = std::vector<std::string>;

constexpr int kRanks = 2;
constexpr uint32_t kFirstOp = 40;

struct Row {
  std::string part, place, verb, number, when;
};
#define ROW(part, place, verb, number, when, partner) \
  {#part, #place, ALLNORM_PTX(ALLNORM_##verb), #number, #when},
const std::vector<Row> kRows = {ALLNORM_ACCESSES(ROW)};
#undef ROW

bool is_load(const std::string& verb) { return verb.rfind("ld.", 0) == 0; }
bool is_push(const std::string& verb) { return verb.rfind("st.relaxed", 0) == 0; }

enum class State { kHealthy, kFailedNow, kFailedBefore };
const char* const kStates[] = {"no failure", "failure in this operation",
                               "failure in an earlier operation"};

// The parts of the table for threads with rows: `send` for every row, then `own` if this rank owns
// the row, else `receive`. If `receive` is empty, every thread runs `send` and `own`.
struct Parts {
  List send, own, receive;
};
const Parts kOneShot = {{"one_shot_send"}, {"one_shot_own"}, {}};
const Parts kTwoShot = {{"two_shot_send"}, {"two_shot_own"}, {"two_shot_receive"}};
const Parts kSumsOfOwners = {{"owners_send"}, {"owners_own", "rows_own"}, {"rows_receive"}};
const Parts kPackedRows = {{"owners_send"}, {"owners_own", "packed_own"}, {"packed_receive"}};
const Parts kKeptRows = {{"owners_send"}, {"owners_own"}, {"no_part"}};
const Parts kGivenRows = {{}, {"rows_own"}, {"rows_receive"}};

// Consecutive operations of all ranks with the same kernel.
struct Case {
  std::string name;
  const Parts& parts;
  AllnormCall call;
  void (*kernel)(const OwnedRowsParams&);
  uint32_t nan_word = 0;  // stored by the second hop after a failure; 0: any 16-bit NaN
  int operations = 1;
  int64_t workspace_bytes = kWorkspaceBytes;
  int rows_per_block = 1;  // more than one: by teams
};

struct Thread {
  List list;            // "place verb" of each access
  uint32_t number = 0;  // the last number loaded from `released`
};

// Adds an access, unless it repeats a poll, or the previous access with a different peer or word.
void add(List& list, const std::string& place, const std::string& verb) {
  const std::string access = place + " " + verb;
  for (auto last = list.rbegin(); last != list.rend(); ++last) {
    if (*last == access) return;
    if (!is_load(verb) || last->find(" ld.") == std::string::npos) break;
  }
  list.push_back(access);
}

std::string text_of(const List& list) {
  std::string text;
  for (const std::string& access : list) text += "\n    " + access;
  return text;
}

class Run {
 public:
  Run(const Case& of, State state, uint64_t seed)
      : of_(of), state_(state), group_(kRanks, kFirstOp, int64_t{1} << 60, of.workspace_bytes) {
    Random random(seed);
    Operation op = make_operation(kRanks, random, of.call, !is_quantized(of.call));
    std::vector<OwnedRowsParams> params;
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto r = static_cast<size_t>(rank);
      params.push_back(owned_rows_params(group_.configs[r], call_of(op, rank), 0,
                                         of.call.num_tokens, &group_.faults[r]));
      if (state == State::kHealthy) continue;
      group_.fail_in(rank, kFirstOp - (state == State::kFailedBefore ? 1 : 0));
    }
    params_ = params[0];
    slots_ = {{0, params_.fused.units, params_.fused.large != 0}};
    while (static_cast<int>(slots_.size()) < of.operations) {
      slots_.push_back({slots_.back().next(), slots_.back().units, slots_.back().large});
    }

    const auto schedule = seed % 2 == 0 ? shim::Schedule::kRandom : shim::Schedule::kHandBackHeld;
    shim::Machine machine(kRanks, seed, schedule);
    group_.share_with(machine);
    shim::trace([this](const shim::Access& access) { record(access); });
    const int packs = params_.fused.packs, threads = threads_of(packs, 1);
    const int shared_bytes = of.rows_per_block == 1 ? 0 : team_shared_bytes(packs, threads, 8);
    for (int i = 0; i < kRanks * of.operations; ++i) {
      const OwnedRowsParams& mine = params[static_cast<size_t>(i % kRanks)];
      machine.launch(
          i % kRanks,
          {.num_blocks = static_cast<uint32_t>(of.call.num_tokens / of.rows_per_block + 1),
           .num_threads = static_cast<uint32_t>(threads),
           .dynamic_shared_bytes = static_cast<uint32_t>(shared_bytes),
           .kernel = [&mine, &of] { of.kernel(mine); }});
    }
    run_to_end(machine, name(), seed);
    shim::trace(nullptr);
  }

  void compare() const {
    std::set<List> kinds;
    for (const auto& [where, thread] : threads_) {
      const auto& [index, rank, block, number] = where;
      const bool has_peer = number % 32 >= 1 && number % 32 < kRanks;
      const std::vector<List> allowed = lists_of(index, block, number, has_peer);
      const bool known = std::find(allowed.begin(), allowed.end(), thread.list) != allowed.end();
      if (!check(known, "%s, %s: rank %d, block %u, thread %u: expected%s\n  seen%s", name(),
                 kStates[static_cast<int>(state_)], rank, block, number,
                 text_of(allowed.back()).c_str(), text_of(thread.list).c_str())) {
        return;
      }
      if (block != 0) kinds.insert(thread.list);
      // A wait ends with the number of the last operation that returned slots, or with a later
      // number.
      const SlotPlace& slots = slots_[index];
      const bool waits = block == 0 ? number / 32 == 1 : number < 32 && slots.large;
      const uint32_t last = kFirstOp + static_cast<uint32_t>(index) - 1 - slots.since();
      check(state_ != State::kHealthy || !has_peer || !waits || has_reached(thread.number, last),
            "%s: continues after a number that is too small: %u, expected %u", name(),
            thread.number, last);
    }
    check(state_ != State::kHealthy || kinds.size() >= (of_.parts.receive.empty() ? 1 : 2),
          "%s: %zu kinds of threads have rows", name(), kinds.size());
  }

 private:
  const char* name() const { return of_.name.c_str(); }
  char* workspace(int rank) {
    return reinterpret_cast<char*>(group_.workspaces[static_cast<size_t>(rank)].data());
  }

  void record(const shim::Access& access) {
    if (std::string_view(access.verb) == "prefetch") return;  // not an access of memory's contents
    first_grid_ = std::min(first_grid_, access.operation);
    const auto index = static_cast<size_t>(access.operation - first_grid_);
    Thread& thread = threads_[{index, access.rank, access.block, access.thread}];
    const std::string verb = access.verb;
    if (access.address == nullptr) {
      // The table lists only one block barrier: the first one of a large operation.
      const size_t before = thread.list.size();
      const bool waited = before == 2 && thread.list[1].rfind("released", 0) == 0;
      const bool at_head = slots_[index].large && (before == 1 || waited);
      if (verb != ALLNORM_PTX(ALLNORM_BLOCK_BARRIER) || at_head) add(thread.list, "none", verb);
      return;
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      const int64_t at = static_cast<const char*>(access.address) - workspace(rank);
      if (at < PushControl::kTags || at >= of_.workspace_bytes) continue;
      const std::string place = place_of(at, slots_[index]);
      // Long waits also load announcements.
      const bool calls_roll = access.block == 0 && access.thread < 32;
      if (place.rfind("tag", 0) == 0 && is_load(verb) && !calls_roll) return;
      add(thread.list, place, verb);
      if (place == "released") thread.number = static_cast<uint32_t>(access.value);
      check((rank != access.rank) == is_push(verb), "%s: rank %d, %s, of rank %d; seen %s", name(),
            access.rank, place.c_str(), rank, verb.c_str());
      if (is_push(verb)) check_value(place, access.value, kFirstOp + static_cast<uint32_t>(index));
    }
  }

  // Checks a value that is pushed in operation `op`.
  void check_value(const std::string& place, uint64_t value, uint32_t op) const {
    const auto word = static_cast<uint32_t>(value);
    bool right = true;
    if (place == "released") right = word == op;
    if (place == "tag0") right = value >> 32 == op;
    if (place == "tag1") right = value >> 56 == (op & 0xff);
    if (state_ == State::kFailedNow && !of_.parts.send.empty()) {
      if (place == "scale") right = word == 0x7fff0000u;
      if (place == "finished" && of_.nan_word != 0) right = word == of_.nan_word;
      if (place == "finished" && of_.nan_word == 0) {
        right = (word & 0x7fff) > 0x7f80 && (word >> 16 & 0x7fff) > 0x7f80;
      }
    }
    check(right, "%s: operation %u, %s: seen %llx", name(), op, place.c_str(),
          static_cast<unsigned long long>(value));
  }

  std::string place_of(int64_t at, const SlotPlace& slots) const {
    if (at < PushControl::kReleased) return (at - PushControl::kTags) % 16 == 0 ? "tag0" : "tag1";
    if (at < PushControl::kBytes) return at < PushControl::kLeft ? "released" : "probe";
    const FusedParams& fused = params_.fused;
    at -= fused.phases.at(slots.large ? slots.large_phase() : slots.unit());
    if (&of_.parts == &kOneShot) return "partial";
    if (&of_.parts == &kTwoShot) {
      const PushLayout layout = {kRanks, fused.packs, fused.num_tokens};
      return at < layout.two_shot_sum(0, 0) ? "partial" : "finished";
    }
    const bool packed = is_quantized(of_.call), gathered = &of_.parts == &kGivenRows;
    const int scales = packed && !is_nvfp4(of_.call) ? fused.epilogue.quant.groups : 0;
    const ShardedLayout layout = {kRanks, fused.packs, packed ? 8 : kPackBytes, scales,
                                  (fused.num_tokens + kRanks - 1) / kRanks};
    at -= layout.finished(0, 0, gathered);
    if (at < 0) return "partial";
    return at % layout.finished_bytes() < layout.finished_scale(0) ? "finished" : "scale";
  }

  // Returns the allowed lists of a thread: with and without scales to store or wait for.
  std::vector<List> lists_of(size_t index, uint32_t block, uint32_t number, bool has_peer) const {
    const SlotPlace& slots = slots_[index];
    const bool head_waits = number < 32 && has_peer;
    if (block == 0) {
      List parts;
      if (has_peer && number < 64) parts = {number < 32 ? "roll_call" : "hand_back"};
      return {list_of(slots, parts, head_waits, true)};
    }
    List sends = of_.parts.send, sums = of_.parts.own;
    List& first = of_.parts.receive.empty() ? sums : sends;
    if (of_.parts.receive.empty()) {
      first.insert(first.begin(), of_.parts.send.begin(), of_.parts.send.end());
    } else {
      first.insert(first.end(), of_.parts.receive.begin(), of_.parts.receive.end());
    }
    std::vector<List> lists;
    for (const bool scales : {false, true}) {
      lists.push_back(list_of(slots, sums, head_waits, scales));
      if (!of_.parts.receive.empty()) lists.push_back(list_of(slots, sends, head_waits, scales));
    }
    return lists;
  }
  List list_of(const SlotPlace& slots, List parts, bool head_waits, bool scales) const {
    parts.insert(parts.begin(), {"begin", "head"});
    List list;
    for (const std::string& part : parts) {
      for (const Row& row : kRows) {
        const bool left_out = (row.place == "scale" && !scales) ||
                              (part == "head" && row.place == "released" && !head_waits);
        if (row.part == part && happens(row, slots) && !left_out) add(list, row.place, row.verb);
      }
    }
    return list;
  }
  bool happens(const Row& row, const SlotPlace& slots) const {
    const bool healthy = state_ == State::kHealthy;
    if (row.when == "large") return slots.large && (healthy || !is_load(row.verb));
    if (row.when == "hands_back") return slots.hands_back() && healthy;
    if (row.when == "unless_failed") return healthy;
    if (row.when == "unless_failed_before") return state_ != State::kFailedBefore;
    return healthy || !is_load(row.verb);
  }

  const Case& of_;
  State state_;
  FiberGroup group_;
  OwnedRowsParams params_;  // rank 0's parameters
  std::vector<SlotPlace> slots_;
  uint64_t first_grid_ = ~uint64_t{0};
  // Keyed by operation, rank, block and thread.
  std::map<std::tuple<size_t, int, uint32_t, uint32_t>, Thread> threads_;
};

template <template <class, int> class Transport, class Schedule, Grid kGrid,
          template <class> class Source = DenseRows, Features kFeatures = kBasic>
void fused(const OwnedRowsParams& params) {
  run_fused<FusedKernel<Bfloat16, kRanks, Source, Transport, Schedule, kGrid, kFeatures, Plain>>(
      params.fused);
}
void teams(const OwnedRowsParams& params) {
  run_team_rows<TeamKernel<Bfloat16, kRanks, Plain>>(params.fused);
}
template <Owned kOwned, template <class> class Format, Features kFeatures = kBasic>
void owned(const OwnedRowsParams& params) {
  run_owned_rows<OwnedKernel<Bfloat16, kRanks, DenseRows, kOwned, false, kFeatures, Format>>(
      params);
}

std::vector<Case> cases() {
  const AllnormCall one_shot = norm_call(ALLNORM_ONE_SHOT, 4, 512);
  const AllnormCall two_shot = norm_call(ALLNORM_TWO_SHOT, 4, 512);
  const auto sharded = [](int quant) {
    return norm_call(ALLNORM_TWO_SHOT, 4, 512, ALLNORM_RESIDUAL_SHARDED, quant, 16);
  };
  AllnormCall gather = two_shot;
  gather.op = ALLNORM_ALL_GATHER_ROWS;
  const auto one_row_ahead = &fused<OneShot, OneRowAhead, Grid::kSparse>;
  const auto prefetched =
      &fused<OneShot, Prefetched, Grid::kDense, PrefetchedExpertRows, kExtended>;
  const auto finished = &owned<Owned::kFinished, Plain>;
  const auto nvfp4 = &owned<Owned::kFinished, AnyQuantized, kExtendedDense>;
  const AllnormCall finished_rows = sharded(ALLNORM_QUANT_NONE);
  AllnormCall kept = sharded(ALLNORM_QUANT_PER_GROUP);
  kept.flags |= ALLNORM_NO_GATHER;
  constexpr uint32_t kE4m3Nans = kNanE4m3 * 0x01010101u, kNvFp4Nan = uint32_t{kNanE4m3} << 16;
  return {
      {"one row ahead", kOneShot, one_shot, one_row_ahead},
      {"paced", kOneShot, one_shot, &fused<OneShot, Paced, Grid::kDense>},
      {"prefetched", kOneShot, one_shot, prefetched},
      {"few blocks", kOneShot, one_shot, &teams, 0, 1, kWorkspaceBytes, /*rows_per_block=*/2},
      {"two_shot", kTwoShot, two_shot, &fused<TwoShot, Relayed, Grid::kSparse>},
      {"sums of owners", kSumsOfOwners, two_shot, &owned<Owned::kSum, Plain>},
      {"finished rows", kSumsOfOwners, finished_rows, finished},
      {"packed rows", kPackedRows, sharded(ALLNORM_QUANT_PER_GROUP), &owned<Owned::kFinished, E4m3>,
       kE4m3Nans},
      {"NVFP4 rows", kPackedRows, sharded(ALLNORM_QUANT_NVFP4), nvfp4, kNvFp4Nan},
      {"kept rows", kKeptRows, kept, &owned<Owned::kFinished, E4m3>},
      {"given rows", kGivenRows, gather, &owned<Owned::kGiven, Plain>},
      // The first operation and large operations return slots. Later operations that take a unit do
      // not.
      {"small operations", kOneShot, one_shot, one_row_ahead, 0, 3},
      {"larger operations", kOneShot, one_shot, one_row_ahead, 0, 5, 256 << 10},
      {"large operations", kOneShot, one_shot, one_row_ahead, 0, 3, 48 << 10},
      {"one large operation", kSumsOfOwners, finished_rows, finished, 0, 1, 64 << 10},
  };
}

TEST(accesses) {
  for (const Case& of : cases()) {
    for (uint64_t seed = 1; seed <= 4; ++seed) Run(of, State::kHealthy, seed).compare();
    if (of.operations > 1) continue;
    for (const State state : {State::kFailedNow, State::kFailedBefore}) Run(of, state, 1).compare();
  }
}

}  // namespace
}  // namespace allnorm
