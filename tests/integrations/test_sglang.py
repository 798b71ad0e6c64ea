"""Tests the SGLang plugin's own logic, with fake modules in place of SGLang's.

tests/engines/test_sglang.py runs it in the real package.
"""

from __future__ import annotations

import functools
import logging
import operator
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import allnorm
from allnorm.errors import UnsupportedError
from allnorm.integrations import engines
from allnorm.integrations import sglang as plugin
from allnorm.integrations.sglang import dense, fusion, handoff, log, norms, seams, start
from allnorm.integrations.sglang.hooks import HOOKS


class PlainNorm(torch.nn.Module):
    """The attributes of SGLang's RMSNorm that the plugin reads."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        self.variance_epsilon = 1e-6
        self.variance_size_override = self.override_orig_dtype = None
        self.fp32_residual = self.cast_x_before_out_mul = False
        self.has_weight = True
        for name, value in changes.items():
            setattr(self, name, value)

    def forward(self, x: Any, residual: Any = None, post: Any = None) -> Any:
        return "stock", x, residual


class GemmaNorm(PlainNorm):
    pass


def old_gate(batch_size: int) -> bool:
    return False


def stock_norm(
    norm_module: Any,
    x: Any,
    residual: Any,
    post_residual_addition: Any,
    weight: Any,
    use_attn_tp_group: bool = True,
) -> str:
    return "stock norm"


def stock_quantized(
    norm_module: Any,
    x: Any,
    residual: Any,
    weight: Any,
    group_size: int = 128,
    use_attn_tp_group: bool = True,
    keep_bf16: bool = False,
) -> str:
    return "stock quantized"


class Runner:
    def _pre_initialize_flashinfer_allreduce_workspace(self) -> None:
        return None


class Registry:
    """Applies a hook at once, as SGLang's does later."""

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: str) -> None:
        assert hook_type == "around"
        where, name = target.rsplit(".", 1)
        holder = sys.modules.get(where) or Runner
        original = getattr(holder, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        setattr(holder, name, wrapper)


LAYERNORM = "sglang.srt.layers.layernorm"
RUNNER = "sglang.srt.model_executor.runner.base_runner"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, types.ModuleType]]:
    """Installs fake modules with the names and functions that the plugin uses."""
    contents: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": "0.0.1"},
        "sglang.srt": {},
        "sglang.srt.layers": {},
        LAYERNORM: {
            "_forward_with_allreduce_fusion": stock_norm,
            "_forward_with_allreduce_fusion_quant_per_group": stock_quantized,
            "RMSNorm": PlainNorm,
            "GemmaRMSNorm": GemmaNorm,
        },
        "sglang.srt.layers.communicator": {"apply_flashinfer_allreduce_fusion": old_gate},
        "sglang.srt.layers.dp_attention": {"is_dp_attention_enabled": lambda: False},
        "sglang.srt.layers.linear": {"RowParallelLinear": object},
        "sglang.srt.runtime_context": {"get_parallel": object, "get_exec": object},
        "sglang.srt.model_executor": {},
        "sglang.srt.model_executor.runner": {},
        RUNNER: {"BaseRunner": Runner},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": Registry,
            "HookType": SimpleNamespace(AROUND="around"),
        },
    }
    made = {}
    for name, values in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        made[name] = module
        if "." in name:
            parent, child = name.rsplit(".", 1)
            setattr(made[parent], child, module)
    name = "_pre_initialize_flashinfer_allreduce_workspace"
    monkeypatch.setattr(Runner, name, Runner.__dict__[name])
    monkeypatch.setattr(plugin, "_registered", [])
    monkeypatch.setattr(plugin, "announcer", type(plugin.announcer)(log.logger))
    monkeypatch.setattr(start, "announcer", plugin.announcer)
    norms.classes.cache_clear()
    yield made
    norms.classes.cache_clear()
    fusion.activate(None)


# ---- registering -------------------------------------------------------------------------------


