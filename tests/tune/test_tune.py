"""Tests that `allnorm tune` excludes wrong candidates and corrects tables, which are then used."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from cli.helpers import command, rows, unwrapped
from typer.testing import CliRunner

import allnorm
from allnorm import names, topology, tuning
from allnorm.bench import arms
from allnorm.cli.app import app
from allnorm.policy import Curve, Step
from allnorm.testing import run_ranks
from allnorm.tune import run as ranks_tune
from allnorm.tune import table
from allnorm.tune.crossovers import Candidate

JOB = ranks_tune.Job(
    dtypes=("bfloat16",),
    quants=("",),
    hidden_sizes=(64,),
    tokens=(1, 4, 16),
    algorithms=("one_shot", "two_shot"),
    device="cpu",
    seconds=0.02,
)
ONE, TWO = Candidate("one_shot"), Candidate("two_shot")


def tune_with_defects(
    rank: int, world_size: int, job: ranks_tune.Job, slow: str = "", wrong: str = ""
) -> ranks_tune.Result:
    """Runs the tuner with an algorithm that is slow, or wrong on the last rank."""
    make = arms.allnorm_arm

    def allnorm_arm(comm: Any, case: Any, mode: Any, name: str, algorithm: str) -> Any:
        arm = make(comm, case, mode, name, algorithm)

        def call(index: int) -> Any:
            result = arm.call(index)
            if name == slow:
                time.sleep(0.02)
            if name == wrong and rank == world_size - 1:
                result[0].view(torch.int16)[-1, -1] ^= 1  # one bit of one element of one rank
            return result

        return dataclasses.replace(arm, call=call)

    ranks_tune.allnorm_arm = allnorm_arm  # type: ignore[attr-defined]
    return ranks_tune.run(rank, world_size, job)


def curves(results: list[ranks_tune.Result]) -> tuning.Curves:
    assert all(result == results[0] for result in results), "ranks decide alike"
    assert (results[0].link.gbps, results[0].link.us) == (0.0, {}), "there is no link on CPU"
    return table.curves_of(results[0])


def tune(job: ranks_tune.Job = JOB, **defects: str) -> list[ranks_tune.Result]:
    return run_ranks(tune_with_defects, 2, args=(job,), kwargs=defects)


@pytest.mark.parametrize("slow", ["one_shot", "two_shot"])
def test_the_faster_algorithm_is_chosen(slow: str) -> None:
    found = curves(tune(slow=slow))
    other = "two_shot" if slow == "one_shot" else "one_shot"
    assert found == {("bfloat16", "norm"): [Curve(64, (Step(None, other),))]}


def test_a_candidate_with_wrong_bits_is_excluded() -> None:
    """A wrong candidate is excluded even if it is the fastest: here the other one is slow."""
    job = dataclasses.replace(JOB, quants=("", "per_group:32"), hidden_sizes=(64, 128))
    results = tune(job, slow="two_shot", wrong="one_shot")
    found = curves(results)
    for curve in (curve for found_curves in found.values() for curve in found_curves):
        assert curve.steps == (Step(None, "two_shot"),)
    first = results[0].curves[0]
    assert all(ONE not in times for times in first.times.values()), "it is not even timed"
    assert first.wrong[ONE] == "1x64: rank 1: normed differs from the reference"
    assert TWO not in first.wrong


def test_times_after_a_gemm_decide_and_times_in_a_chain_are_stored_too(
    tmp_path: pathlib.Path,
) -> None:
    job = dataclasses.replace(JOB, product=256, tokens=(1, 4))
    results = tune(job, slow="two_shot")
    found = curves(results)
    (curve,) = found["bfloat16", "norm"]
    assert curve == Curve(64, (Step(None, "one_shot"),), 256, ranks_tune.PRODUCT_TOKENS)
    (measured,) = results[0].curves
    assert measured.times.keys() == measured.chain.keys() == {1, 4}
    written = list(table.curve_rows(measured, results[0].link.gbps, job.product))
    assert [(r["num_tokens"], r["mode"], r["product"], r["arm"], r["chosen"]) for r in written] == [
        (tokens, mode, product, f"allnorm:{arm}", bool(product) and arm == "one_shot")
        for mode, product in (("product", 256), ("chain", 0))
        for tokens in (1, 4)
        for arm in ("one_shot", "two_shot")
    ]
    path = table.store(results[0], tmp_path, "cpu", 2, {"date": "2026-01-01"})
    assert tuning.read(path, tuning.device_name("cpu"), 2).tuned.curves == found


def tune_over_islands(rank: int, world_size: int) -> ranks_tune.Result:
    over_islands = functools.partial(allnorm.Communicator, islands=((0,), (1,)))
    with mock.patch.object(ranks_tune.allnorm, "Communicator", over_islands):
        return ranks_tune.run(rank, world_size, JOB)


def test_several_islands_get_no_table() -> None:
    results = run_ranks(tune_over_islands, 2)
    assert not curves(results)
    assert results[0].curves[0].reason.startswith("2 islands")


def test_only_wrong_candidates_give_no_curve() -> None:
    job = dataclasses.replace(JOB, algorithms=("one_shot",))
    assert curves(tune(job, wrong="one_shot")) == {}


def test_a_group_size_that_does_not_divide_the_rows_gives_no_curve() -> None:
    job = dataclasses.replace(JOB, quants=("per_group:128",))
    results = tune(job)
    assert "group size" in results[0].curves[0].reason
    assert curves(results) == {}


def choices(rank: int, world_size: int, directory: pathlib.Path) -> list[tuple[str, str]]:
    with allnorm.Communicator(device="cpu", tuning_dir=directory) as comm:
        return [
            (plan.algorithm, plan.source)
            for plan in (comm.plan(tokens, 256, torch.bfloat16) for tokens in (1, 4, 100_000))
        ]


def stored(folder: pathlib.Path, curves: tuning.Curves) -> pathlib.Path:
    """Stores a table for two CPU ranks and returns its file."""
    name = tuning.device_name("cpu")
    path = tuning.path_of(folder, name, 2)
    tuning.save(path, tuning.document(tuning.Measured(curves), name, 2, {"date": "2020-01-01"}))
    return path


@pytest.mark.long
def test_a_slow_table_is_corrected(tmp_path: pathlib.Path) -> None:
    """Runs the command as a user does; new communicators use the stored table."""
    forced = {
        ("bfloat16", "norm"): [
            Curve(256, (Step(None, "unfused"),)),
            Curve(999, (Step(5, "one_shot"), Step(None, "two_shot"))),
        ],
        ("float16", "norm"): [Curve(256, (Step(None, "two_shot"),))],
    }
    path = stored(tmp_path, forced)
    before = run_ranks(choices, 2, args=(tmp_path,))
    assert before[0] == before[1] == [("unfused", f"tuned {path}, 2020-01-01")] * 3

    json_file = tmp_path / "rows.jsonl"
    arguments = (
        *("tune", "--tp", "2", "--device", "cpu", "--hidden", "256", "--max-tokens", "4", "--busy"),
        *("--dir", str(tmp_path), "--algorithms", "one_shot,two_shot,unfused"),
    )
    done = command(*arguments)
    assert done.returncode == 1, "there is no terminal to ask on"
    assert "pass --yes" in unwrapped(done.stdout)
    # The new steps are noise on a shared machine.
    assert "256 columns, bfloat16, norm: from 1: unfused -> " in unwrapped(done.stdout)
    assert tuning.read(path, tuning.device_name("cpu"), 2).tuned.curves == forced
    done = command(*arguments, "--yes", "--json", str(json_file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert path.name in unwrapped(done.stdout)
    found = rows(json_file)
    assert {row["arm"] for row in found} == {f"allnorm:{n}" for n in names.ALGORITHMS}
    assert {row["num_tokens"] for row in found} >= {1, 4}
    for row in found:
        assert row["correct"] is True
        assert row["p50_us"] > 0
        assert {"cpu", "world_size", "hidden_size", "dtype", "commit", "versions"} <= row.keys()
    chosen = [row for row in found if row["chosen"]]
    assert len(chosen) == len({row["num_tokens"] for row in found})

    # gloo takes hundreds of microseconds, far more than the other algorithms.
    after = run_ranks(choices, 2, args=(tmp_path,))
    assert after[0] == after[1]
    assert all(algorithm != "unfused" for algorithm, _ in after[0])
    assert all(source.startswith(f"tuned {path}, 20") for _, source in after[0])
    kept = tuning.read(path, tuning.device_name("cpu"), 2).tuned.curves
    assert kept["float16", "norm"] == forced["float16", "norm"], "not measured again"
    assert {curve.hidden_size for curve in kept["bfloat16", "norm"]} == {256, 999}


def test_check(tmp_path: pathlib.Path) -> None:
    """Detects a slow table. On a shared machine, noise decides whether a good table passes."""
    # The table lets gloo run small calls, which is many times slower than either algorithm.
    forced = {("bfloat16", "norm"): [Curve(256, (Step(2, "unfused"), Step(None, "one_shot")))]}
    path = stored(tmp_path, forced)
    json_file = tmp_path / "rows.jsonl"
    done = command(
        *("tune", "--check", "--tp", "2", "--device", "cpu", "--hidden", "256"),
        *("--max-tokens", "4", "--dir", str(tmp_path), "--json", str(json_file), "--busy"),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "of 3 points are within 5 % of the best algorithm" in unwrapped(done.stdout)
    found = {row["num_tokens"]: row for row in rows(json_file)}
    assert list(found) == [1, 2, 4]
    assert found[1]["ratio"] > 2, "gloo"
    assert found[2]["ratio"] > 2, "gloo"
    assert found[4]["ratio"] < 2
    for row in found.values():
        assert row["correct"] is True
        assert row["auto_us"] == pytest.approx(row["ratio"] * row["best_us"])
    before = json.loads(path.read_text())
    assert before["date"] == "2020-01-01", "--check stores nothing"


def test_a_busy_machine_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(topology, "num_cores", lambda: 4)
    arguments = ("tune", "--device", "cpu", "--tp", "2,3", "--dir", str(tmp_path))
    measured: list[int] = []

    def measure(job: ranks_tune.Job, size: int, show: Any) -> ranks_tune.Result:
        measured.append(size)
        return ranks_tune.Result([])

    monkeypatch.setattr(ranks_tune, "measure", measure)
    for busy, ran in ((2.0, []), (1.4, [2, 3]), (None, [2, 3])):
        measured.clear()
        monkeypatch.setattr(topology, "busy_cores", lambda busy=busy: busy)
        done = CliRunner().invoke(app, arguments)
        assert measured == ran, done.output
        assert done.exit_code == (1 if ran else 2)
        assert ("2.0 of 4 cores are busy" in unwrapped(done.output)) == (not ran)
    monkeypatch.setattr(topology, "busy_cores", lambda: 4.0)
    measured.clear()
    CliRunner().invoke(app, (*arguments, "--busy"))
    assert measured == [2, 3]


def test_a_run_that_fails_keeps_its_measurements(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    link = ranks_tune.LinkTimes({0.0: 200.0, 360.0: 190.0})
    curve = ranks_tune.CurveTimes("bfloat16", "", 64, {1: {ONE: 2.0, TWO: 3.0}}, {}, "")

    def measure(job: ranks_tune.Job, size: int, on_message: Any) -> ranks_tune.Result:
        for rank, measured in itertools.product(range(2), (link, curve)):
            on_message(rank, {"measured": measured})
        raise RuntimeError("a rank died")

    monkeypatch.setattr(ranks_tune, "measure", measure)
    path = tmp_path / "rows.jsonl"
    arguments = ("tune", "--device", "cpu", "--tp", "2", "--busy", "--dir", str(tmp_path))
    assert CliRunner().invoke(app, (*arguments, "--json", str(path))).exit_code == 1
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["arm"], row["link_gbps"], row["p50_us"], row["chosen"]) for row in rows] == [
        ("link", 0.0, 200.0, False),
        ("link", 360.0, 190.0, True),
        ("allnorm:one_shot", 360.0, 2.0, True),
        ("allnorm:two_shot", 360.0, 3.0, False),
    ]


@pytest.mark.parametrize(("again", "runs"), [(1.0, 2), (1.09, 2), (1.2, ranks_tune._MOST_RUNS)])
def test_runs_are_repeated_until_two_agree(
    monkeypatch: pytest.MonkeyPatch, again: float, runs: int
) -> None:
    """Each run takes `again` times as long as the previous one; the smallest median counts."""
    taken: list[float] = []

    def time_cpu(arms: list[Any], seconds: float) -> dict[str, list[float]]:
        taken.append(10.0 * again ** len(taken))
        return {"one_shot": [taken[-1]] * 3}

    monkeypatch.setattr(ranks_tune.clock, "time_cpu", time_cpu)
    monkeypatch.setattr(ranks_tune, "gather", lambda own: [own])
    arm = SimpleNamespace(name="one_shot")
    assert ranks_tune._time(JOB, {ONE: arm}, 1) == {ONE: 10.0}  # type: ignore[dict-item]
    assert len(taken) == runs
