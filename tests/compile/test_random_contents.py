"""Tests random modules that reshape, slice, scale, norm, write in place and return structures.

The elements of normed tensors are small integers times a power of two. Sums of squares then do not
depend on the order, so results must be bit-identical, unless a norm is normed again. The graph must
have as many fused calls as the report has fused sites, and as many reductions as the report has
missed sites.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compile_programs import WrongError, compare
from rank_helpers import comm, device, on
from torch import Tensor, nn
from torch.fx import GraphModule, Proxy, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten

from allnorm.compile import FusionReport, fuse
from allnorm.testing import RankPool

from .helpers import check_programs, gemma, llama, nodes_calling, reduce

HIDDEN, EPS = 32, 1e-5
bf16 = torch.bfloat16


def reduce_in_place(x: Any) -> None:
    """Reduces with the functional collective; under torch.fx, records `dist.all_reduce`."""
    if isinstance(x, Proxy):
        x.tracer.create_proxy("call_function", dist.all_reduce, (x,), {})
        return
    functional = torch.ops._c10d_functional
    functional.wait_tensor.default(functional.all_reduce_.default(x, "sum", "0"))


class Program(nn.Module):
    """A random function of (x, r, other), determined by the seed.

    Attributes:
        exact: for each result, in flattened order, whether it must be bit-identical.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.exact: list[bool] = []
        generator = torch.Generator().manual_seed(seed)
        for name in ("weight", "second"):
            values = torch.randint(1, 9, (HIDDEN,), generator=generator) / 4
            self.register_buffer(name, values.to(device(), bf16))

    def forward(self, x: Any, r: Any, other: Any) -> Any:
        """Runs the random operations, which are the same in every call."""
        self.random = random.Random(self.seed)
        self.normed: list[tuple[Any, bool]] = []  # each with whether it must be bit-identical
        self.sums: list[Any] = [r, other]  # bit-identical tensors with the rows of r
        for _ in range(self.random.randint(1, 3)):
            self.site(x)
        results = [*self.normed, *((one, True) for one in self.sums[2:])]
        results = [self.used(*one) for one in results if self.chance(0.7)] or results[:1]
        self.exact = [exact for _, exact in results]
        return self.structure([tensor for tensor, _ in results])

    def chance(self, part: float) -> bool:
        return self.random.random() < part

    def exactly(self, tensor: Any) -> Any:
        """Returns the tensor times 4, rounded to integers from -32 to 32."""
        return torch.clamp(torch.round(tensor * 4), -32, 32)

    def rows(self, tensor: Any) -> Any:
        """Returns the tensor, possibly in a different shape."""
        forms = [
            lambda: tensor.view(2, -1, HIDDEN),
            lambda: tensor.reshape(-1, HIDDEN),
            lambda: tensor.reshape(-1, HIDDEN).unsqueeze(0),
            lambda: tensor.reshape(-1, 2, HIDDEN),
            lambda: tensor.flatten(0, -2),
        ]
        return self.random.choice([*forms, *[lambda: tensor] * 4])()

    def flat(self, tensor: Any) -> Any:
        return tensor.reshape(-1, HIDDEN)

    def reduced(self, x: Any) -> Any:
        kind = self.random.randrange(6)
        if kind == 0:
            x = x * 1
            reduce_in_place(x)
            return x
        if kind == 1 and self.chance(0.3):
            x = x * 1
            reduce_in_place(x[:1])
            return x
        return reduce(x)

    def norm(self, z: Any) -> Any:
        weight = self.weight if self.chance(0.6) else self.second
        if self.chance(0.1):
            weight = weight[None]
        norms = [
            lambda: llama(z, weight, EPS),
            lambda: gemma(z, weight),
            lambda: F.rms_norm(z, (HIDDEN,), None, EPS),
            lambda: F.rms_norm(z, (HIDDEN,), weight.view(HIDDEN), EPS),
        ]
        return self.random.choice(norms)()

    def write(self, *tensors: Any) -> None:
        """Sometimes writes to one of the tensors or to the weight."""
        if self.chance(0.7):
            return
        tensor = self.random.choice(tensors)
        writes = [
            lambda: tensor.mul_(2.0),
            lambda: tensor.neg_(),
            lambda: tensor.select(0, 0).zero_(),
            lambda: tensor.narrow(-1, 0, 8).mul_(0.5),
            lambda: self.weight.mul_(0.5),
        ]
        self.random.choice(writes)()

    def site(self, x: Any) -> None:
        sources = [x, *self.sums[2:], *(tensor for tensor, _ in self.normed)]
        mine = self.rows(self.exactly(self.flat(self.random.choice(sources))))
        total = self.rows(self.reduced(mine))
        exact, scaled = True, 1.0
        if self.chance(0.2):
            total, exact = self.norm(total), False
        if self.chance(0.3):
            scaled = self.random.choice([0.5, 2.0, -1.0])
            total = total * scaled
        total = self.rows(total)
        if exact and self.chance(0.15):
            self.normed.append((self.flat(total) + 1, True))
        self.write(mine, total)
        if self.chance(0.75):
            residual = torch.clamp(self.random.choice(self.sums), -128, 128).reshape(-1, HIDDEN)
            if self.chance(0.2):
                residual = self.random.choice(self.sums).reshape(-1, HIDDEN)
                exact = False
            residual = residual.view_as(total) if self.chance(0.5) else residual.view(total.shape)
            if self.chance(0.3):
                total += residual
            else:
                total = residual + total if self.chance(0.5) else total + residual
        first = exact
        shaped = self.rows(total)
        y = self.norm(shaped)
        self.normed.append((y, first))
        if self.chance(0.15):
            self.normed.append((self.norm(self.rows(total)), first))
        if self.chance(0.3):
            self.write(y, total, shaped)
        if exact and self.chance(0.7):
            self.sums.append(total)
        elif self.chance(0.5):
            self.normed.append((total, exact))

    def used(self, tensor: Any, exact: bool) -> tuple[Any, bool]:
        """Returns the tensor or one computed from it, and whether that must be bit-identical."""
        uses = [
            lambda: (tensor[-1:], exact),
            lambda: (tensor[..., :8] * 2, exact),
            lambda: (tensor.transpose(0, 1), exact),
            lambda: (tensor.new_ones(tensor.shape), True),
        ]
        return self.random.choice([*uses, *[lambda: (tensor, exact)] * 6])()

    def structure(self, tensors: list[Any]) -> Any:
        kind = self.random.randrange(5)
        if kind == 0:
            return {f"r{index}": tensor for index, tensor in enumerate(tensors)}
        if kind == 1:
            return ((tensors[0], {"rest": tensors[1:]}),)
        if kind == 2 and len(tensors) == 1:
            return tensors[0]
        if kind == 3:
            return [*tensors]
        return tuple(tensors)


