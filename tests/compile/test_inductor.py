"""Tests the graph pass in Inductor: results of compiled code, caches, gradients."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from rank_helpers import comm, device, on
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch.fx import symbolic_trace

import allnorm
from allnorm import reference
from allnorm.compile import groups, inductor
from allnorm.testing import assert_same_bits, rank_input, shared_input

from .helpers import EPS, HIDDEN, Inputs, cast, gemma, llama, open_names, reduce

bf16 = torch.bfloat16
NUMERICS = ["rounded", "transformers", "rounded"]


@contextlib.contextmanager
def inductor_caches(folder: str | None = None) -> Iterator[None]:
    """Gives a test empty caches, or those in `folder`; compiles without worker processes."""
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    before = {name: os.environ.get(name) for name in (*settings, "TORCHINDUCTOR_CACHE_DIR")}
    with tempfile.TemporaryDirectory() as temporary:
        os.environ.update(settings, TORCHINDUCTOR_CACHE_DIR=folder or temporary)
        torch._dynamo.reset()
        try:
            yield
        finally:
            torch._dynamo.reset()
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})


class Layers(torch.nn.Module):
    """A model of three layers, each with a reduction and a norm; `how` selects the reduction."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weights = torch.nn.ParameterList(
            shared_input((HIDDEN,), bf16, f"weight {i}", device=device()) for i in range(3)
        )

    def reduce(self, x: Tensor) -> Tensor:
        if self.how == "dist":
            dist.all_reduce(x)
            return x
        if self.how == "functional":
            return funcol.all_reduce(x, "sum", dist.group.WORLD)
        return torch.ops.allnorm.all_reduce(x, self.how)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        norms = (
            lambda t: F.rms_norm(t, (HIDDEN,), self.weights[0], EPS),
            lambda t: llama(t, self.weights[1]),
            lambda t: gemma(t, self.weights[2]),
        )
        for norm in norms:
            residual = residual + self.reduce(x * 1.5)
            x = torch.relu(norm(residual)).reshape(-1, HIDDEN)
        return x, residual

    def expected(self, xs: list[Tensor], residual: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the expected results by the reference."""
        for weight, numerics, bias in zip(self.weights, NUMERICS, (-0.0, -0.0, 1.0), strict=True):
            normed, residual = reference.all_reduce_add_rms_norm(
                [x * 1.5 for x in xs],
                *(residual, weight.detach(), EPS),
                numerics=numerics,
                weight_bias=bias,
            )
            xs = [torch.relu(normed)] * len(xs)
        return xs[0], residual


def arguments(rank: int, tokens: int = 5) -> tuple[Tensor, Tensor]:
    x = rank_input((tokens, HIDDEN), bf16, rank, call=tokens, device=device())
    return x, shared_input((tokens, HIDDEN), bf16, "residual", call=tokens, device=device())


def compiled(model: torch.nn.Module, fusion: Any, **options: Any) -> Any:
    settings = {} if fusion is None else {"post_grad_custom_post_pass": fusion}
    return torch.compile(model, fullgraph=True, options=settings, **options)


def calls(code: list[str]) -> tuple[int, int]:
    """Counts fused calls and all-reduces in generated code."""
    text = "\n".join(code)
    fused = len(re.findall(r"= torch\.ops\.allnorm\.all_reduce_add_rms_norm\.default\(", text))
    plain = len(re.findall(r"_c10d_functional\.all_reduce|allnorm\.all_reduce\.default\(", text))
    return fused, plain


@pytest.mark.sampled(3)
@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("how", ["dist", "functional", "allnorm"])
def test_end_to_end(rank: int, world_size: int, how: str) -> None:
    c = comm()
    model = Layers(c.name if how == "allnorm" else how)
    x, residual = arguments(rank)
    expected = model.expected([arguments(r)[0] for r in range(world_size)], residual)
    with inductor_caches(), torch.no_grad():
        for given in (c, None):
            torch._dynamo.reset()
            fusion = allnorm.compile.inductor_pass(given)
            results, code = run_and_get_code(compiled(model, fusion), x, residual)
            (report,) = fusion.reports
            assert [site.numerics for site in report.sites] == NUMERICS, str(report)
            assert all(site.fused for site in report.sites)
            assert calls(code) == (3, 0)
            used = c
            if given is None and how != "allnorm":  # the pass uses the oldest communicator
                alike = [o for o in groups.open_communicators() if o.group == c.group]
                used = next(o for o in alike if o.device == c.device)
            assert used.name in "".join(code), "the code does not use the open communicator"
            # + 0.0, because the relu that Inductor generates for GPUs keeps -0.0
            assert_same_bits(results[0] + 0.0, expected[0] + 0.0, "normed")
            assert_same_bits(results[1], expected[1], "residual")


@on(cpu=(2,))
def test_toggled(rank: int, world_size: int) -> None:
    """Tests that no cache returns a graph that was compiled with a different pass."""
    c, other = comm(), allnorm.Communicator(device=device())
    model, (x, residual) = Layers("functional"), arguments(rank)
    expected = model.expected([arguments(r)[0] for r in range(world_size)], residual)
    with inductor_caches(), torch.no_grad():
        for reset in (True, False):
            for given in (c, None, other, c, None):
                if reset:
                    torch._dynamo.reset()  # so that the code comes from Inductor's disk cache
                fusion = None if given is None else allnorm.compile.inductor_pass(given)
                results, code = run_and_get_code(compiled(model, fusion), x, residual)
                # Cached code is not generated again.
                text = "".join(code)
                if given is None:
                    assert "all_reduce_add_rms_norm" not in text
                    continue
                assert not code or repr(given.name) in text
                for mine, theirs in zip(results, expected, strict=True):
                    assert_same_bits(mine, theirs, f"with {given}")
        other.close()
        # Code compiled for the other communicator still runs.
        torch._dynamo.reset()
        results = compiled(model, allnorm.compile.inductor_pass(c))(x, residual)
        assert_same_bits(results[0], expected[0], "after the other communicator was closed")


@on(cpu=(2,))
def test_made_while_compiling(rank: int, world_size: int) -> None:
    """Tests that no communicator is created under Inductor's dispatcher, where it could hang."""
    group = dist.new_group(list(range(world_size)))
    graph = symbolic_trace(lambda x, r, w: llama(reduce(x, group=group.group_name) + r, w))
    is_on = functools.partial(torch._C._dispatch_tls_is_dispatch_key_included, "PythonDispatcher")

    make = allnorm.Communicator.for_group

    def watched(*arguments: Any, **options: Any) -> allnorm.Communicator:
        assert not is_on()
        return make(*arguments, **options)

    before = open_names()
    with pytest.MonkeyPatch.context() as patch, enable_python_dispatcher():
        patch.setattr(groups.Communicator, "for_group", watched)
        assert is_on()
        assert len(allnorm.compile.fuse(graph, Inputs().make(rank)).fused) == 1
    (made,) = set(open_names()) - set(before)
    assert made == group.group_name
    groups._named.pop().close()


@on(cpu=(2,))
def test_dropped_while_open(rank: int, world_size: int) -> None:
    """Tests that no rank uses a dropped communicator alone, and that graphs keep theirs open."""
    group = dist.new_group(list(range(world_size)))
    graph = symbolic_trace(lambda x, r, w: llama(reduce(x, group=group.group_name) + r, w))
    inputs = Inputs().make(rank)
    before = open_names()
    gc.disable()
    try:
        cycle: list[Any] = [allnorm.Communicator(group)]
        cycle.append(cycle)
        (dropped,) = set(open_names()) - set(before)
        del cycle
        if rank == 1:
            gc.collect()
        assert len(allnorm.compile.fuse(graph, inputs).fused) == 1
    finally:
        gc.enable()
    (used,) = set(open_names()) - set(before)
    assert used != dropped
    groups._named.pop().close()

    kept = allnorm.Communicator(group).name
    graph = symbolic_trace(lambda x, r, w: llama(reduce(x, group=group.group_name) + r, w))
    again = allnorm.Communicator(group)
    assert kept not in open_names()
    assert len(allnorm.compile.fuse(graph, inputs).fused) == 1
    name = again.name
    del again
    gc.collect()
    assert name in open_names(), "the communicator that the graph names was closed"
    graph(*inputs)
    groups._named.pop().close()


@on(cpu=(1,))
def test_keys(rank: int, world_size: int) -> None:
    """Tests the pass's cache keys."""
    make = allnorm.compile.inductor_pass
    c = comm()
    assert make(c).uuid() == make(c).uuid()
    fusion = make(c)
    assert copy.deepcopy({"options": fusion})["options"] is fusion, (
        "a copy is a different pass, and torch.compile copies options"
    )
    assert make().uuid() == make().uuid()
    with allnorm.Communicator(device=device()) as other:
        seen = [make(), make(c), make(other), make(c, all_reduce_ops=["my::all_reduce"])]
        seen += [make(c, approximate_quant=True), make(c, approximate_streams=True)]
        assert len({fusion.uuid() for fusion in seen}) == len(seen)
        without = make().uuid()
    assert make().uuid() != without, "the key is the same for a different set of communicators"
    assert isinstance(make(c), CustomGraphPass)
    version, sources = inductor.fingerprint("allnorm.compile")
    assert version == allnorm.__version__
    assert make(c).uuid()[:2] == (version, sources)
    os.environ["ALLNORM_TIMEOUT_SECONDS"] = "77"
    try:
        changed = make(c).uuid()
    finally:
        del os.environ["ALLNORM_TIMEOUT_SECONDS"]
    assert changed != make(c).uuid(), "the key is the same in a different environment"


@on(cpu=(2,), gpu=(2,))
def test_dynamic(rank: int, world_size: int) -> None:
    """Tests that one compiled graph serves every number of tokens."""
    fusion = allnorm.compile.inductor_pass(comm())
    weight = shared_input((HIDDEN,), bf16, "weight", device=device())

    def block(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        reduced = funcol.all_reduce(x.view(-1, 2, HIDDEN), "sum", dist.group.WORLD)
        residual = residual + reduced.view(-1, HIDDEN)
        return gemma(residual, weight), residual

    with inductor_caches(), torch.no_grad():
        fast = compiled(block, fusion)
        for tokens in (4, 10, 18):
            x, residual = arguments(rank, tokens)
            for tensor in (x, residual):
                torch._dynamo.mark_dynamic(tensor, 0)
            xs = [arguments(r, tokens)[0] for r in range(world_size)]
            expected = reference.all_reduce_add_rms_norm(xs, residual, weight, EPS, weight_bias=1.0)
            for mine, theirs in zip(fast(x, residual, weight), expected, strict=True):
                assert_same_bits(mine, theirs, f"{tokens} tokens")
    (report,) = fusion.reports
    assert len(report.fused) == 1
    assert isinstance(report.sites[0].shape[0], str)


@on(cpu=(2,), gpu=(2,))
def test_quantized(rank: int, world_size: int) -> None:
    weight = shared_input((HIDDEN,), bf16, "weight", device=device())

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        dist.all_reduce(x := x * 1.5)
        residual = residual + x
        groups = llama(residual, weight).view(-1, HIDDEN // 128, 128).float()
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
        return cast(groups / scale).view(-1, HIDDEN), scale.squeeze(-1), residual

    x, residual = arguments(rank)
    xs = [arguments(r)[0] * 1.5 for r in range(world_size)]
    want = reference.all_reduce_add_rms_norm_quant(
        xs, residual, weight, EPS, allnorm.Fp8PerGroup(128), numerics="transformers"
    )
    fusion = allnorm.compile.inductor_pass(comm())
    with inductor_caches(), torch.no_grad():
        got = compiled(block, fusion)(x, residual)
    assert fusion.reports[0].fused[0].quant == "per_group 128"
    for mine, theirs in zip(got, want[:3], strict=True):
        assert_same_bits(mine, theirs, "quantized")


@pytest.mark.slow
@on(cpu=(2,))
def test_training(rank: int, world_size: int) -> None:
    """Tests the gradients of a fused forward pass: autograd precedes the passes of Inductor."""
    torch._dynamo.reset()
    gradients = []
    with inductor_caches():
        for fusion in (None, allnorm.compile.inductor_pass(comm())):
            model = Layers("functional")
            x, residual = (t.requires_grad_() for t in arguments(rank))
            torch._dynamo.reset()
            run = model if fusion is None else compiled(model, fusion)
            results = run(x, residual)
            sum(r.float().square().sum() for r in results).backward()
            gradients.append([x.grad, residual.grad, *(w.grad for w in model.weights)])
    assert any(report.fused for report in fusion.reports), [str(r) for r in fusion.reports]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=5e-2, atol=5e-1)


class Boundaries(torch.nn.Module):
    """A model with a sandwich, a post norm without a second norm, and a scaled sum over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            shared_input((HIDDEN,), bf16, f"weight {i}", device=device()) for i in range(4)
        )

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        w = self.weights
        x = funcol.all_reduce(x * 1.5, "sum", dist.group.WORLD)
        residual = residual + gemma(x, w[0])
        x = torch.relu(gemma(residual, w[1]))
        x = funcol.all_reduce(x, "sum", dist.group.WORLD)
        residual = residual + llama(x, w[2])
        rows = torch.relu(torch.stack([residual, -residual], 1))
        x = (rows.float() * rows[..., :1].float()).sum(1).to(bf16)
        x = funcol.all_reduce(x, "sum", dist.group.WORLD)
        residual = residual + x * 0.22
        return llama(residual, w[3]), residual

    def expected(self, xs: list[Tensor], residual: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the expected results by the reference."""
        w = [weight.detach() for weight in self.weights]
        run, ranks = reference.all_reduce_add_rms_norm, len(xs)
        norm, post = {"numerics": "rounded", "weight_bias": 1.0}, allnorm.PostNorm(w[0], EPS, 1.0)
        scaled = [x * 1.5 for x in xs]
        x, residual = run(scaled, residual, w[1], EPS, post_norm=post, **norm)
        xs, post = [torch.relu(x)] * ranks, allnorm.PostNorm(w[2], EPS)
        mode = {"numerics": "transformers"}
        _, residual = run(xs, residual, None, EPS, post_norm=post, **mode)
        rows = torch.relu(torch.stack([residual, -residual], 1))
        experts = allnorm.ExpertSum(rows, rows[..., 0].float())
        return run([experts] * ranks, residual, w[3], EPS, scale=0.22, **mode)


@on(cpu=(2,))
@torch.no_grad()
def test_boundaries(rank: int, world_size: int) -> None:
    model = Boundaries()
    xs, residual = [arguments(peer)[0] for peer in range(world_size)], arguments(0)[1]
    with inductor_caches():
        fusion = allnorm.compile.inductor_pass(comm())
        got, code = run_and_get_code(compiled(model, fusion), xs[rank], residual)
    (report,) = fusion.reports
    found = [(site.numerics, site.boundary) for site in report.fused]
    assert found == [
        ("rounded", "post norm"),
        ("transformers", "post norm, no second norm"),
        ("transformers", "sum of 2 experts' rows, scale 0.22"),
    ], str(report)
    assert calls(code) == (3, 0)
    for mine, theirs in zip(got, model.expected(xs, residual), strict=True):
        assert_same_bits(mine, theirs, "compiled")
