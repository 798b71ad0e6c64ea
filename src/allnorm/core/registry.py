"""The communicators of this process, found by process group or by name."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from allnorm.errors import AllnormError

if TYPE_CHECKING:
    from allnorm.communicator import Communicator
    from allnorm.core.dispatch import Dispatcher

# Open communicators, keyed by name and device type.
_open: weakref.WeakValueDictionary[tuple[str, str], Communicator] = weakref.WeakValueDictionary()
# Dispatchers of open communicators, keyed by name and by whether they are on CUDA.
_dispatchers: dict[tuple[str, bool], Dispatcher] = {}
# Locks that are held while a communicator of a group is opened, keyed by the group's id.
_opening: dict[int, threading.Lock] = {}
# Names of all communicators that this process has created, keyed by group name and device type.
_made: dict[tuple[str, str], list[str]] = {}
# The number of the latest communicator, with the same keys.
_last_numbers: dict[tuple[str, str], int] = {}
# The communicators from `Communicator.for_group`, keyed by the group's id and the device.
_of_group: dict[tuple[int, torch.device], Communicator] = {}
# Locks that are held while one of these communicators is created, with the same keys.
_making: dict[tuple[int, torch.device], threading.RLock] = {}
# Communicators that are not freed yet; forked children must not touch their resources.
_not_freed: weakref.WeakSet[Communicator] = weakref.WeakSet()


@contextlib.contextmanager
def opening(
    group: dist.ProcessGroup, *, named_as_group: bool
) -> Iterator[Callable[[torch.device], tuple[int, bool]]]:
    """Keeps two threads from opening communicators of one group at the same time.

    Yields:
        A function that takes the device. It returns the number of the latest communicator of a
        group with this name, and whether the new communicator may have the group's name. It raises
        AllnormError if another thread is opening a communicator of the group, so call it in a step
        that reports errors to the other ranks.
    """
    lock = _opening.setdefault(id(group), threading.Lock())
    is_alone = lock.acquire(blocking=False)

    def last_number(device: torch.device) -> tuple[int, bool]:
        if not is_alone and dist.get_world_size(group) > 1:
            raise AllnormError(
                f"two threads of this process create communicators of group {group.group_name} at "
                "the same time: their order differs between ranks, which would connect different "
                "communicators. Create them one after the other, in the same order on every rank, "
                "or use a process group for each."
            )
        # Only the communicator of `for_group` has the group's name. Traced calls look that name up.
        key = group.group_name, device.type
        return _last_numbers.get(key, 0), named_as_group and key not in _open

    try:
        yield last_number
    finally:
        if is_alone:
            lock.release()


def add(comm: Communicator, group: dist.ProcessGroup) -> None:
    """Adds a communicator after it was opened."""
    key = group.group_name, comm.device.type
    _made.setdefault(key, []).append(comm.name)
    _last_numbers[key] = comm._endpoint.number
    _open[comm.name, comm.device.type] = comm
    _dispatchers[comm.name, comm.device.type == "cuda"] = comm._dispatcher
    _not_freed.add(comm)


def remove(comm: Communicator) -> None:
    """Removes a communicator after it was closed."""
    key = comm.name, comm.device.type == "cuda"
    if _dispatchers.get(key) is comm._dispatcher:  # a newer communicator may have the group's name
        _open.pop((comm.name, comm.device.type), None)
        del _dispatchers[key]


def find_of_group(group: dist.ProcessGroup, device: torch.device) -> Communicator | None:
    """Returns the open communicator that `make_of_group` made; None if there is none."""
    comm = _of_group.get((id(group), device))
    return comm if comm is not None and comm._endpoint.is_of(group) else None


def make_of_group(
    group: dist.ProcessGroup, device: torch.device, make: Callable[[], Communicator]
) -> Communicator:
    """Returns the communicator of a group and a device; calls `make` if there is none.

    Other threads that ask for the same communicator wait for it. Threads that ask for the
    communicator of a different group do not wait, because thread order differs between ranks.
    """
    key = id(group), device
    with _making.setdefault(key, threading.RLock()):
        comm = find_of_group(group, device)
        if comm is None:
            if key in _of_group:
                _of_group[key].close()  # it belongs to a destroyed group with the same id
            comm = _of_group[key] = make()
            weakref.finalize(group, _close_of_group, *key).atexit = False
        return comm


def find(name: str, device_type: str | None) -> Communicator | None:
    """Returns the open communicator called `name`; on any device if `device_type` is None."""
    return _open.get((name, device_type or "cuda")) or _open.get((name, device_type or "cpu"))


def open_communicators() -> list[Communicator]:
    """Returns all open communicators of this process, in creation order."""
    return list(_open.values())


def dispatchers() -> dict[tuple[str, bool], Dispatcher]:
    """Returns the live table of open communicators' dispatchers; see `_dispatchers`."""
    return _dispatchers


def made_so_far() -> list[tuple[tuple[str, str], list[str]]]:
    """Returns the names of all communicators created so far, per group name and device type."""
    return sorted(_made.items())


def _close_of_group(group_id: int, device: torch.device) -> None:
    comm = _of_group.pop((group_id, device), None)
    if comm is not None:
        comm.close()


def _close_all_of_groups() -> None:
    for group_id, device in list(_of_group):
        _close_of_group(group_id, device)


def _become_fork() -> None:
    _making.clear()  # another thread of the parent may have held a lock
    _opening.clear()
    _open.clear()
    _dispatchers.clear()
    _of_group.clear()
    for comm in list(_not_freed):
        comm._endpoint.become_fork()


atexit.register(_close_all_of_groups)
os.register_at_fork(after_in_child=_become_fork)
