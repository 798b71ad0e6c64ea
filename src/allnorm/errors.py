"""Errors raised by allnorm."""

from __future__ import annotations


class AllnormError(Exception):
    """Base class of allnorm's errors; wrong arguments raise ValueError or TypeError instead."""


class UnsupportedError(AllnormError, ValueError):
    """A shape, dtype, device, world size or algorithm is not supported."""


class ConfigurationError(AllnormError, ValueError):
    """An ``ALLNORM_*`` environment variable is misspelled or has an invalid value."""


class CommunicatorClosedError(AllnormError):
    """A call on a communicator after ``close()``."""


class NativeLibraryError(AllnormError, ImportError):
    """A native library is missing, cannot be loaded, or belongs to a different build."""


class PeerTimeoutError(AllnormError):
    """A wait for a peer timed out. The communicator is unusable afterwards.

    Attributes:
        rank: this rank.
        peer: the rank that this rank waited for; -1 if the process group did not report it.
        op: number of this rank's operation; counts launches and wraps at 2**32. 0 if calls through
            the process group diverged.
        expected: description of what this rank waited for.
        seen: description of the peer's last announcement.
    """

    # The defaults are needed for unpickling, which passes only the message and then sets the
    # attributes.
    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        peer: int = -1,
        op: int = 0,
        expected: str = "",
        seen: str = "nothing",
    ) -> None:
        super().__init__(message)
        self.rank, self.peer, self.op = rank, peer, op
        self.expected, self.seen = expected, seen


class PeerDivergedError(PeerTimeoutError):
    """A peer made a different call: different shape, dtype, op, algorithm or rounding mode.

    If all ranks ran "unfused" or "hierarchical", nothing was computed and the communicator remains
    usable.
    """


class PeerDiedError(PeerTimeoutError):
    """The process of a peer exited while this rank waited for it."""


class PeerLeftError(PeerTimeoutError):
    """A peer closed its communicator, or was interrupted in a call, while this rank waited."""
