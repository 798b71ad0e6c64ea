// Tests the probe of new workspaces on simulated GPUs (tests/shim): every rank receives the word of
// every peer. If the stores of one rank to a peer are lost, only that word is missing.
#include <cstring>
#include <vector>

#include "gpu/probe.cuh"
#include "tests/shim/device.h"
#include "tests/testing.h"

namespace allnorm {
namespace {

using testing::check;

void test_probe(int world_size, uint64_t seed, int deaf) {
  const auto count = static_cast<size_t>(world_size);
  std::vector<std::vector<char>> workspaces(count, std::vector<char>(PushControl::kBytes));
  // Where the lost stores go: those of rank `lost` to rank `deaf`, through a broken mapping.
  std::vector<char> nowhere(PushControl::kBytes);
  const int lost = deaf < 0 ? -1 : (deaf + world_size - 1) % world_size;
  shim::Machine machine(world_size, seed);
  for (int rank = 0; rank < world_size; ++rank) {
    machine.share({.owner = rank,
                   .begin = workspaces[static_cast<size_t>(rank)].data(),
                   .bytes = PushControl::kBytes,
                   .flags_begin = PushControl::kReleased,
                   .flags_end = PushControl::kBytes});
    ProbeParams params = {.workspace = {}, .rank = rank, .world_size = world_size};
    for (int peer = 0; peer < world_size; ++peer) {
      const bool is_lost = rank == lost && peer == deaf;
      params.workspace[peer] =
          is_lost ? nowhere.data() : workspaces[static_cast<size_t>(peer)].data();
    }
    machine.launch(rank,
                   {.num_blocks = 1, .num_threads = 32, .exchanges = false, .kernel = [params] {
                      store_probes(params);
                    }});
  }
  if (!check(machine.run(100'000), "%d ranks: does not end", world_size)) return;
  for (int rank = 0; rank < world_size; ++rank) {
    const char* const own = workspaces[static_cast<size_t>(rank)].data();
    for (int peer = 0; peer < kPushMaxWorldSize; ++peer) {
      uint32_t word = 0;
      memcpy(&word, own + PushControl::probe(peer), sizeof(word));
      const bool stores = peer < world_size && peer != rank && !(rank == deaf && peer == lost);
      check(word == (stores ? PushControl::probe_word(peer) : 0u),
            "%d ranks, deaf %d: rank %d has %08x of rank %d", world_size, deaf, rank, word, peer);
    }
    for (int64_t at = 0; at < PushControl::kBytes; ++at) {
      const bool is_probe =
          at >= PushControl::kProbes && at < PushControl::probe(kPushMaxWorldSize);
      if (!is_probe && !check(own[at] == 0, "byte %lld was written", static_cast<long long>(at))) {
        return;
      }
    }
  }
}

TEST(probe) {
  for (int world_size = 2; world_size <= kPushMaxWorldSize; ++world_size) {
    for (uint64_t seed = 0; seed < 3; ++seed) {
      for (int deaf = -1; deaf < world_size; ++deaf) test_probe(world_size, seed, deaf);
    }
  }
}

}  // namespace
}  // namespace allnorm
