"""Finds or creates the communicator for a reduction's process group."""

from __future__ import annotations

import concurrent.futures
import gc
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from allnorm.communicator import Communicator
from allnorm.compile.candidate import Missed
from allnorm.compile.reductions import Reduction
from allnorm.core.registry import open_communicators

# Keeps the communicators alive that a pass found or created: compiled graphs hold only their names.
_named: list[Communicator] = []


def check_group(reduction: Reduction, device: torch.device, given: Communicator | None) -> None:
    """Raises Missed, with the reason, unless a communicator exists or can be created.

    Not collective. `given` is the caller's communicator.
    """
    if given is not None:
        _check_given(reduction, device, given)
    elif reduction.comm_name is not None:
        return
    elif reduction.group is None:
        raise Missed("the graph does not name its process group as a constant: pass communicator=")
    elif not dist.is_initialized():
        raise Missed(
            "torch.distributed is not initialized: call init_process_group() first, or pass "
            "communicator="
        )
    elif _group(reduction.group) is None:
        raise Missed(
            f"this process has no process group named {reduction.group!r}: pass communicator="
        )


def group_of(reduction: Reduction, given: Communicator | None) -> dist.ProcessGroup | None:
    """Returns a reduction's process group; None if it is unknown or not the communicator's."""
    if given is not None:
        is_mine = reduction.comm_name == given.name or _is_over(reduction, given)
        return given.group if is_mine else None
    if reduction.comm_name is not None:
        open_now = (c for c in open_communicators() if c.name == reduction.comm_name)
        return next((c.group for c in open_now), None)
    return _group(reduction.group) if dist.is_initialized() else None


def communicator_name(
    reduction: Reduction, device: torch.device, given: Communicator | None
) -> str:
    """Returns the name of a reduction's communicator on a device. Collective if it creates one.

    If the caller passed no communicator, this is the oldest open communicator for the reduction's
    group and device, or a new one.
    """
    if given is not None:
        return given.name
    if reduction.comm_name is not None:
        return reduction.comm_name
    group, device = _group(reduction.group), _indexed(device)
    assert group is not None
    _named[:] = [communicator for communicator in _named if not communicator.is_closed]
    found = _first_on(group, device, _named)
    if found is None:
        # Either all ranks must create a communicator or none. So a communicator that was dropped
        # without close() must be freed on all ranks, not only where garbage was already collected.
        gc.collect()
        found = _first_on(group, device, open_communicators()) or _make_in_thread(group, device)
        _named.append(found)
    return found.name


def _first_on(
    group: dist.ProcessGroup, device: torch.device, communicators: list[Communicator]
) -> Communicator | None:
    # Compares groups, not names: an earlier group with the same name may have been destroyed.
    same = (c for c in communicators if c.group == group and c.device == device)
    return next(same, None)


def _make_in_thread(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    """Creates a communicator on a different thread, which avoids a deadlock during compilation.

    Inductor enables PyTorch's Python dispatcher, which holds the GIL in operators such as Gloo's
    enqueue(). enqueue() waits for a lock. Gloo's worker may hold that lock while it waits for the
    GIL to free the tensors of an earlier collective.
    """

    def make() -> Communicator:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL uses the current device, which is 0 in new threads
        return Communicator.for_group(group, device)

    with concurrent.futures.ThreadPoolExecutor(1, "allnorm-communicator") as thread:
        return thread.submit(make).result()


def _check_given(reduction: Reduction, device: torch.device, given: Communicator) -> None:
    if _indexed(device) != given.device:
        raise Missed(f"its tensor is on {device}, the communicator on {given.device}")
    if reduction.comm_name is not None:
        if reduction.comm_name != given.name:
            raise Missed(f"it uses communicator {reduction.comm_name}: expected {given.name}")
        return
    if _is_over(reduction, given):
        return
    if reduction.group is None:
        raise Missed("the graph does not name its process group as a constant")
    assert given.group is not None, "closed"
    raise Missed(
        f"it reduces over group {reduction.group!r}, the communicator over "
        f"{given.group.group_name!r}: pass a communicator of its group"
    )


def _is_over(reduction: Reduction, given: Communicator) -> bool:
    """Returns whether a reduction runs over the group of the caller's communicator.

    A custom operator is assumed to do so, unless it names a different torch process group.
    """
    if reduction.named_by_caller and _group(reduction.group) is None:
        return True
    return given.group is not None and reduction.group == given.group.group_name


def _group(name: str | None) -> dist.ProcessGroup | None:
    """Returns the process group with this name."""
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    try:
        return None if name is None else resolve(name)
    except (RuntimeError, ValueError, KeyError):
        return None


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device
