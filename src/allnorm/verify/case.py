"""A test case: one call of the API, with its inputs and its expected results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import allnorm
from allnorm import reference
from allnorm.names import SWIZZLED
from allnorm.quant import Quant, scale_geometry, swizzled_rows
from allnorm.reference.sharded_norm import normed_slice
from allnorm.reference.shards import split_rows
from allnorm.testing import (
    SPECIAL_KINDS,
    describe_difference,
    rank_input,
    sentinel_input,
    shared_input,
    special_input,
)
from allnorm.testing.rank import device
from allnorm.verify.memory import USUAL, Memory, expression
from allnorm.verify.unlike_norms import (
    expected_streams,
    mix_streams,
    next_input,
    norm_slices,
    slice_sizes,
    squares_of,
)

VALUES = (*SPECIAL_KINDS, "sentinels", "finite_sentinels")
"""Values of `Case.kind` that select special numbers as inputs."""

Results = dict[str, torch.Tensor]
"""A call's results, keyed by: reduced, rows, normed, residual_out, quantized, scale, post, mix."""


@dataclass(frozen=True)
class Experts:
    """A description of expert rows, which replace `x` as the input."""

    top_k: int = 2  # rows per token
    weighted: bool = True  # whether rows have weights
    shared: bool = False  # whether there is a shared expert
    indexed: bool = True  # whether an index selects rows; each rank then has a different number
    absent: float = 0.3  # with an index, the share of choices without a row on this rank

    def __call__(self, case: Case, rank: int) -> allnorm.ExpertSum:
        """Returns the input of one rank."""
        shape, dtype, top_k = case.shape, case.dtype, self.top_k
        num_tokens, hidden_size = shape
        count = num_tokens * top_k + rank if self.indexed else num_tokens * top_k
        rows = case.rows(rank, count)
        generator = torch.Generator().manual_seed(1000 * rank + num_tokens + 7 * top_k + case.call)
        index = None
        if self.indexed:
            index = torch.randint(0, max(count, 1), (num_tokens, top_k), generator=generator)
            absent = torch.rand(num_tokens, top_k, generator=generator) < self.absent
            index = index.masked_fill(absent | torch.tensor(count == 0), -1).to(torch.int32)
            index = index.to(device())
        else:
            rows = rows.view(num_tokens, top_k, hidden_size)
        weights = torch.rand(num_tokens, top_k, generator=generator).to(device())
        shared = rank_input(shape, dtype, rank, call=case.call + 1, device=device())
        return allnorm.ExpertSum(
            rows, weights if self.weighted else None, index, shared if self.shared else None
        )


