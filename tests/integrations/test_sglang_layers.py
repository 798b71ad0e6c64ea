"""Tests which of SGLang's sums, norms and FP8 layers are fused, with fakes of its classes."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import allnorm
from allnorm import reference
from allnorm.integrations.sglang import dense, fusion, handoff, norms
from allnorm.testing import assert_same_bits, shared_input, ulp_distance

from .sglang_stand_in import GemmaNorm, PlainNorm, fake

__all__ = ["fake"]  # a fixture


# ---- norms and tensors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variance_size_override": 32}, "a part of the row"),
        ({"fp32_residual": True}, "a different dtype"),
        ({"override_orig_dtype": torch.float32}, "a different dtype"),
        ({"has_weight": False}, "without weight"),
        (
            {"cast_x_before_out_mul": True, "weight": torch.nn.Parameter(torch.ones(64))},
            "multiplied last",
        ),
    ],
)
def test_norms_that_are_not_fused(fake: Any, changes: dict[str, Any], words: str) -> None:
    assert words in norms.arithmetic(PlainNorm(**changes)).obstacle


def test_arithmetic_of_norms(fake: Any) -> None:
    assert norms.arithmetic(PlainNorm()) == norms.NormArithmetic()
    assert norms.arithmetic(PlainNorm()).numerics == "unrounded"
    assert norms.arithmetic(PlainNorm(cast_x_before_out_mul=True)).numerics == "vllm"
    assert norms.arithmetic(GemmaNorm()).weight_bias == 1.0
    assert "LayerNorm" in norms.arithmetic(torch.nn.LayerNorm(64)).obstacle


def test_tensors_that_do_not_fit() -> None:
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    weight = torch.ones(64, dtype=torch.bfloat16)
    assert norms.tensor_obstacle(weight, x, x) == ""
    assert norms.tensor_obstacle(weight.float(), x, x) == ""
    for other in ((weight.half(), x, x), (weight, x, x.float()), (weight, x.double(), x.double())):
        assert " with a " in norms.tensor_obstacle(*other)
    assert "shape" in norms.tensor_obstacle(weight, x, x[:2])
    assert "shape" in norms.tensor_obstacle(weight[:32], x, x)
    assert "contiguous" in norms.tensor_obstacle(weight, x.T.contiguous().T, x)


def test_sums_before_unfused_norms_are_reduced(fake: Any) -> None:
    """Tests that the plugin reduces these sums, because SGLang 0.5.17 would not."""
    messages: list[str] = []
    reduced: list[torch.Tensor] = []

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        reduced.append(x)
        return x + 1

    communicator: Any = SimpleNamespace()
    fused = fusion.Fusion(communicator, all_reduce, messages.append)
    norm = PlainNorm(fp32_residual=True)
    fusion.complete_sums_in(norm)
    fusion.activate(fused)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    residual = torch.ones(2, 64, dtype=torch.bfloat16)
    what, got, kept = norm(x, residual)
    assert what == "stock"
    assert got.equal(x + 1)
    assert kept is not residual
    assert kept.equal(residual)
    assert len(reduced) == len(messages) == 1
    assert fused.quantized_norm(norm, x, residual, allnorm.Fp8PerGroup(), False) is None
    assert len(reduced) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cast_x_before_out_mul": True}, "round differently"),
        ({"has_weight": False}, "without weight"),
    ],
)
def test_a_post_norm_that_is_not_fused(fake: Any, change: dict[str, bool], words: str) -> None:
    """Tests that SGLang's own functions then reduce, norm, scale and add."""
    messages: list[Any] = []

    class Post(PlainNorm):
        def forward(self, x: Any, residual: Any = None, post: Any = None) -> Any:
            return x * 3

    post, norm = Post(**change), PlainNorm()
    fused = fusion.Fusion(None, lambda x: x + 1, messages.append)
    x, residual = torch.ones(2, 64).bfloat16(), torch.zeros(2, 64).bfloat16()
    with torch.inference_mode():
        _, got, _ = fused.norm(norm, x, residual, fusion.Before(post, 0.5))
    assert got.equal((x + 1) * 3 * 0.5)
    assert words in messages[0]


def on_policy_norm() -> PlainNorm:
    """Returns a norm with SGLang's settings for models whose residual stays in float32."""
    weight = torch.nn.Parameter(1 + 0.25 * shared_input((64,), torch.float32, "weight"))
    return PlainNorm(
        weight=weight,
        fp32_residual=True,
        override_orig_dtype=torch.float32,
        cast_x_before_out_mul=True,
    )


