"""Runs the commands as a user types them, in separate processes, on CPU ranks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from bench.samples import measurement
from typer.testing import CliRunner

import allnorm
import allnorm_command
from allnorm import cli
from allnorm.bench import report as bench_report
from allnorm.cli import app as cli_app
from allnorm.cli import bench, output
from allnorm.cli.app import app
from allnorm.testing import RankError

from .helpers import command, rows, unwrapped

E2E = ("e2e", "--device", "cpu")


def test_bench(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ("bench", "--tp", "2", "--device", "cpu", "--shapes", "1x256", "--json", str(path))
    done = command(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in unwrapped(done.stdout)
    assert re.search(r"\dx (as fast as|slower than) .*gloo\+", done.stdout)
    found = rows(path)
    assert [row["arm"] for row in found] == [
        *("allnorm", "allnorm:one_shot", "allnorm:two_shot", "allnorm:unfused"),
        *("gloo+torch", "gloo+local"),
    ]
    for row in found:
        assert row["correct"] is True
        assert (row["num_tokens"], row["hidden_size"], row["world_size"]) == (1, 256, 2)
        assert 0 < row["p50_us"] <= row["p90_us"] <= row["p99_us"]
        assert {"cpu", "backend", "dtype", "commit", "versions", "command", "date"} <= row.keys()


@pytest.mark.long
def test_bench_in_a_chain_and_after_a_gemm(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    common = ("bench", "--tp", "2", "--device", "cpu", "--shapes", "2x256", "--arms", "allnorm")
    done = command(*common, "--product", "0,512", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GEMM (K = 512)" in unwrapped(done.stdout)
    found = rows(path)
    assert [(row["mode"], row["product"], row["arm"]) for row in found] == [
        ("chain", 0, "allnorm"),
        ("product", 512, "allnorm"),
        ("product", 512, "empty"),
        ("product", 512, "local"),
    ]
    assert [row["over_ranks"] for row in found] == ["slowest", "shortest", "longest", "longest"]
    assert found[0]["beyond_empty_us"] is None
    assert found[2]["beyond_empty_us"] == 0.0
    assert all(row["correct"] for row in found)
    again = command(*common, "--product", "512", "--compare", str(path))
    assert "3 of 3 rows are in rows.jsonl" in again.stdout, again.stdout + again.stderr


@pytest.mark.long
def test_bench_of_layers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    common = ("bench", "--layers", "tiny", "--tp", "2", "--device", "cpu", "--tokens", "1,3")
    done = command(*common, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 2
    found = rows(path)
    assert [(row["mode"], row["num_tokens"], row["arm"]) for row in found] == [
        ("layers", tokens, f"prefetch:{arm}") for tokens in (1, 3) for arm in ("off", "on")
    ]
    for row in found:
        assert row["correct"] is True
        assert {"cpu", "backend", "dtype", "commit", "versions", "command", "date"} <= row.keys()
    refused = CliRunner().invoke(app, [*common, "--shapes", "1x256"])
    assert refused.exit_code == 2
    assert "does not go with --layers" in unwrapped(refused.output)


def test_bench_quantized_and_sharded_with_pictures_and_a_comparison(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows_file, plot, html = (tmp_path / name for name in ("rows.jsonl", "b.svg", "b.html"))
    common = ("bench", "--tp", "2", "--device", "cpu", "--shapes", "3x256")
    kinds = ("--quant", "none,per_group:128", "--residual", "replicated,sharded")
    written = ("--json", str(rows_file), "--plot", str(plot), "--html", str(html))
    done = command(*common, *kinds, *written, "--arms", "allnorm,allnorm16+quant,gloo+local")
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(rows_file)
    assert [(row["quant"], row["residual_sharded"], row["arm"]) for row in found] == [
        (quant, sharded, arm)
        for sharded in (False, True)
        for quant, names in (
            ("", ("allnorm", "gloo+local")),
            ("per_group:128", ("allnorm", "allnorm16", "allnorm16+quant")),
        )
        for arm in names
    ]
    assert all(row["correct"] for row in found)
    assert found[2]["quant_cost_us"] is not None
    assert "wire floor" not in html.read_text()  # this machine's link rate is unknown
    assert plot.stat().st_size > 1000
    again = command(*common, "--arms", "allnorm", "--compare", str(rows_file))
    assert "1 of 1 rows are in rows.jsonl" in again.stdout, again.stdout + again.stderr


@pytest.mark.parametrize(("p50_us", "exit_code"), [(9.0, 0), (10.1, 0), (10.3, 1)])
def test_a_regression_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, p50_us: float, exit_code: int
) -> None:
    def measured(p50_us: float) -> dict[str, object]:
        m = measurement("allnorm", p50_us, p99_us=p50_us)
        return bench_report.json_row(m, {"cpu": "x", "dtype": "bfloat16"})

    old = tmp_path / "old.jsonl"
    old.write_text(json.dumps(measured(10.0)) + "\n")
    monkeypatch.setattr(bench, "_run", lambda *_: ([], [measured(p50_us)]))
    done = CliRunner().invoke(app, ("bench", "--device", "cpu", "--compare", str(old)))
    assert done.exit_code == exit_code, done.output
    assert f"{exit_code} regressed" in unwrapped(done.output)


def test_bench_rejects_a_missing_file_to_compare_with_before_it_measures(tmp_path: Path) -> None:
    arguments = ("bench", "--device", "cpu", "--compare", str(tmp_path / "none.jsonl"))
    # Wide enough for a temporary folder's path on one line.
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
    assert done.exit_code == 2
    assert "none.jsonl" in unwrapped(done.output)


@pytest.mark.long
def test_verify(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ("--tp", "2", "--device", "cpu", "--seed", "7", "--seconds", "2")
    done = command("verify", *arguments, "--stress", "64", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Seed 7" in unwrapped(done.stdout)
    found = {row["check"]: row for row in rows(path)}
    assert {"every combination", "batch invariance", "ordering soak"} <= found.keys()
    assert {"quantization", "quantized special values", "sharded residual"} <= found.keys()
    assert found["ordering soak"]["cases"] == 64
    assert not any(row["failures"] for row in found.values())


def test_verify_runs_only_the_chosen_checks(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    common = ("verify", "--tp", "2", "--device", "cpu", "--seed", "7", "--json", str(path))
    assert command(*common, "--only", "strided,two comm").returncode == 0
    assert [row["check"] for row in rows(path)] == ["strided rows", "two communicators"]
    done = command(*common, "--shapes", "1x4096,3x2880", "--repeat", "70")
    assert done.returncode == 0, done.stdout + done.stderr
    row = rows(path)[-1]
    assert row["check"] == "repeated shapes"
    assert row["cases"] == 2 * 2 * 70
    assert "70 each of 1x4096, 3x2880" in str(row["note"])


def test_doctor(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    done = command("doctor", "--tp", "2", "--device", "cpu", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("torch", "Shared memory", "one_shot", "Flag latency", "OK: "):
        assert word in unwrapped(done.stdout)
    row = rows(path)[0]
    assert row["world_size"] == 2
    assert row["fused_us"] > 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("bench", "--shapes", "4096"), "1x4096"),
        (("bench", "--model", "gpt-2"), "gpt-oss-120b"),
        (("bench", "--arms", "mpi"), "allnorm:one_shot"),
        (("bench", "--dtype", "int8"), "bfloat16"),
        (("bench", "--quant", "int8"), "per_group:128"),
        (("bench", "--residual", "split"), "replicated"),
        (("bench", "--next-input"), "--streams"),
        (("bench", "--layers", "llama-3.1-8b", "--next-input"), "--layers"),
        (("verify", "--tp", "two"), "integers"),
        (("verify", "--device", "tpu"), "cuda, cpu or auto"),
        (("verify", "--stress", "-1"), "--stress"),
        (("verify", "--only", "soak"), "--stress N"),
        (("verify", "--shapes", "4096"), "1x4096"),
        (("doctor", "--tp", "99", "--device", "cuda"), "cuda"),
        (("doctor", "--tp", "65", "--device", "cpu"), "at most 64"),
        (("bench", "--push-gbps", "-1"), "--push-gbps"),
        (("bench", "--plot", "bench.gif"), ".svg"),
        (("bench", "--json", "/dev/null/rows.jsonl"), "cannot be written"),
        (("bench", "--html", "/dev/null/page.html"), "cannot be written"),
        (("verify", "--json", "/"), "cannot be written"),
        (("tune", "--busy", "--device", "cpu", "--dir", "/dev/null"), "cannot be written"),
        ((*E2E, "--model", "llama-3.1-70b", "--tp", "8"), "of memory"),
        (("retune",), "retune"),
        (("tune", "--tp", "1", "--device", "cpu"), "at least 2 ranks"),
        (("tune", "--device", "cpu", "--algorithms", "ring"), "one_shot, two_shot, unfused"),
        (("tune", "--device", "cpu", "--hidden", "0"), "integers of at least 1"),
        (("tune", "--device", "cpu", "--quant", "per_block"), "per_group:128"),
        ((*E2E, "--model", "gpt-2"), "llama-3.1-70b"),
        ((*E2E, "--tp", "3"), "key and value heads"),
        ((*E2E, "--tokens", "1"), "at least 2"),
        ((*E2E, "--batch", "0"), "integers"),
        ((*E2E, "--arms", "mpi"), "allnorm:unfused"),
        ((*E2E, "--dtype", "int8"), "bfloat16"),
        ((*E2E, "--product", "cublas"), "dependent"),
        ((*E2E, "--product", "triton"), "need a GPU"),
        (("trace", "--require", "-0.1", "--", "true"), "--require"),
        (("trace", "--require", "95", "--", "true"), "--require"),
        (("trace", "--", "no-such-program-anywhere"), "no-such-program-anywhere"),
    ],
)
def test_wrong_arguments_are_explained(arguments: tuple[str, ...], complaint: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert complaint in unwrapped(done.output)


def test_a_long_path_does_not_hide_the_message(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*["a-folder-with-a-long-name"] * 4)
    folder.mkdir(parents=True)
    for length in range(40):  # so that the message is wrapped at every word
        file = folder / ("x" * length + ".txt")
        file.write_text("")
        done = CliRunner().invoke(app, ("bench", "--json", str(file / "rows.jsonl")))
        assert done.exit_code == 2
        assert "cannot be written" in unwrapped(done.output)


def test_a_wrong_argument_ends_the_process_without_a_traceback() -> None:
    done = command("bench", "--shapes", "4096")
    assert done.returncode == 2
    assert "1x4096" in unwrapped(done.stderr)
    assert "Traceback" not in unwrapped(done.stderr)


def test_help_is_complete_at_80_columns() -> None:
    for name in ("doctor", "verify", "bench", "tune", "e2e", "trace"):
        done = CliRunner().invoke(app, (name, "--help"), env={"COLUMNS": "80"})
        assert done.exit_code == 0
        assert "…" not in done.output, name


def test_help_has_an_example_whose_options_exist() -> None:
    for name in ("doctor", "verify", "bench", "tune", "e2e", "trace"):
        done = CliRunner().invoke(app, (name, "--help"), env={"COLUMNS": "200"})
        assert done.exit_code == 0
        example = re.search(rf"Example: allnorm {name} (.*)", done.output)
        assert example is not None, done.output
        if name != "trace":
            for option in re.findall("--[a-z-]+", example[1]):
                assert done.output.count(option) > 1, (name, option)


def test_results_are_kept_if_the_file_becomes_unwritable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the folder becomes a file during the run, rows go elsewhere, and the exit code is 1."""
    folder = tmp_path / "results"
    folder.mkdir()
    path = folder / "rows.jsonl"
    monkeypatch.setattr(output, "_instead", {})

    def measured(*_: object) -> tuple[list[object], list[dict[str, object]]]:
        folder.rmdir()
        folder.write_text("no folder")
        output.append_json_lines(path, [{"row": 1}])
        output.append_json_lines(path, [{"row": 2}])
        return [], []

    monkeypatch.setattr(bench, "_run", measured)
    arguments = ("bench", "--device", "cpu", "--json", str(path))
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "2000"})  # the path on one line
    found = re.search(r"the results are in (\S+)", done.output)
    assert found is not None, done.output
    assert [row["row"] for row in rows(Path(found[1]))] == [1, 2]
    assert not output.all_written()
    monkeypatch.setattr(cli_app, "app", lambda: sys.exit(0))
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1


def test_an_unknown_variable_is_an_error() -> None:
    done = command("doctor", ALLNORM_WORKSPACE_BYTE="1")
    assert done.returncode == 2
    assert "ALLNORM_WORKSPACE_BYTE" in unwrapped(done.stdout)


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_the_overview_is_that_of_the_commands(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The overview is shown without the commands, which import torch."""
    monkeypatch.setattr(sys, "argv", ["allnorm", *arguments])
    shown = []
    for run in (app, allnorm_command.main):
        with pytest.raises(SystemExit) as end:
            run()
        shown.append((end.value.code, *capsys.readouterr()))
    assert shown[0] == shown[1]
    assert "bench" in shown[0][1]


def test_version() -> None:
    assert command("--version").stdout.strip() == f"allnorm {allnorm.__version__}"


def test_a_failing_rank_is_shown_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RankError({1: "its process [ended] early"})

    monkeypatch.setattr(cli_app, "app", fail)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert "rank 1: its process [ended] early" in capsys.readouterr().out
