"""Tests that the SGLang plugin registers and starts, with fakes of SGLang's modules.

tests/engines/test_sglang.py runs the plugin in the real package.
"""

from __future__ import annotations

import logging
import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allnorm.errors import UnsupportedError
from allnorm.integrations import engines
from allnorm.integrations import sglang as plugin
from allnorm.integrations.sglang import fusion, seams, start
from allnorm.integrations.sglang.hooks import HOOKS

from .sglang_stand_in import COMMUNICATOR, LAYERNORM, RUNNER, PlainNorm, Runner, fake, stock_norm

__all__ = ["fake"]  # a fixture
QUANTIZED = "_forward_with_allreduce_fusion_quant_per_group"


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


def test_hooks_are_registered_once(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_hooks_call_sglang_until_the_ranks_have_agreed(fake: Any) -> None:
    assert plugin.install()
    module = fake[LAYERNORM]
    assert module._forward_with_allreduce_fusion(None, None, None, None, None) == "stock norm"
    assert getattr(module, QUANTIZED)(None, None, None, None) == "stock quantized"
    assert fake[COMMUNICATOR].apply_flashinfer_allreduce_fusion(3) is False


@pytest.mark.parametrize(
    ("where", "name", "value", "words"),
    [
        (LAYERNORM, "_forward_with_allreduce_fusion", None, "has no sglang.srt.layers.layernorm._"),
        (
            LAYERNORM,
            "_forward_with_allreduce_fusion",
            lambda batch_size: False,
            r"\(batch_size\), expected \(norm",
        ),
        (LAYERNORM, "GemmaRMSNorm", None, "has no sglang.srt.layers.layernorm.GemmaRMSNorm"),
        (RUNNER, "BaseRunner", None, "_pre_initialize_flashinfer_allreduce_workspace"),
        (
            COMMUNICATOR,
            "apply_flashinfer_allreduce_fusion",
            None,
            "flashinfer_ar_fusion_applies or .*apply_flashinfer_allreduce_fusion",
        ),
    ],
)
def test_a_missing_function_is_named(
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


def with_parameters(head: str) -> Any:
    """Returns a function with these parameters; it returns a dict of its arguments."""
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
def test_new_parameters(fake: Any, parameters: str, words: str) -> None:
    """Tests new parameters: optional ones change nothing; required ones prevent fusion."""
    fake[LAYERNORM]._forward_with_allreduce_fusion = with_parameters(parameters)
    if words:
        with pytest.raises(UnsupportedError, match=words):
            seams.probe()
        return
    assert plugin.install()
    assert seams.obstacle(seams.probe()) == ""
    passed_on = fake[LAYERNORM]._forward_with_allreduce_fusion(1, 2, 3, 4, 5, True, scale=0.5)
    assert passed_on.pop("named", {"scale": passed_on.get("scale")})["scale"] == 0.5
    assert (passed_on["norm_module"], passed_on["use_attn_tp_group"]) == (1, True)


def test_new_parameters_of_all_hooks(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = "norm_module, x, residual, weight, group_size=128, use_attn_tp_group=True"
    layernorm, communicator = fake[LAYERNORM], fake[COMMUNICATOR]
    setattr(layernorm, QUANTIZED, with_parameters(quantized + ", keep_bf16=False, scale=None"))
    communicator.apply_flashinfer_allreduce_fusion = with_parameters("batch_size, mode='a'")
    method = "_pre_initialize_flashinfer_allreduce_workspace"
    monkeypatch.setattr(Runner, method, with_parameters("self, force=False"))
    assert plugin.install()
    assert seams.obstacle(seams.probe()) == ""
    assert getattr(layernorm, QUANTIZED)(1, 2, 3, 4, scale=5)["scale"] == 5
    assert communicator.apply_flashinfer_allreduce_fusion(3, "b")["mode"] == "b"
    monkeypatch.setattr(start, "start", lambda runner: None)
    assert getattr(Runner(), method)(force=True)["force"]


def test_fused_calls_raise_for_unknown_arguments(fake: Any) -> None:
    """Tests unknown arguments: SGLang's own function, which would obey them, does not run."""
    fused: Any = SimpleNamespace(norm=lambda *_: "fused", quantized_norm=lambda *_: "fused")
    fusion.activate(fused)
    original = with_parameters(KNOWN + ", scale=1.0, mode='a'")
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
    # The other hooks leave calls with unknown arguments to SGLang.
    quantized = with_parameters("a,b,c,d,e,f,g,h=1")
    assert HOOKS["quantized norm"](quantized, *known, False, 2) is None
    gate = with_parameters("batch_size, mode='a'")
    assert HOOKS["gate"](gate, 3, "a") is True
    assert HOOKS["gate"](gate, 3, "b") == {"batch_size": 3, "mode": "b"}


def test_missing_hooks_and_stale_bindings_are_found(fake: Any) -> None:
    assert plugin.install()
    targets = seams.probe()
    fake["sglang.srt"].old = stock_norm
    assert "sglang.srt.old still refer to" in seams.obstacle(targets)
    fake[LAYERNORM]._forward_with_allreduce_fusion = stock_norm
    assert "is not installed" in seams.obstacle(targets)


# ---- starting ----------------------------------------------------------------------------------


def engine_objects() -> dict[str, Any]:
    """Returns fakes of SGLang's runner, groups and settings."""
    runner = SimpleNamespace(
        model=torch.nn.Module(),
        device="cpu",
        dtype=torch.bfloat16,
        model_config=SimpleNamespace(hidden_size=64),
        server_args=SimpleNamespace(chunked_prefill_size=64, enable_pdmux=False),
    )
    group = SimpleNamespace(
        device_group="device", cpu_group="cpu", world_size=2, rank_in_group=0, ranks=[0, 1]
    )
    group.all_reduce = torch.clone
    sizes = {"attn_tp_size": 2, "moe_ep_size": 1, "moe_tp_size": 2}
    return {
        "run": SimpleNamespace(model_runner=runner),
        "groups": SimpleNamespace(tp_group=group, attn_tp_group=group, moe_tp_group=group, **sizes),
        "switches": SimpleNamespace(
            comm=SimpleNamespace(
                enforce_disable_flashinfer_allreduce_fusion=False,
                enable_quant_communications=False,
                flashinfer_allreduce_fusion_backend=None,
            ),
            deterministic=SimpleNamespace(enable_deterministic_inference=False),
            overlap=SimpleNamespace(enable_two_batch_overlap=False),
        ),
    }


@pytest.fixture
def started(fake: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that starts the plugin and returns the obstacles that it reports.

    The function's argument names a field that it first deletes from SGLang's objects.
    """
    reported: list[str] = []

    def agree(group: Any, device: Any, *, obstacle: str, **_: Any) -> engines.Outcome:
        assert group == "cpu"
        reported.append(obstacle)
        return engines.Outcome(None, obstacle or "nothing is fused here")

    def run(deleted: str = "") -> list[str]:
        objects = engine_objects()
        if deleted:
            owner, _, name = deleted.rpartition(".")
            delattr(operator.attrgetter(owner)(SimpleNamespace(**objects)), name)
        context = fake["sglang.srt.runtime_context"]
        monkeypatch.setattr(context, "get_parallel", lambda: objects["groups"])
        monkeypatch.setattr(context, "get_exec", lambda: objects["switches"])
        spec = SimpleNamespace(speculative_algorithm=None)
        monkeypatch.setattr(context, "get_spec", lambda: spec, raising=False)
        start.start(objects["run"])
        return reported

    monkeypatch.setattr(engines, "engine_communicator", agree)
    monkeypatch.setattr(start, "_decided", [])
    assert plugin.install()
    return run


def test_start_without_obstacles(started: Any) -> None:
    assert started() == [""]


@pytest.mark.parametrize(
    "field",
    [
        "run.model_runner.dtype",
        "run.model_runner.model_config.hidden_size",
        "run.model_runner.server_args.enable_pdmux",
        "run.model_runner.server_args.chunked_prefill_size",
        "groups.attn_tp_size",
        "groups.moe_ep_size",
        "switches.comm.enable_quant_communications",
        "switches.overlap.enable_two_batch_overlap",
    ],
)
def test_a_missing_field_is_reported_to_the_peers(
    started: Any, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    """Tests that the plugin notices if SGLang has renamed a setting."""
    (reported,) = started(field)
    assert reported.startswith("SGLang is not as this plugin expects")
    name = field.partition(".")[2].removeprefix("model_runner.")
    assert f"without {name}" in reported
    assert "SGLang runs without fused reductions" in caplog.text


@pytest.mark.parametrize(
    "field", ["run.model_runner", "run.model_runner.device", "groups.tp_group.cpu_group"]
)
def test_without_a_group_a_missing_field_is_only_logged(
    started: Any, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    assert started(field) == []
    assert f"without {field.rpartition('.')[2]}" in caplog.text
    assert fusion.current() is None
