// Compares the accesses of the CPU backend to shared workspaces with the table protocol/accesses.h.
//
// Rank 0 runs one operation. The test simulates rank 1 in the same thread: it acts whenever rank 0
// polls. comm.cpp and transports.cpp are compiled with memory operations that record themselves
// (tests/traced). Rows are accessed with plain loads and stores, which are not recorded, so the
// test infers these accesses from the contents.
#include <cstring>
#include <string>
#include <vector>

#include "cpu/comm.h"
#include "protocol/accesses.h"
#include "tests/testing.h"

namespace allnorm {
namespace {

using testing::check;

constexpr int kRows = 2, kColumns = 8;
constexpr int64_t kRowBytes = kColumns * sizeof(float), kWorkspaceBytes = 1 << 16;
constexpr uint32_t kFirstOp = 12;
constexpr PullLayout kLayout = {.rows = kRows, .row_bytes = kRowBytes};

struct Row {
  std::string part, place, order;
};
#define ROW(part, place, order, partner) {#part, #place, #order},
const std::vector<Row> kAccesses = {ALLNORM_CPU_ACCESSES(ROW)};
#undef ROW
struct Step {
  std::string algorithm, step;
};
#define STEP(algorithm, step) {#algorithm, #step},
const std::vector<Step> kSteps = {ALLNORM_CPU_ALGORITHMS(STEP)};
#undef STEP

using List = std::vector<std::string>;

std::string text_of(const List& list) {
  std::string text;
  for (const std::string& access : list) text += (text.empty() ? "" : ", ") + access;
  return text;
}

// One operation of rank 0, with its recorded accesses and steps.
class Operation {
 public:
  Operation(std::string name, bool asleep) : name_(std::move(name)), asleep_(asleep) {
    for (auto& workspace : workspaces_) workspace.assign(kWorkspaceBytes / 8, 0);
    for (int i = 0; i < kRows * kColumns; ++i) {
      x_[i] = static_cast<float>(1 + i);
      peer_x_[i] = static_cast<float>(1000 + 3 * i);
      peer_sums_[i] = static_cast<float>(-50 - i);
    }
  }

  void run() {
    AllnormCommConfig config = {};
    config.struct_bytes = sizeof(config);
    config.world_size = 2;
    config.workspace_bytes = kWorkspaceBytes;
    config.timeout_ns = int64_t{1} << 40;
    config.first_op = kFirstOp;
    for (int rank = 0; rank < 2; ++rank) config.workspaces[rank] = workspaces_[rank].data();
    CpuCommunicator comm(config);
    publish(0);

    AllnormCall call = {};
    call.struct_bytes = sizeof(call);
    const bool gathers = name_ == "all_gather";
    call.op = gathers ? ALLNORM_ALL_GATHER_ROWS : ALLNORM_ALL_REDUCE;
    call.algorithm = name_ == "one_shot" ? ALLNORM_ONE_SHOT : ALLNORM_TWO_SHOT;
    call.dtype = ALLNORM_FLOAT32;
    call.num_tokens = kRows;
    call.hidden_size = call.x_stride = call.out_stride = kColumns;
    call.x = x_;
    call.out = out_;
    gathers_ = gathers;
    now = this;
    check(comm.run(call) == ALLNORM_OK, "%s: status of the call", name_.c_str());
    record_steps_of_rows();
    now = nullptr;
    if (is_right()) steps_.push_back(name_ == "two_shot" ? "read_sum" : "read_partial");
    compare();
  }

  // Called before each access of rank 0.
  void note(const char* order, const void* address) {
    record_steps_of_rows();
    const int64_t own = offset(address, 0), theirs = offset(address, 1);
    const bool is_own = own >= 0 && own < PullControl::kBytes;
    const int64_t at = is_own ? own : theirs;
    if (at < 0 || at >= PullControl::kBytes) return;
    const std::string place = at == PullControl::kPublished  ? "published"
                              : at == PullControl::kSleepers ? "sleepers"
                              : at == PullControl::kLeft     ? "left"
                                                             : "tag";
    const std::string access = place + " " + order;
    if (accesses_.empty() || accesses_.back() != access) accesses_.push_back(access);
    if (place == "tag" && is_own && (steps_.empty() || steps_.back() != "announce")) {
      steps_.push_back("announce");
    }
    if (place == "published" && is_own) {
      steps_.push_back("publish_" + std::to_string(++published_));
    }
    const bool waits = place == "published" && !is_own;
    if (waits && (asleep_ ? std::strcmp(order, "seq_cst") == 0 : ++polls_ % 2 == 0)) {
      do_step_of_peer(++peer_step_);
    }
  }