def test_nothing_is_hooked_without_a_gpu(
    fake: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    caplog.set_level(logging.INFO)
    plugin.register()
    assert plugin._registered == []
    assert fake[LAYERNORM]._forward_with_allreduce_fusion is stock_norm
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "no NVIDIA GPU" in caplog.text


def test_the_hooks_are_registered_once_and_answer(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    plugin.register()
    hooked = fake[LAYERNORM]._forward_with_allreduce_fusion
    plugin.register()
    assert fake[LAYERNORM]._forward_with_allreduce_fusion is hooked is not stock_norm
    targets = seams.probe()
    assert plugin._registered == list(targets.values())
    assert seams.obstacle(targets) == ""
    assert set(HOOKS) == {seam.role for seam in seams.SEAMS}


def test_hooks_pass_everything_on_until_the_ranks_agreed(fake: Any) -> None:
    assert plugin.install()
    module = fake[LAYERNORM]
    assert module._forward_with_allreduce_fusion(None, None, None, None, None) == "stock norm"
    quantized = module._forward_with_allreduce_fusion_quant_per_group
    assert quantized(None, None, None, None) == "stock quantized"
    assert fake["sglang.srt.layers.communicator"].apply_flashinfer_allreduce_fusion(3) is False


@pytest.mark.parametrize(
    ("where", "name", "value", "words"),
    [
        (LAYERNORM, "_forward_with_allreduce_fusion", None, "has no sglang.srt.layers.layernorm._"),
        (LAYERNORM, "_forward_with_allreduce_fusion", old_gate, r"\(batch_size\), expected \(norm"),
        (LAYERNORM, "GemmaRMSNorm", None, "has no sglang.srt.layers.layernorm.GemmaRMSNorm"),
        (RUNNER, "BaseRunner", None, "_pre_initialize_flashinfer_allreduce_workspace"),
        (
            "sglang.srt.layers.communicator",
            "apply_flashinfer_allreduce_fusion",
            None,
            "flashinfer_ar_fusion_applies or .*apply_flashinfer_allreduce_fusion",
        ),
    ],
)
def test_a_seam_that_moved_is_named(
    fake: Any, caplog: pytest.LogCaptureFixture, where: str, name: str, value: Any, words: str
) -> None:
    if value is None:
        delattr(fake[where], name)
    else:
        setattr(fake[where], name, value)
    with pytest.raises(UnsupportedError, match=words) as caught:
        seams.probe()
    assert "SGLang 0.0.1" in str(caught.value)
    assert seams.VERSIONS in str(caught.value)
    assert not plugin.install()
    assert not plugin._registered
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def with_more(head: str) -> Any:
    """Replaces SGLang's norm function by one with more parameters that returns its arguments."""
    scope: dict[str, Any] = {}
    exec(f"def function({head}): return locals()", scope)
    return scope["function"]


KNOWN = "norm_module, x, residual, post_residual_addition, weight, use_attn_tp_group=True"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (KNOWN + ", scale=1.0", ""),
        (KNOWN + ", *, scale=1.0", ""),
        (KNOWN + ", *more, **named", ""),
        (KNOWN.replace("=True", "") + ", scale", r"weight, use_attn_tp_group, scale\), expected"),
        (KNOWN + ", *, scale", r"use_attn_tp_group, scale\), expected \(norm_module, .*default"),
        ("scale, " + KNOWN, "expected"),
        (KNOWN.replace("x, residual", "residual, x"), "expected"),
        (KNOWN.replace(", weight", ", *, weight"), "expected"),
    ],
)
def test_parameters_that_are_new(fake: Any, parameters: str, words: str) -> None:
    """Optional parameters change nothing until they are used; required ones prevent fusion."""
    fake[LAYERNORM]._forward_with_allreduce_fusion = with_more(parameters)
    if words:
        with pytest.raises(UnsupportedError, match=words):
            seams.probe()
        return
    assert plugin.install()
    assert seams.obstacle(seams.probe()) == ""
    passed_on = fake[LAYERNORM]._forward_with_allreduce_fusion(1, 2, 3, 4, 5, True, scale=0.5)
    assert passed_on.pop("named", {"scale": passed_on.get("scale")})["scale"] == 0.5
    assert (passed_on["norm_module"], passed_on["use_attn_tp_group"]) == (1, True)


