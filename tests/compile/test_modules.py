"""Tests random modules with every tracer: the fused graph must compute the same results.

test_random.py builds graphs; this file writes the code of a forward method. The code has functional
and in-place steps, views, slices, multiple sites, and norms that are modules, one with a hook.
Every third module has norms and scales before the residual. Dynamo, AOTAutograd, torch.export and
make_fx trace the code.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from compile_programs import compare
from rank_helpers import comm, device, on
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from allnorm.compile import FusionReport, fuse
from allnorm.testing import RankPool, rank_input, shared_input

from .helpers import check_programs

HIDDEN = 64
TRACERS = ("dynamo", "aot", "export", "make_fx")


class Code:
    """A forward method's random lines of code; its inputs are x, r, o and w."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.boundaries = random.Random(seed) if seed % 3 == 0 else None
        self.dtype = self.random.choice(
            [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]
        )
        self.shape = self.random.choice([(6,), (6,), (2, 3), (1, 6)])
        self.dynamic = self.random.random() < 0.25
        self.in_place = self.random.random() < 0.6
        self.lines: list[str] = []
        self.names = ["x", "r", "o"]
        for _ in range(self.random.choice([1, 1, 2, 3])):
            self.site()
        results = self.random.sample(self.names[3:], min(3, len(self.names) - 3))
        self.lines.append(f"return {', '.join(dict.fromkeys([*results, self.names[-1]]))},")

    def pick(self) -> str:
        recent = self.names[-3:] if self.random.random() < 0.6 else self.names
        return self.random.choice(recent)

    def keep(self, expression: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        self.names.append(name)
        return name

    def noise(self, chance: float) -> None:
        while self.random.random() < chance:
            a, b = self.pick(), self.pick()
            pure = [f"torch.relu({a})", f"{a}.clone()", f"{a} + {b}", f"{a}.view({a}.shape)"]
            pure += [f"{a}.flatten(0, -2).view({a}.shape)", f"F.dropout({a}, 0.0).clone()"]
            writes = [f"{a}.mul_(0.5)", f"{a}.add_({b})", f"{a}[0].add_(1)", f"{a}.copy_({b} * 2)"]
            writes += [f"{a}.view(-1, 8).mul_(0.75)", f"{a}[..., :8].zero_()", "w.mul_(0.9)"]
            if self.in_place and self.random.random() < 0.5:
                self.lines.append(self.random.choice(writes))
            else:
                self.keep(self.random.choice(pure))

    def site(self) -> None:
        choose = self.random.choice
        self.noise(0.4)
        x = self.keep(f"{self.pick()} * 0.5") if self.random.random() < 0.7 else self.pick()
        if self.in_place and self.random.random() < 0.5:
            self.lines.append(f"dist.all_reduce({x})")
            total = x
        else:
            total = self.keep(f"all_reduce({x})")
        self.noise(0.2)
        if self.random.random() < 0.2:
            total = self.keep(f"{total} + w")
        if self.boundaries is not None:
            total = self.before_residual(total, self.boundaries)
        if self.random.random() < 0.8:
            other = self.pick()
            add = [f"{total} + {other}", f"{other} + {total}"]
            add += [f"({total}.float() + {other}.float()).to({total}.dtype)"]
            if self.in_place and self.random.random() < 0.4:
                self.lines.append(f"{other}.add_({total})")
                total = other
            else:
                total = self.keep(choose(add))
        self.noise(0.2)
        z, norms = f"{total}.float()", self.norms(total)
        if self.in_place:
            norms += [f"{total}.mul_(root({z})).mul_(w)", f"w * {total}.mul_(root({z}))"]
        normed = self.keep(choose(norms))
        if self.in_place and self.random.random() < 0.15:
            self.lines.append(f"{choose([total, x])}.copy_({normed})")
        self.names.append(total)
        self.names.append(normed)
        self.noise(0.3)

    def norms(self, total: str) -> list[str]:
        z = f"{total}.float()"
        return [
            f"F.rms_norm({total}, ({HIDDEN},), w, 1e-5)",
            f"self.norm({total})",
            f"self.hooked({total})",
            f"w * ({z} * root({z})).to({total}.dtype)",
            f"({z} * root({z}) * (1.0 + w.float())).to({total}.dtype)",
            f"({z} * root({z}) * (w + 1)).to({total}.dtype)",
        ]

    def before_residual(self, total: str, chosen: random.Random) -> str:
        """Returns code for a norm of the reduced sum, or for a scaled sum."""
        if chosen.random() < 0.6:
            _, norm, _, llama, gemma, _ = self.norms(total)
            total = self.keep(chosen.choice([norm, llama, gemma]))
        if chosen.random() < 0.3:
            total = self.keep(f"{total} * {chosen.choice([0.22, -1.5, 2])}")
        if chosen.random() < 0.6:
            self.names.pop()  # no other line reads it
        return total

    def module(self) -> torch.nn.Module:
        body = "\n".join(f"    {line}" for line in self.lines)
        scope: dict[str, Any] = {"torch": torch, "F": F, "dist": dist}
        scope.update(all_reduce=all_reduce, root=root)
        exec(f"def forward(self, x, r, o, w):\n{body}\n", scope)
        made = type("Model", (torch.nn.Module,), {"forward": scope["forward"]})()
        for name in ("norm", "hooked"):
            norm = torch.nn.RMSNorm(HIDDEN, eps=1e-5, dtype=self.dtype).requires_grad_(False)
            torch.nn.init.uniform_(
                norm.weight, 0.5, 1.5, generator=torch.Generator().manual_seed(1)
            )
            setattr(made, name, norm)
        made.hooked.register_forward_hook(lambda module, args, result: result * 2)
        return made.to(device())

    def inputs(self, rank: int, seed: int) -> list[Tensor]:
        shape = (*self.shape, HIDDEN)
        where: dict[str, Any] = {"call": seed % 5, "device": device()}
        tensors = [rank_input(shape, self.dtype, rank, **where)]
        tensors += [shared_input(shape, self.dtype, name, **where) for name in "ro"]
        return [*tensors, shared_input((HIDDEN,), self.dtype, "w", **where)]


def all_reduce(x: Tensor) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x, "sum", "0"))