  static Operation* now;

 private:
  static constexpr uint32_t kOp = kFirstOp;

  int64_t offset(const void* address, int rank) const {
    return static_cast<const char*>(address) -
           reinterpret_cast<const char*>(workspaces_[rank].data());
  }
  char* at(int rank, int64_t offset) {
    return reinterpret_cast<char*>(workspaces_[rank].data()) + offset;
  }
  char* rows(int rank, int64_t offset) {
    const int64_t phase = PullLayout::phase(kOp, PullLayout::phase_bytes(kWorkspaceBytes));
    return at(rank, phase + offset);
  }
  void publish(int step) {
    const uint32_t number = 2 * kOp + static_cast<uint32_t>(step);
    memcpy(at(1, PullControl::kPublished), &number, sizeof(number));
  }

  // Does a step of rank 1: stores its rows, its tag (a copy of rank 0's), and its number.
  void do_step_of_peer(int step) {
    steps_.push_back("wait_" + std::to_string(step));
    memcpy(at(1, PullControl::tag(kOp)), at(0, PullControl::tag(kOp)), 16);
    if (step == 1) memcpy(rows(1, kLayout.partial(0)), peer_x_, sizeof(peer_x_));
    if (step == 2) memcpy(rows(1, kLayout.sum(0)), peer_sums_, sizeof(peer_sums_));
    publish(step);
  }

  // Records a step of rank 0 once its rows show it. Only rows that rank 1 reads count.
  void record_steps_of_rows() {
    const int row = name_ == "two_shot" ? 1 : 0;
    if (!wrote_partial_ &&
        memcmp(rows(0, kLayout.partial(row)), x_ + row * kColumns, kRowBytes) == 0) {
      wrote_partial_ = true;
      steps_.push_back("write_partial");
    }
    if (name_ != "two_shot" || wrote_sum_) return;
    float sum[kColumns];
    for (int i = 0; i < kColumns; ++i) sum[i] = x_[i] + peer_x_[i];
    if (memcmp(rows(0, kLayout.sum(0)), sum, kRowBytes) != 0) return;
    wrote_sum_ = true;
    steps_.push_back("read_partial");
    steps_.push_back("write_sum");
  }

  bool is_right() const {
    for (int i = 0; i < kRows * kColumns; ++i) {
      const bool second = i >= kColumns;
      const float sum = x_[i] + peer_x_[i];
      const float wanted = gathers_              ? (second ? peer_x_[i - kColumns] : x_[i])
                           : name_ == "two_shot" ? (second ? peer_sums_[i] : sum)
                                                 : sum;
      if (out_[i] != wanted) return false;
    }
    return true;
  }

  void compare() const {
    List steps, accesses;
    for (const Step& step : kSteps) {
      if (step.algorithm != name_) continue;
      steps.push_back(step.step);
      const std::string part = step.step.substr(0, step.step.find('_'));
      add_part(accesses, part);
      if (part != "wait") continue;
      if (asleep_) add_part(accesses, "sleep");
      if (asleep_) accesses.push_back("sleepers seq_cst");
      add_part(accesses, "compare");
    }
    check(steps_ == steps, "%s: steps expected\n  %s\nseen\n  %s", name_.c_str(),
          text_of(steps).c_str(), text_of(steps_).c_str());
    check(accesses_ == accesses, "%s: accesses expected\n  %s\nseen\n  %s", name_.c_str(),
          text_of(accesses).c_str(), text_of(accesses_).c_str());
  }
  static void add_part(List& accesses, const std::string& part) {
    for (const Row& row : kAccesses) {
      if (row.part == part) accesses.push_back(row.place + " " + row.order);
    }
  }

  std::string name_;
  bool asleep_, gathers_ = false;
  std::vector<uint64_t> workspaces_[2];
  float x_[kRows * kColumns], peer_x_[kRows * kColumns], peer_sums_[kRows * kColumns];
  float out_[kRows * kColumns] = {};
  List steps_, accesses_;
  int polls_ = 0, published_ = 0, peer_step_ = 0;
  bool wrote_partial_ = false, wrote_sum_ = false;
};
Operation* Operation::now = nullptr;

}  // namespace

void note_access(const char* order, const void* address) {
  if (Operation::now != nullptr) Operation::now->note(order, address);
}

TEST(accesses) {
  for (const bool asleep : {false, true}) {
    for (const char* name : {"one_shot", "two_shot", "all_gather"}) Operation(name, asleep).run();
  }
}

}  // namespace allnorm