def test_new_parameters_of_all_hooks_are_passed_on(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = "norm_module, x, residual, weight, group_size=128, use_attn_tp_group=True"
    layernorm, communicator = fake[LAYERNORM], fake["sglang.srt.layers.communicator"]
    name = "_forward_with_allreduce_fusion_quant_per_group"
    setattr(layernorm, name, with_more(quantized + ", keep_bf16=False, scale=None"))
    communicator.apply_flashinfer_allreduce_fusion = with_more("batch_size, mode='a'")
    method = "_pre_initialize_flashinfer_allreduce_workspace"
    monkeypatch.setattr(Runner, method, with_more("self, force=False"))
    assert plugin.install()
    assert seams.obstacle(seams.probe()) == ""
    assert getattr(layernorm, name)(1, 2, 3, 4, scale=5)["scale"] == 5
    assert communicator.apply_flashinfer_allreduce_fusion(3, "b")["mode"] == "b"
    monkeypatch.setattr(start, "start", lambda runner: None)
    assert getattr(Runner(), method)(force=True)["force"]


def test_what_a_new_parameter_asks_for_is_not_left_out(fake: Any) -> None:
    """A fused call must raise for an unknown argument, because SGLang's function does not run."""

    class Fused:
        def norm(self, *given: Any) -> str:
            return "fused"

        def quantized_norm(self, *given: Any) -> str:
            return "fused"

    fused: Any = Fused()
    fusion.activate(fused)
    original = with_more(KNOWN + ", scale=1.0, mode='a'")
    x = torch.zeros(2, 64)
    known = (PlainNorm(), x, x, None, None, True)
    for more, named in (((), {}), ((1.0,), {}), ((1.0, "a"), {}), ((), {"mode": "a"})):
        assert HOOKS["norm"](original, *known, *more, **named) == "fused"
    with pytest.raises(UnsupportedError, match=r"passes scale=0.5"):
        HOOKS["norm"](original, *known, 0.5)
    with pytest.raises(UnsupportedError, match="ALLNORM_DISABLE=1"):
        HOOKS["norm"](original, *known, mode="b")
    for more, named in (((x,), {}), ((1,), {}), ((1.0, "a", 0), {}), ((), {"other": None})):
        with pytest.raises(UnsupportedError, match="passes"):
            HOOKS["norm"](original, *known, *more, **named)
    # SGLang then calls `norm`, or reduces itself.
    assert HOOKS["quantized norm"](with_more("a,b,c,d,e,f,g,h=1"), *known, False, 2) is None
    gate = with_more("batch_size, mode='a'")
    assert HOOKS["gate"](gate, 3, "a") is True
    assert HOOKS["gate"](gate, 3, "b") == {"batch_size": 3, "mode": "b"}


def test_a_hook_that_is_not_in_place_and_a_stale_binding_are_found(fake: Any) -> None:
    assert plugin.install()
    targets = seams.probe()
    fake["sglang.srt"].old = stock_norm
    assert "sglang.srt.old still refer to" in seams.obstacle(targets)
    fake[LAYERNORM]._forward_with_allreduce_fusion = stock_norm
    assert "is not installed" in seams.obstacle(targets)


# ---- starting ----------------------------------------------------------------------------------


def run_of_sglang() -> Any:
    """Returns a fake of SGLang's runner."""
    server = SimpleNamespace(chunked_prefill_size=64, enable_pdmux=False)
    config = SimpleNamespace(hidden_size=64)
    model = torch.nn.Module()
    run = SimpleNamespace(
        model=model, device="cpu", dtype=torch.bfloat16, model_config=config, server_args=server
    )
    return SimpleNamespace(model_runner=run)


def parallel() -> Any:
    group = SimpleNamespace(
        device_group="device", cpu_group="cpu", world_size=2, rank_in_group=0, ranks=[0, 1]
    )
    group.all_reduce = torch.clone
    sizes = {"attn_tp_size": 2, "moe_ep_size": 1, "moe_tp_size": 2}
    return SimpleNamespace(tp_group=group, attn_tp_group=group, moe_tp_group=group, **sizes)


def settings() -> Any:
    return SimpleNamespace(
        comm=SimpleNamespace(
            enforce_disable_flashinfer_allreduce_fusion=False,
            enable_quant_communications=False,
            flashinfer_allreduce_fusion_backend=None,
        ),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
        overlap=SimpleNamespace(enable_two_batch_overlap=False),
    )


@pytest.fixture
def started(
    fake: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Any]:
    """Starts the plugin with fake objects; returns the obstacles that this rank reported."""
    told: list[str] = []

    def agree(group: Any, device: Any, *, obstacle: str, **_: Any) -> engines.Outcome:
        assert group == "cpu"
        told.append(obstacle)
        return engines.Outcome(None, obstacle or "nothing is fused here")

    def run(runner: Any, groups: Any, switches: Any) -> list[str]:
        context = fake["sglang.srt.runtime_context"]
        monkeypatch.setattr(context, "get_parallel", lambda: groups)
        monkeypatch.setattr(context, "get_exec", lambda: switches)
        spec = SimpleNamespace(speculative_algorithm=None)
        monkeypatch.setattr(context, "get_spec", lambda: spec, raising=False)
        start.start(runner)
        return told

    monkeypatch.setattr(engines, "engine_communicator", agree)
    monkeypatch.setattr(start, "_decided", [])
    assert plugin.install()
    return run


def test_a_start_reads_what_it_knows(started: Any) -> None:
    assert started(run_of_sglang(), parallel(), settings()) == [""]


@pytest.mark.parametrize(
    ("where", "field"),
    [
        ("run", "model_runner.dtype"),
        ("run", "model_runner.model_config.hidden_size"),
        ("run", "model_runner.server_args.enable_pdmux"),
        ("run", "model_runner.server_args.chunked_prefill_size"),
        ("groups", "attn_tp_size"),
        ("groups", "moe_ep_size"),
        ("switches", "comm.enable_quant_communications"),
        ("switches", "overlap.enable_two_batch_overlap"),
    ],
)
def test_a_field_that_is_gone_is_named_and_told_to_the_other_ranks(
    started: Any, caplog: pytest.LogCaptureFixture, where: str, field: str
) -> None:
    """Otherwise a setting that SGLang renamed would be ignored."""
    objects = {"run": run_of_sglang(), "groups": parallel(), "switches": settings()}
    owner, _, name = f"it.{field}".rpartition(".")
    delattr(operator.attrgetter(owner)(SimpleNamespace(it=objects[where])), name)
    (told,) = started(*objects.values())
    assert told.startswith("SGLang is not as this plugin expects")
    assert f"without {field.removeprefix('model_runner.')}" in told
    assert "SGLang runs without fused reductions" in caplog.text


@pytest.mark.parametrize(
    ("where", "field"),
    [("run", "model_runner"), ("run", "model_runner.device"), ("groups", "tp_group.cpu_group")],
)
def test_without_a_group_there_is_nobody_to_tell(
    started: Any, caplog: pytest.LogCaptureFixture, where: str, field: str
) -> None:
    objects = {"run": run_of_sglang(), "groups": parallel(), "switches": settings()}
    owner, _, name = f"it.{field}".rpartition(".")
    delattr(operator.attrgetter(owner)(SimpleNamespace(it=objects[where])), name)
    assert started(*objects.values()) == []
    assert f"without {name}" in caplog.text
    assert fusion.current() is None


# ---- norms and tensors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variance_size_override": 32}, "a part of the row"),
        ({"fp32_residual": True}, "different dtype"),
        ({"override_orig_dtype": torch.float32}, "different dtype"),
        ({"has_weight": False}, "without weight"),
        (
            {"cast_x_before_out_mul": True, "weight": torch.nn.Parameter(torch.ones(64))},
            "multiplied last",
        ),
    ],
)
def test_norms_that_are_computed_otherwise_are_refused(
    fake: Any, changes: dict[str, Any], words: str
) -> None:
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