ENTRANCES = ("fx", "fx", "fx", "real", "fake", "symbolic", "export")


def traced(program: Program, entrance: str, inputs: list[Tensor]) -> tuple[GraphModule, Any]:
    """Returns the traced graph, and the other arguments of fuse()."""
    if entrance == "fx":
        return symbolic_trace(program), inputs
    if entrance == "export":
        return torch.export.export(program, tuple(inputs)).module(check_guards=False), None
    given = [tensor.clone() for tensor in inputs]
    states = {name: buffer.clone() for name, buffer in program.named_buffers()}
    module = make_fx(program, tracing_mode=entrance, _allow_non_fake_inputs=True)(*given)
    for name, buffer in program.named_buffers():
        buffer.copy_(states[name])
    return module, inputs


def ints(rank: int, seed: int, tokens: int) -> list[Tensor]:
    def make(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 8 + number)
        values = torch.randint(-16, 17, (tokens, HIDDEN), generator=generator)
        return values.to(device(), bf16)

    return [make(4 + rank), make(0), make(1)]


def states_of(module: nn.Module) -> list[Tensor]:
    return [tensor for _, tensor in sorted(module.named_buffers())]


def one(rank: int, seed: int) -> list[FusionReport] | None:
    """Fuses a graph and compares its results; returns None if it cannot be traced or run."""
    choose = random.Random(-seed - 1)
    tokens, entrance = choose.choice([4, 6, 12]), choose.choice(ENTRANCES)
    inputs = ints(rank, seed, tokens)
    with torch.no_grad():
        try:
            Program(seed)(*[tensor.clone() for tensor in inputs])
            module, examples = traced(Program(seed), entrance, inputs)
            given, _ = traced(Program(seed), entrance, inputs)
            given(*[tensor.clone() for tensor in inputs])
        except (RuntimeError, ValueError, TypeError, torch.fx.proxy.TraceError):
            return None
        given, _ = traced(Program(seed), entrance, inputs)  # a new program, with unchanged buffers
        before = str(module.graph)
        report = fuse(module, examples, comm())
        module.graph.lint()
        what = f"seed {seed}, {entrance}, {tokens} tokens:\n{before}\n{report}\n{module.graph}"
        check_truth(module, report, what)
        others = [tokens, tokens + 4, 1] if entrance in ("symbolic", "fx") else [tokens]
        for count in others:
            fresh = ints(rank, seed, count)
            check_run(given, module, fresh, Program(seed), what, resized=count != tokens)
    return [report]


