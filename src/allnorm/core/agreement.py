"""The agreement of all ranks on a call before they make it through a process group."""

from __future__ import annotations

import contextlib

from allnorm.core.announcement import Announcement
from allnorm.core.channel import Channel, Waits
from allnorm.core.prepared_call import PreparedCall
from allnorm.errors import PeerDivergedError


def refuse(channel: Channel | None, waits: Waits) -> None:
    """Announces that this rank refuses the call, instead of making it. Collective.

    Every rank that does not refuse raises PeerDivergedError.
    """
    if channel is not None:
        with contextlib.suppress(PeerDivergedError):
            _agree(Announcement.of_refusal(), channel, waits)


def agree(prepared: PreparedCall, channel: Channel, waits: Waits) -> None:
    """Raises on every rank unless all are about to make the same call. Collective."""
    _agree(Announcement.of(prepared), channel, waits)


def _agree(mine: Announcement, channel: Channel, waits: Waits) -> None:
    """Raises on every rank unless all have announced the same. Collective."""
    words = mine.words
    announced = [Announcement(tuple(theirs)) for theirs in channel.gather(words, waits)]
    others = [rank for rank, other in enumerate(announced) if other != mine]
    if not others:
        # Once more: now every rank knows that none was interrupted while it waited for the others.
        # Nobody could end the wait in the process group for one that will not come.
        channel.gather(words, waits)
        return
    rank, peer = waits.rank, others[0]
    raise PeerDivergedError(
        f"rank {rank} does another call than rank {peer}, both through the process group. Expected "
        f"{mine}. Seen from rank {peer}: {announced[peer]}. "
        f"{mine.differences(rank, announced[peer], peer)}"
        "Nothing was computed: make the same call on every rank.",
        rank=rank,
        peer=peer,
        op=0,
        expected=str(mine),
        seen=str(announced[peer]),
    )
