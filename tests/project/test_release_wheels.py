"""Tests wheels of `make release` that lie in dist/, also those for other processors."""

from __future__ import annotations

import email
import pathlib
import re
import zipfile

import pytest

import allnorm

from .test_packaging import ROOT, SYSTEM_LIBRARIES, declared_functions, output_of

MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}
# Kernels for 64-bit ARM may have pages of 64 KiB; a segment must not begin within a page.
LARGEST_PAGE_BYTES = {"x86_64": 1 << 12, "aarch64": 1 << 16}
NEWEST_GLIBC = (2, 28)


@pytest.fixture(scope="module", params=MACHINES)
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def wheel(arch: str) -> zipfile.ZipFile:
    name = f"allnorm-{allnorm.__version__}-py3-none-manylinux_*_{arch}.whl"
    found = sorted((ROOT / "dist").glob(name), key=lambda path: path.stat().st_mtime)
    if not found:
        pytest.skip(f"dist/ has no wheel of this version for {arch}: make release ARCH={arch}")
    return zipfile.ZipFile(found[-1])


def promised_glibc(wheel: zipfile.ZipFile) -> tuple[int, int]:
    """Returns the glibc version of the wheel's only tag."""
    tag = re.search(r"-py3-none-manylinux_(\d+)_(\d+)_[a-z0-9_]+\.whl$", wheel.filename)
    return int(tag[1]), int(tag[2])


@pytest.fixture(scope="module", params=["cpu", "cuda", "python"])
def library(
    request: pytest.FixtureRequest, wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    name = f"allnorm/lib/liballnorm_{request.param}.so"
    return pathlib.Path(wheel.extract(name, tmp_path_factory.mktemp("wheel")))


def test_tag(wheel: zipfile.ZipFile, arch: str) -> None:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/WHEEL")]
    metadata = email.message_from_bytes(wheel.read(name))
    major, minor = promised_glibc(wheel)
    assert (major, minor) <= NEWEST_GLIBC
    assert metadata.get_all("Tag") == [f"py3-none-manylinux_{major}_{minor}_{arch}"]
    assert metadata["Root-Is-Purelib"] == "false"


def test_is_for_its_processor(library: pathlib.Path, arch: str) -> None:
    header = output_of("readelf", "--wide", "--file-header", "--segments", str(library))
    assert re.search(r"Machine: +(.+)", header)[1] == MACHINES[arch]
    alignments = re.findall(r"^ +LOAD .* (0x[0-9a-f]+)$", header, re.MULTILINE)
    assert alignments
    assert min(int(bytes_, 16) for bytes_ in alignments) >= LARGEST_PAGE_BYTES[arch]


def test_needs_only_system_libraries_and_old_symbols(
    library: pathlib.Path, wheel: zipfile.ZipFile
) -> None:
    needs = output_of("readelf", "--wide", "--dynamic", "--version-info", str(library))
    libraries = re.findall(r"\(NEEDED\).*\[(.+)\]", needs)
    assert libraries
    assert [name for name in libraries if not SYSTEM_LIBRARIES.fullmatch(name)] == []
    versions = {(int(a), int(b)) for a, b in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", needs)}
    assert versions
    assert max(versions) <= promised_glibc(wheel)
    assert "GLIBCXX" not in needs


def test_exports_the_c_abi(library: pathlib.Path) -> None:
    table = output_of("readelf", "--wide", "--dyn-syms", str(library))
    exported = set(re.findall(r"GLOBAL +(?:DEFAULT|PROTECTED) +\d+ (allnorm_\w+)", table))
    if "python" in library.name:
        assert exported
        assert all(name.startswith("allnorm_fast_call_") for name in exported)
    else:
        other = "CPU" if "cuda" in library.name else "CUDA"
        assert exported == declared_functions() - declared_functions(other)
