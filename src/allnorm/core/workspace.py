"""Symmetric workspaces: memory that every rank of a group maps.

CUDA: device memory, shared through CUDA IPC and freed once every peer has unmapped it. CPU: POSIX
shared memory. Its name is removed as soon as every rank has opened it, so that nothing is left
behind later. If a rank is killed before that, the other ranks remove the name; if all ranks are
killed, the next group does.
"""

from __future__ import annotations

import contextlib
import glob
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import torch

from allnorm import islands
from allnorm.core import _native, backends, watch
from allnorm.core.notes import NOTE_BYTES
from allnorm.core.rendezvous import Rendezvous

DEFAULT_BYTES_CUDA = 256 << 20
DEFAULT_BYTES_CPU = 4 << 20
MIN_BYTES = 64 << 10
_LEFTOVER_SECONDS = 600.0
# The time that a probe may take to reach a peer that has mapped the memory; usually microseconds.
_PROBE_SECONDS = 3.0
_MAX_WORLD_SIZE = {"cpu": _native.MAX_WORLD_SIZE, "cuda": 8}

_shared_gpus_allowed = False


def allow_shared_gpus(allowed: bool) -> None:
    """Sets whether multiple ranks on one GPU may create workspaces. Set it alike on every rank.

    Ranks that share a GPU run one at a time, a thousand times slower. So only tests allow it
    (`RankPool(share_gpus=True)`).
    """
    global _shared_gpus_allowed
    _shared_gpus_allowed = allowed


