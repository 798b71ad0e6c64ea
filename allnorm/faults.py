"""What a recorded fault says to the user."""

from __future__ import annotations

import datetime

from allnorm import _native
from allnorm.errors import PeerDivergedError, PeerTimeoutError


def fault_error(fault: _native.Fault, timeout: datetime.timedelta) -> PeerTimeoutError:
    """The error for a fault: who waited for whom, for what, and what was seen instead."""
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
    verb = f"waited {timeout.total_seconds():g} s in vain for"
    if fault.status == _native.DIVERGED:
        kind, verb = PeerDivergedError, "does another call than"
    message = (
        f"rank {fault.rank} {verb} rank {fault.peer}. Expected {expected}. Seen from rank "
        f"{fault.peer}: {seen}. Results of this and later calls are not valid; find out what rank "
        f"{fault.peer} did, and make a new Communicator over healthy ranks."
    )
    if fault.status == _native.TIMEOUT:
        message += f" {where_it_stands(fault)}"
    return kind(
        message,
        rank=int(fault.rank),
        peer=int(fault.peer),
        op=int(fault.expected_op),
        expected=expected,
        seen=seen,
    )


def where_it_stands(fault: _native.Fault) -> str:
    """How far the rank of a timeout is, by what it announced, and what can keep it there."""
    if fault.seen_op == fault.expected_op and fault.seen_shape == fault.expected_shape:
        return (
            f"Rank {fault.peer} has begun this operation and not done all of its part: it stands "
            "still or has failed in it; or, on a GPU, not all blocks of its kernel have found room."
        )
    return (
        f"Rank {fault.peer} has not begun this operation: it does not make this call, or is late; "
        "or, on a GPU, its kernel finds no room beside others that wait (another communicator on "
        "another stream, another process)."
    )
