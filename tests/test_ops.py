"""Tests the torch operators: schemas, results, fake kernels, opcheck, torch.compile."""

from __future__ import annotations

import itertools
import os
import tempfile
from typing import Any

import pytest
import torch
from rank_helpers import Case, comm, device, on
from torch._subclasses.fake_tensor import FakeTensorMode

import allnorm
from allnorm import quant as quants
from allnorm import reference
from allnorm.quant import Quant
from allnorm.testing import assert_same_bits

FORMAT = "str quant_kind, int group_size, str scale_layout, str scale_format, Tensor? static_scale"
QUANT = f"{FORMAT}, bool return_normed"
FOUR = "(Tensor quantized, Tensor scale, Tensor residual, Tensor normed)"
LATER = 'SymInt? residual_rows=None, str algorithm="auto"'
BOUNDARY = (
    "Tensor? post_weight=None, float post_eps=0., float post_weight_bias=0., float scale=1., "
    "bool experts=False, Tensor? expert_index=None, Tensor? expert_weights=None, "
    "Tensor? shared=None"
)
LAST = "Tensor? prefetch=None, bool gather=True"
SCHEMAS = {
    "all_reduce": ('allnorm::all_reduce(Tensor x, str comm_name, str algorithm="auto") -> Tensor'),
    "all_reduce_add_rms_norm": (
        "allnorm::all_reduce_add_rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps, "
        "float weight_bias, str numerics, str comm_name, bool residual_sharded=False, "
        f"{LATER}, {BOUNDARY}, {LAST}) -> (Tensor, Tensor)"
    ),
    "all_reduce_add_rms_norm_quant": (
        "allnorm::all_reduce_add_rms_norm_quant(Tensor x, Tensor? residual, Tensor weight, "
        f"float eps, {QUANT}, float weight_bias, str numerics, str comm_name, "
        f"bool residual_sharded=False, {LATER}, {BOUNDARY}, {LAST}) -> {FOUR}"
    ),
    "all_gather_rows": (
        "allnorm::all_gather_rows(Tensor shard, SymInt num_tokens, str comm_name, "
        'str algorithm="auto") -> Tensor'
    ),
    "all_reduce_hyper_connection": (
        "allnorm::all_reduce_hyper_connection(Tensor x, Tensor residual, Tensor post, Tensor mix, "
        'str comm_name, str algorithm="auto", bool experts=False, Tensor? expert_index=None, '
        "Tensor? expert_weights=None, Tensor? shared=None) -> Tensor"
    ),
    "all_reduce_hyper_connection_input": (
        "allnorm::all_reduce_hyper_connection_input(Tensor x, Tensor residual, Tensor post, "
        "Tensor mix, Tensor fn, Tensor scale, Tensor base, Tensor weight, float eps, "
        "float weight_bias, str numerics, float stream_eps, float hc_eps, int iterations, "
        'float post_scale, str comm_name, str algorithm="auto", bool experts=False, '
        "Tensor? expert_index=None, Tensor? expert_weights=None, Tensor? shared=None) -> "
        "(Tensor normed, Tensor residual, Tensor post, Tensor mix)"
    ),
    "rms_norm_sharded": (
        "allnorm::rms_norm_sharded(Tensor[] tensors, Tensor[] weights, float eps, "
        'float weight_bias, str numerics, str comm_name, str algorithm="auto") -> Tensor[]'
    ),
    "add_rms_norm_quant": (
        "allnorm::add_rms_norm_quant(Tensor x, Tensor? residual, Tensor weight, float eps, "
        f"{QUANT}, float weight_bias, str numerics, {BOUNDARY}) -> {FOUR}"
    ),
    "quantize": f"allnorm::quantize(Tensor x, {FORMAT}) -> (Tensor quantized, Tensor scale)",
    "add_rms_norm": (
        "allnorm::add_rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps, "
        f"float weight_bias, str numerics, {BOUNDARY}) -> (Tensor, Tensor)"
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(name: str) -> None:
    op = getattr(torch.ops.allnorm, name).default
    assert str(op._schema) == SCHEMAS[name]
    assert not op._schema.is_mutable


GROUPS = [
    allnorm.Fp8PerGroup(32),
    allnorm.Fp8PerGroup(16, "column_major", "ue8m0"),
    allnorm.Fp8PerGroup(64, "column_major_tma"),
    allnorm.Fp8PerGroup(16, "column_major_tma", "ue8m0_packed"),
]


def specs(where: torch.device | str) -> list[Quant]:
    static = allnorm.Fp8PerTensor(torch.tensor([0.3], device=where))
    return [*GROUPS, allnorm.Fp8PerToken(), static]


@on(cpu=(1, 2), gpu=(1, 2))
def test_raw_ops(rank: int, world_size: int) -> None:
    c, ops = comm(), torch.ops.allnorm
    case = Case((3, 5, 64), numerics="vllm", weight_bias=1.0)
    for spec, normed, sharded in itertools.product(
        (None, *specs(device())), (False, True), (False, True)
    ):
        case = case.but(quant=spec, sharded=sharded, return_normed=normed and spec is not None)
        a = case.call_arguments(c)
        given = (case.x(rank), a["residual"], a["weight"], case.eps)
        options = (case.weight_bias, case.numerics, c.name, sharded)
        if spec is None:
            case.compare(c, *ops.all_reduce_add_rms_norm(*given, *options))
            continue
        out = ops.all_reduce_add_rms_norm_quant(
            *given, *quants.op_arguments(spec), normed, *options
        )
        assert out[3].numel() == (960 if normed else 0)
        scale = out[1]
        if isinstance(spec, allnorm.Fp8PerTensor):  # an operator must not return its input
            assert scale.numel() == 0
            scale = spec.scale
        case.compare(c, out[0], scale, out[2], out[3] if normed else None)
        if sharded:
            rows = ops.all_gather_rows(out[2], 15, c.name)
            want = case.but(quant=None, return_normed=False).expected(world_size)[1]
            assert_same_bits(rows.view(3, 5, 64), want, "all_gather_rows")
    x, weight = case.x(rank), case.weight()
    reduced = ops.all_reduce(x, c.name)
    assert_same_bits(reduced, reference.all_reduce(case.xs(world_size)), "all_reduce")
    with pytest.raises(allnorm.CommunicatorClosedError, match="nobody"):
        ops.all_reduce(x, "nobody")
    with pytest.raises(ValueError, match="numerics"):
        ops.all_reduce_add_rms_norm(x, None, weight, 1e-6, 1.0, "exact", c.name)
    wrong = ("per_row", 0, "", "", None, False)
    with pytest.raises(ValueError, match="quant_kind='per_row'"):
        ops.all_reduce_add_rms_norm_quant(x, None, weight, 1e-6, *wrong, 0.0, "vllm", c.name)


def rows_of(c: allnorm.Communicator, num_tokens: int) -> int:
    lo, hi = c.row_shard(num_tokens)
    return hi - lo


@on(cpu=(2,), gpu=(2,))
def test_opcheck(rank: int, world_size: int) -> None:
    c = comm()
    fused = torch.ops.allnorm.all_reduce_add_rms_norm_quant.default
    for tokens, spec, normed, sharded in (
        *((3, spec, True, False) for spec in specs(device())),
        *((5, spec, False, True) for spec in specs(device())[::2]),
        (4, GROUPS[2], False, False),
        (1, GROUPS[3], False, False),
    ):
        case = Case((tokens, 64), quant=spec, sharded=sharded)
        x, a = case.x(rank), case.call_arguments(c)
        wide = x.repeat(1, 2)[:, :64]
        for first, residual in ((x, a["residual"]), (wide, None)):
            norm = (first, residual, a["weight"], 1e-6, *quants.op_arguments(spec), normed)
            rows = rows_of(c, 5) if sharded and residual is None else None
            torch.library.opcheck(fused, (*norm, 0.0, "rounded", c.name, sharded, rows))
            if not sharded:
                local = torch.ops.allnorm.add_rms_norm_quant.default
                torch.library.opcheck(local, (*norm, 1.0, "vllm"))
    case = Case((5, 64), sharded=True)
    x, a = case.x(rank), case.call_arguments(c)
    ops, wide, norm = torch.ops.allnorm, x.repeat(1, 2)[:, :64], (a["weight"], 1e-6, 0.0, "rounded")
    for residual, rows in ((a["residual"], None), (None, rows_of(c, 5))):
        arguments = (x, residual, *norm, c.name, True, rows)
        for gather in (True, False):
            torch.library.opcheck(
                ops.all_reduce_add_rms_norm.default, arguments, {"gather": gather}
            )
            for spec in specs(device()):
                quant = (*quants.op_arguments(spec), True)
                quantized = (*arguments[:4], *quant, *arguments[4:])
                torch.library.opcheck(fused, quantized, {"gather": gather})
    torch.library.opcheck(ops.all_gather_rows.default, (a["residual"], 5, c.name))
    for first, residual in ((x, x.clone()), (x, None), (wide, wide.clone())):
        torch.library.opcheck(ops.all_reduce.default, (first, c.name))
        arguments = (first, residual, *norm)
        torch.library.opcheck(ops.all_reduce_add_rms_norm.default, (*arguments, c.name))
        torch.library.opcheck(ops.add_rms_norm.default, arguments)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fakes(where: str, dtype: torch.dtype) -> None:
    """Fake kernels return shape, dtype, device and strides without a communicator."""
    with FakeTensorMode():
        wide = torch.empty(2, 5, 128, dtype=dtype, device=where)
        x, weight = wide[..., :64], torch.empty(64, device=where)
        norm = (weight, 1e-6, 0.0, "rounded")
        results = [
            torch.ops.allnorm.all_reduce(x, "any"),
            *torch.ops.allnorm.all_reduce_add_rms_norm(x, None, *norm, "any"),
            *torch.ops.allnorm.all_reduce_add_rms_norm(x, x, *norm, "any"),
            *torch.ops.allnorm.add_rms_norm(x, x, *norm),
        ]
        for result in results:
            assert result.shape == (2, 5, 64)
            assert result.stride() == (320, 64, 1)
            assert result.dtype == dtype
            assert result.device.type == where


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tokens", [0, 1, 3, 8])
def test_fakes_have_the_geometry_of_the_results(where: str, tokens: int) -> None:
    weight = torch.ones(64, device=where)
    x = torch.ones(tokens, 2, 64, device=where)
    for spec, normed in itertools.product(specs(where), (False, True)):
        arguments = (1e-6, *quants.op_arguments(spec), normed, 0.0, "rounded")
        real = torch.ops.allnorm.add_rms_norm_quant(x, x, weight, *arguments)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake_x = mode.from_tensor(x)
            fakes = [
                torch.ops.allnorm.add_rms_norm_quant(fake_x, fake_x, weight, *arguments),
                torch.ops.allnorm.all_reduce_add_rms_norm_quant(
                    *(fake_x, None, weight, *arguments, "any")
                ),
                torch.ops.allnorm.all_reduce_add_rms_norm_quant(
                    *(fake_x, fake_x[:, 0], weight, *arguments, "any", True)
                ),
            ]
        for i, fake in enumerate(fakes):
            for j, (mine, theirs) in enumerate(zip(fake, real, strict=True)):
                assert (mine.dtype, mine.device) == (theirs.dtype, theirs.device)
                if i == 2 and j == 2:
                    assert mine.shape == (tokens, 64)
                else:
                    assert mine.shape == theirs.shape
                    assert mine.stride() == theirs.stride(), (spec, j)


def block(c: allnorm.Communicator, static: torch.Tensor) -> Any:
    def run(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Makes calls of every kind, with code before, between and after them."""
        lo, hi = c.row_shard(x.shape[0])
        shard = residual[lo:hi]
        default = c.all_reduce_add_rms_norm_quant(x + 1, residual, weight, 1e-6)
        packed = c.all_reduce_add_rms_norm_quant(
            *(-x, shard, weight, 1e-5, allnorm.Fp8PerGroup(64, "column_major_tma", "ue8m0_packed")),
            *(True,),
            residual_sharded=True,
            weight_bias=1.0,
        )
        given = c.all_reduce_add_rms_norm_quant(
            packed.normed, packed.residual, weight, 1e-6, quant=allnorm.Fp8PerTensor(static),
            residual_sharded=True,
        )  # fmt: skip
        normed, shard = c.all_reduce_add_rms_norm(
            x, given.residual, weight, 1e-6, residual_sharded=True
        )
        first, rows = c.all_reduce_add_rms_norm(x, None, weight, 1e-6, residual_sharded=True)
        local = allnorm.add_rms_norm_quant(
            normed * 2, None, weight, 1e-6, quant=allnorm.Fp8PerToken(), return_normed=True
        )
        whole = c.all_gather_rows(shard, x.shape[0])
        reduced = c.all_reduce(whole * 2, algorithm="two_shot", out=torch.empty_like(x))
        again, summed = torch.ops.allnorm.all_reduce_add_rms_norm(
            reduced, residual, weight, 1e-6, 1.0, "vllm", c.name
        )
        plain = allnorm.add_rms_norm(again, summed, weight, 1e-6)
        unpacked = given.quantized.float() * given.scale
        return (
            *(*default[:3], *packed, *given[:3], normed, shard, first, rows, *local, whole),
            *(reduced, again, plain[0].relu(), plain[1]),
            unpacked,
            packed.scale.t() + 1,
        )

    return run


@pytest.mark.sampled(2)
@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_fullgraph(rank: int, world_size: int, backend: str) -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        c = comm()
        run = block(c, torch.tensor([0.25], device=device()))
        torch._dynamo.reset()
        fast = torch.compile(run, fullgraph=True, backend=backend)
        for num_tokens in (4, 4, 7):  # the same shape again, and a different one
            case = Case((num_tokens, 256), call=num_tokens)
            x, a = case.x(rank), case.norm_arguments()
            with torch.no_grad():
                want = run(x, a["residual"], a["weight"])
                got = fast(x, a["residual"], a["weight"])
            for i, (mine, eager) in enumerate(zip(got, want, strict=True)):
                assert_same_bits(mine, eager, f"result {i} of {num_tokens} tokens by {backend}")
                assert mine.stride() == eager.stride(), f"result {i} by {backend}"
        torch._dynamo.reset()


@on(cpu=(2,), gpu=(2,))
def test_compiled_graph_after_close(rank: int, world_size: int) -> None:
    """A compiled graph's error names its communicator if that communicator was closed."""
    c = allnorm.Communicator(device=device())
    name = c.name
    fast = torch.compile(
        lambda x: torch.ops.allnorm.all_reduce(x, name) + 1, fullgraph=True, backend="aot_eager"
    )
    x = Case((2, 64)).x(rank)
    with torch.no_grad():
        fast(x)
        c.close()
        with pytest.raises(allnorm.CommunicatorClosedError, match="closed"):
            fast(x)
    torch._dynamo.reset()


@on(cpu=(2, 3), gpu=(2,))
def test_dynamic_number_of_tokens(rank: int, world_size: int) -> None:
    """One graph works for every number of rows, also sharded and quantized."""
    c = comm()
    graphs = 0

    def count(module: torch.fx.GraphModule, _: object) -> object:
        nonlocal graphs
        graphs += 1
        return module.forward

    packed = allnorm.Fp8PerGroup(16, "column_major_tma", "ue8m0_packed")

    def run(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = c.all_reduce_add_rms_norm_quant(x, r, w, 1e-6, quant=packed)
        b = c.all_reduce_add_rms_norm_quant(
            x, None, w, 1e-6, quant=allnorm.Fp8PerGroup(32, "column_major"), residual_sharded=True
        )
        norm = c.all_reduce_add_rms_norm(x, r, w, 1e-6)
        return *a[:3], *b[:3], *norm, c.all_gather_rows(b.residual, x.shape[0])

    torch._dynamo.reset()
    fast = torch.compile(run, fullgraph=True, backend=count)
    for num_tokens in (3, 5, 8, 17):
        case = Case((num_tokens, 64), call=num_tokens)
        x, a = case.x(rank), case.norm_arguments()
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(a["residual"], 0)
        got = fast(x, a["residual"], a["weight"])
        for mine, eager in zip(got, run(x, a["residual"], a["weight"]), strict=True):
            assert_same_bits(mine, eager, str(num_tokens))
            assert mine.stride() == eager.stride()
        want = reference.all_reduce(case.xs(world_size))
        assert_same_bits(got[-1], want, "gathered sum")
    torch._dynamo.reset()
    assert graphs == 1


@on(cpu=(2,), gpu=(2,))
def test_compiled_refusals(rank: int, world_size: int) -> None:
    """Arguments that eager calls refuse are refused when the graph is traced or runs."""
    c = comm()
    case = Case((4, 64))
    x, w = case.x(rank), case.weight()
    torch._dynamo.reset()
    for spec, words in ((allnorm.Fp8PerGroup(128), "128"), ("fp8", "quant")):
        fast = torch.compile(
            lambda x, w, spec=spec: c.all_reduce_add_rms_norm_quant(x, None, w, 1e-6, quant=spec)[
                0
            ],
            fullgraph=True,
            backend="eager",
        )
        with pytest.raises(Exception, match=words):
            fast(x, w)
        torch._dynamo.reset()
    case.check(c)
