"""vLLM's custom all-reduce, followed by its own fused norm or by allnorm's."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

from allnorm.bench.arms import Arm, Reduction
from allnorm.bench.case import Case
from allnorm.bench.peers.base import Peer
from allnorm.testing import copy_all

_WORLD_SIZES = (2, 4, 6, 8)


class Vllm(Peer):
    """Arms of `CustomAllreduce`, at every size; vLLM itself uses NCCL for large inputs.

    In CUDA graphs it reads its peers' partial sums in place; that memory is registered when the
    capture ends. Its norm works in place.
    """

    name = "vllm"
    granule_bytes = 16

    def load(self) -> str:
        """Imports vLLM and looks for its compiled kernels."""
        # Trust the driver's report of peer access; vLLM's own check takes half a minute.
        os.environ.setdefault("VLLM_SKIP_P2P_CHECK", "1")
        from vllm import _custom_ops
        from vllm.distributed.device_communicators import custom_all_reduce

        if not getattr(custom_all_reduce, "custom_ar", True):
            return "its compiled all-reduce does not load"
        self._ops: Any = _custom_ops
        self._class: Any = custom_all_reduce.CustomAllreduce
        return ""

    def open(self) -> str | None:
        """Creates the communicator with buffers for the largest input."""
        setting = self.setting
        if setting.world_size not in _WORLD_SIZES:
            return f"no kernel for {setting.world_size} ranks"
        self._comm = self._class(
            group=setting.group,
            device=setting.device,
            max_size=setting.max_bytes + self.granule_bytes,  # inputs must be smaller than this
        )
        if hasattr(self._comm, "finalize_p2p"):
            self._comm.finalize_p2p()
        return "CustomAllreduce disabled itself" if self._comm.disabled else None

    def reductions(self, case: Case) -> list[Reduction]:
        """Returns the out-of-place all-reduce."""
        xs, reduce = case.xs, self._comm.custom_all_reduce
        return [Reduction(self.name, lambda i: reduce(xs[i]), capturing=self._comm.capture)]

    def fused(self, case: Case) -> list[Arm]:
        """Returns the arm of the all-reduce and vLLM's add + norm kernel."""
        originals = [batch.residual for batch in case.batches]
        residuals, weights = [r.clone() for r in originals], case.unbiased_weights()
        reduction, norm = self.reductions(case)[0], self._ops.fused_add_rms_norm
        eps = case.shape.eps

        def call(index: int) -> Any:
            summed = reduction.call(index)
            norm(summed, residuals[index], weights[index], eps)
            return summed, residuals[index]

        return [replace(reduction.then(call), reset=partial(copy_all, residuals, originals))]

    def close(self) -> None:
        """Frees the shared buffers."""
        self._comm.close()
