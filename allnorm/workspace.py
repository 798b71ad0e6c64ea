"""Symmetric workspaces: memory that every rank of a group has mapped.

CUDA: device memory shared through CUDA IPC, freed once every peer has unmapped it. CPU: POSIX
shared memory, whose name is removed as soon as every rank has opened it, so that nothing is left
behind whatever happens later. What a rank leaves that is killed in between, the next group removes.
"""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from allnorm import _native
from allnorm.errors import AllnormError

DEFAULT_BYTES_CUDA = 256 << 20
DEFAULT_BYTES_CPU = 4 << 20
MIN_BYTES = 64 << 10
_LEFTOVER_SECONDS = 600.0
_MAX_WORLD_SIZE = {"cpu": _native.MAX_WORLD_SIZE, "cuda": 8}

_shared_gpus_allowed = False


def allow_shared_gpus(allowed: bool) -> None:
    """Whether a workspace may be made by several ranks of one GPU. The same on every rank.

    They take turns on it: right, but a thousand times slower than a GPU each, so that only tests
    want it (`RankPool(share_gpus=True)`).
    """
    global _shared_gpus_allowed
    _shared_gpus_allowed = allowed


@dataclass
class Workspace:
    """The mapped workspaces of all ranks.

    Attributes:
        addresses: address of every rank's workspace in this process, by rank; empty if there is
            none.
        num_bytes: bytes of each.
        obstacle: why there is none, else empty.
    """

    addresses: list[int]
    num_bytes: int
    obstacle: str = ""
    _release: Callable[[], None] | None = None

    def release(self, unused: Callable[[], bool] = lambda: True) -> None:
        """Unmaps once nothing uses the memory any more; idempotent.

        Args:
            unused: whether that is so. If it is not, the memory stays, and it is asked again when
                other workspaces are made or released.
        """
        release, self._release = self._release, None
        if release is not None:
            _in_use.append((unused, release))
        _release_unused()


# Workspaces to be released when nothing uses them.
_in_use: list[tuple[Callable[[], bool], Callable[[], None]]] = []


def _release_unused() -> None:
    for entry in list(_in_use):
        try:
            _in_use.remove(entry)
        except ValueError:
            continue  # another thread's, or that of a finaliser that has come in between
        unused, release = entry
        if unused():
            release()
        else:
            _in_use.append(entry)


def agree(group: dist.ProcessGroup, step: Callable[[], Any], what: str) -> list[Any]:
    """Runs `step` on every rank and returns all results, or raises on every rank.

    A rank whose step fails raises its own error; the others raise an AllnormError that names it. No
    rank leaves before all have reported, so that no rank waits for one that has given up.
    """
    error: Exception | None = None
    value: Any = None
    try:
        value = step()
    except Exception as caught:  # noqa: BLE001 - reported to every rank, and raised below
        error = caught
    reports: list[Any] = [None] * dist.get_world_size(group)
    report = (value, None if error is None else f"{type(error).__name__}: {error}")
    dist.all_gather_object(reports, report, group=group)
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(reports):
        if failure is not None:
            raise AllnormError(f"{what} failed on rank {rank}: {failure}")
    return [result for result, _ in reports]


def create(group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> Workspace:
    """Makes a workspace of `num_bytes` on every rank. Collective.

    Raises:
        AllnormError, OSError: shared memory could not be made; raised on every rank.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return Workspace([], num_bytes, "one rank: there is nothing to exchange")
    if world_size > _MAX_WORLD_SIZE[device.type]:
        return Workspace([], num_bytes, f"{world_size} ranks are more than the kernels know")
    hosts = agree(group, _host_identity, "finding out the host")
    if len(set(hosts)) > 1:
        return Workspace([], num_bytes, "the ranks are on different hosts")
    if device.type == "cpu":
        return _create_shared_memory(group, num_bytes)
    return _create_device_memory(group, device, num_bytes)


def _host_identity() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot}"


def _remove_leftovers(folder: str = "/dev/shm") -> None:
    """Removes what a process left behind that was killed before it could remove the name itself.

    A name lives for the moments in which the ranks open it. Younger ones are let be: their process
    may be one that cannot be seen from here, in another container.
    """
    for path in glob.glob(f"{folder}/allnorm-*-*"):
        pid = os.path.basename(path).split("-")[1]
        # Another rank may be removing it, or it may be another user's.
        with contextlib.suppress(OSError):
            old = time.time() - os.stat(path).st_mtime > _LEFTOVER_SECONDS
            if old and pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
                os.unlink(path)


def _create_shared_memory(group: dist.ProcessGroup, num_bytes: int) -> Workspace:
    library = _native.library("cpu")
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    total = num_bytes * world_size
    name = ""
    address = 0

    def make() -> str:
        nonlocal address, name
        if rank != 0:
            return ""
        _remove_leftovers()
        name = f"/allnorm-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        address = library.shm_create(name, total)
        return name

    def attach() -> None:
        nonlocal address
        if rank != 0:
            address = library.shm_open(names[0], total)

    def release() -> None:
        if address:
            library.shm_unmap(address, total)

    try:
        names = agree(group, make, "creating shared memory")
        agree(group, attach, "opening shared memory")
    except BaseException:
        release()
        raise
    finally:
        if name and address:
            library.shm_unlink(name)
    addresses = [address + r * num_bytes for r in range(world_size)]
    return Workspace(addresses, num_bytes, _release=release)


# Own device memory that a peer had still mapped when this rank left: (device, rank, world size,
# address). Freed once that has changed.
_left_behind: list[tuple[int, int, int, int]] = []


def _free_left_behind() -> None:
    library = _native.library("cuda")
    _left_behind[:] = [entry for entry in _left_behind if not library.ipc_free(*entry)]


def _create_device_memory(
    group: dist.ProcessGroup, device: torch.device, num_bytes: int
) -> Workspace:
    library = _native.library("cuda")
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    index = device.index
    addresses = [0] * world_size
    torch.cuda.init()

    def allocate() -> tuple[str, bytes]:
        properties = torch.cuda.get_device_properties(device)
        _release_unused()
        _free_left_behind()
        addresses[rank], handle = library.ipc_create(index, num_bytes)
        return str(getattr(properties, "uuid", index)), handle

    def attach() -> str:
        try:
            for peer, (_, handle) in enumerate(shared):
                if peer != rank:
                    addresses[peer] = library.ipc_open(index, handle)
        except OSError as error:
            return f"no peer-to-peer access: {error}"
        return ""

    def release() -> None:
        try:
            library.ipc_leave(index, rank, addresses)
        finally:
            if addresses[rank]:
                _left_behind.append((index, rank, world_size, addresses[rank]))
            addresses[:] = [0] * world_size
            _free_left_behind()

    try:
        shared = agree(group, allocate, "allocating the workspace")
        if len({uuid for uuid, _ in shared}) < world_size and not _shared_gpus_allowed:
            obstacles = ["several ranks share one GPU"]
        else:
            obstacles = [text for text in agree(group, attach, "mapping the workspace") if text]
    except BaseException:
        release()
        raise
    if obstacles:
        # Every rank has ended its attempts, but one that never opened a workspace says nothing
        # there: so all unmap first and then free.
        own, addresses[rank] = addresses[rank], 0
        agree(group, release, "unmapping the workspace")
        library.ipc_free(index, rank, 0, own)
        return Workspace([], num_bytes, str(obstacles[0]).splitlines()[0])
    return Workspace(list(addresses), num_bytes, _release=release)
