"""From the events of a profile to a report.

Operators and ranges of the host are counted first, the outermost of several; kernels that none of
them has launched, which is what the replay of a CUDA graph looks like, are counted by their names.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

from torch._C._autograd import DeviceType

from allnorm.tracing import names
from allnorm.tracing.report import NORM, REDUCTION, Tally

# Kernels: how many, and microseconds in them.
_Kernels = dict[str, list[float]]


class Collector:
    """Counts what the events of one profile show.

    Args:
        events: of `torch.profiler.profile`, with their tree.
    """

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
        # Not by recursion: traces of compiled programs are deep.
        pending = [(root, "", False)]
        while pending:
            event, module, inside = pending.pop()
            if event.name.startswith(names.MODULE):
                module = event.name[len(names.MODULE) :].split("|")[0]
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
        if not kernels:  # captured, not run
            return
        for kernel in kernels:
            launched = self._launched[kernel.name]
            launched[0] += 1
            launched[1] += kernel.duration
        if kind:
            self.tally.add(kind, what, module, sum(kernel.duration for kernel in kernels))

    def _count_kernels(self, device: list[Any]) -> None:
        seen: _Kernels = collections.defaultdict(lambda: [0, 0.0])
        for event in device:
            seen[event.name][0] += 1
            seen[event.name][1] += event.time_range.elapsed_us()
        for name, (calls, time_us) in seen.items():
            found = names.kernel(name)
            calls -= self._launched[name][0]
            if found is not None and calls > 0:
                rest = max(0.0, time_us - self._launched[name][1])
                self.tally.add(*found, "", rest, int(calls))


def _is_kernel(event: Any) -> bool:
    ours = event.name.startswith((names.CALL, names.MODULE))
    annotation = getattr(event, "is_user_annotation", False)
    return event.device_type != DeviceType.CPU and not ours and not annotation


def _classify(event: Any) -> tuple[str, str] | None:
    """Kind and name of what an event stands for; an empty kind for what is known and not counted.

    None: it may be inside.
    """
    name = event.name
    if name.startswith(names.CALL):
        kind, what = name[len(names.CALL) :].split("|")
        return ("" if kind == "gather" else kind), what
    if name in names.REDUCTION_OPERATORS:
        return REDUCTION, name
    if name in names.OTHER_OPERATORS:
        return "", name
    if name in names.NORM_OPERATORS:
        return NORM, name
    if name.startswith(names.MODULE):
        kind = name.split("|")[-1]
        if names.is_norm_class(kind) and _computes_a_norm(event):
            return NORM, kind
    return None


def _computes_a_norm(event: Any) -> bool:
    inside = {child.name for child in _subtree(event)}
    reduces = any(name.startswith(names.CALL) for name in inside)
    return not reduces and not inside.isdisjoint(names.NORM_ARITHMETIC)


def _subtree(event: Any) -> Iterator[Any]:
    pending = [event]
    while pending:
        current = pending.pop()
        yield current
        pending.extend(current.cpu_children)