def check_truth(module: GraphModule, report: FusionReport, what: str) -> None:
    calls = nodes_calling(module, "add_rms_norm")
    left = nodes_calling(module, "_c10d_functional.all_reduce", "function all_reduce")
    if len(calls) != len(report.fused) or len(left) != len(report.missed):
        raise WrongError(f"the report does not match the graph of {what}")


def check_run(
    given: GraphModule,
    module: GraphModule,
    inputs: list[Tensor],
    program: Program,
    what: str,
    *,
    resized: bool,
) -> None:
    theirs, mine = ([tensor.clone() for tensor in inputs] for _ in range(2))
    try:
        want, structure = tree_flatten(given(*theirs))
    except RuntimeError:
        if not resized:
            raise
        return
    try:
        got, same = tree_flatten(module(*mine))
    except ValueError as error:
        if resized and "Fuse the graph again" in str(error):
            return
        raise
    if structure != same:
        raise WrongError(f"the structure of the results, {same}, not {structure}, of {what}")
    program(*[tensor.clone() for tensor in inputs])
    exact = [*program.exact, *(True for _ in inputs), *(True for _ in states_of(module))]
    got, want = [*got, *mine, *states_of(module)], [*want, *theirs, *states_of(given)]
    for index, (a, b, bits) in enumerate(zip(got, want, exact, strict=True)):
        if (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()):
            raise WrongError(f"result {index} is {a.shape} {a.stride()}, not {b.shape} of {what}")
        if bits and not torch.equal(a.view(torch.int16), b.view(torch.int16)):
            raise WrongError(f"bits of result {index} of {what}")
    compare(got, want, 0.05, 0.95, what)


@pytest.mark.long
@on(cpu=(2,))
@pytest.mark.parametrize(("first", "count"), [(0, 15), (15, 85)])
def test_random_contents(pool: RankPool, first: int, count: int) -> None:
    check_programs(pool, __name__, range(first, first + count), fused=4, missed=4)


@pytest.mark.long
@pytest.mark.timeout(7200)
@on(cpu=(2,))
@pytest.mark.parametrize("first", range(1000, 4000, 500))
def test_many_random_contents(pool: RankPool, first: int) -> None:
    check_programs(pool, __name__, range(first, first + 500), fused=100, missed=100)
