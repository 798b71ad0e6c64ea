"""The torch operators: schemas, fake kernels, opcheck, torch.compile."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
from rank_helpers import Case, comm, device, on
from torch._subclasses.fake_tensor import FakeTensorMode

import allnorm
from allnorm import reference
from allnorm.testing import assert_same_bits

QUANT = (
    "str quant_kind, int group_size, str scale_layout, str scale_format, Tensor? static_scale, "
    "bool return_normed"
)
FOUR = "(Tensor quantized, Tensor scale, Tensor residual, Tensor normed)"
LATER = 'SymInt? residual_rows=None, str algorithm="auto"'
BOUNDARY = (
    "Tensor? post_weight=None, float post_eps=0., float post_weight_bias=0., float scale=1., "
    "bool experts=False, Tensor? expert_index=None, Tensor? expert_weights=None, "
    "Tensor? shared=None"
)
SCHEMAS = {
    "all_reduce": ('allnorm::all_reduce(Tensor x, str comm_name, str algorithm="auto") -> Tensor'),
    "all_reduce_add_rms_norm": (
        "allnorm::all_reduce_add_rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps, "
        "float weight_bias, str numerics, str comm_name, bool residual_sharded=False, "
        f"{LATER}, {BOUNDARY}) -> (Tensor, Tensor)"
    ),
    "all_reduce_add_rms_norm_quant": (
        "allnorm::all_reduce_add_rms_norm_quant(Tensor x, Tensor? residual, Tensor weight, "
        f"float eps, {QUANT}, float weight_bias, str numerics, str comm_name, "
        f"bool residual_sharded=False, {LATER}, {BOUNDARY}) -> {FOUR}"
    ),
    "all_gather_rows": (
        "allnorm::all_gather_rows(Tensor shard, SymInt num_tokens, str comm_name, "
        'str algorithm="auto") -> Tensor'
    ),
    "add_rms_norm_quant": (
        "allnorm::add_rms_norm_quant(Tensor x, Tensor? residual, Tensor weight, float eps, "
        f"{QUANT}, float weight_bias, str numerics, {BOUNDARY}) -> {FOUR}"
    ),
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


@on(cpu=(1, 2), gpu=(1, 2))
def test_raw_ops(rank: int, world_size: int) -> None:
    c = comm()
    case = Case((3, 4, 264), numerics="vllm", weight_bias=1.0)
    x, a = case.x(rank), case.norm_arguments()
    normed, total = torch.ops.allnorm.all_reduce_add_rms_norm(
        x, a["residual"], a["weight"], case.eps, 1.0, "vllm", c.name
    )
    case.compare(c, normed, total)
    reduced = torch.ops.allnorm.all_reduce(x, c.name)
    assert_same_bits(reduced, reference.all_reduce(case.xs(world_size)), "all_reduce")
    with pytest.raises(allnorm.CommunicatorClosedError, match="nobody"):
        torch.ops.allnorm.all_reduce(x, "nobody")
    with pytest.raises(ValueError, match="numerics"):
        torch.ops.allnorm.all_reduce_add_rms_norm(
            x, a["residual"], a["weight"], case.eps, 1.0, "exact", c.name
        )
    case.check(c)


@on(cpu=(2,), gpu=(2,))
def test_opcheck(rank: int, world_size: int) -> None:
    c = comm()
    case = Case((3, 64))
    x, a = case.x(rank), case.norm_arguments()
    wide = case.x(rank).repeat(1, 2)[:, :64]
    norm = (a["weight"], 1e-6, 0.0, "rounded")
    torch.library.opcheck(torch.ops.allnorm.all_reduce.default, (x, c.name))
    torch.library.opcheck(torch.ops.allnorm.all_reduce.default, (wide, c.name))
    fused = torch.ops.allnorm.all_reduce_add_rms_norm.default
    local = torch.ops.allnorm.add_rms_norm.default
    for first, residual in ((x, a["residual"]), (x, None), (wide, wide.clone())):
        torch.library.opcheck(fused, (first, residual, *norm, c.name))
        torch.library.opcheck(local, (first, residual, *norm))


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


@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_fullgraph(rank: int, world_size: int, backend: str) -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        c = comm()

        def block(
            x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            """Has two sites, by method and by raw operator, with code around them."""
            normed, residual = c.all_reduce_add_rms_norm(-x, residual, weight, 1e-5)
            memory = torch.empty_like(x)
            reduced = c.all_reduce(normed * 2, algorithm="two_shot", out=memory)
            again, residual = torch.ops.allnorm.all_reduce_add_rms_norm(
                reduced, residual, weight, 1e-6, 1.0, "vllm", c.name
            )
            local, residual = allnorm.add_rms_norm(again, residual, weight, 1e-6)
            return normed, reduced, again, local.relu(), residual

        torch._dynamo.reset()
        fast = torch.compile(block, fullgraph=True, backend=backend)
        for num_tokens in (4, 4, 7):  # the same shape again, and a different one
            case = Case((num_tokens, 256), call=num_tokens)
            x, a = case.x(rank), case.norm_arguments()
            with torch.no_grad():
                want = block(x, a["residual"], a["weight"])
                got = fast(x, a["residual"], a["weight"])
            for i, (mine, eager) in enumerate(zip(got, want, strict=True)):
                assert_same_bits(mine, eager, f"result {i} of {num_tokens} tokens by {backend}")
        negated = [-x for x in case.xs(world_size)]
        normed, _ = reference.all_reduce_add_rms_norm(negated, a["residual"], a["weight"], 1e-5)
        assert_same_bits(got[0], normed, "the first site")
        torch._dynamo.reset()


@on(cpu=(2,), gpu=(2,))
def test_compiled_graph_after_close(rank: int, world_size: int) -> None:
    """A compiled graph names its communicator in the error after that was closed."""
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


@on(cpu=(2,), gpu=(2,))
def test_dynamic_number_of_tokens(rank: int, world_size: int) -> None:
    c = comm()
    graphs = 0

    def count(module: torch.fx.GraphModule, _: object) -> object:
        nonlocal graphs
        graphs += 1
        return module.forward

    torch._dynamo.reset()
    fast = torch.compile(
        lambda x, r, w: c.all_reduce_add_rms_norm(x, r, w, 1e-6), fullgraph=True, backend=count
    )
    for num_tokens in (3, 5, 9, 17):
        case = Case((num_tokens, 64), call=num_tokens)
        x, a = case.x(rank), case.norm_arguments()
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(a["residual"], 0)
        case.compare(c, *fast(x, a["residual"], a["weight"]))
    torch._dynamo.reset()
    assert graphs == 1, "one graph serves every number of tokens"
