"""AMD GPUs, a preview: what must hold before the HIP library opens, and the stored proof.

The library was never run on hardware. So it opens only if the user asks for it (`ALLNORM_HIP=1`),
and `allnorm verify` with a soak has passed with this very library on these GPUs. That run itself
may open the library, and stores the proof in allnorm's cache folder.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from allnorm import config
from allnorm.core import _native
from allnorm.errors import AllnormError, UnsupportedError

# Fewest calls of the ordering soak in a run of `allnorm verify` that counts as a proof.
LEAST_SOAK_CALLS = 10_000
_OLDEST_HIP = 7  # major version of ROCm
_PAGE = "docs/amd.md"

_proving = False


@dataclass(frozen=True)
class Subject:
    """The library, GPUs and runtime that a proof is valid for.

    Attributes:
        library: SHA-256 of liballnorm_hip.so.
        commit: git hash that was built into the library.
        gpus: name, target and UUID of each GPU.
        runtime: version of HIP that torch was built with.
    """

    library: str
    commit: str
    gpus: tuple[str, ...]
    runtime: str


@dataclass(frozen=True)
class Proof:
    """A run of `allnorm verify` that passed.

    Attributes:
        subject: the library and the GPUs.
        world_sizes: the numbers of ranks that were checked.
        soak_calls: calls of the ordering soak, per number of ranks.
        made: the time, in ISO format.
    """

    subject: Subject
    world_sizes: tuple[int, ...]
    soak_calls: int
    made: str


@dataclass(frozen=True)
class Step:
    """A condition of the preview.

    Attributes:
        name: the condition.
        found: what was found.
        remedy: what to do; empty if the condition holds.
    """

    name: str
    found: str
    remedy: str = ""


def is_used() -> bool:
    """Returns whether torch was built for AMD GPUs, whose device type is "cuda" too."""
    return _native.gpu_backend() == "hip"


def check_open(world_size: int | None = None) -> None:
    """Raises unless the preview may be used, by `world_size` ranks if that is given.

    Raises:
        UnsupportedError: a condition does not hold; the message names the first and its remedy.
    """
    for step in steps(world_size):
        if step.remedy:
            raise UnsupportedError(
                f"AMD GPUs are a preview, which is closed here. {step.name}: {step.found}. "
                f"{step.remedy} `allnorm doctor` lists all conditions; {_PAGE} explains them. "
                "Results on the CPU are the same: device='cpu'."
            )


def quantizes(device_type: str) -> bool:
    """Returns whether calls on devices of this type can quantize; not on gfx942.

    Matrix instructions of gfx942 read e4m3fnuz, and results of this library are e4m3fn.
    """
    if device_type != "cuda" or not is_used():
        return True
    indices = range(torch.cuda.device_count())
    return all(_target(torch.cuda.get_device_properties(i)) != "gfx942" for i in indices)


def prove() -> None:
    """Lets this process open the library without a proof, to make one."""
    global _proving
    _proving = True


def steps(world_size: int | None = None) -> Iterator[Step]:
    """Yields the conditions of the preview, in the order in which to meet them."""
    yield _switch()
    yield _torch()
    yield _library()
    yield _gpus()
    yield _proof(world_size)


def store_proof(world_sizes: Sequence[int], soak_calls: int) -> pathlib.Path:
    """Stores that `allnorm verify` has passed with this library on these GPUs; returns the path.

    Raises:
        AllnormError: the soak was too short to count.
        OSError: the file cannot be written.
    """
    if soak_calls < LEAST_SOAK_CALLS:
        raise AllnormError(f"a soak of {soak_calls} calls: expected {LEAST_SOAK_CALLS} or more.")
    path, about = _path(), subject()
    made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    sizes = set(world_sizes)
    known = _read()
    if known is not None and known.subject == about:
        sizes |= set(known.world_sizes)
        soak_calls = min(soak_calls, known.soak_calls)
    proof = Proof(about, tuple(sorted(sizes)), soak_calls, made)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(proof), indent=1) + "\n")
    return path


def subject() -> Subject:
    """Returns the library, the GPUs and the runtime of this process."""
    build = _native.library("hip").build_info()
    return Subject(_hash(), str(build["commit"]), _gpu_names(), str(torch.version.hip))


def _path() -> pathlib.Path:
    """Returns the path of the proof for this library; a new build needs a new proof."""
    return config.cache_dir() / "hip" / f"proof-{_hash()[:16]}.json"


def _read() -> Proof | None:
    try:
        found = json.loads(_path().read_text())
        about = found["subject"]
        return Proof(
            Subject(about["library"], about["commit"], tuple(about["gpus"]), about["runtime"]),
            tuple(found["world_sizes"]),
            int(found["soak_calls"]),
            str(found["made"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


@functools.cache
def _hash() -> str:
    return hashlib.sha256(_native.library_path("hip").read_bytes()).hexdigest()


@functools.cache
def _gpu_names() -> tuple[str, ...]:
    """Returns name, target and UUID of each visible GPU."""
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = getattr(properties, "uuid", "no UUID")
        names.append(f"{properties.name}, {_target(properties)}, {uuid}")
    return tuple(names)


def _target(properties: object) -> str:
    """Returns the target of a GPU without its features, such as "gfx942"."""
    return str(getattr(properties, "gcnArchName", "unknown")).partition(":")[0]


def _torch() -> Step:
    version = torch.version.hip
    found = f"torch {torch.__version__}, HIP {version or 'none'}"
    major = str(version or "").partition(".")[0]
    if major.isdecimal() and int(major) >= _OLDEST_HIP:
        return Step("torch for ROCm", found)
    remedy = f"Install torch for ROCm {_OLDEST_HIP}.0 or later (gfx950: 7.0.2 or later)."
    return Step("torch for ROCm", found, remedy)


def _library() -> Step:
    path = _native.library_path("hip")
    name = "the library"
    if not path.exists():
        return Step(name, f"no {path.name}", "Build it from source: make HIP=on inplace.")
    try:
        build = _native.library("hip").build_info()
    except AllnormError as error:
        return Step(name, str(error), "Load torch for ROCm first, and build the library here.")
    return Step(name, f"commit {build['commit'] or 'unknown'}, for {build['architectures']}")


def _gpus() -> Step:
    name = "the GPUs"
    targets = {
        _target(torch.cuda.get_device_properties(index))
        for index in range(torch.cuda.device_count())
    }
    found = ", ".join(sorted(targets)) or "torch finds none"
    try:
        compiled = set(str(_native.library("hip").build_info()["architectures"]).split())
    except AllnormError:
        return Step(name, found, "The library must be there before its targets can be compared.")
    if targets and targets <= compiled:
        return Step(name, found)
    return Step(name, found, f"Use GPUs of {' or '.join(sorted(compiled))} only.")


def _switch() -> Step:
    name = "the switch"
    if config.read_settings().hip:
        return Step(name, "ALLNORM_HIP=1")
    return Step(name, "ALLNORM_HIP is not set", "Set ALLNORM_HIP=1 to try the preview.")


def _proof(world_size: int | None) -> Step:
    name = "the proof"
    if _proving:
        return Step(name, "being made by this run")
    command = f"Run `allnorm verify --stress {LEAST_SOAK_CALLS}`"
    if not _native.library_path("hip").exists():
        return Step(name, "none", f"{command} once the library is there.")
    proof = _read()
    if proof is None:
        return Step(name, "none of this library", f"{command}; if it passes, it stores the proof.")
    found = f"of {proof.made}, {', '.join(map(str, proof.world_sizes))} ranks"
    now = subject()
    if proof.subject.runtime != now.runtime or proof.subject.commit != now.commit:
        return Step(name, f"{found}, made with HIP {proof.subject.runtime}", f"{command} again.")
    if other := sorted(set(now.gpus) - set(proof.subject.gpus)):
        return Step(name, f"{found}, without {other[0]}", f"{command} on these GPUs.")
    if world_size is not None and world_size > 1 and world_size not in proof.world_sizes:
        return Step(name, f"{found}, not {world_size}", f"{command} --tp {world_size}.")
    return Step(name, found)