def root(z: Tensor) -> Tensor:
    return torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-5)


def traced(tracer: str, model: Any, code: Code, inputs: list[Tensor]) -> Any:
    """Traces and fuses the model; returns it with its reports."""
    reports: list[FusionReport] = []

    def fused(module: GraphModule, given: Any = None) -> Callable[..., Any]:
        reports.append(fuse(module, None, comm()))
        module.graph.lint()
        return module.forward

    def boxed(module: GraphModule, given: Any = None) -> Callable[..., Any]:
        return make_boxed_func(fused(module))

    if tracer in ("dynamo", "aot"):
        torch._dynamo.reset()
        if code.dynamic:
            for tensor in inputs[:3]:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        backend = fused if tracer == "dynamo" else aot_autograd(fw_compiler=boxed)
        return torch.compile(model, backend=backend), reports
    if tracer == "export":
        module = torch.export.export(model, tuple(t.clone() for t in inputs)).module()
        fused(module)
        return module, reports
    given = [t.clone() for t in inputs]
    module = make_fx(lambda *tensors: model(*tensors))(*given)
    fused(module)
    return module, reports


def one(rank: int, seed: int) -> list[FusionReport]:
    """Traces and fuses a random module, and compares its results; returns its reports."""
    code, tracer = Code(seed), TRACERS[seed % len(TRACERS)]
    model, inputs = code.module(), code.inputs(rank, seed)
    expected_inputs, actual_inputs = ([t.clone() for t in inputs] for _ in range(2))
    expected = model(*expected_inputs)
    model = code.module()
    if tracer in ("export", "make_fx") and any("dist." in line for line in code.lines):
        tracer = "dynamo"  # the other tracers do not record in-place collectives
    module, reports = traced(tracer, model, code, actual_inputs)
    actual = module(*actual_inputs)
    text = "\n".join([f"seed {seed}, {tracer}", *code.lines, *map(str, reports)])
    compare((*actual, *actual_inputs), (*expected, *expected_inputs), 0.03, 0.985, text)
    return reports


# Former bugs: in a graph with a guard, a weight that only fused sites read; a query of a tensor
# where the pass must insert a fused call.
@on(cpu=(2,))
@pytest.mark.parametrize("seed", [3307, 7922])
def test_modules_that_failed(pool: RankPool, seed: int) -> None:
    check_programs(pool, __name__, range(seed, seed + 1), fused=0)


@on(cpu=(2,))
def test_random_modules(pool: RankPool) -> None:
    check_programs(pool, __name__, range(16), fused=4)


@on(cpu=(2,))
def test_random_modules_with_post_norms(pool: RankPool) -> None:
    assert "post norm" in check_programs(pool, __name__, range(18, 54, 3), fused=4)


@pytest.mark.long
@pytest.mark.timeout(7200)
@on(cpu=(2,))
@pytest.mark.parametrize("first", range(1000, 21000, 500))
def test_many_random_modules(pool: RankPool, first: int) -> None:
    check_programs(pool, __name__, range(first, first + 500), fused=100)