def test_what_cannot_be_fused_is_reduced_all_the_same(fake: Any) -> None:
    """SGLang 0.5.17 would run the norm without any all-reduce."""
    said: list[str] = []
    reduced: list[torch.Tensor] = []

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        reduced.append(x)
        return x + 1

    communicator: Any = SimpleNamespace()
    fused = fusion.Fusion(communicator, all_reduce, said.append)
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
    assert len(reduced) == len(said) == 1
    assert fused.quantized_norm(norm, x, residual, allnorm.Fp8PerGroup(), False) is None
    assert len(reduced) == 1


def test_a_wired_norm_without_its_partner_raises(fake: Any) -> None:
    norm = PlainNorm()
    fusion.complete_sums_in(norm)
    with pytest.raises(RuntimeError, match="partial sum"):
        norm(torch.zeros(1, 64), torch.zeros(1, 64))


# ---- FP8 ---------------------------------------------------------------------------------------


def functions(version: str) -> dict[str, Any]:
    """Installs functions with the names and parameters of SGLang's."""
    extra = "" if version == "0.5.17" else ", act_scale_ue8m0=False"
    scope: dict[str, Any] = {}
    for name in [*handoff.GEMMS, "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback"]:
        with_extra = extra if not name.startswith(("cutlass", "flashinfer")) else ""
        exec(f"def {name}(input, weight, input_scale=None{with_extra}): ...", scope)
    return scope


