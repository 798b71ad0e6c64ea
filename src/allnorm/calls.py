"""The collective calls of a communicator, from their public arguments to the fields of a Call."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch

from allnorm.core import arguments
from allnorm.core.call import Runner
from allnorm.core.shards import row_shard
from allnorm.core.slices import Slices
from allnorm.core.stream_input import NextInput
from allnorm.expert_sum import ExpertSum
from allnorm.hyper_connection import HyperConnection, HyperConnectionProjection
from allnorm.post_norm import PostNorm
from allnorm.quant import DEFAULT_QUANT, Quant, QuantizedNorm


class Calls(abc.ABC):
    """The calls that the ranks of a Communicator make together.

    Attributes:
        rank: this rank's number in the group.
        world_size: number of ranks.
        numerics: default rounding mode of the calls.
    """

    rank: int
    world_size: int
    numerics: str

    @abc.abstractmethod
    def _runner(self, x: object) -> Runner:
        """Returns the runner of calls of `x`."""

    @abc.abstractmethod
    def _check_open(self) -> None:
        """Raises CommunicatorClosedError after `close()`."""

    def all_reduce(
        self, x: torch.Tensor, *, algorithm: str = "auto", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sums `x` over the ranks, in rank order in float32, and rounds once.

        PyTorch equivalent, up to the order and rounding of the sum:

            dist.all_reduce(x)

        Args:
            x: [..., hidden_size], float32, float16 or bfloat16; rows may be strided. Not modified.
            algorithm: "auto", "one_shot", "two_shot" or "unfused"; over several islands
                "hierarchical" or "unfused". Results are bit-identical.
            out: preallocated result, like `x`; may be `x` itself.

        Returns:
            The sum, bit-identical on every rank; contiguous unless `out` is given.

        Raises:
            ValueError, TypeError: wrong arguments; raised on every rank.
            UnsupportedError: the dtype is unsupported, or the algorithm cannot run this shape.
            PeerTimeoutError: an earlier call (on CPU also this one) timed out waiting for a peer.
            CommunicatorClosedError: after `close()`.

        Collective. Safe in CUDA graphs and under torch.compile. It does not synchronize, and
        allocates only the result ("unfused" also gathers the inputs). While it is traced
        (torch.compile, torch.export, make_fx), the result is copied to `out`.
        """
        result: torch.Tensor = self._runner(x).call(
            op="all_reduce", source=x, algorithm=algorithm, out=out
        )
        return result

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor | ExpertSum,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        *,
        weight_bias: float = 0.0,
        numerics: str | None = None,
        algorithm: str = "auto",
        residual_sharded: bool = False,
        gather: bool = True,
        post_norm: PostNorm | None = None,
        scale: float = 1.0,
        out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        prefetch: torch.Tensor | None = None,
    ) -> tuple[Any, torch.Tensor]:
        """Reduces `x` over the ranks, adds the residual and applies RMSNorm in one launch.

        PyTorch equivalent, up to the order of sums:

            dist.all_reduce(x)
            residual_out = x + residual  # with post_norm, scale: scale * post_norm(x) + residual
            normed = F.rms_norm(residual_out, weight.shape, weight_bias + weight, eps)

        Args:
            x: [..., hidden_size], float32, float16 or bfloat16: this rank's partial sum; rows may
                be strided. Not modified unless it is also `out`. Or an `ExpertSum`, which is summed
                first; then "like `x`" below means [num_tokens, hidden_size] in the dtype of its
                rows.
            residual: like `x`, equal on every rank; None: nothing is added. It may be float32 while
                `x` is float16 or bfloat16: then `residual_out` is float32 too, and their sum is
                normed without being rounded, in every mode of `numerics`.
            weight: [hidden_size], dtype of `x` or float32. With `post_norm` it may be None: no
                second norm.
            eps: added to the mean square, as float32.
            weight_bias: added to the weight in float32; 1.0 for Gemma-style weights.
            numerics: "rounded", "unrounded", "transformers" or "vllm"; None: the communicator's.
            algorithm: "auto", "one_shot", "two_shot" or "unfused"; over several islands
                "hierarchical" or "unfused". Results are bit-identical.
            residual_sharded: whether `residual` and `residual_out` are only this rank's rows,
                [hi - lo, hidden_size] of `row_shard()`. Not with "one_shot".
            gather: False, only with a sharded residual: `normed` too has only this rank's rows (the
                input of a sequence-parallel region), so only partial sums cross the link.
            post_norm: norm of the reduced sum before the residual add (Gemma 2 to 4, GLM-4,
                EXAONE 4, OLMo 2); the same on every rank.
            scale: factor of the reduced sum, or of its post norm, before the residual add, as
                float32 (Granite, MiniCPM).
            out: preallocated `normed`; may be `x` itself, except with `gather=False`.
            residual_out: preallocated `residual_out`, in the dtype of `residual`; may be `residual`
                itself.
            prefetch: the weight that the next GEMM reads: any strided tensor on the same device. A
                GPU loads the first `plan().prefetch_bytes` bytes of it into the L2 cache while the
                call waits for its peers. Never affects results; may differ between ranks.

        Returns:
            (normed, residual_out), in the shape of `x` unless sharded, contiguous unless
            preallocated. `normed` has the dtype of `x` and all rows, with `gather=False`
            [hi - lo, hidden_size], and is None without a weight. Rows are bit-identical on every
            rank that has them, for every algorithm and batch.

        Raises the errors of `all_reduce`.

        Collective. Safe in CUDA graphs and under torch.compile. It does not synchronize, and
        allocates only the results ("unfused" also gathers the inputs). For inference: results have
        no gradient. While it is traced (torch.compile, torch.export, make_fx), results are copied
        to `out` and `residual_out`.
        """
        results: tuple[Any, torch.Tensor] = self._runner(x).call(
            op="all_reduce_add_rms_norm",
            source=x,
            residual=residual,
            weight=weight,
            eps=eps,
            weight_bias=weight_bias,
            numerics=self.numerics if numerics is None else numerics,
            algorithm=algorithm,
            residual_sharded=residual_sharded,
            gather=gather,
            post_norm=post_norm,
            scale=scale,
            prefetch=prefetch,
            out=out,
            residual_out=residual_out,
        )
        return results

    def all_reduce_add_rms_norm_quant(
        self,
        x: torch.Tensor | ExpertSum,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        quant: Quant = DEFAULT_QUANT,
        return_normed: bool = False,
        *,
        weight_bias: float = 0.0,
        numerics: str | None = None,
        algorithm: str = "auto",
        residual_sharded: bool = False,
        gather: bool = True,
        post_norm: PostNorm | None = None,
        scale: float = 1.0,
        quantized_out: torch.Tensor | None = None,
        scale_out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        normed_out: torch.Tensor | None = None,
        prefetch: torch.Tensor | None = None,
    ) -> QuantizedNorm:
        """Runs `all_reduce_add_rms_norm` and quantizes its result, in one launch.

        Bit-identical to quantizing afterwards. PyTorch equivalent with one scale per row, up to the
        order of sums:

            normed, residual_out = comm.all_reduce_add_rms_norm(x, residual, weight, eps)
            scale = normed.float().abs().amax(-1, keepdim=True) / 448
            quantized = (normed.float() / scale).to(torch.float8_e4m3fn)

        Args:
            x: as for `all_reduce_add_rms_norm`; not modified unless it is also `normed_out`.
            residual: like `x`, or float32; equal on every rank; None: nothing is added.
            weight: [hidden_size], dtype of `x` or float32.
            eps: added to the mean square, as float32.
            quant: `Fp8PerGroup`, `MxFp8()`, `Fp8PerToken`, `Fp8PerTensor` or `NvFp4`; the same on
                every rank.
            return_normed: whether to return the rows before quantization too.
            weight_bias: added to the weight in float32; 1.0 for Gemma-style weights.
            numerics: "rounded", "unrounded", "transformers" or "vllm"; None: the communicator's.
            algorithm: as for `all_reduce_add_rms_norm`.
            residual_sharded: whether the given and the returned residual are only this rank's rows.
            gather: False, only with a sharded residual: all results have only this rank's rows, and
                the scales the layout for that number of rows.
            post_norm: norm of the reduced sum before the residual add.
            scale: factor of the reduced sum, or of its post norm, as float32.
            quantized_out: preallocated `quantized`.
            scale_out: preallocated `scale`, from `allnorm.quant.empty_scale`.
            residual_out: preallocated `residual`; may be the given `residual` itself.
            normed_out: preallocated `normed`, which is then returned; may be `x` itself, except
                with `gather=False`.
            prefetch: as for `all_reduce_add_rms_norm`.

        Returns:
            QuantizedNorm(quantized, scale, residual, normed): `quantized` is float8_e4m3fn in the
            shape of `x`, for NvFp4 uint8 of half the width. `scale` is as `quant` describes, for
            Fp8PerTensor the given tensor. `normed` is in the dtype of `x`, or None. All but a
            sharded residual have all rows unless `gather=False`, bit-identical on every rank, for
            every algorithm and batch.

        Raises the errors of `all_reduce`, and UnsupportedError if hidden_size is not a multiple of
        the group size.

        Collective. Graphs, tracing, allocation and gradients as for `all_reduce_add_rms_norm`; a
        traced call does not support `scale_out`.
        """
        results = self._runner(x).call(
            op="all_reduce_add_rms_norm_quant",
            source=x,
            residual=residual,
            weight=weight,
            eps=eps,
            weight_bias=weight_bias,
            numerics=self.numerics if numerics is None else numerics,
            algorithm=algorithm,
            residual_sharded=residual_sharded,
            gather=gather,
            post_norm=post_norm,
            scale=scale,
            quant=quant,
            return_normed=return_normed if normed_out is None else True,
            prefetch=prefetch,
            out=normed_out,
            residual_out=residual_out,
            quantized_out=quantized_out,
            scale_out=scale_out,
        )
        return QuantizedNorm(*results)

    def all_gather_rows(
        self,
        residual_shard: torch.Tensor,
        num_tokens: int,
        *,
        algorithm: str = "auto",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gathers all ranks' rows of a sharded residual.

        PyTorch equivalent, if every rank has the same number of rows:

            dist.all_gather_into_tensor(out, residual_shard)

        Args:
            residual_shard: this rank's rows, [hi - lo, hidden_size] of `row_shard(num_tokens)`,
                float32, float16 or bfloat16; rows may be strided. Not modified.
            num_tokens: total number of rows.
            algorithm: "auto", "two_shot" or "unfused"; over several islands "hierarchical" or
                "unfused". Results are bit-identical.
            out: preallocated result, [num_tokens, hidden_size].

        Returns:
            [num_tokens, hidden_size], contiguous unless `out` is given.

        Raises the errors of `all_reduce`, also ValueError for a wrong number of rows.

        Collective. Graphs, tracing and allocation as for `all_reduce`.
        """
        result: torch.Tensor = self._runner(residual_shard).call(
            op="all_gather_rows",
            source=residual_shard,
            algorithm=algorithm,
            num_tokens=num_tokens,
            out=out,
        )
        return result

    def rms_norm_sharded(
        self,
        tensors: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        eps: float,
        weight_bias: float = 0.0,
        out: Sequence[torch.Tensor] | None = None,
        *,
        numerics: str | None = None,
        algorithm: str = "auto",
    ) -> list[torch.Tensor]:
        """Applies RMSNorm to rows that are spread over the ranks, such as q and k.

        A row of a tensor is the concatenation of all ranks' slices. Only the sums of squares cross
        the link, in one exchange for all tensors. PyTorch equivalent, for each tensor and weight,
        up to the order of sums:

            squares = x.float().square().sum(-1, keepdim=True)
            dist.all_reduce(squares)
            normed = x * torch.rsqrt(squares / (local_size * world_size) + eps)
            normed = normed * (weight_bias + weight)

        Args:
            tensors: 1 to 4 tensors [..., local_size], float32, float16 or bfloat16, all of one
                dtype and with the same number of rows: this rank's slices. `local_size` may differ
                between tensors, and is the same on every rank. Rows may be strided. Not modified
                unless they are also `out`.
            weights: this rank's slice of each weight, [local_size], dtype of the tensors or
                float32.
            eps: added to the mean square, as float32.
            weight_bias: added to the weights in float32; 1.0 for Gemma-style weights.
            out: preallocated results, one per tensor; each may be the tensor itself.
            numerics: "rounded" or "transformers" (rounds before the weight too); "unrounded" and
                "vllm" mean the same, because there is no sum. None: the communicator's.
            algorithm: "auto", "one_shot" or "unfused". Results are bit-identical.

        Returns:
            The normed slices, one per tensor, contiguous unless `out` is given. The results depend
            on how rows are divided among the ranks, and on nothing else.

        Raises the errors of `all_reduce`, also UnsupportedError for rows of 2**20 elements or more
        in all.

        Collective. Safe in CUDA graphs and under torch.compile. It does not synchronize, and
        allocates only the results ("unfused" also gathers the sums). Results have no gradient.
        While it is traced (torch.compile, torch.export, make_fx), results are copied to `out`.
        """
        slices = Slices.of(tensors, weights, out)
        results: list[torch.Tensor] = self._runner(slices.tensors[0]).call(
            op="rms_norm_sharded",
            source=slices.tensors[0],
            eps=eps,
            weight_bias=weight_bias,
            numerics=self.numerics if numerics is None else numerics,
            algorithm=algorithm,
            slices=slices,
        )
        return results

    def all_reduce_hyper_connection(
        self,
        x: torch.Tensor | ExpertSum,
        residual: torch.Tensor,
        connection: HyperConnection,
        *,
        algorithm: str = "auto",
        residual_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Reduces `x` over the ranks, and adds it to mixed residual streams, in one launch.

        PyTorch equivalent, up to the order and rounding of the sum over the ranks:

            dist.all_reduce(x)
            residual_out = connection.post.unsqueeze(-1) * x.float().unsqueeze(-2)
            for j in range(streams):
                factor = connection.mix[..., j].unsqueeze(-1)
                residual_out = residual_out + factor * residual[..., j : j + 1, :].float()
            residual_out = residual_out.to(residual.dtype)

        Args:
            x: [..., hidden_size], float32, float16 or bfloat16: this rank's partial sum; rows may
                be strided. Not modified. Or an `ExpertSum`, which is summed first; then the leading
                dimensions below mean [num_tokens].
            residual: [..., streams, hidden_size], dtype of `x` or float32, equal on every rank;
                2 to 8 streams, which may be strided.
            connection: the coefficients of this layer, float32, equal on every rank.
            algorithm: "auto", "one_shot", "two_shot" or "unfused"; over several islands
                "hierarchical" or "unfused". Results are bit-identical.
            residual_out: preallocated result, like `residual`; may be `residual` itself.

        Returns:
            The new streams, like `residual`, contiguous unless preallocated; bit-identical on every
            rank.

        Raises the errors of `all_reduce`.

        Collective. Graphs, tracing, allocation and gradients as for `all_reduce_add_rms_norm`.
        """
        result: torch.Tensor = self._runner(x).call(
            op="all_reduce_hyper_connection",
            source=x,
            residual=residual,
            algorithm=algorithm,
            residual_out=residual_out,
            connection=connection,
        )
        return result

    def all_reduce_hyper_connection_input(
        self,
        x: torch.Tensor | ExpertSum,
        residual: torch.Tensor,
        connection: HyperConnection,
        projection: HyperConnectionProjection,
        weight: torch.Tensor,
        eps: float,
        *,
        weight_bias: float = 0.0,
        numerics: str | None = None,
        algorithm: str = "auto",
        residual_out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, HyperConnection]:
        """Reduces `x` into mixed residual streams, and makes the next layer's input from them.

        The same as the following, bit for bit:

            residual_out = comm.all_reduce_hyper_connection(x, residual, connection)
            normed, connection = allnorm.hyper_connection_input(
                residual_out, projection, weight, eps
            )

        On NVIDIA GPUs from compute capability 9.0 on, it is one launch for up to about 64 tokens of
        2 to 4 streams in the 16-bit dtype of `x`, if `x` is no ExpertSum and "one_shot" is chosen.
        Otherwise it is two, and also in repeated calls outside CUDA graphs, which are limited by
        the CPU. Under torch.compile it is one operator that follows the same rule.

        Args:
            x: this rank's partial sum, as for `all_reduce_hyper_connection`.
            residual: the residual streams, as there.
            connection: the coefficients of this layer, as there.
            projection: the next layer's parameters.
            weight: [hidden_size], of the next layer's norm: see `allnorm.hyper_connection_input`.
            eps: added to the mean square of the input.
            weight_bias: added to the weight in float32.
            numerics: rounding mode of the norm; None means the communicator's.
            algorithm: algorithm of the exchange, as for `all_reduce_hyper_connection`.
            residual_out: preallocated new streams, as there.

        Returns:
            `(normed, residual_out, connection)`: the next layer's input, the new streams, and the
            coefficients with which that layer's output enters them. Bit-identical on every rank.

        Raises the errors of both functions.

        Collective; peers may call `all_reduce_hyper_connection` instead. Safe in CUDA graphs and
        under torch.compile. It does not synchronize. Results have no gradient.
        """
        numerics = self.numerics if numerics is None else numerics
        normed, streams, next_connection = self._runner(x).call_with_input(
            op="all_reduce_hyper_connection",
            source=x,
            residual=residual,
            algorithm=algorithm,
            residual_out=residual_out,
            connection=connection,
            next_input=NextInput(projection, weight, eps, weight_bias, numerics),
        )
        return normed, streams, next_connection

    def row_shard(self, num_tokens: int) -> tuple[int, int]:
        """Returns this rank's rows of a sharded residual: `(lo, hi)` means rows lo to hi - 1.

        Ranks hold contiguous blocks in rank order; the first `num_tokens % world_size` ranks have
        one row more. Pure, not collective.

        Args:
            num_tokens: total number of rows: the product of the leading dimensions of `x`.

        Raises:
            ValueError, TypeError: num_tokens is not an integer >= 0.
            CommunicatorClosedError: after `close()`.
        """
        self._check_open()
        arguments.check_count("num_tokens", num_tokens)
        return row_shard(num_tokens, self.world_size, self.rank)