@dataclass
class Workspace:
    """The mapped workspaces of all ranks."""

    addresses: list[int]  # where each rank's workspace is mapped here; empty without workspaces
    num_bytes: int  # size of each workspace
    obstacle: str = ""  # why no workspaces exist; empty if they exist
    _release: Callable[[], None] | None = None
    # If some devices do not reach others: the groups of ranks that reach each other, provided that
    # reachability is transitive. Otherwise empty.
    reach: islands.Islands = ()
    # Address of every rank's note (notes.py), initially zeros, in host memory that is released with
    # the workspaces. Empty on CUDA.
    notes: tuple[int, ...] = ()

    def release(self) -> None:
        """Unmaps the workspaces. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()


def create(meeting: Rendezvous, device: torch.device, num_bytes: int) -> Workspace:
    """Creates a workspace of `num_bytes` on every rank. Collective.

    Raises:
        PeerTimeoutError: a rank did not come.
        AllnormError, OSError: shared memory could not be created; raised on every rank.
    """
    world_size = meeting.world_size
    if world_size == 1:
        return Workspace([], num_bytes, "one rank: there is nothing to exchange")
    if world_size > _MAX_WORLD_SIZE[device.type]:
        return Workspace([], num_bytes, f"{world_size} ranks are more than the kernels support")
    if device.type == "cpu":
        return create_shared_memory(meeting, num_bytes)
    return _create_device_memory(meeting, device, num_bytes)


def hosts(meeting: Rendezvous) -> islands.Islands:
    """Returns the ranks of each host. Collective."""
    return islands.group_islands(meeting.agree(_host_identity, "finding out the host"))


def on_one_host(meeting: Rendezvous) -> bool:
    """Returns whether all ranks are on one host. Collective."""
    return len(hosts(meeting)) == 1


def _host_identity() -> str:
    """Returns a string that is equal in all processes that can share memory: boot id and /dev/shm.

    Containers on one host have different host names, and may or may not share /dev/shm.
    """
    machine = watch.machine_id()
    try:
        memory = os.stat("/dev/shm").st_dev
    except OSError:
        return machine
    return f"{machine} {memory}"


def _remove_leftovers(folder: str = "/dev/shm") -> None:
    """Removes shared memory of processes that were killed before they could remove its name.

    A name exists only while the ranks open it. Recent names are kept, because their process may be
    invisible from here, in a different container.
    """
    for path in glob.glob(f"{folder}/allnorm-*-*"):
        pid = os.path.basename(path).split("-")[1]
        # Another rank may be removing it, or it may be another user's.
        with contextlib.suppress(OSError):
            old = time.time() - os.stat(path).st_mtime > _LEFTOVER_SECONDS
            if old and pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
                os.unlink(path)


def create_shared_memory(meeting: Rendezvous, num_bytes: int) -> Workspace:
    """Creates host memory that all ranks of one host map. Collective."""
    library = _native.library("cpu")
    rank, world_size = meeting.rank, meeting.world_size
    total = (num_bytes + NOTE_BYTES) * world_size
    address = 0
    # All ranks know the name before the memory exists, so that a surviving rank can remove it.
    names = meeting.agree(
        lambda: f"/allnorm-{os.getpid()}-{uuid.uuid4().hex[:12]}", "naming shared memory"
    )

    def make() -> None:
        nonlocal address
        if rank == 0:
            _remove_leftovers()
            address = library.shm_create(names[0], total)

    def attach() -> None:
        nonlocal address
        if rank != 0:
            address = library.shm_open(names[0], total)

    def release() -> None:
        if address:
            library.shm_unmap(address, total)

    try:
        meeting.agree(make, "creating shared memory")
        meeting.agree(attach, "opening shared memory")
    except BaseException:
        release()
        raise
    finally:
        # Every rank tries to remove the name, because rank 0 may have been killed.
        with contextlib.suppress(OSError):
            library.shm_unlink(names[0])
    addresses = [address + r * num_bytes for r in range(world_size)]
    after = address + num_bytes * world_size
    notes = tuple(after + r * NOTE_BYTES for r in range(world_size))
    return Workspace(addresses, num_bytes, _release=release, notes=notes)


# Own device memory that a peer still mapped when this rank left: (device, rank, world size,
# address). It is freed later.
_left_behind: list[tuple[int, int, int, int]] = []


def _free_left_behind() -> None:
    library = backends.library("cuda")
    _left_behind[:] = [entry for entry in _left_behind if not library.ipc_free(*entry)]


def _allocate(library: _native.Library, device: torch.device, num_bytes: int) -> tuple[int, bytes]:
    """Allocates device memory; returns its address and its handle.

    Raises:
        MemoryError: the device has too little memory, even after torch has emptied its cache.
    """
    try:
        return library.ipc_create(device.index, num_bytes)
    except OSError:
        torch.cuda.empty_cache()
    try:
        return library.ipc_create(device.index, num_bytes)
    except OSError as error:
        free, total = (size >> 20 for size in torch.cuda.mem_get_info(device))
        used = torch.cuda.memory_allocated(device) >> 20
        raise MemoryError(
            f"a workspace of {num_bytes / 2**20:g} MiB on {device}: {error}. {free} of {total} MiB "
            f"are free, tensors of this process take {used} MiB. Pass a smaller workspace_bytes, "
            "or make the Communicator before the memory is taken."
        ) from error


def _create_device_memory(meeting: Rendezvous, device: torch.device, num_bytes: int) -> Workspace:
    library = backends.library("cuda")
    rank, world_size = meeting.rank, meeting.world_size
    index = device.index
    addresses = [0] * world_size
    torch.cuda.init()

    def allocate() -> tuple[str, bytes]:
        properties = torch.cuda.get_device_properties(device)
        _free_left_behind()
        addresses[rank], handle = _allocate(library, device, num_bytes)
        return str(getattr(properties, "uuid", index)), handle

    def attach() -> dict[int, str]:
        failed = {}
        for peer, (_, handle) in enumerate(shared):
            if peer == rank:
                continue
            try:
                addresses[peer] = library.ipc_open(index, handle)
            except OSError as error:
                failed[peer] = f"no peer-to-peer access: {error}"
        return failed

    def probe() -> dict[int, str]:
        """Returns the peers whose stores do not arrive here."""
        numbers = index, rank, world_size
        missing = library.ipc_probed(*numbers, addresses[rank], int(_PROBE_SECONDS * 1e9))
        return {
            peer: (
                f"stores of rank {meeting.ranks[peer]} do not reach rank {meeting.ranks[rank]} "
                "although its memory is mapped: peer access between their GPUs loses data, usually "
                "because of an IOMMU or PCIe ACS"
            )
            for peer in missing
        }

    def release() -> None:
        try:
            library.ipc_leave(index, rank, addresses)
        finally:
            if addresses[rank]:
                _left_behind.append((index, rank, world_size, addresses[rank]))
            addresses[:] = [0] * world_size
            _free_left_behind()

    try:
        shared = meeting.agree(allocate, "allocating the workspace")
        reach: islands.Islands = ()
        if len({uuid for uuid, _ in shared}) < world_size and not _shared_gpus_allowed:
            obstacles = ["several ranks share one GPU"]
        else:
            failed = meeting.agree(attach, "mapping the workspace")
            if not any(failed):
                meeting.agree(lambda: library.ipc_probe(index, rank, addresses), "probing peers")
                failed = meeting.agree(probe, "waiting for the probes of peers")
            obstacles = [text for of_rank in failed for text in of_rank.values()]
            reach = islands.split_by_reach(failed)
    except BaseException:
        release()
        raise
    if obstacles:
        # All ranks have stopped trying. A rank that never opened a workspace does not signal that
        # it left, so all ranks unmap first and then free.
        own, addresses[rank] = addresses[rank], 0
        meeting.agree(release, "unmapping the workspace")
        library.ipc_free(index, rank, 0, own)
        return Workspace([], num_bytes, str(obstacles[0]).splitlines()[0], reach=reach)
    return Workspace(list(addresses), num_bytes, _release=release)
