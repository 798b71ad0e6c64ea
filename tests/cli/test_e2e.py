"""Tests `allnorm e2e` on CPU ranks: it passes with complete rows, and fails for wrong results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import allnorm
from allnorm.bench.e2e import models as e2e_models
from allnorm.bench.e2e import report as e2e_report
from allnorm.bench.e2e import run as ranks_e2e
from allnorm.bench.e2e.models import PEER_ARMS, Job, Transformer, arm_names
from allnorm.cli.app import app

from .helpers import rows, unwrapped

ARMS = ["allnorm", "allnorm:unfused", "gloo+torch", "gloo+local"]
QUICK = ("--device", "cpu", "--prompt", "5", "--tokens", "4", "--rounds", "1")
CONDITIONS = {
    *("cpu", "cores", "backend", "dtype", "prompt", "tokens", "rounds", "product", "commit"),
    *("versions", "command", "date", "model"),
}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("e2e", *QUICK, *arguments))


def run(folder: Path, *arguments: str, exit_code: int = 0) -> tuple[str, list[dict[str, Any]]]:
    """Returns the command's output and the rows that it wrote."""
    path = folder / "rows.jsonl"
    done = invoke(*arguments, "--json", str(path))
    assert done.exit_code == exit_code, done.output
    return unwrapped(done.output), rows(path)


def test_tokens_and_logits_equal_those_of_unfused(tmp_path: Path) -> None:
    shown, found = run(tmp_path, "--tp", "2", "--layers", "2", "--batch", "1,3")
    assert "comm us/layer" in shown
    assert "PASS" in shown
    assert [(row["batch_size"], row["arm"]) for row in found] == [
        (batch_size, arm) for batch_size in (1, 3) for arm in ARMS
    ]
    names = {f.name for kind in (Transformer, e2e_report.Result) for f in dataclasses.fields(kind)}
    for row in found:
        assert row.keys() == CONDITIONS | names - {"name"}
        assert (row["model"], row["num_layers"], row["world_size"]) == ("tiny", 2, 2)
        assert row["finite"] is True
        assert row["error"] == ""
        assert row["num_tokens"] == 4 * row["batch_size"]
        assert row["steps_checked"] == 4
        assert 0 < row["itl_p50_ms"] <= row["itl_p99_ms"]
        assert min(row["ttft_ms"], row["tpot_ms"], row["tokens_per_s"]) > 0
        if row["arm"].startswith("allnorm"):
            assert row["tokens_equal_unfused"] == row["num_tokens"]
            assert row["steps_equal_unfused"] == row["steps_checked"]


def test_logits_of_four_ranks_differ_as_much_as_those_of_the_yardstick(tmp_path: Path) -> None:
    arguments = ("--model", "tiny-qk-norm", "--tp", "4", "--batch", "2")
    _, (own, other) = run(tmp_path, *arguments, "--arms", "allnorm,gloo+torch")
    assert (own["arm"], other["arm"]) == ("allnorm", "gloo+torch")
    assert own["yardstick_max"] > 0
    assert 0 < own["logits_max_diff"] < 4 * own["yardstick_max"]
    assert 0 < own["logits_mean_diff"] < 2 * own["yardstick_mean"]
    assert other["logits_max_diff"] == 0
    assert other["choices_equal_torch"] == other["tokens_equal_torch"] == other["num_tokens"]


@pytest.mark.parametrize("model", ["tiny-gemma", "tiny-moe"])
def test_post_norms_and_experts_give_equal_tokens(model: str, tmp_path: Path) -> None:
    _, found = run(tmp_path, "--model", model, "--tp", "2", "--batch", "1,3")
    assert [row["arm"] for row in found] == ARMS * 2
    for row in found:
        # With two ranks the summation order does not matter, and all arms have equal weights.
        assert row["logits_max_diff"] == 0, row["arm"]
        assert row["steps_equal_unfused"] == row["steps_checked"] == 4
        assert row["tokens_equal_torch"] == row["num_tokens"]


@pytest.mark.gpu
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("model", "product"),
    [
        *(("tiny", "torch"), ("tiny-gemma", "torch"), ("tiny-moe", "torch")),
        *(("tiny", "triton"), ("tiny", "dependent")),
    ],
)
def test_on_gpus(model: str, product: str, tmp_path: Path) -> None:
    arguments = ("--batch", "1,3", "--tp", "2", "--device", "cuda")
    _, found = run(tmp_path, *arguments, "--model", model, "--product", product)
    assert {"allnorm", "allnorm:unfused", "nccl+torch", "nccl+local"} <= {r["arm"] for r in found}
    assert {row["yardstick"] for row in found} == {"NCCL's ring and tree"}
    assert {row["steps_checked"] for row in found} == {4}


def test_one_rank() -> None:
    done = invoke("--tp", "1", "--layers", "1", "--batch", "2", "--dtype", "float32")
    assert done.exit_code == 0, done.output


class Wrong(allnorm.Communicator):
    """A communicator with a wrong normed row on one rank, unless the algorithm is "unfused"."""

    value = -3.0

    def all_reduce_add_rms_norm(self, *arguments: Any, **options: Any) -> Any:
        normed, residual = super().all_reduce_add_rms_norm(*arguments, **options)
        if self.rank == 1 and options["algorithm"] != "unfused":
            normed[-1] *= self.value
        return normed, residual


class NotFinite(Wrong):
    value = float("nan")


def run_with(communicator: Any, rank: int, world_size: int, job: Job) -> Any:
    allnorm.Communicator = communicator
    return RUN(rank, world_size, job)


RUN = ranks_e2e.run