@pytest.mark.parametrize("packs", [False, True], ids=["hopper", "blackwell"])
@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_which_scales_a_gemm_reads(
    monkeypatch: pytest.MonkeyPatch, version: str, packs: bool
) -> None:
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


def test_which_layers_take_fp8() -> None:
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


class Stack(torch.nn.Module):
    def __init__(self, start_layer: int = 0, last: bool = True) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.start_layer, self.end_layer, self.norm = start_layer, 3, PlainNorm()
        self.pp_group = SimpleNamespace(is_last_rank=last)
        self.layers_to_capture: list[int] = []


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the classes above under the names of SGLang's."""
    paths = {
        RowParallelLinear: "sglang.srt.layers.linear.RowParallelLinear",
        Layer: "sglang.srt.models.llama.LlamaDecoderLayer",
        Stack: "sglang.srt.models.llama.LlamaModel",
    }
    monkeypatch.setattr(dense, "_path", lambda module: paths.get(type(module), ""))


def found(model: Any, world_size: int = 2, leave: bool = False) -> list[tuple[int, int]]:
    pairs = dense.sites(model, world_size, hidden_states_leave=leave)
    return [(id(site.linear), id(site.norm)) for site in pairs]


def test_sites_of_a_stack(named: None) -> None:
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
    # A pipeline stage completes its sums before it sends them.
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
def test_layers_that_must_keep_their_sum(named: None, change: dict[str, bool]) -> None:
    stack = Stack()
    layers: Any = stack.layers
    layers[0].self_attn.o_proj = RowParallelLinear(**change)
    assert len(found(stack)) == 5
    layers[1].mlp.down_proj = torch.nn.Linear(4, 4)
    assert len(found(stack)) == 4


def test_wiring_changes_what_it_says(named: None) -> None:
    stack = Stack()
    dense.wire(dense.sites(stack, 2, hidden_states_leave=False))
    layers: Any = stack.layers
    assert not any(layer.mlp.down_proj.reduce_results for layer in layers)
    assert "forward" not in layers[0].input_layernorm.__dict__
    for norm in (layers[0].post_attention_layernorm, layers[1].input_layernorm, stack.norm):
        assert norm.forward.__func__ is fusion.completing_forward
    assert dense.sites(stack, 2, hidden_states_leave=False) == []


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


