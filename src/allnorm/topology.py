"""Properties of this machine: GPUs, links, peer access, versions, cores, shared memory.

Driver and link properties come from `nvidia-ml-py` if it can be imported, the rest from torch. A
property that cannot be determined is None; nothing is guessed. No function here is collective.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import shutil
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

_MAX_NVLINKS = 18  # NVLinks per GPU of Hopper and Blackwell


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process may use."""

    index: int  # CUDA device index
    name: str  # name that the driver reports
    compute_capability: str  # "9.0" for Hopper
    memory_bytes: int  # size of device memory
    num_sms: int  # number of SMs
    nvlinks: int | None  # active NVLinks; None if unknown
    nvlink_version: int | None  # NVML's number of the links' generation; None if unknown


@dataclass(frozen=True)
class Machine:
    """The properties of the machine, as one process sees them."""

    cpu_name: str  # processor model
    num_cores: int  # cores that this process may run on
    shm_total_bytes: int | None  # size of /dev/shm; None if it does not exist
    shm_free_bytes: int | None  # free bytes of /dev/shm
    gpus: tuple[Gpu, ...]  # the visible GPUs
    # `peer_access[i][j]`: GPU i can read and write GPU j's memory.
    peer_access: tuple[tuple[bool, ...], ...]
    driver_version: str | None  # version of the NVIDIA kernel driver
    driver_cuda_version: str | None  # newest CUDA version that the driver supports
    torch_cuda_version: str | None  # CUDA that torch was built with; None for a CPU build
    nccl_version: str | None  # NCCL that torch was built with
    link_source: str  # source of the link properties, or why they are unknown


def probe() -> Machine:
    """Returns the machine's properties. If it has GPUs, this initializes CUDA in this process."""
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
    """Returns the number of GPUs that this process may use; does not initialize CUDA."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def has_gpu_devices(dev: pathlib.Path = pathlib.Path("/dev")) -> bool:
    """Returns whether there are device files of NVIDIA GPUs; does not load the driver."""
    return any(name[6:].isdigit() for name in os.listdir(dev) if name.startswith("nvidia"))


def num_cores() -> int:
    """Returns the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_cores(seconds: float = 0.5) -> float | None:
    """Measures, for `seconds`, how many cores other work keeps busy; None if unknown."""
    begin = _busy_seconds()
    time.sleep(seconds)
    end = _busy_seconds()
    return None if begin is None or end is None else max(0.0, (end - begin) / seconds)


def _busy_seconds() -> float | None:
    """Returns the busy time of all cores since boot."""
    try:
        fields = pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def cpu_name() -> str:
    """Returns the model name of the processor."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    for line in text.splitlines():
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def shm_bytes() -> tuple[int, int] | None:
    """Returns total and free bytes of /dev/shm; None if it does not exist."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return usage.total, usage.free


def available_memory_bytes(device: str) -> int | None:
    """Returns the memory of the smallest GPU, or the free CPU memory; None if unknown."""
    if device == "cuda":
        counts = (torch.cuda.get_device_properties(i).total_memory for i in range(num_gpus()))
        return min(counts, default=None)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        limits = [int(line.split()[1]) << 10]
        for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup limits, v2 and v1
            with contextlib.suppress(OSError, ValueError):
                limits.append(int(pathlib.Path("/sys/fs/cgroup", name).read_text()))
        return min(limits)
    return None


def nccl_version() -> str | None:
    """Returns the version of torch's NCCL; None in a build without NCCL."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    from torch.cuda import nccl  # missing in some builds

    return ".".join(map(str, nccl.version()))


def device_name(device: str, index: int = 0) -> str:
    """Returns the name of GPU `index` if `device` is "cuda", otherwise the processor's name."""
    return torch.cuda.get_device_name(index) if device == "cuda" else cpu_name()


def versions() -> dict[str, str | None]:
    """Returns the versions that measurements depend on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "driver": _Nvml().driver_version() if num_gpus() else None,
    }


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
    """A wrapper around NVML; without NVML its methods return None."""

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
        """Returns the version of the kernel driver; without NVML it is read from /proc."""
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
        """Returns the newest CUDA version that the driver supports."""
        if not self._nvml:
            return None
        number = int(self._nvml.nvmlSystemGetCudaDriverVersion_v2())
        return f"{number // 1000}.{number % 1000 // 10}"

    def links(self, uuid: str) -> tuple[int | None, int | None]:
        """Returns the active NVLinks of a GPU and their generation; None if unknown."""
        if not self._nvml or not uuid:
            return None, None
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        states = {}
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(name)
        except self._nvml.NVMLError:
            return None, None
        for link in range(_MAX_NVLINKS):
            with contextlib.suppress(self._nvml.NVMLError):  # the link does not exist or is hidden
                states[link] = bool(self._nvml.nvmlDeviceGetNvLinkState(handle, link))
        if not states:
            return None, None
        active = [link for link, up in states.items() if up]
        if not active:
            return 0, None
        return len(active), int(self._nvml.nvmlDeviceGetNvLinkVersion(handle, active[0]))
