"""``allnorm doctor``: the hardware of this machine, and which algorithms will run on it."""

from __future__ import annotations

import dataclasses
import platform
import time
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

import allnorm
from allnorm import topology
from allnorm.cli import options, output
from allnorm.cli.options import Device, Json, Tp
from allnorm.core import _native, hip
from allnorm.testing import run_ranks
from allnorm.topology import Machine
from allnorm.verify import doctor as ranks_doctor

_OLD_CODE = (
    "Slow: these GPUs have compute capability 9.0 or later, but the kernels of this build (sm {}) "
    "were compiled for an earlier one. Such kernels use neither thread block clusters nor "
    "programmatic dependent launch, so each call takes longer, and rows wider than 8 KiB run "
    "unfused. Build for these GPUs: pip install . "
    "--config-settings=cmake.define.ALLNORM_CUDA_ARCHITECTURES=90"
)
_COPY_BYTES = 256 << 20
_COPIES = 10


def doctor(tp: Tp = "", device: Device = "auto", json: Json = None) -> None:
    """Shows this machine's hardware, which algorithms will run and why, and the time of a call."""
    where = options.device(device)
    size = max(options.world_sizes(tp, where))
    console = output.console()
    machine = topology.probe()
    capabilities = allnorm.capabilities()
    console.print(output.facts("Software", _software(machine, capabilities)))
    console.print(output.facts("CPU", _cpu(machine)))
    _print_gpus(console, machine, capabilities)
    steps = list(hip.steps(size)) if where == "cuda" and hip.is_used() else []
    if steps:
        console.print(output.facts("Preview for AMD GPUs", map(_step, steps)))
    missing = next((step for step in steps if step.remedy), None)
    preview = [dataclasses.asdict(step) for step in steps]
    if missing is not None:
        known = {
            "machine": dataclasses.asdict(machine),
            "capabilities": capabilities,
            "preview": preview,
            "backend": where,
            **output.provenance(),
        }
        output.append_json_lines(json, [known])
        output.fail(f"the preview for AMD GPUs is closed here. {missing.name}: {missing.remedy}")
    with output.progress(f"doctor, {output.ranks(size)}") as show:
        found = run_ranks(ranks_doctor.run, size, device=where, args=(where,), on_message=show)[0]
    plans = [
        (p["shape"], p["algorithm"], str(p["launches"]), p["reason"], p["source"])
        for p in found["plans"]
    ]
    columns = ("tokens x hidden", "algorithm", "launches", "reason", "source")
    title = f"Algorithms for bfloat16, {output.ranks(size)} on {where}"
    console.print(
        output.FittedTable(
            *(title, columns, plans),
            words=columns[1:2] + columns[3:],
            optional=("source", "launches"),
        )
    )
    copy_gbps = _peer_copy_gbps(machine) if where == "cuda" else None
    console.print(output.facts("Measured", _measured(found, size, where, copy_gbps)))
    if found["old_code"]:
        built_for = capabilities["backends"][_native.gpu_backend()].get("architectures", "unknown")
        console.print(output.bad(_OLD_CODE.format(built_for)))
    row = {
        "machine": dataclasses.asdict(machine),
        "capabilities": capabilities,
        "backend": where,
        "world_size": size,
        "copy_gbps": copy_gbps,
        "preview": preview,
        **found,
        **output.provenance(),
    }
    output.append_json_lines(json, [row])
    if found["error"]:
        output.fail(found["error"])
    text = f"OK: results are bit-identical to the reference ({output.ranks(size)} on {where})"
    console.print(output.ok(text))


def _step(step: hip.Step) -> tuple[str, str]:
    if not step.remedy:
        return step.name, output.ok(step.found)
    return step.name, f"{output.bad(step.found)}. {escape(step.remedy)}"


def _software(machine: Machine, capabilities: dict[str, Any]) -> list[tuple[str, str]]:
    built = f"{capabilities['version']}, built from commit {_native.built_commit() or 'unknown'}"
    pairs = [("allnorm", built)]
    for backend, build in capabilities["backends"].items():
        text = build.get("error") or ", ".join(f"{key} {value}" for key, value in build.items())
        pairs.append((f"allnorm {backend}", text))
    fast = "dispatched in C"
    if not capabilities["fast_calls"]:
        fast = "dispatched in Python: about 1.5 us slower each"
    return [
        *pairs,
        ("Repeated calls", fast),
        ("Python", platform.python_version()),
        ("torch", str(torch.__version__)),
        ("torch's CUDA", machine.torch_cuda_version or _no_cuda()),
        ("torch's NCCL", machine.nccl_version or ("none" if not machine.gpus else "unknown")),
        ("NVIDIA driver", _driver(machine)),
    ]


