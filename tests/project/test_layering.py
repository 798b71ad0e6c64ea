"""Checks source rules that linters do not check. Import rules are in pyproject.toml."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

from allnorm import names

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "allnorm"
CSRC = ROOT / "csrc"

# Maps a pattern to the only file of the package in which it may occur.
ONE_HOME = {
    r"\bCUDAGraph\(\)|capture_error_mode": "testing/timing.py",
    r"torch\.cuda\.Event\(": "testing/timing.py",
    r"""(["'])ALLNORM_[A-Z_]+\1""": "config.py",
}

# Maps each folder of csrc to the folders whose headers it may include. "" is csrc: the C ABI.
CSRC_ALLOWED = {
    "": set(),
    "protocol": {"protocol"},
    "abi": {"", "abi", "protocol"},
    "cpu": {"", "abi", "protocol", "cpu"},
    "gpu": {"", "abi", "protocol", "gpu"},
    "python": {"", "python"},
    "tests": {"", "abi", "protocol", "cpu", "gpu", "tests"},
}

# Orthogonal parts of the kernels: a header of one kind must not include a header of another kind.
CSRC_KINDS = {"sources", "transports", "formats", "epilogue"}

# GPU vendor headers. The include path selects their folder: a vendor's, or the fibers in
# csrc/tests/shim.
CSRC_LEAF = {path.name for path in (CSRC / "gpu" / "cuda").iterdir()}

# Maps third-party headers to the files that may include them.
CSRC_FOREIGN = {
    r"(torch|ATen|c10|pybind11)/": r"(?!)",
    r"Python\.h": r"python/ref\.h",
    r"cuda": r"gpu/cuda/|tests/fake_(cuda|hip)/|protocol/numerics\.h",
}

# Maps a pattern to the files of csrc in which it may occur.
CSRC_CONFINED = {
    r"\basm\b|__asm__": {
        "gpu/cuda/memory.cuh",
        "gpu/hip/memory.cuh",
        "cpu/memory.h",
        "cpu/float_mode.h",
    },
    r"<<<|\bcudaLaunch\w+": {
        *("gpu/launch.cu", "gpu/hip/runtime.h"),
        *("tests/fake_cuda/cuda_runtime.h", "tests/fake_cuda/only_cuda.cpp"),
        "tests/fake_cuda/fake.cpp",
    },
    r"\bgetenv\b": set(),  # only config.py reads the environment
    # These count references like the CPython of the headers, not like the running one.
    r"\bPy_(X?INCREF|X?DECREF|X?NewRef|CLEAR|RETURN_\w+)\b": set(),
}


def python_files() -> list[pathlib.Path]:
    return sorted(PACKAGE.rglob("*.py"))


def native_files() -> list[pathlib.Path]:
    return sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cuh", ".cpp", ".cu"})


def ids(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", python_files(), ids=ids)
def test_python(path: pathlib.Path) -> None:
    text, relative = path.read_text(), path.relative_to(PACKAGE).as_posix()
    for pattern, home in ONE_HOME.items():
        assert relative == home or not re.search(pattern, text), f"/{pattern}/ belongs to {home}"
    lists = {tuple(v) for k, v in vars(names).items() if k.isupper()}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            # `getattr(dist, new, dist.old)` needs the old name even if the new one exists.
            eager = len(node.args) == 3 and isinstance(node.args[2], ast.Attribute)
            assert not eager, f"line {node.lineno}: {ast.unparse(node)}: use `or`"
        if isinstance(node, ast.Tuple | ast.List | ast.Set) and relative != "names.py":
            words = tuple(e.value for e in node.elts if isinstance(e, ast.Constant))
            assert words not in lists, f"line {node.lineno} repeats a list of allnorm.names"


@pytest.mark.parametrize("path", native_files(), ids=ids)
def test_csrc(path: pathlib.Path) -> None:
    relative = path.relative_to(CSRC)
    folder = relative.parts[0] if len(relative.parts) > 1 else ""
    kind = pathlib.Path(*relative.parts[1:2]).stem
    text = path.read_text()
    for bracket, name in re.findall(r'#\s*include\s*([<"])([^>"]+)', text):
        if bracket == "<":
            for pattern, homes in CSRC_FOREIGN.items():
                foreign = re.match(pattern, name) and not re.match(homes, relative.as_posix())
                assert not foreign, f"must not include <{name}>"
        elif name in CSRC_LEAF:
            assert "gpu" in CSRC_ALLOWED[folder], f"must not include {name}"
        elif not (path.parent / name).exists():  # a header in the same folder
            assert (CSRC / name).exists(), f"write {name} as a path from csrc/"
            assert not name.startswith("gpu/cuda/"), f"the include path finds {name}"
            target, *rest = name.split("/")
            assert (target if rest else "") in CSRC_ALLOWED[folder], f"must not include {name}"
            other = pathlib.Path(rest[0]).stem if rest else ""
            apart = folder != "gpu" or kind not in CSRC_KINDS or other not in CSRC_KINDS - {kind}
            assert apart, f"{kind} and {other} are independent of each other"
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    for pattern, homes in CSRC_CONFINED.items():
        assert relative.as_posix() in homes or not re.search(pattern, code), f"/{pattern}/"
