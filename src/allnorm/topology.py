"""What this machine has: GPUs, links, peer access, versions, cores, shared memory.

`nvidia-ml-py` is asked for driver and link facts when it can be imported, torch for the rest.
Whatever cannot be determined is None; nothing is guessed. Nothing here is collective.
"""

from __future__ import annotations

import contextlib
import filecmp
import functools
import os
import pathlib
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

_MAX_NVLINKS = 18  # per GPU: what Hopper and Blackwell have


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process may use."""

    index: int  # its CUDA device index
    name: str  # as the driver says it
    compute_capability: str  # "9.0" for Hopper
    memory_bytes: int  # device memory
    num_sms: int  # multiprocessors
    nvlinks: int | None  # active NVLinks; None if it could not be determined
    nvlink_version: int | None  # NVML's number of the links' generation; None likewise


@dataclass(frozen=True)
class Machine:
    """The machine as one process sees it."""

    cpu_name: str  # processor model
    num_cores: int  # cores that this process may run on
    shm_total_bytes: int | None  # size of /dev/shm; None where there is none
    shm_free_bytes: int | None  # what is free of it
    gpus: tuple[Gpu, ...]  # the visible GPUs
    # `peer_access[i][j]`: GPU i can read and write GPU j's memory.
    peer_access: tuple[tuple[bool, ...], ...]
    driver_version: str | None  # NVIDIA kernel driver
    driver_cuda_version: str | None  # newest CUDA that the driver runs
    torch_cuda_version: str | None  # CUDA that torch was built with; None for a CPU build
    nccl_version: str | None  # NCCL that torch was built with
    link_source: str  # who reported the links, or why nobody could


def probe() -> Machine:
    """Looks at the machine. With GPUs this initialises CUDA in the calling process."""
    count = num_gpus()
    nvml = _Nvml()
    shm = shm_bytes()
    return Machine(
        cpu_name=cpu_name(),
        num_cores=num_cores(),
        shm_total_bytes=shm[0] if shm else None,
        shm_free_bytes=shm[1] if shm else None,
        gpus=tuple(_gpu(index, nvml) for index in range(count)),
        peer_access=tuple(
            tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count))
            for i in range(count)
        ),
        driver_version=nvml.driver_version(),
        driver_cuda_version=nvml.driver_cuda_version(),
        torch_cuda_version=torch.version.cuda,
        nccl_version=nccl_version(),
        link_source=nvml.source,
    )


def num_gpus() -> int:
    """GPUs that this process may use; does not initialise CUDA."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def has_gpu_devices(dev: pathlib.Path = pathlib.Path("/dev")) -> bool:
    """Whether this process sees NVIDIA GPUs, by their device files: no driver is loaded to ask."""
    return any(name[6:].isdigit() for name in os.listdir(dev) if name.startswith("nvidia"))


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_cores(seconds: float = 0.5) -> float | None:
    """How many cores other work kept busy for so long; None if that is not known."""
    begin = _busy_seconds()
    time.sleep(seconds)
    end = _busy_seconds()
    return None if begin is None or end is None else max(0.0, (end - begin) / seconds)


def _busy_seconds() -> float | None:
    """What all cores have worked together since the machine was started."""
    try:
        fields = pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def cpu_name() -> str:
    """The processor's model name."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    for line in text.splitlines():
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def shm_bytes() -> tuple[int, int] | None:
    """Total and free bytes of /dev/shm; None where there is none."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return usage.total, usage.free


def available_memory_bytes(device: str) -> int | None:
    """What ranks may use: all of the smallest GPU, or what is free here; None if not known."""
    if device == "cuda":
        counts = (torch.cuda.get_device_properties(i).total_memory for i in range(num_gpus()))
        return min(counts, default=None)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        limits = [int(line.split()[1]) << 10]
        for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of a container, v2 and v1
            with contextlib.suppress(OSError, ValueError):
                limits.append(int(pathlib.Path("/sys/fs/cgroup", name).read_text()))
        return min(limits)
    return None


def nccl_version() -> str | None:
    """Version of the NCCL that torch was built with; None in a build without it."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    from torch.cuda import nccl  # not there in every build

    return ".".join(map(str, nccl.version()))


def device_name(device: str, index: int = 0) -> str:
    """Name of the hardware that ranks of `device` ("cuda" or "cpu") run on, of GPU `index`."""
    return torch.cuda.get_device_name(index) if device == "cuda" else cpu_name()


def versions() -> dict[str, str | None]:
    """Versions that a measurement depends on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "driver": _Nvml().driver_version() if num_gpus() else None,
    }


@functools.cache
def source_commit() -> str | None:
    """Git commit of the source that runs; None if it is not known.

    Known are a package imported from a checkout, and an installed one while the working directory
    is a checkout with the same Python files. The suffix "-dirty" tells of uncommitted changes.
    """
    package = pathlib.Path(__file__).resolve().parent
    checkouts = [root for root in (package.parent, pathlib.Path.cwd()) if (root / ".git").exists()]
    checkout = next((root for root in checkouts if _same_python(package, root / "allnorm")), None)
    if checkout is None:
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _same_python(package: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether two folders hold the same Python files."""
    files = {path.relative_to(package) for path in package.rglob("*.py")}
    others = {path.relative_to(other) for path in other.rglob("*.py")}
    return files == others and all(
        filecmp.cmp(package / name, other / name, shallow=False) for name in files
    )


def _gpu(index: int, nvml: _Nvml) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    nvlinks, version = nvml.links(str(getattr(properties, "uuid", "")))
    return Gpu(
        index=index,
        name=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        memory_bytes=int(properties.total_memory),
        num_sms=int(properties.multi_processor_count),
        nvlinks=nvlinks,
        nvlink_version=version,
    )


class _Nvml:
    """NVML, or nothing that answers None to every question."""

    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
        except ImportError:
            self.source = "unknown: nvidia-ml-py is not installed"
        except pynvml.NVMLError as error:
            self.source = f"unknown: NVML does not start ({error})"
        else:
            self._nvml, self.source = pynvml, "NVML"

    def driver_version(self) -> str | None:
        """Version of the kernel driver; without NVML read from /proc."""
        if self._nvml:
            version = self._nvml.nvmlSystemGetDriverVersion()
            return version.decode() if isinstance(version, bytes) else str(version)
        try:
            text = pathlib.Path("/proc/driver/nvidia/version").read_text()
        except OSError:
            return None
        words = text.split("\n")[0].split()
        return next((word for word in words if word[0].isdigit() and "." in word), None)

    def driver_cuda_version(self) -> str | None:
        """Newest CUDA version that the driver runs."""
        if not self._nvml:
            return None
        number = int(self._nvml.nvmlSystemGetCudaDriverVersion_v2())
        return f"{number // 1000}.{number % 1000 // 10}"

    def links(self, uuid: str) -> tuple[int | None, int | None]:
        """Active NVLinks of a GPU and their generation; None for what cannot be determined."""
        if not self._nvml or not uuid:
            return None, None
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        states = {}
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(name)
        except self._nvml.NVMLError:
            return None, None
        for link in range(_MAX_NVLINKS):
            with contextlib.suppress(self._nvml.NVMLError):  # no such link, or hidden
                states[link] = bool(self._nvml.nvmlDeviceGetNvLinkState(handle, link))
        if not states:
            return None, None
        active = [link for link, up in states.items() if up]
        if not active:
            return 0, None
        return len(active), int(self._nvml.nvmlDeviceGetNvLinkVersion(handle, active[0]))
