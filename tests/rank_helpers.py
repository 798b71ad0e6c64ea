"""What the test functions that run inside ranks share: cases, communicators, checks."""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allnorm
from allnorm import names, reference
from allnorm.quant import Quant
from allnorm.testing import assert_same_bits, rank_input, sentinel_input, shared_input
from allnorm.testing import special_input as make_special
from allnorm.testing.rank import device

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MODES = reference.NUMERICS
ALGORITHMS = ("auto", *names.ALGORITHMS)
dtype_ids = {"argvalues": DTYPES, "ids": [str(dtype)[6:] for dtype in DTYPES]}


def on(*, cpu: Iterable[int] = (), gpu: Iterable[int] = ()) -> pytest.MarkDecorator:
    """Runs a test, with the fixture `pool`, on CPU ranks and on GPUs, once per world size."""
    return pytest.mark.parametrize(
        "pool",
        [pytest.param(("cpu", n), id=f"cpu{n}", marks=pytest.mark.world_size(n)) for n in cpu]
        + [
            pytest.param(
                ("cuda", n), id=f"cuda{n}", marks=(pytest.mark.gpu, pytest.mark.world_size(n))
            )
            for n in gpu
        ],
        indirect=True,
    )


def destroy_groups(rank: int, world_size: int) -> None:
    """Runs in ranks: ends all process groups but the first.

    Each has threads that look around every few milliseconds, for as long as the ranks live; a model
    of transformers makes six.
    """
    groups = [g for g in dist.distributed_c10d._world.pg_map if g is not dist.group.WORLD]
    for group in groups:
        dist.destroy_process_group(group)
    if groups:
        gc.collect()  # of models that hold on to them


@functools.cache
def comm(**arguments: Any) -> allnorm.Communicator:
    """A communicator that later calls with these arguments find again. Collective."""
    return allnorm.Communicator(device=device(), **arguments)


@dataclasses.dataclass(frozen=True)
class Experts:
    """What stands for `x` of a call that begins with what experts return."""

    top_k: int = 2
    weighted: bool = True
    shared: bool = False
    indexed: bool = True
    absent: float = 0.3
    """The part of the choices that a rank has no row for, of those with an index."""

    def of(self, case: Case, rank: int) -> allnorm.ExpertSum:
        """Of one rank; with an index other rows than choices, and another number on each rank."""
        shape, dtype, top_k = case.shape, case.dtype, self.top_k
        num_tokens, hidden_size = shape
        count = num_tokens * top_k + rank if self.indexed else num_tokens * top_k
        rows = case.but(shape=(count, hidden_size), experts=None).x(rank)
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
            rows,
            weights if self.weighted else None,
            index,
            shared if self.shared else None,
        )


