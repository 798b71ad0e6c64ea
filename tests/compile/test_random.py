"""Tests random graphs with views, copies and in-place calls: fusion must not change results.

Half of the graphs also norm in place and overwrite their inputs with results.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compile_programs import WrongError, compare
from rank_helpers import comm, device, on
from torch.fx import Graph, GraphModule, Node

from allnorm.compile import FusionReport, fuse
from allnorm.testing import RankPool, rank_input, shared_input

from .helpers import check_programs

TOKENS, HIDDEN, EPS = 6, 64, 1e-5
bf16 = torch.bfloat16


class Program:
    """A random graph of bfloat16 tensors [6, 64]; not all of its sites can be fused."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.in_place = seed % 2 == 1
        self.graph = Graph()
        self.weight = self.graph.placeholder("weight")
        self.tensors = [self.graph.placeholder(name) for name in ("x", "residual", "other")]
        for _ in range(self.random.randint(1, 3)):
            self.site()
        outputs = self.random.sample(
            self.tensors, min(len(self.tensors), self.random.randint(1, 4))
        )
        self.graph.output(tuple(outputs))
        self.module = GraphModule(torch.nn.Module(), self.graph)

    def pick(self) -> Node:
        """Returns a random tensor, often one of the latest."""
        if self.random.random() < 0.6:
            return self.random.choice(self.tensors[-3:])
        return self.random.choice(self.tensors)

    def call(self, target: Any, *arguments: Any, **keywords: Any) -> Node:
        if isinstance(target, str):
            return self.graph.call_method(target, arguments, keywords)
        return self.graph.call_function(target, arguments, keywords)

    def noise(self, chance: float = 0.35) -> None:
        """Adds operations that read or write tensors of sites."""
        while self.random.random() < chance:
            operation = self.random.choice(OPERATIONS)
            operation(self, self.pick())

    def keep(self, target: Any, *arguments: Any) -> None:
        """Adds a call to the graph; later operations may pick its result."""
        self.tensors.append(self.call(target, *arguments))

    def view_twice(self, tensor: Node) -> None:
        wide = self.call("view", tensor, 2, 3, HIDDEN)
        self.keep("view", wide, TOKENS, HIDDEN)
        if self.random.random() < 0.5:
            self.call("add_", wide, 0.25)

    def copy_rows(self, tensor: Node) -> None:
        rows = self.call(operator.getitem, self.pick(), slice(1, 3))
        self.call("copy_", self.call(operator.getitem, tensor, slice(3, 5)), rows)

    def product(self, a: Node, b: Node) -> Node:
        if self.in_place and self.random.random() < 0.4:
            return self.call("mul_", a, b)
        return self.call(operator.mul, *((a, b) if self.random.random() < 0.5 else (b, a)))

    def reduce(self, x: Node) -> Node:
        kind = self.random.randrange(4)
        if kind == 0:
            self.call(dist.all_reduce, x)
            return x
        wait = torch.ops._c10d_functional.wait_tensor.default
        if kind == 3:
            return self.call(
                wait, self.call(torch.ops._c10d_functional.all_reduce_.default, x, "sum", "0")
            )
        functional = torch.ops._c10d_functional.all_reduce.default
        reduced = self.call(functional, x, "sum", "0")
        waited = self.call(wait, reduced)
        if kind == 1:
            return waited
        self.call("copy_", x, waited)
        return x

    def norm(self, total: Node, sum32: Node | None) -> Node:
        kind = self.random.randrange(4)
        if kind == 0 and sum32 is None:
            return self.call(F.rms_norm, total, (HIDDEN,), self.weight, EPS)
        if self.in_place and sum32 is None and self.random.random() < 0.3:
            root = self.root(self.call("float", total), kind)
            return self.product(self.product(total, root), self.weight)
        z = self.call("float", total) if sum32 is None else sum32
        self.noise(0.15)
        normed = self.product(z, self.root(z, kind))
        self.noise(0.15)
        if kind == 2:
            normed = self.call("to", normed, bf16)
            return self.product(normed, self.weight)
        gain = self.call(operator.add, 1.0, self.call("float", self.weight))
        return self.call("type_as", self.product(normed, gain), total)

    def root(self, z: Node, kind: int) -> Node:
        mean = self.call("mean", self.call(operator.mul, z, z), -1, keepdim=True)
        if kind == 1:
            self.call("add_", mean, EPS)
        else:
            mean = self.call(operator.add, mean, EPS)
        return self.call(torch.rsqrt, mean)

    def quantize(self, normed: Node) -> None:
        values = self.call("float", normed)
        if self.random.random() < 0.5:
            values = self.call("view", values, TOKENS, 2, HIDDEN // 2)
        amax = self.call("amax", self.call("abs", values), -1, keepdim=True)
        scale = self.call(operator.truediv, self.call("clamp", amax, min=1e-10), 448.0)
        self.noise(0.15)
        quotient = self.call(operator.truediv, values, scale)
        quantized = self.call("to", self.call("clamp", quotient, -448, 448), torch.float8_e4m3fn)
        product = self.call(operator.mul, self.call("float", quantized), scale)
        product = self.call("view", self.call("to", product, bf16), TOKENS, HIDDEN)
        self.tensors.append(product)

    def site(self) -> None:
        self.noise()
        x = self.call(operator.mul, self.pick(), 0.5) if self.random.random() < 0.7 else self.pick()
        self.noise(0.2)
        total = reduced = self.reduce(x)
        sum32 = None
        self.noise(0.2)
        if self.random.random() < 0.3:
            total = reduced = self.norm(reduced, None)
        if self.random.random() < 0.2:
            factor = self.random.choice([0.22, -1.5, 2])
            total = reduced = self.call(operator.mul, reduced, factor)
        if self.random.random() < 0.8:
            residual = self.pick()
            add = self.random.choice([operator.add, operator.iadd, torch.add])
            pair = [residual, reduced] if self.random.random() < 0.5 else [reduced, residual]
            if self.random.random() < 0.3:
                sum32 = self.call(add, self.call("float", pair[0]), pair[1])
                total = self.call("to", sum32, bf16)
            else:
                total = self.call(add, *pair)
        self.noise(0.2)
        normed = self.norm(total, sum32)
        if self.in_place and self.random.random() < 0.2:
            self.call("copy_", self.random.choice([total, reduced, x]), normed)
        self.tensors += [normed, total]
        if self.random.random() < 0.3:
            self.quantize(normed)
        if self.random.random() < 0.2:
            self.tensors.append(reduced)
        self.noise()


OPERATIONS: list[Callable[[Program, Node], Any]] = [
    lambda program, tensor: program.keep("clone", tensor),
    lambda program, tensor: program.keep("view", tensor, TOKENS, HIDDEN),
    lambda program, tensor: program.keep(torch.relu, tensor),
    lambda program, tensor: program.call("mul_", tensor, 0.5),
    lambda program, tensor: program.call("add_", tensor, program.pick()),
    lambda program, tensor: program.call(
        "add_", program.call(operator.getitem, tensor, slice(0, 2)), 1.0
    ),
    lambda program, tensor: program.call("copy_", tensor, program.pick()),
    lambda program, tensor: program.keep(operator.iadd, tensor, program.pick()),
    Program.view_twice,
    lambda program, tensor: program.keep(operator.add, tensor, program.pick()),
    lambda program, tensor: program.call("mul_", program.weight, 0.9),
    lambda program, tensor: program.call(torch.add, tensor, program.pick(), out=program.pick()),
    lambda program, tensor: program.call(operator.setitem, tensor, 0, 1.5),
    lambda program, tensor: program.call("zero_", program.call("narrow", tensor, 1, 0, 8)),
    lambda program, tensor: program.call("add_", program.call("t", tensor), 0.5),
    lambda program, tensor: program.call("mul_", program.call("view", tensor, TOKENS, 8, 8), 0.75),
    lambda program, tensor: program.keep("detach", tensor),
    Program.copy_rows,
]


def one(rank: int, seed: int) -> list[FusionReport] | None:
    """Fuses a graph and compares its results; returns None if the unfused graph cannot run."""
    program = Program(seed)
    where: dict[str, Any] = {"device": device(), "call": seed % 7}
    given = [
        shared_input((HIDDEN,), bf16, "weight", **where),
        rank_input((TOKENS, HIDDEN), bf16, rank, **where),
        shared_input((TOKENS, HIDDEN), bf16, "residual", **where),
        shared_input((TOKENS, HIDDEN), bf16, "other", **where),
    ]
    expected_inputs, actual_inputs = ([t.clone() for t in given] for _ in range(2))
    try:
        expected = program.module(*expected_inputs)
    except RuntimeError:  # a copy between overlapping parts of a tensor
        return None
    before = str(program.graph)
    report = fuse(program.module, given, comm())
    program.graph.lint()
    actual = program.module(*actual_inputs)
    changed = f"seed {seed}:\n{before}\n{report}\n{program.graph}"
    for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        if mine.stride() != theirs.stride():
            raise WrongError(f"strides of result {i} of {changed}")
    # A norm that differs in the last bit can change a few elements by one FP8 step.
    compare((*actual, *actual_inputs), (*expected, *expected_inputs), 0.04, 0.97, changed)
    if not report.fused and str(program.graph) != before:
        raise WrongError(f"nothing is fused in {changed}")
    return [report]


@pytest.mark.long
@on(cpu=(2,))
@pytest.mark.parametrize("first", [0, 15])
def test_random_graphs(pool: RankPool, first: int) -> None:
    check_programs(pool, __name__, range(first, first + 15), fused=5, missed=5)


@pytest.mark.long
@pytest.mark.timeout(7200)
@on(cpu=(2,))
@pytest.mark.parametrize("first", range(1000, 21000, 500))
def test_many_random_graphs(pool: RankPool, first: int) -> None:
    check_programs(pool, __name__, range(first, first + 500), fused=100, missed=100)
