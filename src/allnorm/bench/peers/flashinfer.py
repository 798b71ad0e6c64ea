"""FlashInfer's all-reduce + residual add + RMSNorm (+ FP8), and its all-reduce + stream mixing.

All reductions run on its `trtllm` kernels. The other backends, which "auto" may choose, use NVLink
multicast. The unified API is therefore bypassed: a lower-level function creates the workspace in
plain shared memory, and the calls use the matching kernel function. Both have the same arguments in
versions 0.3 to 0.7, except a few that were added later.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import allnorm
from allnorm.bench import streams
from allnorm.bench.arms import Arm
from allnorm.bench.case import Case
from allnorm.bench.modes import Mode
from allnorm.bench.peers.base import Peer, optional_module

_WORLD_SIZES = (2, 4, 8)
_ACCESS_BYTES = 16
_CREATE = "trtllm_create_ipc_workspace_for_all_reduce_fusion"
_CALL = "trtllm_allreduce_fusion"
_NORM = "kARResidualRMSNorm"


class FlashInfer(Peer):
    """Arms with FlashInfer's own choice of one-shot or two-shot, and with each of them.

    The arguments are those that vLLM and SGLang pass: float32 accumulation, programmatic dependent
    launch, and completion triggered at the end.
    """

    name = "flashinfer"

    def load(self) -> str:
        """Imports flashinfer.comm and compiles its kernels, unless they are in its cache."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from flashinfer import comm
            from flashinfer.comm import trtllm_ar

        absent = [part for part in (_CREATE, _CALL) if not hasattr(trtllm_ar, part)]
        if absent:
            return f"this version has no {absent[0]}"
        trtllm_ar.get_trtllm_comm_module()
        self._create: Callable[..., Any] = getattr(trtllm_ar, _CREATE)
        self._fusion: Callable[..., Any] = getattr(trtllm_ar, _CALL)
        self._patterns: Any = comm.AllReduceFusionPattern
        self._mhc = optional_module("flashinfer.mhc")  # missing before 0.7
        self._parameters = inspect.signature(self._fusion).parameters
        return ""

    def open(self) -> str | None:
        """Creates the workspace, large enough for one-shot at every shape."""
        setting = self.setting
        if setting.world_size not in _WORLD_SIZES:
            return f"no kernel for {setting.world_size} ranks"
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            # Old versions print pointers here, new ones warn of a deprecation.
            warnings.simplefilter("ignore")
            created = self._create(
                tp_rank=setting.rank,
                tp_size=setting.world_size,
                max_token_num=-(-setting.max_elems // setting.max_hidden_size),
                hidden_dim=setting.max_hidden_size,
                use_fp32_lamport=setting.dtype == torch.float32,
                group=setting.group,
            )
        self._handles, self._workspace = created[0], created[1]
        return None

    def supports(self, case: Case, mode: Mode) -> str:
        """Returns why not: rows must be multiples of 16 bytes; old versions lack weight_bias."""
        if (
            not case.shape.num_tokens
            or case.shape.hidden_size * case.dtype.itemsize % _ACCESS_BYTES
        ):
            return f"no kernel for {case.shape}"
        if case.shape.weight_bias and "weight_bias" not in self._parameters:
            return "this version has no weight_bias"
        return ""

    def fused(self, case: Case) -> list[Arm]:
        """Returns the arms of the fused norm."""
        return self._arms(case, Mode(), getattr(self._patterns, _NORM))

    def fused_quant(self, case: Case, mode: Mode) -> list[Arm]:
        """Returns the arms of the fused norm and quantization, if the mode has a kernel."""
        pattern = self._quant_pattern(case, mode)
        return [] if pattern is None else self._arms(case, mode, pattern)

    def streams(self, case: Case, mode: Mode) -> list[Arm]:
        """Returns an arm of the plain all-reduce, then the kernel that mixes four streams."""
        if self._mhc is None or case.dtype != torch.bfloat16:
            return []
        mix, fusion = self._mhc.mhc_post, self._fusion
        common = self._common(case, self._patterns.kAllReduce, None) | dict.fromkeys(
            ("residual_in", "residual_out", "norm_out", "rms_gamma", "quant_out", "scale_out")
        )

        def call(
            index: int, residual: torch.Tensor, post: torch.Tensor, factors: torch.Tensor
        ) -> torch.Tensor:
            x = case.xs[index]
            reduced = torch.empty_like(x)
            fusion(allreduce_in=x, allreduce_out=reduced, **common)
            mixed: torch.Tensor = mix(reduced, residual, post, factors)
            return mixed

        return [streams.of_peer(case, mode, f"{self.name}+mix", call)]

    def _arms(self, case: Case, mode: Mode, pattern: int) -> list[Arm]:
        choices: dict[str, bool | None] = {"": None, ":one_shot": True}
        if case.shape.num_tokens > case.world_size:  # asserted by FlashInfer's two-shot
            choices[":two_shot"] = False
        return self.variants(partial(self._call, case, mode, pattern), choices)

    def _quant_pattern(self, case: Case, mode: Mode) -> int | None:
        """Returns the id of the kernel that quantizes as in the mode, if there is one."""
        spec = case.spec(mode.quant)
        if isinstance(spec, allnorm.Fp8PerTensor):
            kind = "FP8Quant"
        elif isinstance(spec, allnorm.Fp8PerToken):
            kind = "DynamicFP8Quant"
        elif (
            isinstance(spec, allnorm.Fp8PerGroup)
            and spec.scale_format == "ue8m0_packed"
            and "block_quant_group_size" in self._parameters
        ):
            kind = "PerTokenGroupFP8PackedQuant"
        else:
            return None
        name = f"{_NORM}{'Out' if mode.return_normed else ''}{kind}"
        pattern: int | None = getattr(self._patterns, name, None)
        return pattern

    def _call(
        self, case: Case, mode: Mode, pattern: int, one_shot: bool | None
    ) -> Callable[[int], Any]:
        spec, fusion = case.spec(mode.quant), self._fusion
        static = spec.scale if isinstance(spec, allnorm.Fp8PerTensor) else None
        rows, columns = case.xs[0].shape
        common = self._common(case, pattern, one_shot) | {"scale_factor": static}
        if isinstance(spec, allnorm.Fp8PerGroup):
            common["block_quant_group_size"] = spec.group_size

        def call(index: int) -> Any:
            x, batch, quantized, scale = case.xs[index], case.batches[index], None, static
            residual = torch.empty_like(x)
            normed = torch.empty_like(x) if spec is None or mode.return_normed else None
            if spec is not None:
                quantized = torch.empty_like(x, dtype=torch.float8_e4m3fn)
                if static is None:
                    scale = allnorm.quant.empty_scale(spec, rows, columns, x.device)
            fusion(
                allreduce_in=x,
                allreduce_out=None,
                residual_in=batch.residual,
                residual_out=residual,
                norm_out=normed,
                rms_gamma=batch.weight,
                quant_out=quantized,
                scale_out=None if scale is static else scale,
                **common,
            )
            if quantized is None or scale is None:
                return normed, residual
            return allnorm.QuantizedNorm(quantized, scale, residual, normed)

        return call

    def _common(self, case: Case, pattern: int, one_shot: bool | None) -> dict[str, Any]:
        """Returns the arguments that are the same for every buffer set."""
        bias = case.shape.weight_bias
        rows, columns = case.xs[0].shape
        return {
            "world_size": case.world_size,
            "world_rank": case.rank,
            "token_num": rows,
            "hidden_dim": columns,
            "workspace_ptrs": self._workspace,
            "launch_with_pdl": True,
            "trigger_completion_at_end": True,
            "fp32_acc": True,
            "pattern_code": pattern,
            "use_oneshot": one_shot,
            "rms_eps": case.shape.eps,
            "scale_factor": None,
            "layout_code": None,
            **({"weight_bias": bias} if bias else {}),
        }
