"""Dependencies point one way. The tables are the rule; a module outside them does not pass."""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

import pytest

from allnorm import names

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "allnorm"
CSRC = ROOT / "csrc"

# ---- Python ------------------------------------------------------------------------------------

# The package itself, `import allnorm`: what its users see.
PUBLIC = "allnorm"

# module or subpackage: what of allnorm it may import. Lower layers first.
ALLOWED = {
    "_version": set(),
    "errors": set(),
    "names": set(),
    "islands": set(),
    "policy": {"islands", "names"},
    "quant": {"errors", "names"},
    "expert_sum": set(),
    "post_norm": set(),
    "reference": {"expert_sum", "islands", "names", "post_norm", "quant"},
    "config": {"errors"},
    "topology": {"errors"},
    "tuning": {"_version", "config", "names", "policy", "topology"},
    "core": set(),
    "core._native": {"errors", "config", "names"},
    "core.shortcuts": set(),
    "core.sharding": set(),
    "core.tensors": set(),
    "core.call": {"expert_sum", "post_norm", "quant"},
    "core.arguments": {"core._native", "core.call", "core.tensors", "errors", "names", "quant"},
    "core.prepared_call": {
        *("core._native", "core.arguments", "core.call", "core.shortcuts", "core.tensors"),
        *("errors", "expert_sum", "policy", "post_norm", "quant"),
    },
    "core.fast_call": {
        *(
            "core._native",
            "core.arguments",
            "core.call",
            "core.prepared_call",
            "core.shortcuts",
            "quant",
        ),
    },
    "core.traced": {"core.arguments", "core.call", "core.tensors", "quant"},
    "core.dispatch": {
        *("core._native", "core.arguments", "core.call", "core.fast_call", "core.prepared_call"),
        *("core.shortcuts", "core.tensors", "core.traced", "errors", "policy"),
    },
    "core.announcement": {"core._native", "core.prepared_call", "names"},
    "core.refusal": {"core._native", "core.call", "core.prepared_call", "policy"},
    "core.notes": set(),
    "core.turn": set(),
    "core.watch": set(),
    "core.arrival": {"core.watch", "errors"},
    "core.rendezvous": {"core.arrival", "core.watch", "errors"},
    "core.workspace": {
        *("core._native", "core.notes", "core.rendezvous", "core.watch", "islands"),
    },
    "core.between": {"config", "core.notes", "core.rendezvous", "islands"},
    "core.verdicts": {"errors"},
    "core.faults": {
        *("core._native", "core.announcement", "core.refusal", "core.rendezvous", "core.watch"),
        "errors",
    },
    "core.channel": {
        *("core._native", "core.announcement", "core.prepared_call", "core.notes"),
        *("core.rendezvous", "core.watch", "core.workspace", "errors"),
    },
    "core.unfused": {
        *("core._native", "core.announcement", "core.arguments", "core.between", "core.channel"),
        *("core.prepared_call", "core.rendezvous", "errors", "islands", "policy", "quant"),
    },
    "core.hierarchical": {
        *("core._native", "core.announcement", "core.arguments", "core.between", "core.channel"),
        *(
            "core.prepared_call",
            "core.rendezvous",
            "core.unfused",
            "core.workspace",
            "islands",
            "policy",
        ),
    },
    "core.local": {
        *("core._native", "core.call", "core.dispatch", "core.fast_call", "core.prepared_call"),
        *("core.shortcuts", "core.tensors", "core.traced", "errors", "expert_sum", "policy"),
        *("post_norm", "quant"),
    },
    "core.endpoint": {
        *("core._native", "core.announcement", "core.between", "core.call", "core.channel"),
        *(
            "core.dispatch",
            "core.fast_call",
            "core.faults",
            "core.hierarchical",
            "core.prepared_call",
        ),
        *("core.notes", "core.refusal", "core.turn", "core.unfused", "core.watch"),
        *("core.workspace", "errors", "names", "policy"),
    },
    "core.opening": {
        *("_version", "config", "core._native", "core.arguments", "core.between", "core.channel"),
        *(
            "core.dispatch",
            "core.endpoint",
            "core.hierarchical",
            "core.prepared_call",
            "core.rendezvous",
        ),
        *("core.unfused", "core.watch", "core.workspace", "errors", "islands", "names", "policy"),
        *("quant", "tuning"),
    },
    "communicator": {
        *(
            "core.arguments",
            "core.call",
            "core.endpoint",
            "core.opening",
            "core.shortcuts",
            "core.traced",
        ),
        *("errors", "expert_sum", "islands", "policy", "post_norm", "quant"),
    },
    "functions": {
        *("communicator", "core.arguments", "core.call", "core.shortcuts", "core.traced"),
        *("expert_sum", "post_norm", "quant"),
    },
    "fakes": {"quant"},
    "lowering": set(),
    "ops": {
        *("communicator", "core.call", "core.local", "core.tensors", "expert_sum", "fakes"),
        "lowering",
        *("post_norm", "quant"),
    },
    "tracing": {"core.dispatch", "core.fast_call", "errors"},
    PUBLIC: {
        *("_version", "communicator", "config", "core._native", "core.endpoint", "core.fast_call"),
        *("core.local", "errors", "expert_sum", "functions", "ops", "policy", "post_norm", "quant"),
        *("reference", "topology", "tracing"),
    },
    "testing": {"core.workspace", "names"},
    "compile": {
        *(PUBLIC, "_version", "communicator", "config", "core.rendezvous", "core.sharding"),
        *("core.verdicts", "errors", "names", "ops", "quant"),
    },
    "integrations": {
        *(PUBLIC, "compile", "config", "core.sharding", "core.verdicts", "errors", "names", "ops"),
    },
    "verify": {PUBLIC, "errors", "islands", "names", "quant", "reference", "testing"},
    "bench": {PUBLIC, "config", "islands", "names", "quant", "reference", "testing", "topology"},
    "tune": {PUBLIC, "bench", "policy", "testing", "tuning"},
    "cli": {
        *(PUBLIC, "bench", "config", "errors", "names", "testing", "topology"),
        *("tracing", "tune", "tuning", "verify"),
    },
    "__main__": {"cli"},
}

