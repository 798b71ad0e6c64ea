"""Dependencies point one way. The tables are the rule; a module outside them does not pass."""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

import pytest

from allnorm import names

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "allnorm"
CSRC = ROOT / "csrc"

# ---- Python ------------------------------------------------------------------------------------

# The package itself, `import allnorm`: what its users see.
PUBLIC = "allnorm"

# module or subpackage: what of allnorm it may import. Lower layers first.
ALLOWED = {
    "_version": set(),
    "errors": set(),
    "names": set(),
    "policy": {"names"},
    "shortcuts": set(),
    "quant": {"errors", "names"},
    "reference": {"names", "quant"},
    "config": {"errors"},
    "topology": {"errors"},
    "tuning": {"_version", "config", "names", "policy", "topology"},
    "_native": {"errors", "config", "names"},
    "tensors": set(),
    "arguments": {"_native", "errors", "names", "quant", "tensors"},
    "keys": set(),
    "launch": {"_native", "arguments", "errors", "quant", "shortcuts", "tensors"},
    "announcement": {"_native", "launch"},
    "refusal": {"_native", "arguments", "launch"},
    "fast_call": {"_native", "arguments", "keys", "launch", "quant", "shortcuts"},
    "watch": set(),
    "rendezvous": {"errors", "watch"},
    "workspace": {"_native", "rendezvous"},
    "faults": {"_native", "announcement", "errors", "refusal", "rendezvous", "watch"},
    "channel": {
        *("_native", "errors", "faults", "launch", "rendezvous", "watch", "workspace"),
    },
    "unfused": {
        *("_native", "announcement", "arguments", "channel", "errors", "launch", "policy"),
        "quant",
    },
    "local": {
        *("_native", "arguments", "errors", "fast_call", "keys", "launch", "quant", "shortcuts"),
        "tensors",
    },
    "results": {"arguments", "launch"},
    "prepare": {
        *("_native", "arguments", "errors", "keys", "launch", "policy", "quant", "shortcuts"),
        "tensors",
    },
    "calls": {
        *("_native", "announcement", "arguments", "channel", "errors", "fast_call", "faults"),
        *("launch", "prepare", "quant", "refusal", "results", "shortcuts", "tensors", "unfused"),
        "watch",
    },
    "traced": {"arguments", "quant"},
    "collectives": {"arguments", "calls", "quant", "shortcuts", "traced"},
    "communicator": {
        *("_native", "_version", "arguments", "channel", "collectives", "config", "errors"),
        *("fast_call", "launch", "policy", "prepare", "quant", "rendezvous", "shortcuts"),
        *("tuning", "watch", "workspace"),
    },
    "fakes": {"quant"},
    "lowering": set(),
    "ops": {"communicator", "errors", "fakes", "local", "lowering", "quant"},
    "tracing": {"_native", "calls", "errors", "fast_call", "local"},
    PUBLIC: {
        *("_native", "_version", "communicator", "config", "errors", "fast_call", "local", "ops"),
        *("policy", "quant", "reference", "tracing"),
    },
    "testing": {"names", "workspace"},
    "compile": {PUBLIC, "_version", "communicator", "config", "errors", "names", "ops", "quant"},
    "integrations": {PUBLIC, "compile", "config", "errors", "names", "ops"},
    "verify": {PUBLIC, "errors", "names", "quant", "reference", "testing"},
    "bench": {PUBLIC, "names", "quant", "reference", "testing", "topology"},
    "tune": {PUBLIC, "bench", "policy", "testing", "tuning"},
    "cli": {
        *(PUBLIC, "bench", "config", "errors", "names", "testing", "topology"),
        *("tracing", "tune", "tuning", "verify"),
    },
    "__main__": {"cli"},
}

# What is imported besides the standard library; {"torch"} where nothing is said.
THIRD_PARTY = {
    "_native": set(),
    "_version": set(),
    "config": set(),
    "errors": set(),
    "policy": set(),
    "topology": {"torch", "pynvml"},
    "tuning": set(),
    "integrations": {"torch", "vllm", "sglang", "transformers", "packaging"},
    "names": set(),
    "testing": {"torch", "numpy"},
    "bench": {"torch", "numpy", "triton", "flashinfer", "sglang", "vllm"},
    "cli": {"torch", "rich", "typer", "matplotlib", "jinja2"},
}

# Who touches the environment, and why. Variables of allnorm's own are the business of config alone.
ENVIRONMENT = {
    "config": "reads ALLNORM_*; sets the switch that keeps torch from multicast",
    "bench": "names NCCL's algorithm for a group, and other libraries' switches",
    "tracing": "the environment of the program it traces",
    "testing": "sets the multicast switches for the ranks it starts",
}


