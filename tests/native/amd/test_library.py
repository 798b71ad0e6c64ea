"""Loads the HIP library beside a fake of AMD's runtime, as the package does beside torch's."""

from __future__ import annotations

import pathlib
import shutil
import struct
import subprocess
import sys

import pytest
from limits import HANG_SECONDS

from native.sass.kernels import all_variants, variant_of

from .disassembly import disassemble
from .rules import complaints, complaints_of_callee

ROOT = pathlib.Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"
FAKE = "fake_cuda/fake.cpp fake_cuda/streams.cpp fake_hip/only_hip.cpp fake_hip/loaded.cpp"
BUILT = ROOT / "src/allnorm/lib/liballnorm_hip.so"

# Runs in a process of its own, because a process has one HIP runtime.
PROGRAM = """
import ctypes, pathlib, sys, types

runtime, path, capability = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
sys.modules["torch"] = types.SimpleNamespace(version=types.SimpleNamespace(hip="7.0.2"))
sys.path.insert(0, sys.argv[4])
package = types.ModuleType("allnorm")  # without its __init__, which imports torch
package.__path__ = [sys.argv[4] + "/allnorm"]
sys.modules["allnorm"] = package
from allnorm import errors
from allnorm.core import _native

_native.library_path = lambda backend: path
assert _native.gpu_backend() == "hip"
try:
    _native.library("hip")
except errors.NativeLibraryError as error:
    assert "torch for ROCm" in str(error), error
else:
    raise AssertionError("loaded without a runtime")
fake = ctypes.CDLL(runtime)  # RTLD_LOCAL, like torch
library = _native.library("hip")
build = library.build_info()
assert build["backend"] == "hip" and "architectures" in build and "clang" in build, build

fake.fake_set_device(0, capability)
fake.fake_registered.restype = fake.fake_launched.restype = ctypes.c_char_p
code = library.device_code(0)
assert (code.capability, code.compiled_for) == (capability, capability), code.capability
address, handle = library.ipc_create(0, 1 << 20)
assert fake.fake_num_cached() == 0, "a workspace is cached"
peer = library.ipc_open(0, handle)
config = _native.CommConfig(rank=0, world_size=2, device=0, workspace_bytes=1 << 20)
config.struct_bytes, config.timeout_ns = ctypes.sizeof(config), 10**9
config.workspaces[:2] = [address, address]
comm = ctypes.c_void_p()
status = library.comm_create(ctypes.addressof(config), ctypes.addressof(comm))
assert status == 0, library.last_error()
call = _native.Call(op=_native.ADD_RMS_NORM, dtype=2, weight_dtype=2, num_tokens=1, num_sources=1)
call.struct_bytes, call.hidden_size, call.eps = ctypes.sizeof(call), 4096, 1e-6
for field in ("x", "residual", "out", "residual_out", "source"):
    setattr(call, field + "_stride", 4096)
for place, field in enumerate(("x", "residual", "weight", "out", "residual_out", "quantized")):
    setattr(call, field, (1 << 40) + (place << 32))
call.quantized = None
assert library.run(comm, ctypes.addressof(call)) == 0, library.last_error()
assert fake.fake_num_launches() == 1
print(fake.fake_launched(0).decode())
call.quant, call.quantized, call.scale = _native.QUANT["per_token"], 1 << 41, 1 << 42
call.quantized_stride, call.scale_row_stride, call.scale_group_stride = 4096, 1, 1
status = library.run(comm, ctypes.addressof(call))
refused = status == _native.UNSUPPORTED and "e4m3fnuz" in library.last_error()
assert refused if capability == 94 else status == 0, (status, library.last_error())
assert library.comm_destroy(comm) == 0
print(fake.fake_num_registered())
for index in range(fake.fake_num_registered()):
    print(fake.fake_registered(index).decode())
"""