@dataclasses.dataclass(frozen=True)
class Case:
    """One fused call. Everything about it follows from these values, on every rank."""

    shape: tuple[int, ...] = (3, 4096)
    dtype: torch.dtype = torch.bfloat16
    residual: bool = True
    float32_weight: bool = False
    weight_bias: float = 0.0
    eps: float = 1e-6
    numerics: str = "rounded"
    algorithm: str = "auto"
    kind: str = "normal"  # or one of SPECIAL_KINDS, "sentinels", "finite_sentinels"
    call: int = 0
    quant: Quant | None = None
    return_normed: bool = False
    sharded: bool = False
    post_norm: bool = False
    scale: float = 1.0
    second_norm: bool = True
    experts: Experts | None = None

    def x(self, rank: int) -> Any:
        if self.experts is not None:
            return self.experts.of(self, rank)
        if self.kind == "normal":
            return rank_input(self.shape, self.dtype, rank, call=self.call, device=device())
        if self.kind.endswith("sentinels"):
            return sentinel_input(
                self.shape,
                self.dtype,
                rank,
                finite=self.kind.startswith("finite"),
                call=self.call,
                device=device(),
            )
        return make_special(
            self.kind, self.shape, self.dtype, rank, call=self.call, device=device()
        )

    def xs(self, world_size: int) -> list[Any]:
        return [self.x(rank) for rank in range(world_size)]

    def residual_tensor(self) -> torch.Tensor | None:
        if not self.residual:
            return None
        scale = 0.0 if self.kind == "negative_zeros" else 3.0
        values = shared_input(self.shape, self.dtype, "residual", call=self.call, device=device())
        return -(values.abs() * 0.0) if scale == 0.0 else values * scale

    def weight(self) -> torch.Tensor:
        dtype = torch.float32 if self.float32_weight else self.dtype
        return shared_input(self.shape[-1:], dtype, "weight", device=device())

    def norm_before(self) -> allnorm.PostNorm | None:
        """Of a weight in the dtype that the other weight does not have."""
        if not self.post_norm:
            return None
        dtype = self.dtype if self.float32_weight else torch.float32
        weight = shared_input(self.shape[-1:], dtype, "post_norm", device=device())
        return allnorm.PostNorm(weight, 2 * self.eps, 1.0 - self.weight_bias)

    def norm_arguments(self) -> dict[str, Any]:
        arguments = {
            "residual": self.residual_tensor(),
            "weight": self.weight() if self.second_norm else None,
            "eps": self.eps,
            "weight_bias": self.weight_bias,
            "numerics": self.numerics,
        }
        if self.post_norm:
            arguments["post_norm"] = self.norm_before()
        if self.scale != 1.0:
            arguments["scale"] = self.scale
        return arguments

    def spec(self) -> Quant | None:
        """How to quantise; a given scale is on this rank's device."""
        if isinstance(self.quant, allnorm.Fp8PerTensor):
            return allnorm.Fp8PerTensor(self.quant.scale.to(device()))
        if isinstance(self.quant, allnorm.NvFp4):
            given = self.quant.global_scale.to(device())
            return allnorm.NvFp4(given, self.quant.scale_layout)
        return self.quant

    def call_arguments(self, c: allnorm.Communicator) -> dict[str, Any]:
        """Of the method that makes this call: `method(x, **call_arguments)`."""
        arguments = {**self.norm_arguments(), "algorithm": self.algorithm}
        if self.sharded:
            arguments["residual_sharded"] = True
            if self.residual:
                arguments["residual"] = self.own_rows(c, arguments["residual"]).clone()
        if self.quant is not None:
            arguments |= {"quant": self.spec(), "return_normed": self.return_normed}
        return arguments

    def method(self, c: allnorm.Communicator) -> Any:
        return c.all_reduce_add_rms_norm if self.quant is None else c.all_reduce_add_rms_norm_quant

    def run(self, c: allnorm.Communicator, **more: Any) -> Any:
        """(normed, residual), or a QuantizedNorm."""
        return self.method(c)(self.x(c.rank), **{**self.call_arguments(c), **more})

    def own_rows(self, c: allnorm.Communicator, rows: torch.Tensor) -> torch.Tensor:
        lo, hi = reference.row_shard(torch.Size(self.shape[:-1]).numel(), c.world_size, c.rank)
        return rows.reshape(-1, self.shape[-1])[lo:hi]

    def expected(self, world_size: int, islands: Any = None) -> Any:
        """What the reference says of the call, with all rows of the residual."""
        xs, arguments = self.xs(world_size), self.norm_arguments()
        if self.quant is None:
            return reference.all_reduce_add_rms_norm(xs, islands=islands, **arguments)
        return reference.all_reduce_add_rms_norm_quant(
            xs,
            quant=self.spec(),
            return_normed=self.return_normed,
            islands=islands,
            **arguments,
        )

    def check(self, c: allnorm.Communicator) -> Any:
        """Runs the call and compares all results with the reference."""
        results = self.run(c)
        self.compare(c, *results)
        return results

    def compare(self, c: allnorm.Communicator, *results: torch.Tensor | None) -> None:
        names = ("normed", "residual")
        if self.quant is not None:
            names = ("quantized", "scale", "residual", "normed")
        for name, got, want in zip(
            names, results, self.expected(c.world_size, c.islands), strict=True
        ):
            if want is None or got is None:
                assert got is want, f"{name} of {self}"
                continue
            if self.sharded and name == "residual":
                want = self.own_rows(c, want)
            assert_same_bits(got, want, f"{name} of {self}")
            if name == "scale" and not isinstance(self.quant, allnorm.Fp8PerTensor):
                assert got.stride() == want.stride(), f"strides of {self}"
                assert_padding_is_zero(got, self.quant)

    def but(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)


