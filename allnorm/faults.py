"""What a recorded fault says to the user."""

from __future__ import annotations

import datetime

from allnorm import _native
from allnorm.errors import PeerDiedError, PeerDivergedError, PeerLeftError, PeerTimeoutError
from allnorm.watch import Watch


def fault_error(
    fault: _native.Fault, timeout: datetime.timedelta, watch: Watch | None = None
) -> PeerTimeoutError:
    """The error for a fault: who waited for whom, for what, and what was seen instead.

    Args:
        fault: what was recorded.
        timeout: the communicator's.
        watch: of its peers' processes.
    """
    expected = (
        f"operation {fault.expected_op}: "
        f"{_native.describe_shape(fault.expected_shape, fault.expected_tokens)}"
    )
    # Memory in which no call was ever announced: zeros, or ones as no call announces them.
    if fault.seen_shape == _native.NO_SHAPE or (fault.seen_shape == fault.seen_tokens == 0):
        seen = "nothing"
    else:
        seen = (
            f"operation {fault.seen_op}: "
            f"{_native.describe_shape(fault.seen_shape, fault.seen_tokens)}"
        )
        if fault.status == _native.DIVERGED and seen == expected:
            # These are announced as a hash.
            seen += ", but another eps, weight_bias, dtype of the weight or format of the scales"
    kind: type[PeerTimeoutError] = PeerTimeoutError
    rank, peer = f"rank {fault.rank}", f"rank {fault.peer}"
    what = f"{rank} waited {timeout.total_seconds():g} s in vain for {peer}"
    if fault.status == _native.DIVERGED:
        kind, what = PeerDivergedError, f"{rank} does another call than {peer}"
    elif fault.status == _native.PEER_DIED:
        process = "its process" if watch is None else watch.describe(fault.peer)
        kind, what = PeerDiedError, f"{rank} waited for {peer}, but {process} has ended"
    elif fault.status == _native.PEER_LEFT:
        left = "it has closed its communicator or was interrupted in a call"
        kind, what = PeerLeftError, f"{rank} waited for {peer}, but {left}"
    elif fault.status == _native.INTERRUPTED:
        what = f"{rank} was interrupted, by an exception of a signal handler, waiting for {peer}"
    elif watch is not None and fault.peer in watch.blind:
        what += " (whose process cannot be watched from here, so that its end would not be seen)"
    message = (
        f"{what}. Expected {expected}. Seen from {peer}: {seen}. Results of this and later calls "
        f"are not valid; find out what {peer} did, and make a new Communicator over healthy ranks."
    )
    return kind(
        message,
        rank=int(fault.rank),
        peer=int(fault.peer),
        op=int(fault.expected_op),
        expected=expected,
        seen=seen,
    )
