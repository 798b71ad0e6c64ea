"""Tests the engines' latency benchmarks without an engine: clock, settings and weights."""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
from typing import Any

import pytest
import torch

ENGINES = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "engines"


sys.path.insert(0, str(ENGINES))  # the scripts import each other
latency, sglang_latency, vllm_latency, weights = map(
    importlib.import_module, ("latency", "sglang_latency", "vllm_latency", "weights")
)
sys.path.remove(str(ENGINES))


class Engine:
    """A fake engine: prefills alternate between 20 and 60 ms; a token takes 2 ms."""

    def __init__(self, tells: bool) -> None:
        self._made, self._tells, self._calls = latency.Generation, tells, 0

    def __call__(self, prompts: list[list[int]], tokens: int) -> object:
        self._calls += 1
        decode = 2e-3 * (tokens - 1)
        prefill = 0.02 if self._calls % 2 else 0.06
        generated = [[len(prompt)] * tokens for prompt in prompts]
        return self._made(prefill + decode, generated, decode if self._tells else None)


def test_prefills_do_not_affect_times_that_the_engine_reports() -> None:
    row = latency.latency(Engine(tells=True), [[1, 2], [3]], 64, 5)
    assert row["tpot_ms"] == 2.0
    assert row["decode_ms"] == [126.0] * 5
    assert row["repeats_equal"]
    assert row["tokens"] == [[2] * 64, [1] * 64]


def test_the_time_to_the_first_token_is_subtracted_otherwise() -> None:
    row = latency.latency(Engine(tells=False), [[1, 2], [3]], 64, 5)
    assert row["decode_ms"] is None
    # Requests for one token always take 60 ms, requests for 64 tokens 20 + 126 ms.
    assert row["ttft_ms"] == 60.0
    assert row["tpot_ms"] == pytest.approx((146 - 60) / 63, abs=1e-4)


def test_decode_times_of_the_sglang_scheduler() -> None:
    outputs = [
        {"meta_info": {"prefill_finished_time": 10.0 + i, "request_finished_ts": 20.0 - i}}
        for i in range(3)
    ]
    assert sglang_latency.decode_seconds(outputs) == 8.0
    del outputs[1]["meta_info"]["prefill_finished_time"]
    assert sglang_latency.decode_seconds(outputs) is None


def test_rows_have_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--model", "/models/llama", "--json", "rows.jsonl", "--engine", '{"seed": 3}']
    script = "/somewhere/benchmarks/engines/vllm_latency.py"
    monkeypatch.setattr(sys, "argv", [script, *given, "--arm", "unfused"])
    row = latency.row_of(vllm_latency.arguments(sys.argv[1:]), ["torch"])
    assert row["command"] == (
        "python benchmarks/engines/vllm_latency.py --model llama --json rows.jsonl "
        """--engine '{"seed": 3}' --arm unfused"""
    )


# ---- settings ------------------------------------------------------------------------------------


def settings(*more: str) -> dict[str, Any]:
    options = vllm_latency.arguments(["--model", "m", "--json", "rows", "--tp", "4", *more])
    made: dict[str, Any] = vllm_latency.settings_of(options, "unfused", [1, 6])
    return made


def test_arguments_of_the_engine_are_merged() -> None:
    plain = settings()
    given = {"compilation_config": {"custom_ops": ["+quant_fp8"]}, "seed": 3}
    made = settings("--engine", json.dumps(given))
    assert made == {
        **plain,
        "seed": 3,
        "compilation_config": {
            "cudagraph_capture_sizes": [1, 2, 4, 6],
            "pass_config": {"fuse_allreduce_rms": False},
            "custom_ops": ["+quant_fp8"],
        },
    }