def modules() -> list[pathlib.Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit_of(path: pathlib.Path) -> str:
    """The row of a file in the tables: its module, or the subpackage it is in."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return PUBLIC if parts == ("__init__",) else parts[0]


def imports_of(path: pathlib.Path) -> Iterator[str]:
    """Dotted names of everything imported, in functions too."""
    package = ("allnorm", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            if prefix == "allnorm":  # `from allnorm import errors` or `from allnorm import Plan`
                for alias in node.names:
                    yield f"allnorm.{alias.name}" if alias.name in ALLOWED else "allnorm"
            else:
                yield prefix


def ids(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", modules(), ids=ids)
def test_python_imports(path: pathlib.Path) -> None:
    unit = unit_of(path)
    assert unit in ALLOWED, f"{unit} has no row in ALLOWED: say what it may import"
    for name in imports_of(path):
        top, *rest = name.split(".")
        if top == "allnorm":
            target = rest[0] if rest else PUBLIC
            assert target == unit or target in ALLOWED[unit], f"{unit} must not import {name}"
        elif top not in sys.stdlib_module_names:
            assert top in THIRD_PARTY.get(unit, {"torch"}), f"{unit} must not import {name}"


def test_the_table_has_no_cycle() -> None:
    done: list[str] = []
    for unit, allowed in ALLOWED.items():
        assert allowed <= set(done), f"{unit} may import {allowed - set(done)}, which comes later"
        done.append(unit)


@pytest.mark.parametrize("path", modules(), ids=ids)
def test_a_default_is_not_looked_up_for_nothing(path: pathlib.Path) -> None:
    """`getattr(dist, new, dist.old)` needs the old name also where there is the new one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            eager = len(node.args) == 3 and isinstance(node.args[2], ast.Attribute)
            assert not eager, f"{path.name}:{node.lineno} {ast.unparse(node)}: use `or`"


@pytest.mark.parametrize("path", modules(), ids=ids)
def test_environment(path: pathlib.Path) -> None:
    unit = unit_of(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"}:
            assert unit in ENVIRONMENT, f"{path.name}:{node.lineno} touches the environment"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and unit != "config":
            is_variable = re.fullmatch(r"ALLNORM_[A-Z_]+", node.value)
            assert not is_variable, f"{path.name}:{node.lineno} knows {node.value}: ask config"


# pattern: the file of allnorm in which alone it may stand: there is one of each
ONE_HOME = {
    r"\bCUDAGraph\(\)|capture_error_mode": "testing/timing.py",
    r"torch\.cuda\.Event\(": "testing/timing.py",
}


@pytest.mark.parametrize("path", modules(), ids=ids)
def test_there_is_one_of_each(path: pathlib.Path) -> None:
    relative = path.relative_to(PACKAGE).as_posix()
    for pattern, home in ONE_HOME.items():
        found = re.search(pattern, path.read_text())
        assert not found or relative == home, f"{relative}: use allnorm/{home}"
    lists = {tuple(v) for k, v in vars(names).items() if k.isupper()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Tuple | ast.List | ast.Set) and relative != "names.py":
            words = tuple(e.value for e in node.elts if isinstance(e, ast.Constant))
            assert words not in lists, f"{relative}:{node.lineno} repeats a list of allnorm.names"


# ---- C++ and CUDA --------------------------------------------------------------------------------

# folder of csrc: whose headers it may include. "" is csrc itself: the C ABI.
CSRC_ALLOWED = {
    "": set(),
    "protocol": {"protocol"},
    "abi": {"", "abi", "protocol"},
    "cpu": {"", "abi", "protocol", "cpu"},
    "cuda": {"", "abi", "protocol", "cuda"},
    "python": {"", "python"},
    "tests": {"", "abi", "protocol", "cpu", "cuda", "tests"},
}

# pattern: (files of csrc in which it may stand, why)
CONFINED = {
    r"\basm\b|__asm__": (
        {"cuda/memory.cuh", "cpu/memory.h"},
        "inline assembly has one home for each backend",
    ),
    r"<<<|\bcudaLaunch\w+": (
        {"cuda/launch.cu", "tests/fake_cuda/cuda_runtime.h", "tests/fake_cuda/fake.cpp"},
        "there is one launch site, and one fake of what it calls",
    ),
    r"\bgetenv\b": (set(), "allnorm/config.py reads the environment"),
    r"\bPy_(X?INCREF|X?DECREF|X?NewRef|CLEAR|RETURN_\w+)\b": (
        set(),
        "counts as the version of the headers does, not as the one that runs",
    ),
}


def sources() -> list[pathlib.Path]:
    return sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cuh", ".cpp", ".cu"})


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("path", sources(), ids=ids)
def test_csrc_includes(path: pathlib.Path) -> None:
    relative = path.relative_to(CSRC)
    folder = relative.parts[0] if len(relative.parts) > 1 else ""
    assert folder in CSRC_ALLOWED, f"csrc/{folder} has no row in CSRC_ALLOWED"
    for kind, name in re.findall(r'#\s*include\s*([<"])([^>"]+)', path.read_text()):
        if kind == "<":
            foreign = re.match(r"(torch|ATen|c10|pybind11)/", name)
            assert not foreign, f"{relative} includes {name}: csrc does not know torch"
            python_may = relative.as_posix() == "python/ref.h"
            assert python_may or name != "Python.h", f"{relative} includes {name}: see python/ref.h"
            fake = relative.parts[:2] == ("tests", "fake_cuda")
            cuda_may = folder == "cuda" or fake or relative.as_posix() == "protocol/numerics.h"
            assert cuda_may or not name.startswith("cuda"), f"{relative} must not include {name}"
        elif not (path.parent / name).exists():  # beside it: the same folder
            assert (CSRC / name).exists(), f"{relative}: write {name} as a path from csrc/"
            target = name.split("/")[0] if "/" in name else ""
            assert target in CSRC_ALLOWED[folder], f"{relative} must not include {name}"


@pytest.mark.parametrize("path", sources(), ids=ids)
def test_csrc_confined_constructs(path: pathlib.Path) -> None:
    relative = path.relative_to(CSRC).as_posix()
    code = without_comments(path.read_text())
    for pattern, (homes, why) in CONFINED.items():
        if relative not in homes:
            assert not re.search(pattern, code), f"{relative}: /{pattern}/ belongs elsewhere: {why}"
