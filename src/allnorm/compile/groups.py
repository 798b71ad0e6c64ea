"""Which communicator stands for the process group of a reduction."""

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

# Communicators that a pass found or made: a compiled graph knows only their names.
_named: list[Communicator] = []


def check_group(reduction: Reduction, device: torch.device, given: Communicator | None) -> None:
    """Checks whether there can be a communicator for a reduction; not collective.

    Args:
        reduction: of a graph.
        device: of what it reduces.
        given: the caller's, or None.

    Raises:
        Missed: there can be none.
    """
    if given is not None:
        _check_given(reduction, device, given)
    elif reduction.comm_name is None:
        if reduction.group is None:
            raise Missed("its process group is not a constant of the graph: pass communicator=")
        if not dist.is_initialized():
            raise Missed("torch.distributed is not initialized: there is no communicator to use")
        if _group(reduction.group) is None:
            raise Missed(f"there is no process group called {reduction.group!r} here")


def group_of(reduction: Reduction, given: Communicator | None) -> dist.ProcessGroup | None:
    """Returns the process group of a reduction; None if it is not known or not the caller's."""
    if given is not None:
        vouched = reduction.named_by_caller and _group(reduction.group) is None
        mine = None if given.group is None else given.group.group_name
        is_mine = vouched or reduction.comm_name == given.name
        return given.group if is_mine or reduction.group == mine else None
    if reduction.comm_name is not None:
        open_now = (c for c in open_communicators() if c.name == reduction.comm_name)
        return next((c.group for c in open_now), None)
    return _group(reduction.group) if dist.is_initialized() else None


def communicator_name(
    reduction: Reduction, device: torch.device, given: Communicator | None
) -> str:
    """Returns the name of the communicator for a reduction; collective if it has to be made.

    Args:
        reduction: one that `check_group` has let pass.
        device: of what it reduces.
        given: the caller's; None to use the oldest one open on that group and device, or make one.
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
        # One that was dropped without being closed is gone now on all ranks, and not on those only
        # whose garbage collectors have seen it: all make one, or none.
        gc.collect()
        found = _first_on(group, device, open_communicators()) or _made_aside(group, device)
        _named.append(found)
    return found.name


def _first_on(
    group: dist.ProcessGroup, device: torch.device, communicators: list[Communicator]
) -> Communicator | None:
    # By the group itself: one of the same name may have been destroyed since.
    same = (c for c in communicators if c.group == group and c.device == device)
    return next(same, None)


def _made_aside(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    """A new communicator, made on a thread that knows nothing of the compilation going on here.

    Inductor compiles with PyTorch's Python dispatcher on, which takes the GIL around operators.
    Gloo's enqueue() is one of them and waits for a lock that Gloo's worker may hold while it frees
    the tensors of an older collective, for which it in turn wants the GIL: they would hang.
    """

    def make() -> Communicator:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread starts with device 0; NCCL takes the current
        return Communicator.for_group(group, device)

    with concurrent.futures.ThreadPoolExecutor(1, "allnorm-communicator") as thread:
        return thread.submit(make).result()


def _check_given(reduction: Reduction, device: torch.device, given: Communicator) -> None:
    if _indexed(device) != given.device:
        raise Missed(f"it is on {device}, the communicator on {given.device}")
    if reduction.comm_name is not None:
        if reduction.comm_name != given.name:
            raise Missed(f"it is on communicator {reduction.comm_name}, not on {given.name}")
        return
    assert given.group is not None, "closed"
    mine = given.group.group_name
    # The caller vouches for an operator of its own, unless it names another group of torch.
    vouched = reduction.named_by_caller and _group(reduction.group) is None
    if reduction.group != mine and not vouched:
        if reduction.group is None:
            raise Missed("its process group is not a constant of the graph")
        raise Missed(f"it is over group {reduction.group!r}, the communicator over {mine!r}")


def _group(name: str | None) -> dist.ProcessGroup | None:
    """The process group with this name."""
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    try:
        return None if name is None else resolve(name)
    except (RuntimeError, ValueError, KeyError):
        return None


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device
