"""The commands as a user types them, in processes of their own, on CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import allnorm
from allnorm import cli
from allnorm.testing import RankError


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # A terminal of the person who runs the tests must not fold the tables.
    environ = {**os.environ, "COLUMNS": "180", **environment}
    return subprocess.run(
        # -P: the package that is under test, not a checkout in the working directory.
        [sys.executable, "-P", "-m", "allnorm", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environ,
        check=False,
    )


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_bench(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ("bench", "--tp", "2", "--device", "cpu", "--shapes", "1x256", "--json", str(path))
    done = command(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout
    assert "faster than gloo + PyTorch" in done.stdout or "slower than" in done.stdout
    found = rows(path)
    assert [row["arm"] for row in found] == [
        "allnorm",
        "allnorm:one_shot",
        "allnorm:two_shot",
        "allnorm:unfused",
        "gloo+torch",
        "gloo+local",
    ]
    for row in found:
        assert row["correct"] is True
        assert (row["num_tokens"], row["hidden_size"], row["world_size"]) == (1, 256, 2)
        assert 0 < row["p50_us"] <= row["p90_us"] <= row["p99_us"]  # type: ignore[operator]
        assert {"cpu", "backend", "dtype", "commit", "versions", "command", "date"} <= row.keys()


def test_verify(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ("--tp", "2", "--device", "cpu", "--seed", "7", "--seconds", "2")
    done = command("verify", *arguments, "--stress", "64", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Seed 7" in done.stdout
    found = {row["check"]: row for row in rows(path)}
    assert {"every combination", "batch invariance", "ordering soak"} <= found.keys()
    assert {"quantisation", "quantised special values", "sharded residual"} <= found.keys()
    assert found["ordering soak"]["cases"] == 64
    assert not any(row["failures"] for row in found.values())


def test_doctor(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    done = command("doctor", "--tp", "2", "--device", "cpu", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("torch", "Shared memory", "one_shot", "Flag latency", "reference's bits"):
        assert word in done.stdout
    row = rows(path)[0]
    assert row["world_size"] == 2
    assert row["fused_us"] > 0  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("bench", "--shapes", "4096"), "1x4096"),
        (("bench", "--model", "gpt-2"), "gpt-oss-120b"),
        (("bench", "--arms", "mpi"), "allnorm:one_shot"),
        (("bench", "--dtype", "int8"), "bfloat16"),
        (("verify", "--tp", "two"), "integers"),
        (("verify", "--device", "tpu"), "cuda, cpu or auto"),
        (("verify", "--stress", "-1"), "--stress"),
        (("doctor", "--tp", "99", "--device", "cuda"), "cuda"),
        (("retune",), "retune"),
    ],
)
def test_wrong_arguments_are_explained(arguments: tuple[str, ...], complaint: str) -> None:
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 2
    assert complaint in done.output


def test_a_wrong_argument_ends_the_process_without_a_traceback() -> None:
    done = command("bench", "--shapes", "4096")
    assert done.returncode == 2
    assert "1x4096" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_variable_is_an_error() -> None:
    done = command("doctor", ALLNORM_WORKSPACE_BYTE="1")
    assert done.returncode == 2
    assert "ALLNORM_WORKSPACE_BYTE" in done.stdout


def test_version() -> None:
    assert command("--version").stdout.strip() == f"allnorm {allnorm.__version__}"


def test_a_failing_rank_is_shown_and_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RankError({1: "its process [ended] early"})

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert "rank 1: its process [ended] early" in capsys.readouterr().out