def test_which_float32_residuals_are_fused(fake: Any) -> None:
    norm = on_policy_norm()
    how = norms.arithmetic(norm, is_rounded=True)
    assert (how.numerics, how.float32_residual, how.obstacle) == ("unrounded", True, "")
    assert "a different dtype" in norms.arithmetic(norm).obstacle
    for change in ("fp32_residual", "override_orig_dtype"):
        other = on_policy_norm()
        setattr(other, change, None)
        assert "a different dtype" in norms.arithmetic(other, is_rounded=True).obstacle
    half = on_policy_norm()
    half.weight.data = half.weight.data.bfloat16()
    assert "a different dtype" in norms.arithmetic(half, is_rounded=True).obstacle


def test_the_formula_of_a_float32_residual(fake: Any) -> None:
    """Tests that SGLang's formula, then rounded by its reader, is that of the fused call."""
    norm = on_policy_norm()
    x = shared_input((24, 64), torch.bfloat16, "x")
    for dtype in (torch.float32, torch.bfloat16):
        residual = shared_input((24, 64), dtype, "residual")
        total = x.to(torch.float32) + residual.to(torch.float32)
        rstd = torch.rsqrt(total.pow(2).mean(dim=-1, keepdim=True) + norm.variance_epsilon)
        read = (norm.weight * (total * rstd).to(torch.float32)).detach().bfloat16()
        normed, summed = reference.all_reduce_add_rms_norm(
            *([x], residual.float(), norm.weight.detach(), norm.variance_epsilon),
            numerics=norms.arithmetic(norm, is_rounded=True).numerics,
        )
        assert normed is not None
        assert_same_bits(summed, total, "residual")
        distance = ulp_distance(normed, read)
        assert int(distance.max()) <= 1
        assert float((distance > 0).float().mean()) < 0.01


def test_a_float32_residual_is_passed_on(fake: Any) -> None:
    calls: list[Any] = []
    communicator: Any = SimpleNamespace(
        traits=None, device=None, all_reduce_add_rms_norm=lambda *a, **k: calls.append((a, k))
    )
    norm: Any = on_policy_norm()
    setattr(norm, norms.ATTRIBUTE, norms.arithmetic(norm, is_rounded=True))
    fused = fusion.Fusion(communicator, lambda x: x + 1, calls.append)
    x, residual = torch.ones(2, 64).bfloat16(), torch.zeros(2, 64).bfloat16()
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(fusion.policy, "prefetch_tokens", lambda _: 0)
        fused.norm(norm, x, residual)
        assert fused.quantized_norm(norm, x, residual, allnorm.Fp8PerGroup(), False) is None
    ((given, named),) = calls
    assert given[1].dtype == torch.float32
    assert given[2] is norm.weight
    assert named["numerics"] == "unrounded"


def test_a_wired_norm_raises_without_a_fusion(fake: Any) -> None:
    norm = PlainNorm()
    fusion.complete_sums_in(norm)
    with pytest.raises(RuntimeError, match="partial sum"):
        norm(torch.zeros(1, 64), torch.zeros(1, 64))


# ---- FP8 ---------------------------------------------------------------------------------------


def functions(version: str) -> dict[str, Any]:
    """Returns fakes with the names and parameters of SGLang's functions."""
    extra = "" if version == "0.5.17" else ", act_scale_ue8m0=False"
    scope: dict[str, Any] = {}
    for name in [*handoff.GEMMS, "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback"]:
        with_extra = extra if not name.startswith(("cutlass", "flashinfer")) else ""
        exec(f"def {name}(input, weight, input_scale=None{with_extra}): ...", scope)
    return scope


@pytest.mark.parametrize("packs", [False, True], ids=["hopper", "blackwell"])
@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_scales_of_gemms(monkeypatch: pytest.MonkeyPatch, version: str, packs: bool) -> None:
    monkeypatch.setattr(handoff, "_deepgemm_packs_scales", lambda: packs)
    known = functions(version)
    deepgemm = known["deepgemm_w8a8_block_fp8_linear_with_fallback"]
    cutlass = known["cutlass_w8a8_block_fp8_linear_with_fallback"]
    triton = known["triton_w8a8_block_fp8_linear"]
    columns = allnorm.Fp8PerGroup(128, "column_major_tma")
    packed = allnorm.Fp8PerGroup(128, "column_major_tma", "ue8m0_packed")
    if packs:
        assert handoff.quant_for(deepgemm, 256) == (None if version == "0.5.17" else packed)
    else:
        assert handoff.quant_for(deepgemm, 256) == columns
        assert handoff.quant_for(deepgemm, 96) is None
    assert handoff.quant_for(cutlass, 256) == columns
    assert handoff.quant_for(cutlass, 192) is None
    if version == "0.5.17":
        assert handoff.quant_for(triton, 256) is None
    else:
        assert handoff.quant_for(triton, 256) == allnorm.Fp8PerGroup(128, "row_major")
        rounded = functools.partial(triton, act_scale_ue8m0=True)
        assert handoff.quant_for(rounded, 256) == allnorm.Fp8PerGroup(128, "row_major", "ue8m0")
    flashinfer = known["flashinfer_gemm_w8a8_block_fp8_linear_with_fallback"]
    assert handoff.quant_for(flashinfer, 256) is None


