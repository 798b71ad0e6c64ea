"""Symmetric workspaces: memory that every rank of a group has mapped.

CUDA: PyTorch symmetric memory with multicast off. CPU: POSIX shared memory, whose name is removed
as soon as every rank has opened it, so that nothing is left behind whatever happens later.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from allnorm import _native, config
from allnorm.errors import AllnormError

DEFAULT_BYTES_CUDA = 256 << 20
DEFAULT_BYTES_CPU = 4 << 20
MIN_BYTES = 64 << 10


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
    _keep: list[Any] = field(default_factory=list)
    _release: Callable[[], None] | None = None

    def release(self) -> None:
        """Unmaps; idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()
        self._keep.clear()


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
    if dist.get_world_size(group) == 1:
        return Workspace([], num_bytes, "one rank: there is nothing to exchange")
    hosts = agree(group, _host_identity, "finding out the host")
    if len(set(hosts)) > 1:
        return Workspace([], num_bytes, "the ranks are on different hosts")
    if device.type == "cpu":
        return _create_shared_memory(group, num_bytes)
    return _create_symmetric_memory(group, device, num_bytes)


def _host_identity() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot}"


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


def _create_symmetric_memory(
    group: dist.ProcessGroup, device: torch.device, num_bytes: int
) -> Workspace:
    config.disable_multicast()
    import torch.distributed._symmetric_memory as symm_mem

    def uuid_of_device() -> str:
        return str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))

    devices = agree(group, uuid_of_device, "reading the device")
    if len(set(devices)) < len(devices):
        return Workspace([], num_bytes, "several ranks share one GPU")

    buffer: Any = None
    problem = ""
    addresses: list[int] = []
    keep: list[Any] = []

    def allocate() -> Any:
        nonlocal buffer, problem
        try:
            for peer in range(torch.cuda.device_count()):
                if peer != device.index and not torch.cuda.can_device_access_peer(device, peer):
                    problem = f"{device} has no P2P access to cuda:{peer}"
                    return problem
            buffer = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, AttributeError) as error:
            problem = f"no symmetric memory: {error}"
        return problem

    def exchange() -> Any:
        nonlocal addresses, problem
        try:
            handle = symm_mem.rendezvous(buffer, group=group.group_name)
            addresses = [int(address) for address in handle.buffer_ptrs]
            keep.append(handle)
        except RuntimeError as error:
            problem = f"no symmetric memory: {error}"
        return problem

    for step in (allocate, exchange):
        obstacles = [text for text in agree(group, step, "making the workspace") if text]
        if obstacles:
            return Workspace([], num_bytes, str(obstacles[0]).splitlines()[0])
    keep.append(buffer)
    return Workspace(addresses, num_bytes, _keep=keep)
