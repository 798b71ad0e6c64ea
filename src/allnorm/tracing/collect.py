"""Converts a profile's events to counts for a report.

Host operators and ranges are counted first; of nested ones, only the outermost counts. The
remaining kernels, such as those in replays of CUDA graphs, are then counted by name.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch._C._autograd import DeviceType

from allnorm.tracing.report import FUSED, NORM, REDUCTION, Tally

# Prefixes of this package's ranges. `kind|what` or `path|class` follows the prefix.
CALL = "allnorm.call|"
MODULE = "allnorm.module|"

# Reduction operators. Operators inside them (nccl:all_reduce, gloo:all_reduce) are not counted.
# Functional collectives call c10d::allreduce_ when they run, but not when a compiler traces them.
REDUCTION_OPERATORS = frozenset(
    {
        "c10d::allreduce_",
        *("vllm::all_reduce", "sgl_kernel::all_reduce", "symm_mem::one_shot_all_reduce"),
        *("symm_mem::two_shot_all_reduce_", "symm_mem::multimem_all_reduce_"),
    }
)
# Other operators whose kernels have names like those of reductions.
OTHER_OPERATORS = frozenset({"c10d::barrier"})
NORM_OPERATORS = frozenset(
    {
        *("aten::rms_norm", "aten::_fused_rms_norm", "_C::rms_norm", "_C::fused_add_rms_norm"),
        *("sgl_kernel::rmsnorm", "sgl_kernel::fused_add_rmsnorm", "vllm_ir::rms_norm"),
    }
)
# A module with RMSNorm in its class name counts as a norm if it calls one of these.
NORM_ARITHMETIC = frozenset({"aten::rsqrt", "aten::pow", "aten::rms_norm", "aten::_fused_rms_norm"})

# Kernels that no operator launched, as in a replayed CUDA graph; the first matching row counts.
_KERNELS = (
    (re.compile(r"allnorm::fused_kernel<.*\bOneShot\b"), FUSED, "one_shot"),
    (re.compile(r"allnorm::fused_kernel<.*\bTwoShot\b"), FUSED, "two_shot"),
    # Values of allnorm::Owned in csrc/gpu/owned_rows.cuh; value 2 gathers finished rows.
    (re.compile(r"allnorm::owned_rows_kernel<.*Owned\)0"), FUSED, "two_shot"),
    (re.compile(r"allnorm::owned_rows_kernel<.*Owned\)1"), FUSED, "two_shot, sharded"),
    (re.compile(r"allnorm::local(_rows)?_kernel<"), NORM, "allnorm local"),
    (re.compile(r"nccl\w*Kernel\w*_AllReduce", re.IGNORECASE), REDUCTION, "NCCL"),
    (re.compile(r"allreduce_fusion|moereduce_allreduce", re.IGNORECASE), FUSED, "another library"),
    (re.compile(r"cross_device_reduce|all_?reduce", re.IGNORECASE), REDUCTION, "custom all-reduce"),
    (re.compile(r"rms_?norm", re.IGNORECASE), NORM, "kernel"),
    # PyTorch's kernels; the last template argument is true for RMSNorm.
    (re.compile(r"(layer_norm_kernel|LayerNormForwardCUDAKernel)<[^<>]*\btrue>"), NORM, "PyTorch"),
    (re.compile(r"^triton_\w*rsqrt"), NORM, "compiled kernel"),
)

# Maps each kernel name to its number of launches and total microseconds.
_Kernels = dict[str, list[float]]


class Collector:
    """Counts reductions and norms in the events of one `torch.profiler.profile`."""

    def __init__(self, events: Iterable[Any]) -> None:
        self.tally = Tally()
        self.passes = 0
        self._launched: _Kernels = collections.defaultdict(lambda: [0, 0.0])
        host = [event for event in events if event.device_type == DeviceType.CPU]
        device = [event for event in events if _is_kernel(event)]
        self._has_kernels = bool(device)
        for event in host:
            if event.cpu_parent is None:
                self._visit(event)
        self._count_kernels(device)

    def _visit(self, root: Any) -> None:
        # Iterative, because traces of compiled programs are too deep for recursion.
        pending = [(root, "", False)]
        while pending:
            event, module, inside = pending.pop()
            if event.name.startswith(MODULE):
                module = event.name[len(MODULE) :].split("|")[0]
                self.passes += not inside
                inside = True
            found = _classify(event)
            if found is None:
                pending.extend((child, module, inside) for child in event.cpu_children)
            else:
                self._count(event, *found, module)

    def _count(self, event: Any, kind: str, what: str, module: str) -> None:
        if not self._has_kernels:
            if kind:
                self.tally.add(kind, what, module, event.cpu_time_total)
            return
        kernels = [kernel for each in _subtree(event) for kernel in each.kernels]
        if not kernels:  # it was captured in a graph, not run
            return
        for kernel in kernels:
            launched = self._launched[kernel.name]
            launched[0] += 1
            launched[1] += kernel.duration
        if kind:
            self.tally.add(kind, what, module, sum(kernel.duration for kernel in kernels))

    def _count_kernels(self, device: list[Any]) -> None:
        seen: _Kernels = collections.defaultdict(lambda: [0, 0.0])
        for event, time_us in _own_times(device):
            seen[event.name][0] += 1
            seen[event.name][1] += time_us
        for name, (calls, time_us) in seen.items():
            found = kernel(name)
            calls -= self._launched[name][0]
            if found is not None and calls > 0:
                rest = max(0.0, time_us - self._launched[name][1])
                self.tally.add(*found, "", rest, int(calls))


def _own_times(kernels: list[Any]) -> Iterator[tuple[Any, float]]:
    """Yields each kernel and its time after the end of earlier kernels in its stream.

    Kernels that start early, as allnorm's kernels do in CUDA graphs, wait until then.
    """
    ended: dict[Any, float] = {}  # by stream
    for event in sorted(kernels, key=lambda event: event.time_range.start):
        span, stream = event.time_range, (event.device_index, event.device_resource_id)
        before = ended.get(stream, span.start)
        yield event, max(0.0, span.end - max(span.start, before))
        ended[stream] = max(span.end, before)


def _is_kernel(event: Any) -> bool:
    ours = event.name.startswith((CALL, MODULE))
    annotation = getattr(event, "is_user_annotation", False)
    return event.device_type != DeviceType.CPU and not ours and not annotation


def _classify(event: Any) -> tuple[str, str] | None:
    """Returns an event's kind and name; the kind is "" for a known event that does not count.

    Returns None for any other event; events inside it may count.
    """
    name = event.name
    if name.startswith(CALL):
        kind, what = name[len(CALL) :].split("|")
        return ("" if kind == "gather" else kind), what
    if name in REDUCTION_OPERATORS:
        return REDUCTION, name
    if name in OTHER_OPERATORS:
        return "", name
    if name in NORM_OPERATORS:
        return NORM, name
    if name.startswith(MODULE):
        kind = name.split("|")[-1]
        if is_norm_class(kind) and _computes_a_norm(event):
            return NORM, kind
    return None


def _computes_a_norm(event: Any) -> bool:
    inside = {child.name for child in _subtree(event)}
    reduces = any(name.startswith(CALL) for name in inside)
    return not reduces and not inside.isdisjoint(NORM_ARITHMETIC)


def _subtree(event: Any) -> Iterator[Any]:
    pending = [event]
    while pending:
        current = pending.pop()
        yield current
        pending.extend(current.cpu_children)


def kernel(name: str) -> tuple[str, str] | None:
    """Returns a kernel's kind and name; None if it is neither a reduction nor a norm."""
    for pattern, kind, what in _KERNELS:
        if pattern.search(name):
            return kind, what
    return None


def is_norm_class(name: str) -> bool:
    """Returns whether modules of this class are RMSNorms."""
    return re.search(r"rms_?norm", name, re.IGNORECASE) is not None