def test_two_hosts_share_the_engine() -> None:
    assert "nnodes" not in settings()
    first, second = (settings("--hosts", "2", "--host", str(host)) for host in (0, 1))
    assert first == {**second, "node_rank": 0}
    assert second["node_rank"] == 1
    assert second["nnodes"] == 2


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_has_its_own_gpus(monkeypatch: pytest.MonkeyPatch, host: int) -> None:
    environment: dict[str, str] = {}
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(vllm_latency.os, "environ", environment)
    monkeypatch.setattr(vllm_latency.subprocess, "Popen", started.append)
    monkeypatch.setattr(sys, "argv", ["vllm_latency.py", "--arm", "allnorm"])
    given = ["--model", "m", "--json", "rows", "--tp", "4", "--hosts", "2", "--host", str(host)]
    vllm_latency.be_host(vllm_latency.arguments(given))
    assert environment["CUDA_VISIBLE_DEVICES"] == ("0,1", "2,3")[host]
    assert environment["NCCL_HOSTID"] == f"host{host}"
    assert "NCCL_P2P_DISABLE" not in environment, "NCCL has NVLink inside a host"
    # Host 0 starts host 1.
    assert [command[-4:] for command in started] == [["--arm", "allnorm", "--host", "1"]][host:]


def test_fp8_is_an_override_of_the_configuration() -> None:
    assert "hf_overrides" not in settings()
    more = '{"hf_overrides": {"vocab_size": 9}}'
    made = settings("--fp8", "block", "--layers", "3", "--engine", more)
    assert made["hf_overrides"] == {
        "num_hidden_layers": 3,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        "vocab_size": 9,
    }
    static = settings("--fp8", "static")["hf_overrides"]["quantization_config"]
    assert static == {"quant_method": "fp8", "activation_scheme": "static"}


# ---- weights -------------------------------------------------------------------------------------


class Linear(torch.nn.Module):
    """An FP8 layer as vLLM has it after loading: a transposed view, and various scales."""

    def __init__(self, *, block: bool) -> None:
        super().__init__()
        stored = torch.zeros(384, 512).to(torch.float8_e4m3fn)
        self.weight = torch.nn.Parameter(stored if block else stored.t(), requires_grad=False)
        if block:
            self.weight_scale_inv = torch.nn.Parameter(-torch.ones(3, 4), requires_grad=False)
            self.input_scale = None
        else:
            self.register_buffer("weight_scale", torch.tensor(-1e-3))
            self.input_scale = torch.tensor(-1e-3)  # a plain attribute


def make_model(*, block: bool = False) -> torch.nn.Module:
    model = torch.nn.ModuleDict({"linear": Linear(block=block), "other": torch.nn.Linear(64, 64)})
    model["norm"] = torch.nn.LayerNorm(512, bias=False)
    model["norm"].table = torch.nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    return model


@pytest.mark.parametrize("block", [False, True])
def test_fp8_weights_have_the_usual_distribution(block: bool) -> None:
    model = make_model(block=block)
    linear: Any = model["linear"]
    before = (linear.weight.data_ptr(), linear.weight.stride())
    assert weights.fill(model, 0) == (5 if block else 6)
    assert (linear.weight.data_ptr(), linear.weight.stride()) == before
    scale = linear.weight_scale_inv if block else linear.weight_scale
    assert len(scale.unique()) == 1
    values = linear.weight.float() * scale.max()
    assert float(values.mean()) == pytest.approx(0.0, abs=2e-4)
    assert float(values.std()) == pytest.approx(0.02, rel=0.01)
    assert float(values.abs().max()) > 0.07
    if not block:
        assert float(linear.input_scale) == pytest.approx(8 / 448)
    assert float(model["other"].weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(model["norm"].weight.detach().mean()) == pytest.approx(1.0, abs=0.02)
    assert not model["norm"].table.any()


def test_ranks_share_norms_and_scales_only() -> None:
    models = [make_model() for _ in range(3)]
    for model, rank in zip(models, (0, 1, 0), strict=True):
        weights.fill(model, rank, prefix="7 ")
    first, second, again = ({**m.state_dict(), "i": m["linear"].input_scale} for m in models)
    for name, tensor in first.items():
        assert torch.equal(tensor.float(), again[name].float()), name
        shared = torch.equal(tensor.float(), second[name].float())
        assert shared == (name not in ("linear.weight", "other.weight")), name


def test_an_fp8_weight_without_a_scale_is_refused() -> None:
    model = make_model()
    del model["linear"].weight_scale
    with pytest.raises(ValueError, match=r"linear\.weight is .* has no float32 scale"):
        weights.fill(model, 0)