def fp8_layer(shape: tuple[int, int] = (256, 256), **changes: Any) -> Any:
    method = {
        "block_quant": True,
        "weight_block_size": [128, 128],
        "w8a8_block_fp8_linear": functions("0.5.23")["triton_w8a8_block_fp8_linear"],
    }
    linear: Any = torch.nn.Module()
    linear.weight = torch.zeros(shape)
    linear.quant_method = SimpleNamespace(**(method | changes))
    return linear


def test_layers_that_take_fp8() -> None:
    assert handoff.quant_of(fp8_layer()) == allnorm.Fp8PerGroup(128, "row_major")
    assert handoff.quant_of(None) is None
    assert handoff.quant_of(torch.nn.Linear(4, 4)) is None
    for change in (
        {"block_quant": False},
        {"use_marlin": True},
        {"use_mxfp8": True},
        {"block_fp8_as_mxfp8": True},
        {"weight_block_size": [32, 32]},
        {"weight_block_size": None},
        {"w8a8_block_fp8_linear": None},
    ):
        assert handoff.quant_of(fp8_layer(**change)) is None, change
    assert handoff.quant_of(fp8_layer((256, 200))) is None


# ---- wiring ------------------------------------------------------------------------------------


class RowParallelLinear(torch.nn.Module):
    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.tp_size = 2
        self.reduce_results = self.input_is_parallel = True
        self.skip_bias_add = self.use_dp_attention_reduce = self.use_decode_attn_tp = False
        for name, value in changes.items():
            setattr(self, name, value)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = torch.nn.Module(), torch.nn.Module()
        self.self_attn.o_proj, self.mlp.down_proj = RowParallelLinear(), RowParallelLinear()
        self.input_layernorm, self.post_attention_layernorm = PlainNorm(), PlainNorm()


class GemmaLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = PlainNorm(), PlainNorm()


class GraniteLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.residual_multiplier = 0.22


class OlmoLayer(GemmaLayer):
    pass


class Stack(torch.nn.Module):
    """A model of three layers with pipeline stages."""

    def __init__(self, start_layer: int = 0, last: bool = True) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.start_layer, self.end_layer, self.norm = start_layer, 3, PlainNorm()
        self.pp_group = SimpleNamespace(is_last_rank=last)
        self.layers_to_capture: list[int] = []


class PlainStack(torch.nn.Module):
    """A model of two layers without pipeline stages, as in Gemma, Granite and OLMo."""

    def __init__(self, kind: type[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(kind() for _ in range(2))
        self.norm = PlainNorm()
        self.layers_to_capture: list[int] = []


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the classes above the import paths of SGLang's classes."""
    paths = {
        RowParallelLinear: "layers.linear.RowParallelLinear",
        Layer: "models.llama.LlamaDecoderLayer",
        Stack: "models.llama.LlamaModel",
        GemmaLayer: "models.gemma2.Gemma2DecoderLayer",
        GraniteLayer: "models.granite.GraniteDecoderLayer",
        OlmoLayer: "models.olmo2.Olmo2DecoderLayer",
        PlainStack: "models.gemma2.Gemma2Model",
    }
    monkeypatch.setattr(dense, "_path", lambda m: f"sglang.srt.{paths.get(type(m), '')}")


def found(model: Any, world_size: int = 2, leave: bool = False) -> list[tuple[int, int]]:
    pairs = dense.sites(model, world_size, hidden_states_leave=leave)
    return [(id(site.linear), id(site.norm)) for site in pairs]


def test_sites_of_a_stack() -> None:
    stack = Stack()
    layers: Any = list(stack.layers)
    within = [(id(x.self_attn.o_proj), id(x.post_attention_layernorm)) for x in layers]
    following = [x.input_layernorm for x in layers[1:]] + [stack.norm]
    between = [(id(x.mlp.down_proj), id(norm)) for x, norm in zip(layers, following, strict=True)]
    assert sorted(found(stack)) == sorted(within + between)
    assert found(stack, leave=True) == within
    stack.layers_to_capture = [1]
    assert found(stack) == within
    assert found(stack, world_size=4) == []
    # A pipeline stage reduces its last sum before it sends the result to the next stage.
    assert len(found(Stack(start_layer=1, last=False))) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"reduce_results": False},
        {"input_is_parallel": False},
        {"skip_bias_add": True},
        {"use_dp_attention_reduce": True},
        {"use_decode_attn_tp": True},
    ],
)
def test_layers_that_must_keep_their_sum(change: dict[str, bool]) -> None:
    stack = Stack()
    layers: Any = stack.layers
    layers[0].self_attn.o_proj = RowParallelLinear(**change)
    assert len(found(stack)) == 5
    layers[1].mlp.down_proj = torch.nn.Linear(4, 4)
    assert len(found(stack)) == 4


