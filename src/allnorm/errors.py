"""Errors raised by allnorm."""

from __future__ import annotations


class AllnormError(Exception):
    """Base of every error that is not a plain wrong argument."""


class UnsupportedError(AllnormError, ValueError):
    """A shape, dtype, device, world size or algorithm that cannot run at all."""


class ConfigurationError(AllnormError, ValueError):
    """An ``ALLNORM_*`` environment variable that is misspelled or cannot be read."""


class CommunicatorClosedError(AllnormError):
    """A call on a communicator after ``close()``."""


class NativeLibraryError(AllnormError, ImportError):
    """A native library is missing, cannot be loaded, or is of another build."""


class PeerTimeoutError(AllnormError):
    """A peer did not come before the deadline. The communicator is unusable from then on.

    Attributes:
        rank: this rank.
        peer: the rank that was waited for; -1 where the process group did not say who it was.
        op: the operation number this rank was in; counts launches, wraps at 2**32. 0 where calls
            that went through the process group diverged.
        expected: what this rank waited for, in words.
        seen: what the peer last announced, in words.
    """

    # With defaults, so that it can be pickled as exceptions are: made of its message alone, and
    # then given its attributes.
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
    """A peer came with another call: another shape, dtype, op, algorithm or rounding mode.

    Where all ran "unfused" or "hierarchical", nothing was computed and the communicator goes on.
    """


class PeerDiedError(PeerTimeoutError):
    """The process of a peer that is waited for has ended."""


class PeerLeftError(PeerTimeoutError):
    """A peer that is waited for has closed its communicator, or was interrupted in a call."""
