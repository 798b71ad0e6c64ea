// The probe of a new workspace: each rank stores one word into every peer's workspace. A mapping
// can exist although stores through it are lost (IOMMU, PCIe ACS, some drivers).
//
// Contract: a workspace holds zeros when its handle is sent to the peers. Only the peer `source`
// writes PushControl::probe(source), once. The owner reads the words after all ranks have stored
// (Rendezvous.agree orders the two steps) and before comm_create() initializes the control block.
#pragma once

#include "gpu/params.h"
#include "memory.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// Stores the probe words, one thread per peer. The stores are complete when the kernel ends.
__device__ __forceinline__ void store_probes(const ProbeParams& params) {
  const int peer = static_cast<int>(threadIdx.x);
  if (ALLNORM_FAULT(last_peer_not_probed, peer + 1, peer) >= params.world_size ||
      peer == params.rank)
    return;
  store_relaxed_sys(
      params.workspace[peer] + PushControl::probe(params.rank),
      PushControl::probe_word(ALLNORM_FAULT(probe_word_of_another, peer, params.rank)));
}

}  // namespace allnorm