def test_norms_whose_readers_round(monkeypatch: pytest.MonkeyPatch) -> None:
    stack: Any = Stack()
    assert list(dense.rounded_norms(stack)) == []
    monkeypatch.setattr(dense, "_ROUND_FIRST", ("sglang.srt.models.llama.LlamaDecoderLayer",))
    found = list(dense.rounded_norms(stack))
    layer = stack.layers[0]
    assert found[:2] == [layer.input_layernorm, layer.post_attention_layernorm]
    assert len(found) == 6
    assert stack.norm not in found


def test_wiring() -> None:
    stack = Stack()
    dense.wire(dense.sites(stack, 2, hidden_states_leave=False))
    layers: Any = stack.layers
    assert not any(layer.mlp.down_proj.reduce_results for layer in layers)
    assert "forward" not in layers[0].input_layernorm.__dict__
    for norm in (layers[0].post_attention_layernorm, layers[1].input_layernorm, stack.norm):
        assert norm.forward.__func__ is fusion.completing_forward
    assert dense.sites(stack, 2, hidden_states_leave=False) == []


def test_post_norms_are_computed_by_the_norms_after_them() -> None:
    stack: Any = PlainStack(GemmaLayer)
    first, second = stack.layers
    dense.wire(dense.sites(stack, 2, hidden_states_leave=False))
    for norm, post in (
        (first.pre_feedforward_layernorm, first.post_attention_layernorm),
        (second.input_layernorm, first.post_feedforward_layernorm),
        (second.pre_feedforward_layernorm, second.post_attention_layernorm),
        (stack.norm, second.post_feedforward_layernorm),
    ):
        assert norm.forward.__func__ is fusion.completing_forward
        assert norm._allnorm_before == fusion.Before(post)
        assert post.forward.__func__ is fusion.passing_on
        assert post not in list(norm.modules())
    assert not any(layer.mlp.down_proj.reduce_results for layer in stack.layers)


def test_scales_are_applied_by_the_norms_or_by_the_layer() -> None:
    stack: Any = PlainStack(GraniteLayer)
    assert dense.sites(stack, 2, hidden_states_leave=True) == [], (
        "one sum of each layer must be complete when it leaves"
    )
    stack.layers[0].mlp.down_proj = torch.nn.Linear(4, 4)
    dense.wire(dense.sites(stack, 2, hidden_states_leave=False))
    first, second = stack.layers
    assert (first.residual_multiplier, second.residual_multiplier) == (0.22, 1.0)
    assert first.self_attn.o_proj.reduce_results
    assert second.post_attention_layernorm._allnorm_before == fusion.Before(None, 0.22)
    assert stack.norm._allnorm_before == fusion.Before(None, 0.22)
    assert "forward" not in second.input_layernorm.__dict__


def test_a_layer_that_adds_its_residual() -> None:
    stack: Any = PlainStack(OlmoLayer)
    pairs = dense.sites(stack, 2, hidden_states_leave=True)
    assert len(pairs) == 4, "its sums are complete when they leave it"
    dense.wire(pairs)
    for layer in stack.layers:
        for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
            assert norm.forward.__func__ is fusion.completing_alone
            with pytest.raises(RuntimeError, match="partial sum"):
                norm(torch.zeros(1, 64), torch.zeros(1, 64))
    assert "forward" not in stack.norm.__dict__


def test_names_of_groups() -> None:
    """Tests layers of SGLang 0.5.23, which store group names."""
    stack = Stack()
    layers: Any = stack.layers
    for layer, group, size in zip(layers, (None, "attn_tp", "tp"), (2, 2, 4), strict=True):
        linear = layer.self_attn.o_proj
        del linear.tp_size
        linear.parallel_group, linear.tp_group = group, SimpleNamespace(world_size=size)
    assert len(found(stack)) == 4