@dataclass(frozen=True, repr=False)
class Case:
    """A call and its inputs. Every rank can compute all ranks' inputs from these fields alone."""

    shape: tuple[int, ...] = (3, 4096)  # shape of `x`; for "all_gather_rows" of all rows
    dtype: torch.dtype = torch.bfloat16
    residual: bool = True
    float32_weight: bool = False  # whether the weight is float32 instead of `dtype`
    weight_bias: float = 0.0
    eps: float = 1e-6
    numerics: str = "rounded"
    algorithm: str = "auto"
    # kind of values: "normal", one of VALUES, "equal_rows", or "word 0x..." for one repeated word
    kind: str = "normal"
    call: int = 0  # call number; each number gives different values
    quant: Quant | None = None
    return_normed: bool = False  # whether a quantized call returns the normed rows too
    sharded: bool = False  # whether each rank holds only its own rows of the residual
    float32_residual: bool = False  # whether the residual is float32, whatever the dtype of x
    gather: bool = True  # False, only if sharded: each rank gets only its own rows of all results
    post_norm: bool = False
    scale: float = 1.0
    second_norm: bool = True  # whether there is a norm after the residual add
    # Returns the ExpertSum of a rank, which replaces `x`.
    experts: Callable[[Case, int], allnorm.ExpertSum] | None = None
    # "norm", "all_reduce", "all_gather_rows", "rms_norm_sharded" of the slices that `slice_sizes`
    # cuts the columns of `x` into, "all_reduce_hyper_connection" of the streams that `streams_of`
    # makes of the residual, or "local": the norm of rank 0's rows, on one rank
    op: str = "norm"
    streams: int = 4  # number of residual streams of "all_reduce_hyper_connection"
    next_input: bool = False  # whether `issue` also makes the next layer's input, in the same call
    # Elements to overwrite, each as (tensor, index, number). Tensors are "weight", "residual", and
    # "x0" for the rows of rank 0.
    put: tuple[tuple[str, Any, float], ...] = ()
    memory: Memory = USUAL

    __repr__ = expression

    def but(self, **changes: Any) -> Case:
        """Returns the case with some fields changed."""
        return replace(self, **changes)

    @property
    def num_tokens(self) -> int:
        """The total number of rows."""
        return rows_of(self.shape)

    @property
    def hidden_size(self) -> int:
        """The number of columns."""
        return self.shape[-1]

    def possible(self) -> Case:
        """Returns the case, changed into one that the API allows: whole groups, no conflicts."""
        case = self
        size = _group_size(case.quant)
        case = case.but(shape=(*case.shape[:-1], -(-case.hidden_size // size) * size))
        case = case.but(gather=case.gather or not case.sharded)
        if case.sharded and case.algorithm == "one_shot":
            case = case.but(algorithm="two_shot")
        if case.experts is not None and len(case.shape) != 2:
            case = case.but(shape=(case.num_tokens, case.hidden_size))
        second = case.second_norm or not case.post_norm or case.quant is not None
        case = case.but(
            second_norm=second, return_normed=case.return_normed and case.quant is not None
        )
        memory = case.memory
        if memory.out == "x" and (case.experts is not None or not second or not case.gather):
            memory = replace(memory, out="own")
        if memory.out == "own" and not second:
            memory = replace(memory, out="new")
        if memory.residual_out == "residual" and not case.residual:
            memory = replace(memory, residual_out="own")
        return case.but(memory=memory)

    # ---- its inputs ----

    def x(self, rank: int) -> Any:
        """Returns the input of one rank."""
        if self.experts is not None:
            return self.experts(self, rank)
        return self._put(f"x{rank}", self._values(self.shape, rank))

    def xs(self, world_size: int) -> list[Any]:
        """Returns the inputs of all ranks."""
        return [self.x(rank) for rank in range(world_size)]

    def x_of(self, comm: allnorm.Communicator) -> Any:
        """Returns the input of this rank."""
        if self.op == "all_gather_rows":
            return self.own_rows(comm, self.x(0)).clone()
        return self.x(0 if self.op == "local" else comm.rank)

    def rows(self, rank: int, count: int) -> torch.Tensor:
        """Returns `count` rows with the case's kind of values, for `experts`."""
        return self._values((count, self.hidden_size), rank)

    def _values(self, shape: tuple[int, ...], rank: int) -> torch.Tensor:
        more: Any = {"call": self.call, "device": device()}
        if self.kind == "normal":
            return rank_input(shape, self.dtype, rank, **more)
        if self.kind == "equal_rows":
            return rank_input((1, shape[-1]), self.dtype, rank, **more).repeat(rows_of(shape), 1)
        if self.kind.startswith("word "):
            return _of_word(int(self.kind[5:], 16), shape, self.dtype)
        if self.kind.endswith("sentinels"):
            finite = self.kind.startswith("finite")
            return sentinel_input(shape, self.dtype, rank, finite=finite, **more)
        return special_input(self.kind, shape, self.dtype, rank, **more)

    def _put(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        for where, index, number in self.put:
            if where == name:
                tensor[index] = number
        return tensor

    def residual_tensor(self) -> torch.Tensor | None:
        """Returns all rows of the residual, or None."""
        if not self.residual:
            return None
        dtype = torch.float32 if self.float32_residual else self.dtype
        if self.kind.startswith("word "):
            return _of_word(int(self.kind[5:], 16), self.shape, dtype)
        values = shared_input(self.shape, dtype, "residual", call=self.call, device=device())
        if self.kind == "negative_zeros":
            return -(values.abs() * 0.0)
        return self._put("residual", values * 3.0)

    def weight(self) -> torch.Tensor:
        """Returns the weight of the norm."""
        dtype = torch.float32 if self.float32_weight else self.dtype
        weight = shared_input(self.shape[-1:], dtype, "weight", device=device())
        return self._put("weight", weight)

    def post_weight(self) -> torch.Tensor:
        """Returns the post norm's weight, in the dtype that the norm's weight lacks."""
        dtype = self.dtype if self.float32_weight else torch.float32
        return shared_input(self.shape[-1:], dtype, "post_norm", device=device())

    def norm_before(self, weight: torch.Tensor | None = None) -> allnorm.PostNorm | None:
        """Returns the post norm, or None."""
        if not self.post_norm:
            return None
        weight = self.post_weight() if weight is None else weight
        return allnorm.PostNorm(weight, 2 * self.eps, 1.0 - self.weight_bias)

    def spec(self) -> Quant | None:
        """Returns the quantization spec; a given scale is on this rank's device."""
        if isinstance(self.quant, allnorm.Fp8PerTensor):
            return allnorm.Fp8PerTensor(self.quant.scale.to(device()))
        if isinstance(self.quant, allnorm.NvFp4):
            given = self.quant.global_scale.to(device())
            return allnorm.NvFp4(given, self.quant.scale_layout)
        return self.quant

    def own_rows(self, comm: allnorm.Communicator, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows of a sharded residual that this rank holds."""
        lo, hi = reference.row_shard(self.num_tokens, comm.world_size, comm.rank)
        return rows.reshape(-1, self.hidden_size)[lo:hi]

    # ---- the call ----

    def norm_arguments(
        self, residual: torch.Tensor | None = None, weight: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Returns the arguments that the methods and the reference share.

        Given tensors replace the case's tensors. A given weight is used for both norms.
        """
        if weight is None:
            residual, second = self.residual_tensor(), self.weight()
        else:
            residual, second = (residual if self.residual else None), weight
            if residual is not None and self.float32_residual:
                residual = residual.float()
        arguments: dict[str, Any] = {
            "residual": residual,
            "weight": second if self.second_norm else None,
            "eps": self.eps,
            "weight_bias": self.weight_bias,
            "numerics": self.numerics,
        }
        if self.post_norm:
            arguments["post_norm"] = self.norm_before(weight)
        if self.scale != 1.0:
            arguments["scale"] = self.scale
        return arguments

    def call_arguments(
        self,
        comm: allnorm.Communicator,
        residual: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Returns the arguments that follow `x` in the call.

        A sharded call uses views of its own rows of the given tensors.
        """
        if self.op == "all_reduce":
            return {"algorithm": self.algorithm}
        if self.op == "all_gather_rows":
            return {"num_tokens": self.num_tokens, "algorithm": self.algorithm}
        arguments = self.norm_arguments(residual, weight)
        if self.op == "rms_norm_sharded":
            del arguments["residual"]
            return arguments | {"algorithm": self.algorithm}
        if self.op == "all_reduce_hyper_connection":
            chosen = {"streams": self.streams, "algorithm": self.algorithm}
            return {"residual": arguments["residual"], **chosen}
        if self.op == "norm":
            arguments["algorithm"] = self.algorithm
        if self.sharded:
            arguments |= {"residual_sharded": True, "gather": self.gather}
            if self.residual:
                own = self.own_rows(comm, arguments["residual"])
                arguments["residual"] = own.clone() if weight is None else own
        if self.quant is not None:
            arguments |= {"quant": self.spec(), "return_normed": self.return_normed}
        return arguments

    def method(self, comm: allnorm.Communicator) -> Any:
        """Returns the method or function that this case calls."""
        if self.op == "local":
            return allnorm.add_rms_norm if self.quant is None else allnorm.add_rms_norm_quant
        if self.op == "rms_norm_sharded":
            return functools.partial(norm_slices, comm)
        if self.op == "all_reduce_hyper_connection":
            return functools.partial(mix_streams, comm)
        if self.op != "norm":
            return getattr(comm, self.op)
        if self.quant is None:
            return comm.all_reduce_add_rms_norm
        return comm.all_reduce_add_rms_norm_quant

    @property
    def has_norm(self) -> bool:
        """Returns whether the call has a norm."""
        return self.op in ("norm", "local")

    def run(self, comm: allnorm.Communicator, **more: Any) -> Any:
        """Runs the call; returns (normed, residual), a QuantizedNorm, or a tensor."""
        arguments = {**self.call_arguments(comm), **more}
        return self.method(comm)(self.x_of(comm), **arguments)

    def run_on(
        self,
        comm: allnorm.Communicator,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        **out: Any,
    ) -> Results:
        """Runs the call on the given tensors; does not wait for CUDA.

        `residual` has all rows even if the call is sharded. `weight` is used for both norms. `out`
        maps argument names of the method to preallocated results.
        """
        given: Any = x if self.experts is None else _as_experts(x)
        if self.op == "all_gather_rows":
            given = self.own_rows(comm, x).clone()
        arguments = self.call_arguments(comm, residual, weight)
        return self.named(self.method(comm)(given, **arguments, **out))

    def issue(
        self,
        comm: allnorm.Communicator,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        in_place: bool = False,
    ) -> Results:
        """Runs the call like `run_on`, then gathers a sharded residual if the call gathers rows.

        With `in_place`, results overwrite `x` and `residual` where possible.
        """
        out: dict[str, Any] = {}
        if self.float32_residual:
            residual = residual.float()
        given_out = self.quant is None and self.second_norm and self.experts is None
        given_out = given_out and self.op != "all_reduce_hyper_connection"
        if in_place and given_out and self.gather:
            out["out"] = x
        if in_place and self.op == "norm" and self.residual:
            out["residual_out"] = self.own_rows(comm, residual) if self.sharded else residual
        if self.op == "all_reduce_hyper_connection":
            out["in_place"] = in_place
        if self.next_input:
            rounding = {"weight_bias": self.weight_bias, "numerics": self.numerics}
            out["next_norm"] = {"weight": weight, "eps": self.eps, **rounding}
        results = self.run_on(comm, x, residual, weight, **out)
        if self.sharded and self.gather:
            shard = results["residual_out"]
            results["residual_out"] = comm.all_gather_rows(shard, self.num_tokens)
        return results

    # ---- what it must return ----

    def expected(self, world_size: int, islands: Any = None) -> Any:
        """Returns the reference's results for the call, with all rows of the residual.

        If rows are not gathered, each result is the list of all ranks' rows; for
        "rms_norm_sharded", it is the list of all ranks' slices.
        """
        xs = self.xs(world_size)
        if self.op == "all_reduce":
            return reference.all_reduce(xs, islands=islands)
        if self.op == "all_gather_rows":
            return xs[0].reshape(-1, self.hidden_size)
        arguments = self.norm_arguments()
        if self.op == "all_reduce_hyper_connection":
            reduced = reference.all_reduce(xs, islands=islands)
            return expected_streams(reduced, arguments["residual"], self.streams)
        if self.op == "rms_norm_sharded":
            squares = functools.reduce(torch.add, map(squares_of, xs))
            options = (squares, arguments["weight"], world_size)
            return [self.expected_slices(x, *options)["normed"] for x in xs]
        if not self.gather:
            arguments |= {"residual_sharded": True, "gather": False}
            if self.residual:
                arguments["residual"] = split_rows(arguments["residual"], world_size)
        if self.quant is not None:
            arguments |= {"quant": self.spec(), "return_normed": self.return_normed}
        if self.op == "local":
            local = reference.add_rms_norm if self.quant is None else reference.add_rms_norm_quant
            return local(xs[0], **arguments)
        if self.quant is None:
            return reference.all_reduce_add_rms_norm(xs, islands=islands, **arguments)
        return reference.all_reduce_add_rms_norm_quant(xs, islands=islands, **arguments)

    def expected_of(
        self, reduced: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> Results:
        """Returns the reference's results for the given tensors.

        `reduced` is the sum over the ranks. Normed rows are always included. For
        "rms_norm_sharded", see `expected_slices`.
        """
        if self.op == "all_reduce":
            return {"reduced": reduced}
        arguments = self.norm_arguments(residual, weight)
        if self.op == "all_reduce_hyper_connection":
            mixed = expected_streams(reduced, arguments["residual"], self.streams)
            return self.named(mixed) | (self._input(mixed, weight) if self.next_input else {})
        if self.quant is None:
            return self.named(reference.add_rms_norm(reduced, **arguments))
        return self.named(
            reference.add_rms_norm_quant(reduced, quant=self.quant, return_normed=True, **arguments)
        )

    def _input(self, streams: torch.Tensor, weight: torch.Tensor) -> Results:
        options = {"weight_bias": self.weight_bias, "numerics": self.numerics}
        return next_input(reference.hyper_connection_input, streams, weight, self.eps, **options)

    def expected_slices(
        self, x: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, world_size: int
    ) -> Results:
        """Returns the reference's result of "rms_norm_sharded" for a rank's rows.

        `squares` [num_tokens, slices] are the sums of squares over all ranks, see `squares_of`.
        """
        sizes = slice_sizes(self.hidden_size)
        parts = zip(x.split(sizes, -1), squares.unbind(-1), weight.split(sizes), strict=True)
        options = (self.eps, self.weight_bias, self.numerics)
        normed = [normed_slice(x, each, world_size, gains, *options) for x, each, gains in parts]
        return {"normed": torch.cat(normed, -1)}

    def result_key(self) -> tuple[Any, ...]:
        """Returns a key that is equal for two cases if they compute the same results for a row."""
        if self.op == "all_reduce":
            return (self.op,)
        # The layout does not change the numbers of the scales.
        quant: Any = self.quant
        if isinstance(quant, allnorm.Fp8PerGroup) and quant.scale_layout != SWIZZLED:
            quant = ("per_group", quant.group_size, quant.scale_format)
        bias = str(self.weight_bias)  # -0.0 is equal to 0.0
        if self.op == "rms_norm_sharded":
            return (self.op, self.numerics, bias, self.float32_weight, self.eps)
        wide = self.residual and self.float32_residual
        if self.op == "all_reduce_hyper_connection":
            norm = (self.numerics, bias, self.float32_weight, self.eps) if self.next_input else ()
            return (self.op, self.streams, wide, *norm)
        options = (self.numerics, bias, self.float32_weight, self.residual, wide, self.eps)
        return (*options, quant, self.post_norm, self.scale, self.second_norm)

    def named(self, result: Any) -> Results:
        """Returns the existing results by name, with scales in row order."""
        if self.op == "rms_norm_sharded":
            return {"normed": result}
        if self.op == "all_reduce_hyper_connection":
            return result if isinstance(result, dict) else {"residual_out": result}
        if self.op != "norm":
            return {"reduced" if self.op == "all_reduce" else "rows": result}
        if self.quant is None:
            found = dict(zip(("normed", "residual_out"), result, strict=True))
        else:
            found = {
                "quantized": result.quantized,
                "residual_out": result.residual,
                "normed": result.normed,
            }
            if not isinstance(self.quant, allnorm.Fp8PerTensor):
                found["scale"] = self._scale_by_rows(result)
        return {name: part for name, part in found.items() if part is not None}

    def _scale_by_rows(self, result: allnorm.QuantizedNorm) -> torch.Tensor:
        """Returns the scales in row order; tiled scales keep each row's padding."""
        num_tokens = rows_of(result.quantized.shape)
        assert self.quant is not None
        geometry = scale_geometry(self.quant, num_tokens, self.hidden_size)
        if geometry is None or not geometry.tiles:
            return result.scale
        return swizzled_rows(result.scale, geometry.tiles)[:num_tokens]

    def check(self, comm: allnorm.Communicator) -> Any:
        """Runs the call and compares all results with the reference.

        Raises:
            AssertionError: a result differs from the reference.
        """
        results = self.run(comm)
        self.compare(comm, *(results if self.has_norm else (results,)))
        return results

    def compare(self, comm: allnorm.Communicator, *results: torch.Tensor | None) -> None:
        """Compares this rank's results with the reference.

        Raises:
            AssertionError: a result differs from the reference.
        """
        wrong = self.wrong(comm, results)
        if wrong:
            raise AssertionError(f"{self}: {'; '.join(wrong)}")

    def wrong(
        self, comm: allnorm.Communicator, results: Sequence[torch.Tensor | None]
    ) -> list[str]:
        """Describes the errors in this rank's results."""
        expected = self.expected(comm.world_size, comm.islands)
        if not self.gather:
            expected = [None if ranks is None else ranks[comm.rank] for ranks in expected]
        listed: tuple[str, ...] = ("normed", "residual_out")
        if self.op == "rms_norm_sharded":
            listed, expected = ("normed",), (expected[comm.rank],)
        elif not self.has_norm:
            listed, expected = (self.op,), (expected,)
        elif self.quant is not None:
            listed = ("quantized", "scale", "residual_out", "normed")
        found = []
        for name, got, want in zip(listed, results, expected, strict=True):
            if want is None or got is None:
                if got is not want:
                    found.append(f"{name} is {'None' if got is None else 'not None'}")
                continue
            if self.sharded and self.gather and name == "residual_out":
                want = self.own_rows(comm, want)
            scale = name == "scale" and not isinstance(self.quant, allnorm.Fp8PerTensor)
            if scale and got.stride() != want.stride():
                found.append(f"strides of the scales are {got.stride()}")
            elif scale:
                got, want = (with_padding(part, self.quant) for part in (got, want))
            difference = describe_difference(got, want)
            found += [f"{name}: {difference}"] if difference else []
        return found

    def agreed(self, results: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Returns the results that must be equal on every rank."""
        if not self.gather or self.op == "rms_norm_sharded":
            return []
        kept = list(results)
        if self.sharded and self.has_norm:
            del kept[1 if self.quant is None else 2]
        return [result for result in kept if result is not None]


def with_padding(scale: torch.Tensor, quant: Quant | None) -> torch.Tensor:
    """Returns scales with their padding rows, if the layout has them."""
    if getattr(quant, "scale_layout", "") != "column_major_tma" or not scale.numel():
        return scale
    rows, words = scale.stride(1), scale.shape[1]
    return scale.as_strided((rows, words), (1, rows))


def rows_of(shape: Sequence[int]) -> int:
    """Returns the product of the leading dimensions."""
    return torch.Size(shape[:-1]).numel()


def _group_size(quant: Quant | None) -> int:
    if isinstance(quant, allnorm.Fp8PerGroup):
        return quant.group_size
    return 16 if isinstance(quant, allnorm.NvFp4) else 1


def _of_word(word: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    signed = word - (1 << 32) if word >= 1 << 31 else word
    words = (*shape[:-1], shape[-1] * dtype.itemsize // 4)
    return torch.full(words, signed, dtype=torch.int32, device=device()).view(dtype)


def _as_experts(x: torch.Tensor) -> allnorm.ExpertSum:
    """Returns an ExpertSum whose sum is exactly `x`, if its numbers can be halved exactly."""
    token = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    index = torch.stack((token, torch.full_like(token, -1), token), dim=1)
    weights = torch.full(index.shape, 0.5, device=x.device)
    return allnorm.ExpertSum(x, weights, index)
