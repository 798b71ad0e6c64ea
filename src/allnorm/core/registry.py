"""The communicators of this process: which one a process group, or a name, stands for."""

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

# Open communicators, by name and kind of device.
_open: weakref.WeakValueDictionary[tuple[str, str], Communicator] = weakref.WeakValueDictionary()
# What runs their calls, by name and whether they are on CUDA.
_dispatchers: dict[tuple[str, bool], Dispatcher] = {}
# Held while a communicator of a group is opened, by the id of the group.
_opening: dict[int, threading.Lock] = {}
# The names of all communicators that this process has made, by the group's name and device type.
_made: dict[tuple[str, str], list[str]] = {}
# The number of the latest communicator, by the same.
_last_numbers: dict[tuple[str, str], int] = {}
# The communicators of `Communicator.for_group`, by the id of the group.
_of_group: dict[tuple[int, torch.device], Communicator] = {}
# Held while one of them is made.
_making: dict[tuple[int, torch.device], threading.RLock] = {}
# All communicators that are not freed: a child of fork() must not touch what they use.
_living: weakref.WeakSet[Communicator] = weakref.WeakSet()


@contextlib.contextmanager
def opening(
    group: dist.ProcessGroup, *, named_as_group: bool
) -> Iterator[Callable[[torch.device], tuple[int, bool]]]:
    """Keeps two threads from opening communicators of one group at the same time.

    Args:
        group: the ranks of the communicator that is opened.
        named_as_group: whether it is to have the group's name.

    Yields:
        A function of the device: returns the number of the last communicator of a group of this
        name, and whether the new one may have the group's name. It raises AllnormError if another
        thread is opening one: the caller calls it where the other ranks learn of the error.
    """
    lock = _opening.setdefault(id(group), threading.Lock())
    is_alone = lock.acquire(blocking=False)

    def last_number(device: torch.device) -> tuple[int, bool]:
        if not is_alone and dist.get_world_size(group) > 1:
            raise AllnormError(
                f"two threads of this process make communicators of group {group.group_name} at "
                "the same time: which of them comes first differs from rank to rank, so ranks "
                "would take one for the other. Make them one after the other, in the same order "
                "on every rank, or of a process group each."
            )
        # Traced calls name the communicator of `for_group` by the group's name, no other one.
        key = group.group_name, device.type
        return _last_numbers.get(key, 0), named_as_group and key not in _open

    try:
        yield last_number
    finally:
        if is_alone:
            lock.release()


def add(comm: Communicator, group: dist.ProcessGroup) -> None:
    """Adds a communicator that was opened."""
    key = group.group_name, comm.device.type
    _made.setdefault(key, []).append(comm.name)
    _last_numbers[key] = comm._endpoint.number
    _open[comm.name, comm.device.type] = comm
    _dispatchers[comm.name, comm.device.type == "cuda"] = comm._dispatcher
    _living.add(comm)


def remove(comm: Communicator) -> None:
    """Removes a communicator that was closed."""
    key = comm.name, comm.device.type == "cuda"
    if _dispatchers.get(key) is comm._dispatcher:  # another may have the name of a group by now
        _open.pop((comm.name, comm.device.type), None)
        del _dispatchers[key]


def find_of_group(group: dist.ProcessGroup, device: torch.device) -> Communicator | None:
    """Returns the open communicator that `make_of_group` made; None if there is none."""
    comm = _of_group.get((id(group), device))
    return comm if comm is not None and comm._endpoint.is_of(group) else None


def make_of_group(
    group: dist.ProcessGroup, device: torch.device, make: Callable[[], Communicator]
) -> Communicator:
    """Returns the one communicator of a group and a device; calls `make` if there is none.

    Another thread that asks for the same one meanwhile waits, and gets it. A thread that asks for
    that of another group must not wait: which thread comes first differs from rank to rank.
    """
    key = id(group), device
    with _making.setdefault(key, threading.RLock()):
        comm = find_of_group(group, device)
        if comm is None:
            if key in _of_group:
                _of_group[key].close()  # of a group with the same id that is gone
            comm = _of_group[key] = make()
            weakref.finalize(group, _close_of_group, *key).atexit = False
        return comm


def find(name: str, device_type: str | None) -> Communicator | None:
    """Returns the open communicator called `name`; on any device if `device_type` is None."""
    return _open.get((name, device_type or "cuda")) or _open.get((name, device_type or "cpu"))


def open_communicators() -> list[Communicator]:
    """Returns all open communicators of this process, in the order of their making."""
    return list(_open.values())


def dispatchers() -> dict[tuple[str, bool], Dispatcher]:
    """Returns the live table of dispatchers of open communicators, by name and whether on CUDA."""
    return _dispatchers


def made_so_far() -> list[tuple[tuple[str, str], list[str]]]:
    """Returns the names of all communicators ever made here, by group and device type."""
    return sorted(_made.items())


def _close_of_group(group_id: int, device: torch.device) -> None:
    comm = _of_group.pop((group_id, device), None)
    if comm is not None:
        comm.close()


def _close_all_of_groups() -> None:
    for group_id, device in list(_of_group):
        _close_of_group(group_id, device)


def _become_fork() -> None:
    _making.clear()  # another thread of the parent may have held one
    _opening.clear()
    _open.clear()
    _dispatchers.clear()
    _of_group.clear()
    for comm in list(_living):
        comm._endpoint.become_fork()


atexit.register(_close_all_of_groups)
os.register_at_fork(after_in_child=_become_fork)
