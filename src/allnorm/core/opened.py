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
    """The parts of one rank's end of a communicator."""

    name: str  # equal on every rank
    # equal on every rank; higher than that of every earlier communicator of a group with this name
    number: int
    key: str  # unique; equal on every rank
    # Returns the process group; None after close() and after the group was destroyed. A strong
    # reference would keep gloo alive until the interpreter exits, and the exit would then abort.
    group: Callable[[], dist.ProcessGroup | None]
    rank: int
    world_size: int
    device: torch.device
    timeout: datetime.timedelta
    library: _native.Library
    workspace: Workspace  # workspaces of all ranks of an island
    handle: int = 0  # native communicator; 0 if ranks cannot exchange directly
    channel: Channel | None = None  # for announcements of unfused calls; None for one rank
    # this rank's position among multiple islands; workspace and handle then belong to its island
    hierarchy: Hierarchy | None = None
    connection: Connection | None = None  # for unfused calls; None for one rank
    closed: bool = False  # whether calls are refused
    process: int = field(default_factory=os.getpid)  # process that opened the communicator

    def check_open(self) -> None:
        """Raises CommunicatorClosedError after close(), and in a forked child."""
        if not self.closed:
            return
        if self.process != os.getpid():
            raise CommunicatorClosedError(
                f"communicator {self.name} belongs to process {self.process}, and this process, "
                f"{os.getpid()}, is a fork of it: only process {self.process} may use, check or "
                "close it. Create a communicator here, in its own process group."
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
        """Returns the exchanges that go through process groups."""
        own = None if self.hierarchy is None else self.hierarchy.between
        return [one for one in (own, self.connection) if one is not None]

    def in_group(self, fault: _native.Fault) -> _native.Fault:
        """Returns the native communicator's fault, with its ranks numbered as in the group."""
        if self.hierarchy is not None:
            ranks = self.hierarchy.ranks
            fault = _native.Fault.from_buffer_copy(fault)
            fault.rank, fault.peer = ranks[fault.rank], ranks[fault.peer]
        return fault
