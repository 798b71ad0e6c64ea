"""Makes all ranks agree on a call before they run it through a process group."""

from __future__ import annotations

import contextlib

from allnorm.core.announcement import Announcement
from allnorm.core.channel import Channel, Waits
from allnorm.core.prepared_call import PreparedCall
from allnorm.errors import PeerDivergedError


def refuse(channel: Channel | None, waits: Waits) -> None:
    """Announces that this rank refuses the call. Collective.

    Ranks that do not refuse raise PeerDivergedError.
    """
    if channel is not None:
        with contextlib.suppress(PeerDivergedError):
            _agree(Announcement.of_refusal(), channel, waits)


def agree(prepared: PreparedCall, channel: Channel, waits: Waits) -> None:
    """Raises on every rank unless all are about to make the same call. Collective."""
    _agree(Announcement.of(prepared), channel, waits)


def _agree(mine: Announcement, channel: Channel, waits: Waits) -> None:
    """Raises on every rank unless all announce the same call. Collective."""
    words = mine.words
    channel.announced = mine
    announced = [Announcement(tuple(theirs)) for theirs in channel.gather(words, waits)]
    others = [rank for rank, other in enumerate(announced) if other != mine]
    if not others:
        # The second round tells every rank that no rank was interrupted in the first. Once the call
        # is under way, nothing could end the process group's wait for an interrupted rank.
        channel.gather(words, waits)
        return
    rank, peer = waits.rank, others[0]
    raise PeerDivergedError(
        f"rank {rank} makes a different call than rank {peer}, both through the process group. "
        f"Expected {mine}. Seen from rank {peer}: {announced[peer]}. "
        f"{mine.differences(rank, announced[peer], peer)}"
        "Nothing was computed: make the same call on every rank.",
        rank=rank,
        peer=peer,
        op=0,
        expected=str(mine),
        seen=str(announced[peer]),
    )
