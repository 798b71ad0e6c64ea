"""`allnorm e2e` on CPU ranks: it passes, its rows are complete, and a wrong call makes it fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import allnorm
from allnorm.bench.e2e import models as e2e_models
from allnorm.bench.e2e import report as e2e_report
from allnorm.bench.e2e import run as ranks_e2e
from allnorm.bench.e2e.models import PEER_ARMS, Job, arm_names
from allnorm.cli.app import app

from .helpers import unwrapped

ARMS = ["allnorm", "allnorm:unfused", "gloo+torch", "gloo+local"]
QUICK = ("--device", "cpu", "--prompt", "5", "--tokens", "4", "--rounds", "1")
FIELDS = {
    *("cpu", "cores", "backend", "dtype", "prompt", "tokens", "rounds", "commit", "versions"),
    "product",
    *("command", "date", "model", "hidden_size", "num_layers", "num_heads", "num_kv_heads"),
    *("head_dim", "intermediate_size", "vocab_size", "eps", "rope_theta", "qk_norm", "arm"),
    *("weight_bias", "post_norm", "activation", "num_experts", "top_k"),
    *("batch_size", "world_size", "ttft_ms", "tpot_ms", "itl_p50_ms", "itl_p99_ms"),
    *("tokens_per_s", "comm_us_per_layer", "local_ms", "num_tokens", "tokens_equal_unfused"),
    *("tokens_equal_torch", "steps_checked", "steps_equal_unfused", "choices_equal_torch"),
    *("logits_max_diff", "logits_mean_diff", "yardstick", "yardstick_max", "yardstick_mean"),
    *("finite", "error"),
}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("e2e", *QUICK, *arguments))


def test_tokens_and_logits_are_those_of_unfused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    done = invoke("--tp", "2", "--layers", "2", "--batch", "1,3", "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "comm us/layer" in unwrapped(done.output)
    assert "PASS" in unwrapped(done.output)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["batch_size"], row["arm"]) for row in rows] == [
        (batch_size, arm) for batch_size in (1, 3) for arm in ARMS
    ]
    for row in rows:
        assert row.keys() == FIELDS
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


def test_more_ranks_round_otherwise_but_like_the_yardstick(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ("--model", "tiny-qk-norm", "--tp", "4", "--batch", "2", "--json", str(path))
    done = invoke(*arguments, "--arms", "allnorm,gloo+torch")
    assert done.exit_code == 0, done.output
    own, other = (json.loads(line) for line in path.read_text().splitlines())
    assert (own["arm"], other["arm"]) == ("allnorm", "gloo+torch")
    assert own["yardstick_max"] > 0
    assert 0 < own["logits_max_diff"] < 4 * own["yardstick_max"]
    assert 0 < own["logits_mean_diff"] < 2 * own["yardstick_mean"]
    assert other["logits_max_diff"] == 0
    assert other["choices_equal_torch"] == other["tokens_equal_torch"] == other["num_tokens"]


@pytest.mark.parametrize("model", ["tiny-gemma", "tiny-moe"])
def test_what_comes_before_the_residual_changes_no_token(model: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ("--model", model, "--tp", "2", "--batch", "1,3", "--json", str(path))
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["arm"] for row in rows] == ARMS * 2
    for row in rows:
        # With two ranks the order of sums does not matter, and all arms have equal weights.
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
    path = tmp_path / "rows.jsonl"
    arguments = ("--batch", "1,3", "--tp", "2", "--device", "cuda", "--json", str(path))
    done = invoke(*arguments, "--model", model, "--product", product)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {"allnorm", "allnorm:unfused", "nccl+torch", "nccl+local"} <= {r["arm"] for r in rows}
    assert {row["yardstick"] for row in rows} == {"NCCL's ring and tree"}
    assert {row["steps_checked"] for row in rows} == {4}


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


def run_wrong(rank: int, world_size: int, job: Job) -> Any:
    allnorm.Communicator = Wrong
    return RUN(rank, world_size, job)


def run_not_finite(rank: int, world_size: int, job: Job) -> Any:
    allnorm.Communicator = NotFinite
    return RUN(rank, world_size, job)


RUN = ranks_e2e.run


@pytest.mark.parametrize(
    ("broken", "complaints"),
    [
        (run_wrong, ("logits differ from allnorm:unfused at 4 of 4 steps", "tokens differ")),
        (run_not_finite, ("logits are not finite",)),
    ],
)
def test_a_wrong_call_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: Any, complaints: tuple[str, ...]
) -> None:
    monkeypatch.setattr(ranks_e2e, "run", broken)
    path = tmp_path / "rows.jsonl"
    done = invoke("--tp", "2", "--layers", "2", "--batch", "2", "--json", str(path))
    assert done.exit_code == 1, done.output
    assert "WRONG" in unwrapped(done.output)
    rows = {row["arm"]: row for row in map(json.loads, path.read_text().splitlines())}
    for complaint in complaints:
        assert complaint in rows["allnorm"]["error"]
    # A wrong arm does not affect later arms.
    assert all(rows[arm]["error"] == "" and rows[arm]["finite"] for arm in ARMS[1:])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--model", "gpt-2"), "llama-3.1-70b"),
        (("--tp", "3"), "key and value heads"),
        (("--tokens", "1"), "at least 2"),
        (("--batch", "0"), "integers"),
        (("--arms", "mpi"), "allnorm:unfused"),
        (("--dtype", "int8"), "bfloat16"),
        (("--product", "cublas"), "dependent"),
        (("--product", "triton"), "need a GPU"),
    ],
)
def test_wrong_arguments_are_explained(arguments: tuple[str, ...], complaint: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert complaint in unwrapped(done.output)


def record(**changes: Any) -> dict[str, Any]:
    return {
        "arm": "allnorm",
        "batch_size": 2,
        "num_tokens": 10,
        "steps_checked": 5,
        "finite": True,
        "ttft_ms": 2.0,
        "tpot_ms": 1.0,
        "itl_p50_ms": 0.9,
        "itl_p99_ms": 1.5,
        "local_ms": 0.8,
        "tokens_equal_unfused": 10,
        "tokens_equal_torch": 9,
        "choices_equal_torch": 9,
        "steps_equal_unfused": 5,
        "logits_max_diff": 0.5,
        "logits_mean_diff": 0.1,
        "yardstick": "two",
        "yardstick_max": 0.4,
        "yardstick_mean": 0.1,
        **changes,
    }


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
    """Compares the number of parameters in billions, with separate embedding and head."""
    expected = {"llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "qwen3-32b": 32.8}
    expected |= {"qwen3-30b-a3b": 30.5, "gemma-3-27b": 27.0 + 262208 * 5376 / 1e9}
    for name, billions in expected.items():
        m = e2e_models.find(name)
        heads = (2 * m.num_heads + 2 * m.num_kv_heads) * m.head_dim
        mlps = max(1, m.num_experts) * 3 * m.intermediate_size + m.num_experts
        layer = m.hidden_size * (heads + mlps)
        count = m.num_layers * layer + 2 * m.vocab_size * m.hidden_size
        assert count / 1e9 == pytest.approx(billions, rel=2e-3), name


def test_every_model_can_be_shared_by_as_many_ranks_as_it_has_key_heads() -> None:
    for m in e2e_models.TRANSFORMERS.values():
        e2e_models.check_world_size(m, m.num_kv_heads)
        for shared in (m.num_heads, m.intermediate_size, m.vocab_size):
            assert shared % m.num_kv_heads == 0, m.name
        assert m.vocab_size <= 1 << 24  # tokens are sent as float32
        assert m.hidden_size % 8 == 0


def test_products_of_triton_are_of_dense_layers_in_16_bits_on_gpus() -> None:
    dense, experts = e2e_models.find("llama-3.1-8b"), e2e_models.find("qwen3-30b-a3b")
    for product in e2e_models.PRODUCTS:
        e2e_models.check_product(dense, product, "bfloat16", "cuda")
    e2e_models.check_product(experts, "torch", "bfloat16", "cuda")
    for model, dtype, device, word in (
        (experts, "bfloat16", "cuda", "grouped"),
        (dense, "float32", "cuda", "16 bits"),
        (dense, "bfloat16", "cpu", "GPU"),
    ):
        with pytest.raises(ValueError, match=word):
            e2e_models.check_product(model, "dependent", dtype, device)


def test_experts_on_gpus_are_bfloat16() -> None:
    experts = e2e_models.find("tiny-moe")
    with pytest.raises(ValueError, match="float16: on GPUs"):
        e2e_models.check_dtype(experts, "float16", "cuda")
    for model, dtype, device in (
        (experts, "bfloat16", "cuda"),
        (experts, "float32", "cpu"),
        (e2e_models.find("tiny-gemma"), "float16", "cuda"),
    ):
        e2e_models.check_dtype(model, dtype, device)


def test_arm_names() -> None:
    assert list(arm_names("cpu")) == ARMS
    assert arm_names("cuda")[2:] == ("nccl+torch", "nccl+local", *PEER_ARMS)


def test_prompts_are_distinct_and_do_not_depend_on_anything_else() -> None:
    job = Job(e2e_models.find("tiny"), (3,), 6, 2, ("allnorm",), "float32", "cpu", 1)
    prompts = ranks_e2e.make_prompts(job, 3)
    assert len({tuple(row.tolist()) for row in prompts}) == 3
    assert torch.equal(prompts, ranks_e2e.make_prompts(job, 3))
