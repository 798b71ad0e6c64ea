"""What a communicator computes, as its callers see it; how is in calls.py."""

from __future__ import annotations

import torch

from allnorm import arguments, traced
from allnorm.calls import Calls
from allnorm.quant import DEFAULT_QUANT, Quant, QuantizedNorm
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
        but the result ("unfused" also gathers the inputs). Traced (torch.compile, torch.export,
        make_fx), the result is copied to `out`.
        """
        if is_traced(x):
            return traced.all_reduce(self._ranks, x, algorithm, out)
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
        gradient. Traced (torch.compile, torch.export, make_fx), results are copied to `out` and
        `residual_out`.
        """
        mode = self.numerics if numerics is None else numerics
        norm = (eps, weight_bias, mode, residual_sharded)
        if is_traced(x):
            return traced.all_reduce_add_rms_norm(
                self._ranks, x, residual, weight, norm, algorithm, out, residual_out
            )
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
        gradient. Traced (torch.compile, torch.export, make_fx), results are copied to preallocated
        ones, and `scale_out` is refused.
        """
        mode = self.numerics if numerics is None else numerics
        fresh = out is scale_out is normed_out is residual_out is None
        norm = (eps, weight_bias, mode, residual_sharded)
        wants_normed = return_normed or normed_out is not None
        memory = () if fresh else (out, scale_out, residual_out, normed_out)
        if is_traced(x):
            return traced.all_reduce_add_rms_norm_quant(
                *(self._ranks, x, residual, weight, norm, quant, wants_normed, algorithm, memory)
            )
        return self._call_quantized(
            x, residual, weight, norm, quant, wants_normed, algorithm, memory
        )

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
        but the result. Traced (torch.compile, torch.export, make_fx), the result is copied to
        `out`.
        """
        if is_traced(residual_shard):
            return traced.all_gather_rows(self._ranks, residual_shard, num_tokens, algorithm, out)
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

    @property
    def _ranks(self) -> tuple[str, int, int]:
        """What a traced call knows of the communicator."""
        return self.name, self.world_size, self.rank
