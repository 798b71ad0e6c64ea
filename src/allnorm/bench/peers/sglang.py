"""SGLang's fused push kernels, and its custom all-reduce followed by allnorm's norm."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from allnorm.bench import streams
from allnorm.bench.arms import Arm, Reduction
from allnorm.bench.case import Case
from allnorm.bench.modes import Mode
from allnorm.bench.peers.base import Peer, optional_module

_KERNELS = "sglang.kernels.ops.communication"

# In every rank's memory each peer has two slots of this size, and each row has a counter.
_MAX_PUSH_BYTES = 16 << 20
_MAX_PUSH_ROWS = 1024
# With more than two ranks: SGLang's own limit. With 1024 rows its two-shot fails at launch on four
# H200s (0.5.23); on two it runs.
_MAX_PUSH_ROWS_OF_MANY_RANKS = 512


class Sglang(Peer):
    """Arms of `all_reduce_residual_norm`, with its own choice of algorithm and with each of them.

    The kernels push rows, and the data are the flags. They support bfloat16 and widths that are
    multiples of 256, here up to 16 MiB and 1024 rows with two ranks, 512 with more. SGLang itself
    uses them for at most 512 rows and 4 MiB, in decode. For other sizes up to 16 MiB there is an
    arm of its `CustomAllReduceV2`; for larger ones SGLang uses NCCL.

    In CUDA graphs the two-shot algorithm of `CustomAllReduceV2` overwrites the inputs of all ranks,
    which it keeps mapped, with the sum.
    """

    name = "sglang"
    dtypes = (torch.bfloat16,)
    overwrites_inputs = True
    granule_bytes = 16

    def load(self) -> str:
        """Imports SGLang; old versions have only the plain all-reduce."""
        os.environ.setdefault("SGLANG_SKIP_P2P_CHECK", "1")  # the check takes half a minute
        from sglang.srt.distributed.device_communicators import custom_all_reduce_v2

        self._class: Any = custom_all_reduce_v2.CustomAllReduceV2
        self._mhc = optional_module(f"{_KERNELS}.all_reduce_mhc")
        fusion = optional_module(f"{_KERNELS}.all_reduce_fusion")
        self._fusion: Any = fusion if hasattr(fusion, "all_reduce_residual_norm") else None
        return ""

    def open(self) -> str | None:
        """Creates a communicator for the plain all-reduce and one for the fused kernel."""
        setting = self.setting
        self._comm = self._class(setting.group, setting.device)
        if self._comm.disabled:
            return "CustomAllReduceV2 disabled itself"
        if getattr(self._comm, "has_multicast", False):
            return "its memory uses NVLink multicast"
        if self._fusion is None:
            return None
        # The fused kernel has a counter per row; the plain all-reduce uses the same ones per block.
        self._push = self._class(
            setting.group,
            setting.device,
            max_pull_size=0,
            max_pull_blocks=0,
            max_push_size=min(_MAX_PUSH_BYTES, setting.max_bytes),
            max_push_blocks=min(self._max_rows(), setting.max_tokens),
        )
        if self._push.disabled:
            return "CustomAllReduceV2 disabled itself"
        self._fusion.register_comm(self._push.obj)
        return None

    def fused(self, case: Case) -> list[Arm]:
        """Returns the arms of the fused kernel, for shapes that it supports."""
        if (
            not self._can_push(case)
            or case.shape.weight_bias not in (0.0, 1.0)
            or not self._fusion.valid_cluster_sizes(case.shape.hidden_size)
        ):
            return []
        choices = {"": None, ":one_shot": False, ":two_shot": True}
        return self.variants(partial(self._call, case), choices)

    def streams(self, case: Case, mode: Mode) -> list[Arm]:
        """Returns the arm of the kernel that mixes four streams, which is built for one width.

        The kernel sums experts' rows: each row of x is the only expert of a token, with weight 1.
        It also stores the reduced sum.
        """
        rows, columns = case.xs[0].shape
        if self._mhc is None or columns != self._mhc._MHC_HIDDEN_DIM or not self._can_push(case):
            return []
        index = torch.arange(rows, device=case.device, dtype=torch.int32)
        ones = torch.ones(rows, 1, device=case.device)
        run, ranks = self._mhc.moe_finalize_all_reduce_mhc_post, case.world_size

        def call(
            number: int, residual: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
        ) -> torch.Tensor:
            given = (case.xs[number], index, ones, 1, None, residual, post, mix)
            mixed: torch.Tensor = run(*given, world_size=ranks)[1]
            return mixed

        return [streams.of_peer(case, mode, self.name, call)]

    def reductions(self, case: Case) -> list[Reduction]:
        """Returns the plain all-reduce, for sizes at which SGLang does not use NCCL."""
        if not self._comm.should_custom_ar(case.xs[0]):
            return []
        xs, reduce = case.xs, self._comm.custom_all_reduce
        return [Reduction(self.name, lambda i: reduce(xs[i]), capturing=self._comm.capture)]

    def _can_push(self, case: Case) -> bool:
        """Returns whether the fused kernels exist, and support this number of rows and bytes."""
        num_bytes = case.xs[0].numel() * case.dtype.itemsize
        fits = num_bytes <= _MAX_PUSH_BYTES and case.shape.num_tokens <= self._max_rows()
        return self._fusion is not None and fits

    def _max_rows(self) -> int:
        return _MAX_PUSH_ROWS if self.setting.world_size == 2 else _MAX_PUSH_ROWS_OF_MANY_RANKS

    def _call(self, case: Case, two_shot: bool | None) -> Any:
        run = self._fusion.all_reduce_residual_norm
        eps, gemma = case.shape.eps, case.shape.weight_bias

        def call(index: int) -> Any:
            batch = case.batches[index]
            return run(
                case.xs[index],
                batch.residual,
                batch.weight,
                eps,
                world_size=case.world_size,
                gemma=bool(gemma),
                residual_out=torch.empty_like(batch.residual),
                two_shot=two_shot,
            )

        return call

    def close(self) -> None:
        """Frees the shared buffers."""
        self._comm.close()
        if self._fusion is not None:
            self._push.close()
