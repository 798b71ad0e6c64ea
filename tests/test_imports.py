"""Tests which modules are loaded: engines need only torch, ranks only torch and numpy."""

from __future__ import annotations

import importlib
import os
import pathlib
import subprocess
import sys
import warnings

import pytest
import torch
from limits import HANG_SECONDS

import allnorm
from allnorm import topology
from allnorm.core import _native

PACKAGE = pathlib.Path(allnorm.__file__).parent
COMMANDS_ONLY = ("typer", "click", "rich", "matplotlib")
# allnorm may take 30 ms if torch takes 1.2 s. A slow machine slows both imports.
IMPORT_SHARE = 0.030 / 1.2
# `allnorm --help` may take 0.3 s, without torch.
HELP_SHARE = 0.3 / 1.2

PRELUDE = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n"

# A program like pip's entry point. Ranks also import the program that started them.
PROGRAM = """\
import sys
sys.path.insert(0, {path!r})
from allnorm.cli import main

if __name__ == "__main__":
    from allnorm.bench import report, run
    from allnorm.bench.modes import Mode
    from allnorm.bench.modes import Shape
    from allnorm.cli import app
    from allnorm.testing import run_ranks
    from allnorm.verify.context import Job

    sys.path.insert(0, {tests!r})
    import test_imports

    job = run.Job((Shape(2, 256),), (Mode(),), "bfloat16", "rounded", ("allnorm",), "cpu", 0.01)
    print(*sum(run_ranks(test_imports.loaded_by, 2, args=("bench", job)), []))
    job = Job("cpu", 1, full=False, seconds=0.1, stress=0, only=("strided",))
    print(*sum(run_ranks(test_imports.loaded_by, 2, args=("verify", job)), []))
"""


def loaded_by(rank: int, world_size: int, package: str, job: object) -> list[str]:
    """Runs a job of `bench` or `verify`; returns loaded modules that only commands need."""
    assert importlib.import_module(f"allnorm.{package}.run").run(rank, world_size, job)
    return [name for name in COMMANDS_ONLY if name in sys.modules]


def output_of(
    code: str, *, check: bool = True, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", PRELUDE + code],
        check=check,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env=environ,
    )


def test_an_engine_loads_torch_and_nothing_else() -> None:
    """All modules that torch does not load must belong to allnorm or the standard library."""
    done = output_of(
        "import torch; before = set(sys.modules); import allnorm\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - {'allnorm', 'torch'} - set(sys.stdlib_module_names)))\n"
        "libraries = ('bench', 'verify', 'tune', 'cli', 'testing')\n"
        "print(*(name for name in libraries if f'allnorm.{name}' in sys.modules))"
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("local_rank", [None, "0", "1"])
@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("backends", [["cpu"], ["cpu", "cuda"]])
@pytest.mark.parametrize("torch_has_cuda", [False, True])
def test_a_build_for_cpus_says_so_where_gpus_are(
    local_rank: str | None,
    gpus: int,
    backends: list[str],
    torch_has_cuda: bool,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("nvidiactl", "nvidia-uvm", "null", *(f"nvidia{gpu}" for gpu in range(gpus))):
        (tmp_path / name).touch()
    found = topology.has_gpu_devices(tmp_path)
    assert found == (gpus > 0)
    monkeypatch.setattr(topology, "has_gpu_devices", lambda: found)
    monkeypatch.setattr(_native, "available_backends", lambda: backends)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if torch_has_cuda else None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        allnorm._warn_of_unused_gpus()
    expected = torch_has_cuda and found and backends == ["cpu"] and local_rank != "1"
    assert len(said) == expected
    assert all("`nvcc --version`, then `pip install" in str(one.message) for one in said)


IMPORT = (
    "from time import process_time as now; a = now(); import torch; b = now(); import allnorm; "
    "print((now() - b) / (b - a))"
)
HELP = """\
import contextlib, io
from time import process_time as now
a = now()
import allnorm_command
sys.argv = ["allnorm", "--help"]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    allnorm_command.main()
b = now()
assert "allnorm" not in sys.modules and "torch" not in sys.modules
import torch
print((b - a) / (now() - b))
"""


@pytest.mark.parametrize(
    ("code", "most"), [(IMPORT, IMPORT_SHARE), (HELP, HELP_SHARE)], ids=["import", "help"]
)
def test_import_takes_no_time(code: str, most: float) -> None:
    """Compares with torch's import in CPU seconds: the best of many, as the machine may be busy."""
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    shares: list[float] = []
    while len(shares) < 10 and min(shares, default=1) >= most:
        shares.append(float(output_of(code, environ=environ).stdout))
    assert min(shares) < most, shares


def test_libraries_do_not_need_what_commands_do() -> None:
    """Imports every module of these packages except GPU kernels, which need Triton."""
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for library in ("bench", "testing", "tracing", "tune", "verify")
        for path in sorted((PACKAGE / library).rglob("*.py"))
        if path.name != "__init__.py" and not path.name.startswith("triton_")
    ]
    assert len(names) > 40
    done = output_of(
        f"sys.modules.update(dict.fromkeys({COMMANDS_ONLY!r}))  # an import of these fails\n"
        f"import {', '.join(names)}"
    )
    assert done.returncode == 0


def test_ranks_of_the_commands_load_nothing_for_commands(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "allnorm-command"
    tests = str(pathlib.Path(__file__).parent)
    program.write_text(PROGRAM.format(path=str(PACKAGE.parent), tests=tests))
    done = subprocess.run(
        [sys.executable, "-P", str(program)],
        check=False,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_says_what_to_install(missing: str) -> None:
    done = output_of(
        f"sys.modules[{missing!r}] = None; from allnorm.cli import main; main()", check=False
    )
    assert done.returncode == 2
    assert f"needs {missing}" in done.stderr
    assert 'pip install "allnorm[cli]"' in done.stderr
    assert "Traceback" not in done.stderr