@pytest.mark.parametrize(
    ("broken", "complaints"),
    [
        (Wrong, ("logits differ from allnorm:unfused at 4 of 4 steps", "tokens differ")),
        (NotFinite, ("logits are not finite",)),
    ],
)
def test_a_wrong_call_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: Any, complaints: tuple[str, ...]
) -> None:
    monkeypatch.setattr(ranks_e2e, "run", functools.partial(run_with, broken))
    arguments = ("--tp", "2", "--layers", "2", "--batch", "2")
    shown, found = run(tmp_path, *arguments, exit_code=1)
    assert "WRONG" in shown
    by_arm = {row["arm"]: row for row in found}
    for complaint in complaints:
        assert complaint in by_arm["allnorm"]["error"]
    # A wrong arm does not affect later arms.
    assert all(by_arm[arm]["error"] == "" and by_arm[arm]["finite"] for arm in ARMS[1:])


def record(**changes: Any) -> dict[str, Any]:
    times = {"ttft_ms": 2.0, "tpot_ms": 1.0, "itl_p50_ms": 0.9, "itl_p99_ms": 1.5, "local_ms": 0.8}
    counts = {"batch_size": 2, "num_tokens": 10, "steps_checked": 5, "steps_equal_unfused": 5}
    counts |= {"tokens_equal_unfused": 10, "tokens_equal_torch": 9, "choices_equal_torch": 9}
    logits = {"finite": True, "logits_max_diff": 0.5, "logits_mean_diff": 0.1}
    yardstick = {"yardstick": "two", "yardstick_max": 0.4, "yardstick_mean": 0.1}
    return {"arm": "allnorm", **times, **counts, **logits, **yardstick, **changes}


def test_the_slowest_rank_and_the_worst_result_count() -> None:
    model = e2e_models.find("tiny", num_layers=4)
    ranks = [
        [record()],
        [record(tpot_ms=1.2, steps_equal_unfused=4, logits_max_diff=0.7, logits_mean_diff=0.3)],
    ]
    (result,) = e2e_report.merge(ranks, model)
    assert (result.ttft_ms, result.tpot_ms, result.local_ms) == (2.0, 1.2, 0.8)
    assert result.comm_us_per_layer == pytest.approx(100.0)
    assert result.tokens_per_s == pytest.approx(10 / (2e-3 + 4 * 1.2e-3))
    assert (result.logits_max_diff, result.logits_mean_diff) == (0.7, pytest.approx(0.2))
    assert result.error == "logits differ from allnorm:unfused at 1 of 5 steps"
    others = [[record(arm="nccl+torch", steps_equal_unfused=0, tokens_equal_unfused=0)]]
    assert e2e_report.merge(others, model)[0].error == ""
    (result,) = e2e_report.merge([[record(arm="nccl+torch", finite=False)]], model)
    assert result.error == "logits are not finite"


def test_published_dimensions() -> None:
    """Compares parameter counts in billions, with separate embedding and head."""
    expected = {"llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "qwen3-32b": 32.8}
    expected |= {"qwen3-30b-a3b": 30.5, "gemma-3-27b": 27.0 + 262208 * 5376 / 1e9}
    for name, billions in expected.items():
        m = e2e_models.find(name)
        heads = (2 * m.num_heads + 2 * m.num_kv_heads) * m.head_dim
        mlps = max(1, m.num_experts) * 3 * m.intermediate_size + m.num_experts
        layer = m.hidden_size * (heads + mlps)
        count = m.num_layers * layer + 2 * m.vocab_size * m.hidden_size
        assert count / 1e9 == pytest.approx(billions, rel=2e-3), name


def test_every_model_fits_as_many_ranks_as_it_has_key_heads() -> None:
    for m in e2e_models.TRANSFORMERS.values():
        e2e_models.check_world_size(m, m.num_kv_heads)
        for shared in (m.num_heads, m.intermediate_size, m.vocab_size):
            assert shared % m.num_kv_heads == 0, m.name
        assert m.vocab_size <= 1 << 24  # tokens are sent as float32
        assert m.hidden_size % 8 == 0


@pytest.mark.parametrize(
    ("model", "product", "dtype", "device", "error"),
    [
        *(("llama-3.1-8b", product, "bfloat16", "cuda", "") for product in e2e_models.PRODUCTS),
        ("qwen3-30b-a3b", "torch", "bfloat16", "cuda", ""),
        ("tiny-moe", "torch", "float32", "cpu", ""),
        ("tiny-gemma", "torch", "float16", "cuda", ""),
        ("qwen3-30b-a3b", "dependent", "bfloat16", "cuda", "grouped"),
        ("llama-3.1-8b", "dependent", "float32", "cuda", "16 bits"),
        ("llama-3.1-8b", "dependent", "bfloat16", "cpu", "GPU"),
        ("tiny-moe", "torch", "float16", "cuda", "float16: on GPUs"),
    ],
)
def test_supported_dtypes_and_gemms(
    model: str, product: str, dtype: str, device: str, error: str
) -> None:
    found = e2e_models.find(model)
    with pytest.raises(ValueError, match=error) if error else contextlib.nullcontext():
        e2e_models.check_product(found, product, dtype, device)
        e2e_models.check_dtype(found, dtype, device)


def test_arm_names() -> None:
    assert list(arm_names("cpu")) == ARMS
    assert arm_names("cuda")[2:] == ("nccl+torch", "nccl+local", *PEER_ARMS)


def test_prompts_are_distinct_and_reproducible() -> None:
    job = Job(e2e_models.find("tiny"), (3,), 6, 2, ("allnorm",), "float32", "cpu", 1)
    prompts = ranks_e2e.make_prompts(job, 3)
    assert len({tuple(row.tolist()) for row in prompts}) == 3
    assert torch.equal(prompts, ranks_e2e.make_prompts(job, 3))