# What is imported besides the standard library; {"torch"} where nothing is said.
THIRD_PARTY = {
    "core._native": set(),
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
    "config": "reads ALLNORM_* and LOCAL_RANK; sets switches of torch: multicast, NCCL's errors",
    "bench": "names NCCL's algorithm for a group, and other libraries' switches",
    "tracing": "the environment of the program it traces",
    "testing": "sets the multicast switches for the ranks it starts",
}


def modules() -> list[pathlib.Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit_of(path: pathlib.Path) -> str:
    """The row of a file in the tables: its module, or the subpackage it is in.

    Modules of `core` have a row each.
    """
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts == ("__init__",):
        return PUBLIC
    return ".".join(parts) if parts[0] == "core" and parts[1] != "__init__" else parts[0]


def imports_of(path: pathlib.Path) -> Iterator[str]:
    """Dotted names of everything imported, in functions too."""
    package = ("allnorm", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            if prefix in ("allnorm", "allnorm.core"):  # a module, or what `allnorm` has of one
                for alias in node.names:
                    unit = f"{prefix}.{alias.name}".removeprefix("allnorm.")
                    yield f"allnorm.{unit}" if unit in ALLOWED else prefix
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
            target = ".".join(rest[: 2 if rest[0] == "core" else 1]) if rest else PUBLIC
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
        assert not found or relative == home, f"{relative}: use src/allnorm/{home}"
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
    "gpu": {"", "abi", "protocol", "gpu"},
    "python": {"", "python"},
    "tests": {"", "abi", "protocol", "cpu", "gpu", "tests"},
}

# Within a folder: a file without its ending, or a folder of a kind, and what of the same folder it
# may include. Sources, transports, the epilogue and formats know nothing of each other on GPUs; on
# CPU, where a row is summed while it is normed, the epilogue takes sources and formats.
CSRC_WITHIN = {
    "protocol": {
        "numerics": set(),
        "row_format": set(),
        **{name: {"numerics"} for name in ("signal", "slot", "call_tag", "layout")},
    },
    "abi": {
        "error": set(),
        "tag": set(),
        "gate": {"error"},
        "check": {"error", "tag"},
        "check_memory": {"check", "error", "tag"},
        "entry_points": {"check", "error", "gate"},
    },
    "gpu": {
        "cache_policy": set(),
        "cuda": {"cache_policy"},  # the leaf of a vendor
        "params": {"cache_policy"},
        "words": {"cuda"},
        "row_exchange": {"cuda", "params"},
        "exchange": {"cuda", "params"},
        "pace": {"cuda"},
        "stamps": {"cuda", "params"},
        "slots": {"exchange", "words"},
        "sources": {"cuda", "params"},
        "transports": {"slots"},
        "formats": {"cuda", "params", "row_exchange", "words"},
        "epilogue": {"params", "row_exchange"},
        "fused": {"cuda", "epilogue", "exchange", "pace", "stamps"},
        "owned_rows": {"fused", "sources", "transports"},
        "local_rows": {"epilogue", "params"},
        "any_rows": {"cuda", "params", "row_exchange", "sources", "words"},
        "kernels": set(),
        "probe": {"cuda", "params"},
        "kernels_probe": {"kernels", "probe"},
        "instantiate": {
            *("sources", "transports", "formats", "kernels"),
            *("fused", "owned_rows", "local_rows", "any_rows"),
        },
        **{f"kernels_{dtype}": {"instantiate"} for dtype in ("bfloat16", "float16", "float32")},
        "geometry": {"params"},
        "prepare": {"geometry", "params"},
        "capture": {"cuda"},
        "launch": {"capture", "cuda", "geometry", "kernels", "params", "prepare"},
        "ipc": {"cuda", "launch"},
        "stream_order": {"capture", "cuda", "launch"},
        "communicator": {"cuda", "launch", "prepare", "stream_order"},
        "c_api": {"communicator"},
    },
    "cpu": {
        "memory": set(),
        "shared_memory": set(),
        "simd": set(),
        "row_task": set(),
        "row": {"row_task", "simd"},
        "sources": {"row", "simd"},
        "formats": {"row", "simd"},
        "epilogue": {"formats", "row", "simd", "sources"},
        "kernels": {"epilogue", "row", "row_task", "simd", "sources"},
        "dispatch": {"row_task"},
        "call": {"row_task"},
        "comm": {"call", "memory", "row_task"},
        "transports": {"comm"},
        "fault": {"comm"},
        "c_api": {"call", "comm"},
    },
    "python": {
        "ref": set(),
        "prepared": {"ref"},
        "fast_call": {"prepared", "ref"},
        "interrupts": {"ref"},
    },
}

# What of a GPU vendor the kernels and the host side know: found by the include path, so that
# another vendor's folder, or the fibers of csrc/tests/shim, can stand in its place.
LEAF_FOLDER = "gpu/cuda"
LEAF = {path.name for path in (CSRC / LEAF_FOLDER).iterdir()}

# pattern: (files of csrc in which it may stand, why)
CONFINED = {
    r"\basm\b|__asm__": (
        {"gpu/cuda/memory.cuh", "cpu/memory.h"},
        "inline assembly has one home for each backend",
    ),
    r"<<<|\bcudaLaunch\w+": (
        {"gpu/launch.cu", "tests/fake_cuda/cuda_runtime.h", "tests/fake_cuda/fake.cpp"},
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
            leaf = relative.parent.as_posix() == LEAF_FOLDER
            cuda_may = leaf or fake or relative.as_posix() == "protocol/numerics.h"
            assert cuda_may or not name.startswith("cuda"), f"{relative} must not include {name}"
        elif name in LEAF:
            assert "gpu" in CSRC_ALLOWED[folder], f"{relative} must not include {name}"
        elif not (path.parent / name).exists():  # beside it: the same folder
            assert (CSRC / name).exists(), f"{relative}: write {name} as a path from csrc/"
            assert not name.startswith(LEAF_FOLDER), f"{relative}: the include path finds {name}"
            target = name.split("/")[0] if "/" in name else ""
            assert target in CSRC_ALLOWED[folder], f"{relative} must not include {name}"


@pytest.mark.parametrize("path", sources(), ids=ids)
def test_csrc_confined_constructs(path: pathlib.Path) -> None:
    relative = path.relative_to(CSRC).as_posix()
    code = without_comments(path.read_text())
    for pattern, (homes, why) in CONFINED.items():
        if relative not in homes:
            assert not re.search(pattern, code), f"{relative}: /{pattern}/ belongs elsewhere: {why}"


@pytest.mark.parametrize("path", sources(), ids=ids)
def test_csrc_includes_within_a_folder(path: pathlib.Path) -> None:
    folder, *rest = path.relative_to(CSRC).parts
    if folder not in CSRC_WITHIN or not rest:
        return
    unit = pathlib.Path(rest[0]).stem
    rows = CSRC_WITHIN[folder]
    assert unit in rows, f"csrc/{folder}/{unit} has no row in CSRC_WITHIN: say what it may include"
    for name in re.findall(r'#\s*include\s*"([^"]+)"', path.read_text()):
        whole = f"{LEAF_FOLDER}/{name}" if name in LEAF else name
        if whole.startswith(f"{folder}/"):
            target = pathlib.Path(whole.split("/")[1]).stem
            assert target in {unit, *rows[unit]}, f"{folder}/{unit} must not include {whole}"


def test_csrc_has_no_cycle() -> None:
    for folder, rows in CSRC_WITHIN.items():
        done: list[str] = []
        for unit, allowed in rows.items():
            later = allowed - set(done)
            assert not later, f"{folder}/{unit} may include {later}, which comes later"
            done.append(unit)
        files = {
            pathlib.Path(p.relative_to(CSRC / folder).parts[0]).stem
            for p in sources()
            if p.is_relative_to(CSRC / folder)
        }
        assert files == set(rows), f"csrc/{folder}: rows and files differ: {files ^ set(rows)}"
    done = []
    for folder in ("", *CSRC_WITHIN):
        assert CSRC_ALLOWED[folder] <= {*done, folder}, f"csrc/{folder} may include what is later"
        done.append(folder)
