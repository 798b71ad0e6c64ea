"""Tests the installed package: the wheel's tag and contents, its libraries' symbols."""

from __future__ import annotations

import email
import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile

import pytest

import allnorm

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARIES = pathlib.Path(allnorm.__file__).parent / "lib"

# Libraries that every Linux has. libstdc++ and libcudart are not listed: they are static.
SYSTEM_LIBRARIES = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libgcc_s|ld-linux-[\w-]+)\.so\.\d+"
)


NOT_BUILT = {"cuda": "without nvcc", "python": "without Python's headers"}


@pytest.fixture(params=["cpu", "cuda", "python"])
def library(request: pytest.FixtureRequest) -> pathlib.Path:
    path = LIBRARIES / f"liballnorm_{request.param}.so"
    if request.param in NOT_BUILT and not path.exists():
        pytest.skip(f"this installation was built {NOT_BUILT[request.param]}")
    return path


@pytest.fixture(scope="module")
def distribution() -> importlib.metadata.Distribution:
    try:
        found = importlib.metadata.distribution("allnorm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("allnorm runs from its source tree here, it is not installed")
    return found


def output_of(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not on this machine")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def declared_functions(backend: str = "") -> set[str]:
    """Returns all functions of the C ABI, or those of one backend ("CPU" or "CUDA") only."""
    blocks = (ROOT / "csrc" / "allnorm.h").read_text().split("\n\n")
    chosen = [b for b in blocks if not backend or b.startswith(f"// {backend} library only")]
    text = "\n".join(chosen)
    return set(re.findall(r"^ALLNORM_API [\w *]+?(allnorm_\w+)\(", text, flags=re.MULTILINE))


def test_exports_the_c_abi_and_nothing_else(library: pathlib.Path) -> None:
    lines = output_of("nm", "--dynamic", "--defined-only", str(library)).splitlines()
    if "python" in library.name:
        assert all("allnorm_fast_call_" in line for line in lines)
        return
    of_one = {backend: declared_functions(backend.upper()) for backend in ("cpu", "cuda")}
    assert of_one["cpu"] > {"allnorm_shm_create"}
    assert of_one["cuda"] > {"allnorm_ipc_create"}
    expected = declared_functions() - of_one["cpu" if "cuda" in library.name else "cuda"]
    assert "allnorm_run" in expected
    assert {line.split()[-1] for line in lines} == expected


def test_needs_only_system_libraries(library: pathlib.Path) -> None:
    dynamic = output_of("readelf", "--dynamic", str(library))
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert needed
    assert [name for name in needed if not SYSTEM_LIBRARIES.fullmatch(name)] == []
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


def test_undefined_symbols_are_in_the_system_or_python(library: pathlib.Path) -> None:
    undefined = output_of("nm", "--dynamic", "--undefined-only", str(library)).splitlines()
    names = [line.split()[-1] for line in undefined]
    of_python = {name for name in names if re.match(r"_?Py", name)}
    assert bool(of_python) == ("python" in library.name)
    # Undefined symbols must be versioned libc symbols, or weak symbols, which can be missing.
    strong = {n for n, line in zip(names, undefined, strict=True) if line.split()[-2] == "U"}
    assert [name for name in strong - of_python if "@" not in name] == []


def test_needs_no_newer_glibc_than_its_tag_says(
    library: pathlib.Path, distribution: importlib.metadata.Distribution
) -> None:
    """Checks a wheel that is meant for other machines."""
    wheel = email.message_from_string(distribution.read_text("WHEEL") or "")
    promised = re.search(r"manylinux_(\d+)_(\d+)", wheel["Tag"])
    if promised is None:
        pytest.skip("this wheel was built for this machine: make release")
    installed = distribution.locate_file(f"allnorm/lib/{library.name}")
    needed = re.findall(r"GLIBC_(\d+)\.(\d+)", output_of("objdump", "-T", str(installed)))
    assert needed
    assert max((int(a), int(b)) for a, b in needed) <= (int(promised[1]), int(promised[2]))


def test_contains_no_path_of_the_build(library: pathlib.Path) -> None:
    assert str(ROOT).encode() not in library.read_bytes()


def test_wheel_serves_every_python(distribution: importlib.metadata.Distribution) -> None:
    wheel = email.message_from_string(distribution.read_text("WHEEL") or "")
    assert re.fullmatch(r"py3-none-(many)?linux\w*", wheel["Tag"])
    assert wheel["Root-Is-Purelib"] == "false"


def test_wheel_contents(distribution: importlib.metadata.Distribution) -> None:
    files = {str(file) for file in distribution.files or []}
    assert "allnorm/lib/liballnorm_cpu.so" in files
    assert "allnorm/py.typed" in files
    assert any(name.endswith("licenses/LICENSE") for name in files)
    assert "allnorm/cli/bench_page.html.j2" in files
    # A wheel has Python files, libraries, tuning tables and a template, but no headers or sources.
    assert [f for f in files if f.startswith("allnorm/") and not is_shipped(f)] == []


def is_shipped(name: str) -> bool:
    if name.startswith("allnorm/seeds/"):
        return name.endswith(".json")
    if name == "allnorm/cli/bench_page.html.j2":
        return True
    return name.endswith((".py", ".pyc", "py.typed")) or name.startswith("allnorm/lib/liballnorm_")


def test_metadata(distribution: importlib.metadata.Distribution) -> None:
    assert distribution.version == allnorm.__version__
    required = [r for r in distribution.requires or [] if "extra ==" not in r]
    assert sorted(re.match(r"[\w-]+", r)[0] for r in required) == [
        "numpy",
        "packaging",
        "torch",
    ]
    scripts = {e.name: e.value for e in distribution.entry_points if e.group == "console_scripts"}
    assert scripts == {"allnorm": "allnorm_command:main"}


def test_import_starts_no_cuda_and_warns_of_nothing(tmp_path: pathlib.Path) -> None:
    code = "import torch, allnorm; allnorm.capabilities(); assert not torch.cuda.is_initialized()"
    where = str(pathlib.Path(allnorm.__file__).parent.parent)
    code = f"import sys; sys.path.insert(0, {where!r}); {code}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_sdist_is_complete(tmp_path: pathlib.Path) -> None:
    backend = pytest.importorskip("scikit_build_core.build")
    assert backend
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    sources = {
        str(path.relative_to(ROOT))
        for folder, patterns in (("csrc", "*.*"), ("allnorm", "*.py"), ("cmake", "*.*"))
        for path in (ROOT / folder).rglob(patterns)
    }
    wanted = sources | {"CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md"}
    assert sorted(wanted - names) == []
    assert sorted(name for name in names if name.endswith((".so", ".o"))) == []


@pytest.mark.parametrize("address", ["", "https://example.org/allnorm"])
def test_links_to_the_repository_if_its_address_is_known(
    address: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = pytest.importorskip("scikit_build_core.build")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ALLNORM_REPOSITORY", address)
    folder = backend.prepare_metadata_for_build_wheel(str(tmp_path))
    metadata = email.message_from_string((tmp_path / folder / "METADATA").read_text())
    links = metadata.get_all("Project-URL", [])
    names = [link.split(", ")[0] for link in links]
    assert names == (["Repository", "Issues", "Changelog"] if address else [])
    assert all(address in link for link in links)
