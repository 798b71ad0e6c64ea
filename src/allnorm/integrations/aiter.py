"""Fused calls with the signatures of AITER, AMD's library of operators.

`AiterCalls` stands in for `CustomAllreduce` of `aiter.dist.device_communicators.custom_all_reduce`
where an engine makes its fused calls. Signatures are those of AITER's main branch, November 2026.
Nothing of AITER is imported, so the class also runs on CPU ranks and on NVIDIA GPUs.

Differences: bits are those of `allnorm.reference`, in the rounding mode of the communicator.
`registered` and `use_1stage` are accepted and have no effect, because allnorm copies nothing into
registered buffers, and its bits do not depend on the transport. `custom_` calls never return None.
FP8 results are `torch.float8_e4m3fn`; on gfx942, whose FP8 is e4m3fnuz, these calls raise
`UnsupportedError`.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from allnorm.communicator import Communicator
from allnorm.errors import UnsupportedError
from allnorm.quant import Fp8PerGroup, Fp8PerToken, Quant

Tensor: TypeAlias = torch.Tensor
Results: TypeAlias = tuple[Tensor, ...]


class AiterCalls:
    """AITER's fused all-reduce calls, on an allnorm communicator.

    All calls are collective. They can be captured in graphs, and take rows of the dtypes and widths
    that `Communicator.all_reduce_add_rms_norm` takes.

    Args:
        comm: the communicator of the tensor-parallel group.
    """

    disabled = False  # engines look at it before they call

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def fused_ar_rms(
        self, inp: Tensor, res_inp: Tensor, *, res_out: Tensor | None = None,
        out: Tensor | None = None, scale_out: Tensor | None = None, w: Tensor, eps: float,
        registered: bool = False, use_1stage: bool = False, post_per_token_quant: bool = False,
        out_hidden_dim: int = 0, gemma_norm: bool = False, emit_bf16: bool = False,
    ) -> Results:  # fmt: skip
        """Reduces `inp`, adds the residual and applies RMSNorm; optionally quantizes each row.

        Args:
            inp: [..., hidden_size], bfloat16, float16 or float32: this rank's partial sum.
            res_inp: like `inp`, equal on every rank.
            res_out: preallocated result for the residual.
            out: preallocated result: like `inp`, or float8_e4m3fn if rows are quantized.
            scale_out: preallocated scales, [..., 1], float32.
            w: [hidden_size], the weight of the norm.
            eps: added to the mean square.
            registered: no effect.
            use_1stage: no effect.
            post_per_token_quant: whether rows are quantized to FP8 with one scale each.
            out_hidden_dim: width of the result; 0 or hidden_size, because rows are not padded.
            gemma_norm: whether the norm multiplies by 1 + `w`.
            emit_bf16: whether quantized calls also return the rows in the dtype of `inp`.

        Returns:
            (normed, residual); with `post_per_token_quant` (quantized, residual, scale), and with
            `emit_bf16` (quantized, residual, scale, normed).

        Raises:
            UnsupportedError: the result or the weight is wider or narrower than `inp`, or the GPU
                cannot use the quantized format.
        """
        hidden_size = inp.shape[-1]
        if out_hidden_dim not in (0, hidden_size) or w.numel() != hidden_size:
            raise UnsupportedError(
                f"out_hidden_dim={out_hidden_dim} and a weight of {w.numel()} elements for rows of "
                f"{hidden_size}: expected {hidden_size} for both (or out_hidden_dim=0). Pad or cut "
                "the rows outside of the call."
            )
        bias = 1.0 if gemma_norm else 0.0
        if post_per_token_quant:
            given = (out, scale_out, res_out)
            return self._quantized(inp, res_inp, w, eps, Fp8PerToken(), emit_bf16, bias, given)
        return self.comm.all_reduce_add_rms_norm(
            inp, res_inp, w, eps, weight_bias=bias, out=out, residual_out=res_out
        )

    def fused_ar_rms_per_group_quant(
        self, inp: Tensor, res_inp: Tensor, *, w: Tensor, eps: float, group_size: int = 128,
        registered: bool = False, use_1stage: bool = False, emit_bf16: bool = False,
    ) -> Results:  # fmt: skip
        """Runs `fused_ar_rms` and quantizes its rows with one scale per `group_size` columns.

        Arguments are those of `fused_ar_rms`; `Fp8PerGroup` lists the values of `group_size`.

        Returns:
            (quantized, residual, scale); with `emit_bf16` also the normed rows. `scale`:
            [..., hidden_size / group_size], float32, contiguous.

        Raises:
            ValueError: `group_size` is not one that `Fp8PerGroup` takes, or does not divide
                hidden_size.
            UnsupportedError: the GPU cannot use the quantized format.
        """
        return self._quantized(inp, res_inp, w, eps, Fp8PerGroup(group_size), emit_bf16)

    # ---- the names under which engines call them

    def custom_fused_ar_rms(
        self, input: Tensor, residual_inp: Tensor, weight: Tensor, eps: float, use_1stage: bool,
        out_hidden_dim: int = 0, gemma_norm: bool = False,
    ) -> Results:  # fmt: skip
        """Runs `fused_ar_rms` without quantization."""
        given = input, residual_inp
        return self.fused_ar_rms(
            *given, w=weight, eps=eps, out_hidden_dim=out_hidden_dim, gemma_norm=gemma_norm
        )

    def custom_fused_ar_rms_quant(
        self, input: Tensor, residual_inp: Tensor, weight: Tensor, eps: float, use_1stage: bool,
        gemma_norm: bool = False, emit_bf16: bool = False,
    ) -> Results:  # fmt: skip
        """Runs `fused_ar_rms` with one scale per row."""
        bias = 1.0 if gemma_norm else 0.0
        return self._quantized(input, residual_inp, weight, eps, Fp8PerToken(), emit_bf16, bias)

    def custom_fused_ar_rms_per_group_quant(
        self, input: Tensor, residual_inp: Tensor, weight: Tensor, eps: float,
        group_size: int = 128, use_1stage: bool = False, emit_bf16: bool = False,
    ) -> Results:  # fmt: skip
        """Runs `fused_ar_rms_per_group_quant`."""
        return self._quantized(input, residual_inp, weight, eps, Fp8PerGroup(group_size), emit_bf16)

    def _quantized(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, quant: Quant, emit: bool,
        bias: float = 0.0, given: tuple[Tensor | None, ...] = (None, None, None),
    ) -> Results:  # fmt: skip
        out, scale_out, residual_out = given
        results = self.comm.all_reduce_add_rms_norm_quant(
            *(x, residual, weight, eps, quant),
            return_normed=emit,
            weight_bias=bias,
            quantized_out=out,
            scale_out=None if scale_out is None else scale_out.view(-1, scale_out.shape[-1]),
            residual_out=residual_out,
        )
        scale = results.scale.view(*x.shape[:-1], -1) if x.numel() else results.scale
        found = results.quantized, results.residual, scale
        return found if results.normed is None else (*found, results.normed)
