"""PyTorch's symmetric memory: one-shot and two-shot all-reduce, without multicast."""

from __future__ import annotations

import torch

from allnorm.bench.arms import Reduction
from allnorm.bench.case import NUM_SETS, Case
from allnorm.bench.peers.base import Peer
from allnorm.testing import copy_all


class SymmMem(Peer):
    """Arms of `one_shot_all_reduce` and `two_shot_all_reduce_`, each followed by a local norm.

    The partial sums are in symmetric memory, where the GEMM before a call writes them. No copy is
    timed.
    """

    name = "symm_mem"
    dtypes = (torch.bfloat16, torch.float32)
    granule_bytes = 4

    def load(self) -> str:
        """Looks for the operators."""
        import torch.distributed._symmetric_memory as memory

        self._memory = memory
        ops = ("one_shot_all_reduce", "two_shot_all_reduce_")
        absent = [op for op in ops if not hasattr(torch.ops.symm_mem, op)]
        return f"this torch has no symm_mem.{absent[0]}" if absent else ""

    def open(self) -> str | None:
        """Allocates and shares a buffer per buffer set."""
        setting = self.setting
        self._group_name = setting.group.group_name
        self._buffers = [
            self._memory.empty(setting.max_elems, dtype=setting.dtype, device=setting.device)
            for _ in range(NUM_SETS)
        ]
        handles = [
            self._memory.rendezvous(buffer, group=self._group_name) for buffer in self._buffers
        ]
        multicast = any(getattr(handle, "multicast_ptr", 0) for handle in handles)
        return "its memory uses NVLink multicast" if multicast else None

    def reductions(self, case: Case) -> list[Reduction]:
        """Returns both algorithms, on views of the shared buffers."""
        shape, group_name = case.xs[0].shape, self._group_name
        inputs = [buffer[: shape.numel()].view(shape) for buffer in self._buffers]
        one_shot = torch.ops.symm_mem.one_shot_all_reduce.default
        two_shot = torch.ops.symm_mem.two_shot_all_reduce_.default

        def reset() -> None:
            # Peers read this memory. Their kernels start only after this rank's kernel has started,
            # and this rank's kernel ends only after all ranks have read.
            copy_all(inputs, case.xs)

        def by_one_shot(index: int) -> torch.Tensor:
            return one_shot(inputs[index], "sum", group_name)

        def by_two_shot(index: int) -> torch.Tensor:
            return two_shot(inputs[index], "sum", group_name)

        return [
            Reduction(f"{self.name}:one_shot", by_one_shot, reset, inputs=inputs),
            Reduction(f"{self.name}:two_shot", by_two_shot, reset, inputs=inputs),
        ]

    def close(self) -> None:
        """Drops the buffers."""
        self._buffers = []