def assert_padding_is_zero(scale: torch.Tensor, quant: Quant | None) -> None:
    """The memory between the last row of scales and the next multiple of four."""
    if getattr(quant, "scale_layout", "") != "column_major_tma" or not scale.numel():
        return
    (rows, words), column = scale.shape, scale.stride(1)
    assert column == -(-rows // 4) * 4
    memory = scale.as_strided((words, column), (column, 1)).view(torch.int32)
    assert (memory[:, rows:] == 0).all(), "padding rows are zero"


def agreed(case: Case, results: Any) -> list[torch.Tensor]:
    """Those of the results that every rank holds the same."""
    if case.quant is None:
        kept = results[: 1 if case.sharded else 2]
        return [result for result in kept if result is not None]
    quantized, scale, residual, normed = results
    whole = [quantized, scale, *([] if case.sharded else [residual])]
    return whole if normed is None else [*whole, normed]


def can_run(
    c: allnorm.Communicator,
    algorithm: str,
    hidden_size: int,
    dtype: torch.dtype,
    sharded: bool = False,
) -> bool:
    """What the contract promises: which algorithm must run, and which may be refused."""
    if algorithm in ("auto", "unfused") or c.world_size == 1:
        return True
    if sharded and algorithm == "one_shot":
        return False
    return c.device.type == "cpu" or hidden_size * dtype.itemsize % 16 == 0


def usable(c: allnorm.Communicator, hidden_size: int, dtype: torch.dtype) -> list[str]:
    """The algorithms that must run; with several ranks these are more than one."""
    names = [name for name in ALGORITHMS if can_run(c, name, hidden_size, dtype)]
    assert len(names) >= 2
    return names


def check_or_refuse(c: allnorm.Communicator, case: Case) -> Any:
    """Checks the bits of a case, and returns its results; if it cannot run, that it says so."""
    if can_run(c, case.algorithm, case.shape[-1], case.dtype, case.sharded):
        if case.algorithm != "auto" and c.world_size > 1:
            tokens = torch.Size(case.shape[:-1]).numel()
            plan = c.plan(
                *(tokens, case.shape[-1], case.dtype, case.spec(), case.sharded),
                algorithm=case.algorithm,
            )
            assert plan.algorithm == case.algorithm, plan
        return case.check(c)
    with pytest.raises(allnorm.UnsupportedError, match=case.algorithm):
        case.run(c)
    return None


def assert_ranks_agree(c: allnorm.Communicator, *tensors: torch.Tensor) -> None:
    """Every rank holds the same bits, NaN payloads included. Collective."""
    digest = hashlib.blake2b()
    for tensor in tensors:
        # cloned: of one element alone even a contiguous tensor may keep an odd stride
        dense = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
        digest.update(dense.view(torch.uint8).cpu().numpy().tobytes())
    digests: list[str] = [""] * c.world_size
    dist.all_gather_object(digests, digest.hexdigest(), group=c.group)
    assert len(set(digests)) == 1, f"the ranks hold different bits: {digests}"


def message_of(error: type[BaseException] | tuple[type[BaseException], ...], call: Any) -> str:
    """The text of the error that `call` must raise."""
    with pytest.raises(error) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def check_cases(rank: int, world_size: int, cases: list[Case], **arguments: Any) -> int:
    """Runs in ranks; returns how many of the cases ran (the others were refused, as they should).

    `arguments` are those of the communicator.
    """
    c = comm(**arguments)
    ran = 0
    for case in cases:
        results = check_or_refuse(c, case)
        if results is not None:
            assert_ranks_agree(c, *agreed(case, results))
            ran += 1
    assert c.check() is None
    return ran