def _no_cuda() -> str:
    return f"none: HIP {torch.version.hip}" if hip.is_used() else "none: a CPU build"


def _driver(machine: Machine) -> str:
    if machine.driver_version is None:
        return "unknown" if machine.gpus else "none found"
    newest = machine.driver_cuda_version or "an unknown version"
    return f"{machine.driver_version}, supports CUDA up to {newest}"


def _cpu(machine: Machine) -> list[tuple[str, str]]:
    shm = "none: the CPU backend cannot run"
    if machine.shm_total_bytes is not None:
        free, total = machine.shm_free_bytes, machine.shm_total_bytes
        shm = f"{output.gibibytes(free)} free of {output.gibibytes(total)}"
    return [
        ("Processor", machine.cpu_name),
        ("Cores of this process", str(machine.num_cores)),
        ("Shared memory (/dev/shm)", shm),
    ]


def _print_gpus(console: Console, machine: Machine, capabilities: dict[str, Any]) -> None:
    if not machine.gpus:
        console.print("GPUs: torch sees none; allnorm runs its CPU backend here.\n")
        return
    rows = []
    for gpu in machine.gpus:
        links = "unknown" if gpu.nvlinks is None else str(gpu.nvlinks)
        if gpu.nvlinks and gpu.nvlink_version is not None:
            links += f" (NVML version {gpu.nvlink_version})"
        memory, sms = output.gibibytes(gpu.memory_bytes), str(gpu.num_sms)
        rows.append((f"{gpu.index}  {gpu.name}", gpu.compute_capability, memory, sms, links))
    columns = ("GPU", "compute capability", "memory", "SMs", "active NVLinks")
    console.print(output.FittedTable("GPUs", columns, rows))
    if any(gpu.nvlinks is None for gpu in machine.gpus):
        source = machine.link_source
        text = f"{source} does not report them" if source == "NVML" else source
        console.print(f"NVLinks: {text}.")
    indices = [str(gpu.index) for gpu in machine.gpus]
    access = [
        (index, *(output.ok("yes") if peer else output.bad("no") for peer in peers))
        for index, peers in zip(indices, machine.peer_access, strict=True)
    ]
    title = "Peer access (GPU of the row can map memory of the column's GPU)"
    console.print(output.FittedTable(title, ("GPU", *indices), access))
    switches = capabilities["multicast"]["switches"]
    state = ", ".join(f"{k}={'unset' if v is None else v}" for k, v in switches.items())
    console.print(f"NVLink multicast: allnorm never uses it. Environment: {state}.\n")


def _measured(
    found: dict[str, Any], size: int, where: str, copy_gbps: float | None
) -> list[tuple[str, str]]:
    method = "CUDA graph replay" if where == "cuda" else "wall clock"
    flag, large = (output.time_of(found[name]) for name in ("flag_us", "large_us"))
    flag = f"{flag} (time of the smallest all_reduce, 1x8)"
    if size > 1:
        gbps = 2 * (size - 1) / size * ranks_doctor.BANDWIDTH_BYTES / found["large_us"] / 1e3
        large += f" = {gbps:.1f} GB/s per rank, counting 2(N-1)/N of the bytes"
    else:
        flag = "unknown: needs two ranks"
    fused = f"{output.time_of(found['fused_us'])} (p50, slowest rank, {method})"
    islands = ", ".join(map(str, found["islands"]))
    pairs = [
        ("Islands", f"{len(found['islands'])}: ranks {islands}"),
        ("Creating a communicator", f"{found['create_s'] * 1e3:.0f} ms"),
        ("Fused op, 1x4096 bfloat16", fused),
        ("Flag latency", flag),
        (f"all_reduce of {ranks_doctor.BANDWIDTH_BYTES >> 20} MiB", large),
    ]
    if where == "cuda":
        text = "unknown: needs two GPUs with peer access"
        if copy_gbps is not None:
            text = f"{copy_gbps:.0f} GB/s, GPU 0 to GPU 1, a copy of {_COPY_BYTES >> 20} MiB"
        pairs.append(("Link bandwidth", text))
    return pairs


def _peer_copy_gbps(machine: Machine) -> float | None:
    """Measures copies from GPU 0 to GPU 1 in GB/s; None without peer access between them."""
    if len(machine.gpus) < 2 or not machine.peer_access[0][1]:
        return None
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cuda:0")
    target = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cuda:1")

    def copies() -> float:
        began = time.perf_counter()
        for _ in range(_COPIES):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        return time.perf_counter() - began

    copies()
    return _COPY_BYTES * _COPIES / copies() / 1e9