@pytest.fixture
def stack_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a stack of the layers above without pipeline stages, as in these models."""
    paths = {
        RowParallelLinear: "sglang.srt.layers.linear.RowParallelLinear",
        GemmaLayer: "sglang.srt.models.gemma2.Gemma2DecoderLayer",
        GraniteLayer: "sglang.srt.models.granite.GraniteDecoderLayer",
        OlmoLayer: "sglang.srt.models.olmo2.Olmo2DecoderLayer",
        Stack: "sglang.srt.models.gemma2.Gemma2Model",
    }
    monkeypatch.setattr(dense, "_path", lambda module: paths.get(type(module), ""))

    def make(kind: type[torch.nn.Module]) -> Any:
        stack: Any = Stack()
        stack.layers = torch.nn.ModuleList(kind() for _ in range(2))
        del stack.start_layer, stack.end_layer, stack.pp_group
        return stack

    return make


def test_post_norms_are_computed_by_the_norms_behind_them(stack_of: Any) -> None:
    stack = stack_of(GemmaLayer)
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


def test_a_scale_is_left_to_the_norms_or_to_the_layer(stack_of: Any) -> None:
    stack = stack_of(GraniteLayer)
    assert dense.sites(stack, 2, hidden_states_leave=True) == [], "only one of its sums is taken"
    stack.layers[0].mlp.down_proj = torch.nn.Linear(4, 4)
    dense.wire(dense.sites(stack, 2, hidden_states_leave=False))
    first, second = stack.layers
    assert (first.residual_multiplier, second.residual_multiplier) == (0.22, 1.0)
    assert first.self_attn.o_proj.reduce_results
    assert second.post_attention_layernorm._allnorm_before == fusion.Before(None, 0.22)
    assert stack.norm._allnorm_before == fusion.Before(None, 0.22)
    assert "forward" not in second.input_layernorm.__dict__


def test_a_layer_that_adds_by_itself(stack_of: Any) -> None:
    stack = stack_of(OlmoLayer)
    pairs = dense.sites(stack, 2, hidden_states_leave=True)
    assert len(pairs) == 4, "its sums are complete when they leave it"
    dense.wire(pairs)
    for layer in stack.layers:
        for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
            assert norm.forward.__func__ is fusion.completing_alone
            with pytest.raises(RuntimeError, match="partial sum"):
                norm(torch.zeros(1, 64), torch.zeros(1, 64))
    assert "forward" not in stack.norm.__dict__


def test_groups_of_a_layer_by_their_name(named: None) -> None:
    """SGLang 0.5.23 stores names instead of groups."""
    stack = Stack()
    layers: Any = stack.layers
    for layer, group, size in zip(layers, (None, "attn_tp", "tp"), (2, 2, 4), strict=True):
        linear = layer.self_attn.o_proj
        del linear.tp_size
        linear.parallel_group, linear.tp_group = group, SimpleNamespace(world_size=size)
    assert len(found(stack)) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cast_x_before_out_mul": True}, "round differently"),
        ({"has_weight": False}, "without weight"),
    ],
)
def test_a_post_norm_that_is_not_fused(fake: Any, change: dict[str, bool], words: str) -> None:
    """SGLang's own functions complete, norm, scale and add the sum."""
    seen: list[Any] = []

    class Post(PlainNorm):
        def forward(self, x: Any, residual: Any = None, post: Any = None) -> Any:
            return x * 3

    post, norm = Post(**change), PlainNorm()
    fused = fusion.Fusion(None, lambda x: x + 1, seen.append)  # type: ignore[arg-type]
    x, residual = torch.ones(2, 64).bfloat16(), torch.zeros(2, 64).bfloat16()
    with torch.inference_mode():
        _, got, _ = fused.norm(norm, x, residual, fusion.Before(post, 0.5))
    assert got.equal((x + 1) * 3 * 0.5)
    assert words in seen[0]
