"""The parts of a communicator that its ranks have opened together, and whether it is open."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from allnorm.core import _native
from allnorm.core.between import Between
from allnorm.core.channel import Channel
from allnorm.core.connection import Connection
from allnorm.core.hierarchical import Hierarchy
from allnorm.core.workspace import Workspace
from allnorm.errors import CommunicatorClosedError


@dataclass(eq=False)
class Opened:
    """The parts of one rank's end of a communicator.

    Attributes:
        name: the name of the communicator, the same on every rank.
        number: the same on every rank; higher than that of every earlier communicator that a rank
            has made of a group of this name, for such a device.
        key: the same on every rank; no other communicator ever has it.
        group: returns the process group; None after close() and when the group was destroyed.
            Weak: torch holds the group until it is destroyed. Held any longer, it would keep gloo
            from ending, which then aborts the interpreter at its exit.
        rank: this rank.
        world_size: the number of ranks.
        device: the device of the tensors.
        timeout: the timeout of every wait.
        library: the library of the backend.
        workspace: the workspaces of all ranks of an island.
        handle: the native communicator; 0 if ranks cannot exchange directly.
        channel: where ranks announce unfused calls; None for one rank.
        hierarchy: this rank's place among several islands: then workspace and handle are those of
            its island; None if there is one island, or nothing hierarchical.
        connection: the process group of unfused calls; None for one rank.
        closed: whether calls are refused.
        process: the process that has opened it.
    """

    name: str
    number: int
    key: str
    group: Callable[[], dist.ProcessGroup | None]
    rank: int
    world_size: int
    device: torch.device
    timeout: datetime.timedelta
    library: _native.Library
    workspace: Workspace
    handle: int = 0
    channel: Channel | None = None
    hierarchy: Hierarchy | None = None
    connection: Connection | None = None
    closed: bool = False
    process: int = field(default_factory=os.getpid)

    def check_open(self) -> None:
        """Raises CommunicatorClosedError after close(), and in a fork."""
        if not self.closed:
            return
        if self.process != os.getpid():
            raise CommunicatorClosedError(
                f"communicator {self.name} belongs to process {self.process}, of which this one, "
                f"{os.getpid()}, is a fork: only that one may use, check or close it. Make another "
                "communicator here, in a process group of its own."
            )
        raise CommunicatorClosedError(f"communicator {self.name} is closed: make a new one.")

    def living_group(self) -> dist.ProcessGroup:
        """Returns the process group; raises if it was destroyed."""
        group = self.group()
        if group is None:
            raise CommunicatorClosedError(
                f"the process group of communicator {self.name} was destroyed: make a new "
                "communicator, in a new group."
            )
        return group

    def exchanges(self) -> list[Connection | Between]:
        """Returns the exchanges through process groups of the communicator's own."""
        own = None if self.hierarchy is None else self.hierarchy.between
        return [one for one in (own, self.connection) if one is not None]

    def in_group(self, fault: _native.Fault) -> _native.Fault:
        """Returns a fault of the native communicator with numbers of ranks of the group."""
        if self.hierarchy is not None:
            ranks = self.hierarchy.ranks
            fault = _native.Fault.from_buffer_copy(fault)
            fault.rank, fault.peer = ranks[fault.rank], ranks[fault.peer]
        return fault
