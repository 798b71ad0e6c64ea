"""What a communicator computes, as its callers see it; how is in calls.py."""

from __future__ import annotations

import math
from typing import Any

import torch

from allnorm import arguments
from allnorm.arguments import Like
from allnorm.calls import Calls
from allnorm.quant import DEFAULT_QUANT, Quant, QuantizedNorm, from_op_results, op_arguments
from allnorm.quant import DTYPE as FP8
from allnorm.shortcuts import is_traced


class Collectives(Calls):
    """The calls of a Communicator."""

    rank: int
    world_size: int
    numerics: str

    def all_reduce(
        self, x: torch.Tensor, *, algorithm: str = "auto", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum of all ranks' `x` in rank order, accumulated in float32 and rounded once.

        PyTorch equivalent, up to the order and rounding of the sum::

            dist.all_reduce(x)

        Args:
            x: [..., hidden_size], float32, float16 or bfloat16; rows may be strided. Not modified.
            algorithm: "auto", "one_shot", "two_shot" or "unfused"; the bits are the same.
            out: result, like `x`; may be `x` itself.

        Returns:
            The reduced tensor, contiguous unless `out` is given; the same bits on every rank.

        Raises:
            ValueError, TypeError: wrong arguments; every rank refuses alike.
            UnsupportedError: the requested algorithm cannot run this shape, or the dtype cannot
                run.
            PeerTimeoutError: an earlier call (on CPU: this one) waited in vain for a peer.
            CommunicatorClosedError: after `close()`.

        Collective. Safe in CUDA graphs and under torch.compile; no synchronisation, no allocation
        but the result ("unfused" also gathers the inputs).
        """
        if is_traced(x):
            arguments.check_algorithm(algorithm)
            given = _given(("out", out, Like.rows(x, None)))
            return _into(given, torch.ops.allnorm.all_reduce(x, self.name, algorithm))[0]
        result, _ = self._call(x, None, None, None, algorithm, out, None)
        return result

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float = 1e-6,
        *,
        weight_bias: float = 0.0,
        numerics: str | None = None,
        algorithm: str = "auto",
        residual_sharded: bool = False,
        out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-reduce, residual add and RMSNorm in one launch.

        PyTorch equivalent, up to the order of sums::

            dist.all_reduce(x)
            residual_out = x + residual
            normed = F.rms_norm(residual_out, weight.shape, weight_bias + weight, eps)

        Args:
            x: [..., hidden_size], float32, float16 or bfloat16, this rank's partial sum; rows may
                be strided. Not modified unless it is also `out`.
            residual: like `x`, the same values on every rank; None adds nothing.
            weight: [hidden_size], dtype of `x` or float32.
            eps: added to the mean square, as float32.
            weight_bias: added to the weight in float32; 1.0 for Gemma-style weights.
            numerics: "rounded", "unrounded", "transformers" or "vllm"; None is the communicator's.
            algorithm: "auto", "one_shot", "two_shot" or "unfused"; the bits are the same.
            residual_sharded: `residual` and `residual_out` are this rank's rows only,
                [hi - lo, hidden_size] of `row_shard()`. Not by "one_shot".
            out: preallocated `normed`; may be `x` itself.
            residual_out: preallocated `residual_out`; may be `residual` itself.

        Returns:
            (normed, residual_out), contiguous and of the shape of `x` unless preallocated or
            sharded; `normed` is complete. The same bits on every rank, for every algorithm and
            batch.

        Raises:
            ValueError, TypeError: wrong arguments; every rank refuses alike.
            UnsupportedError: the requested algorithm cannot run this shape, or the dtype cannot
                run.
            PeerTimeoutError: an earlier call (on CPU: this one) waited in vain for a peer.
            CommunicatorClosedError: after `close()`.

        Collective. Safe in CUDA graphs and under torch.compile; no synchronisation, no allocation
        but the results ("unfused" also gathers the inputs). For inference: results carry no
        gradient.
        """
        mode = self.numerics if numerics is None else numerics
        if is_traced(x):
            arguments.check_algorithm(algorithm)
            bounds = self._bounds(x) if residual_sharded else None
            given = _given(
                ("out", out, Like.rows(x, None)),
                ("residual_out", residual_out, _like_rows(x, bounds)),
            )
            traced = torch.ops.allnorm.all_reduce_add_rms_norm(
                *(x, residual, weight, eps, weight_bias, mode, self.name, residual_sharded),
                *(_rows(residual, bounds), algorithm),
            )
            return _into(given, *traced)
        norm = (eps, weight_bias, mode, residual_sharded)
        normed, summed = self._call(x, residual, weight, norm, algorithm, out, residual_out)
        assert summed is not None
        return normed, summed

    def all_reduce_add_rms_norm_quant(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float = 1e-6,
        quant: Quant = DEFAULT_QUANT,
        return_normed: bool = False,
        *,
        weight_bias: float = 0.0,
        numerics: str | None = None,
        algorithm: str = "auto",
        residual_sharded: bool = False,
        out: torch.Tensor | None = None,
        scale_out: torch.Tensor | None = None,
        normed_out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
    ) -> QuantizedNorm:
        """All-reduce, residual add, RMSNorm and quantisation to FP8 in one launch.

        The bytes are those of quantising the result of `all_reduce_add_rms_norm` afterwards.
        PyTorch equivalent for one scale a row, up to the order of sums::

            normed, residual_out = comm.all_reduce_add_rms_norm(x, residual, weight, eps)
            scale = normed.float().abs().amax(-1, keepdim=True) / 448
            quantized = (normed.float() / scale).to(torch.float8_e4m3fn)

        Args:
            x: [..., hidden_size], float32, float16 or bfloat16, this rank's partial sum; rows may
                be strided. Not modified unless it is also `normed_out`.
            residual: like `x`, the same values on every rank; None adds nothing.
            weight: [hidden_size], dtype of `x` or float32.
            eps: added to the mean square, as float32.
            quant: `Fp8PerGroup`, `Fp8PerToken` or `Fp8PerTensor`; the same on every rank.
            return_normed: whether the rows before quantisation are wanted too.
            weight_bias: added to the weight in float32; 1.0 for Gemma-style weights.
            numerics: "rounded", "unrounded", "transformers" or "vllm"; None is the communicator's.
            algorithm: "auto", "one_shot", "two_shot" or "unfused"; the bits are the same.
            residual_sharded: `residual` and the returned one are this rank's rows only,
                [hi - lo, hidden_size] of `row_shard()`. Not by "one_shot".
            out: preallocated `quantized`.
            scale_out: preallocated `scale`, as `allnorm.quant.empty_scale` makes it.
            normed_out: preallocated `normed`, which is then returned; may be `x` itself.
            residual_out: preallocated `residual`; may be the given `residual` itself.

        Returns:
            QuantizedNorm(quantized, scale, residual, normed): float8_e4m3fn of the shape of `x`;
            its scales as `quant` says, of an Fp8PerTensor the given one; the new residual; and the
            normed rows in the dtype of `x`, or None. `quantized`, `scale` and `normed` are complete
            and the same bits on every rank, for every algorithm and batch.

        Raises:
            ValueError, TypeError: wrong arguments; every rank refuses alike.
            UnsupportedError: the requested algorithm cannot run this shape, the dtype cannot run,
                or hidden_size does not consist of whole groups.
            PeerTimeoutError: an earlier call (on CPU: this one) waited in vain for a peer.
            CommunicatorClosedError: after `close()`.

        Collective. Safe in CUDA graphs and under torch.compile; no synchronisation, no allocation
        but the results ("unfused" also gathers the inputs). For inference: results carry no
        gradient.
        """
        mode = self.numerics if numerics is None else numerics
        fresh = out is scale_out is normed_out is residual_out is None
        if is_traced(x):
            return self._quantize_traced(
                x,
                residual,
                weight,
                (eps, weight_bias, mode, residual_sharded),
                quant,
                return_normed or normed_out is not None,
                algorithm,
                (out, scale_out, residual_out, normed_out),
            )
        return self._call_quantized(
            x,
            residual,
            weight,
            (eps, weight_bias, mode, residual_sharded),
            quant,
            return_normed or normed_out is not None,
            algorithm,
            () if fresh else (out, scale_out, residual_out, normed_out),
        )

    def _quantize_traced(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        norm: tuple[Any, ...],
        quant: Quant,
        return_normed: bool,
        algorithm: str,
        memory: tuple[torch.Tensor | None, ...],
    ) -> QuantizedNorm:
        """As `_call_quantized`, by the operator."""
        eps, weight_bias, numerics, sharded = norm
        out, scale_out, residual_out, normed_out = memory
        arguments.check_algorithm(algorithm)
        if scale_out is not None:
            raise ValueError(
                "scale_out in a call that is traced: expected None, because padding between its "
                "columns is no part of what a tracer sees. Take the scale that is returned."
            )
        bounds = self._bounds(x) if sharded else None
        given = _given(
            ("out", out, Like(x.shape, FP8, x.device)),
            ("residual_out", residual_out, _like_rows(x, bounds)),
            ("normed_out", normed_out, Like.rows(x, None)),
        )
        traced = torch.ops.allnorm.all_reduce_add_rms_norm_quant(
            *(x, residual, weight, eps, *op_arguments(quant), return_normed, sharded),
            *(weight_bias, numerics, self.name, _rows(residual, bounds), algorithm),
        )
        quantized, scale, summed, normed = from_op_results(traced, quant, return_normed)
        quantized, summed = _into(given[:2], quantized, summed)
        if normed is not None:
            (normed,) = _into(given[2:], normed)
        return QuantizedNorm(quantized, scale, summed, normed)

    def all_gather_rows(
        self,
        residual_shard: torch.Tensor,
        num_tokens: int,
        *,
        algorithm: str = "auto",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All ranks' rows of a sharded residual.

        PyTorch equivalent, if every rank has equally many rows::

            dist.all_gather_into_tensor(out, residual_shard)

        Args:
            residual_shard: this rank's rows, [hi - lo, hidden_size] of `row_shard(num_tokens)`,
                float32, float16 or bfloat16; rows may be strided. Not modified.
            num_tokens: rows in all.
            algorithm: "auto", "two_shot" or "unfused"; the bits are the same.
            out: result, [num_tokens, hidden_size].

        Returns:
            [num_tokens, hidden_size], contiguous unless `out` is given; the same bits on every
            rank.

        Raises:
            ValueError, TypeError: wrong arguments, such as a shard of another height.
            UnsupportedError: the requested algorithm cannot run this shape, or the dtype cannot
                run.
            PeerTimeoutError: an earlier call (on CPU: this one) waited in vain for a peer.
            CommunicatorClosedError: after `close()`.

        Collective. Safe in CUDA graphs and under torch.compile; no synchronisation, no allocation
        but the result.
        """
        if is_traced(residual_shard):
            arguments.check_algorithm(algorithm)
            shape = (num_tokens, residual_shard.shape[-1])
            source = "num_tokens rows as wide as residual_shard"
            like = Like(shape, residual_shard.dtype, residual_shard.device, source)
            rows = torch.ops.allnorm.all_gather_rows(
                residual_shard, num_tokens, self.name, algorithm
            )
            return _into(_given(("out", out, like)), rows)[0]
        return self._gather_rows(residual_shard, num_tokens, algorithm, out)

    def row_shard(self, num_tokens: int) -> tuple[int, int]:
        """This rank's rows of a sharded residual. Pure, not collective.

        Contiguous blocks in rank order; the first `num_tokens % world_size` ranks have one row
        more.

        Args:
            num_tokens: rows in all: the product of the leading dimensions of `x`.

        Returns:
            (lo, hi): rows lo to hi - 1. The shard is [hi - lo, hidden_size].

        Raises:
            ValueError, TypeError: num_tokens is not an integer >= 0.
            CommunicatorClosedError: after `close()`.
        """
        if self._closed:
            self._refuse()
        arguments.check_count("num_tokens", num_tokens)
        return arguments.row_shard(num_tokens, self.world_size, self.rank)

    def _bounds(self, x: torch.Tensor) -> tuple[int, int]:
        return arguments.row_shard(math.prod(x.shape[:-1]), self.world_size, self.rank)


# ---- calls that are traced: by operators that are functional, then copied ------------------------


def _rows(residual: torch.Tensor | None, bounds: tuple[int, int] | None) -> int | None:
    """The `residual_rows` of an operator: what a fake cannot tell from the residual."""
    if bounds is None or residual is not None:
        return None
    lo, hi = bounds
    return hi - lo


def _like_rows(x: torch.Tensor, bounds: tuple[int, int] | None) -> Like:
    if bounds is None:
        return Like.rows(x, None)
    lo, hi = (
        bounds  # may be symbolic; writing them into words would make the graph that of one size
    )
    source = "this rank's rows, as row_shard() gives them"
    return Like((hi - lo, x.shape[-1]), x.dtype, x.device, source)


def _given(
    *wanted: tuple[str, torch.Tensor | None, Like],
) -> tuple[torch.Tensor | None, ...]:
    """The preallocated results, checked; what cannot be seen before they have memory is not."""
    for name, result, like in wanted:
        if result is not None:
            arguments.check_like(name, result, like)
    return tuple(result for _, result, _ in wanted)


def _into(given: tuple[torch.Tensor | None, ...], *results: Any) -> tuple[Any, ...]:
    """The results, in the memory that is given for them, if any."""
    return tuple(
        result if memory is None else memory.copy_(result)
        for memory, result in zip(given, results, strict=True)
    )