def compile_library(path: pathlib.Path, sources: str, *includes: pathlib.Path) -> pathlib.Path:
    """Compiles sources of csrc, given relative to `includes[0]`, into a shared library."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder, *_ = includes
    files = [str(file) for source in sources.split() for file in sorted(folder.glob(source))]
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", "-fvisibility=hidden"]
    flags += [f"-I{include}" for include in includes]
    done = subprocess.run([compiler, *flags, *files, "-o", str(path)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return path


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    tests = CSRC / "tests"
    path = tmp_path_factory.mktemp("hip") / "libamdhip64.so.7"
    return compile_library(path, FAKE, tests, tests / "fake_hip", CSRC / "gpu/hip", CSRC)


@pytest.fixture(scope="module")
def host_code(runtime: pathlib.Path) -> pathlib.Path:
    """Returns a library of the host code with stand-ins for the kernels."""
    (runtime.parent / "built_commit.h").write_text('#define ALLNORM_COMMIT ""\n')
    path = runtime.parent / "liballnorm_hip.so"
    sources = "gpu/host.cpp abi/*.cpp tests/fake_hip/kernels.cpp"
    return compile_library(path, sources, CSRC, CSRC / "gpu/hip", runtime.parent)


def test_a_bundle_contains_its_code_objects_on_pages_of_their_own(tmp_path: pathlib.Path) -> None:
    objects = {"gfx942": b"first" * 1000, "gfx950": b"second"}
    parts = []
    for target, code in objects.items():
        (tmp_path / target).write_bytes(code)
        parts.append(f"{target}={tmp_path / target}")
    path = tmp_path / "bundle"
    subprocess.run([sys.executable, ROOT / "tools/hip_bundle.py", path, *parts], check=True)
    data = path.read_bytes()
    magic, count = struct.unpack_from("<24sQ", data)
    assert magic == b"__CLANG_OFFLOAD_BUNDLE__"
    found, place = {}, 32
    for _ in range(count):
        begin, size, length = struct.unpack_from("<QQQ", data, place)
        name = data[place + 24 : place + 24 + length].decode()
        found[name] = data[begin : begin + size]
        assert begin % 4096 == 0
        place += 24 + length
    host, *targets = found
    assert host.startswith("host-")
    assert found[host] == b""
    assert {name.rpartition("-")[2]: found[name] for name in targets} == objects


def lines_of(runtime: pathlib.Path, library: pathlib.Path, capability: int) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, runtime, library, str(capability), ROOT / "src"]
    done = subprocess.run(command, capture_output=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("capability", [94, 95])
def test_host_code_loads_beside_the_runtime_of_the_process(
    runtime: pathlib.Path, host_code: pathlib.Path, capability: int
) -> None:
    assert lines_of(runtime, host_code, capability)[0] == "bfloat16"


def test_built_library_launches_kernels_that_its_code_objects_contain(
    runtime: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    codes = code_objects(tmp_path)
    for capability in (94, 95):
        launched, count, *registered = lines_of(runtime, BUILT, capability)
        assert launched in registered
        assert len(registered) == int(count) > 100
    for target, files in codes.items():
        symbols = ""
        for code in files:
            done = subprocess.run([objdump(), "--syms", code], check=True, capture_output=True)
            symbols += done.stdout.decode()
        names = set(symbols.split())
        assert names.issuperset(registered), (target, sorted(set(registered) - names)[:3])


@pytest.mark.long  # a minute
def test_every_kernel_of_the_built_library_follows_the_rules(tmp_path: pathlib.Path) -> None:
    for target, files in code_objects(tmp_path).items():
        checked, wrong = set(), []
        for function in (function for code in files for function in disassemble(code)):
            variant = variant_of(function.name)
            if variant is not None:
                checked.add(variant)
                wrong += complaints(function, variant)
            elif function.needs is None:
                wrong += complaints_of_callee(function)
        assert checked == all_variants(clusters=False), target
        assert wrong == [], target


def objdump() -> str:
    path = shutil.which("llvm-objdump-22")
    if path is None:
        pytest.skip("needs llvm-objdump-22")
    return path


def code_objects(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """Returns the code objects of the built library, by target."""
    if not BUILT.exists():
        pytest.skip("needs `make HIP=on inplace`")
    copy = shutil.copy(BUILT, folder)
    command = [objdump(), "--offloading", copy]
    subprocess.run(command, check=True, cwd=folder, capture_output=True)
    targets = ("gfx942", "gfx950")
    return {target: list(folder.glob(f"*{target}")) for target in targets}
