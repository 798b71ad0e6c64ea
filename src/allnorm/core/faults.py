"""Errors for recorded faults, and the accounts that ranks exchange after they diverged.

A fault contains only some of the properties of a call that ranks compare: it has eps, weight_bias
and some others only as a hash. So ranks that diverged publish an account of their own call in the
process group's store, and read their peer's account. This happens only after a failure.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from allnorm.core import _native
from allnorm.core.announcement import Announcement, describe, differences, tag_fields
from allnorm.core.refusal import is_refusal
from allnorm.core.rendezvous import store_of
from allnorm.core.threads import run_bounded
from allnorm.core.watch import Watch
from allnorm.errors import PeerDiedError, PeerDivergedError, PeerLeftError, PeerTimeoutError

Account = dict[str, str]
"""Properties of a rank's call that a fault lacks, keyed by name; REFUSED: why it refused."""

REFUSED = "refused"
# On CPU peers notice a divergence within moments; on CUDA at their next call or check().
_ACCOUNT_SECONDS = 2.0


def account_of(fault: _native.Fault, calls: Sequence[Announcement]) -> Account:
    """Returns this rank's account of the call with the fault, which may be any of `calls`."""
    announced = tag_fields(fault.expected_shape, fault.expected_tokens)
    alike = [call for call in calls if _looks_like(call, announced)]
    # If a call runs in chunks, each launch announces only its chunk's rows.
    whole = [call for call in alike if call["num_tokens"] == fault.expected_tokens]
    account: dict[str, dict[str, None]] = {}
    for call in whole or alike:
        for name, text in call.hashed().items():
            account.setdefault(name, {})[text] = None
    return {name: " or ".join(texts) for name, texts in account.items()}


def _looks_like(call: Announcement, announced: dict[str, str]) -> bool:
    fields = call.tagged()
    return all(
        fields[name] == text
        for name, text in announced.items()
        if name in fields and name != "num_tokens"
    )


def ask(group: dist.ProcessGroup, name: str, fault: _native.Fault, own: Account) -> Account:
    """Publishes this rank's account of its call; returns the peer's, or {} without an answer.

    Bounded in time: a peer may be busy, and on CUDA it may not have noticed the fault yet. `name`
    is the communicator's key; see Opened.
    """
    key = f"allnorm/fault/{name}/{fault.expected_op}"
    theirs = f"{key}/{fault.peer}"
    if is_refusal(fault.seen_shape, fault.seen_tokens):
        theirs = _refusal_key(name, fault.peer)
    text = _with_store(group, lambda store: _exchange(store, f"{key}/{fault.rank}", own, theirs))
    return {} if text is None else dict(json.loads(text))


def publish_refusal(group: dist.ProcessGroup, name: str, rank: int, why: str) -> None:
    """Publishes why this rank refuses its next call, for peers that diverge. Bounded in time."""
    text = json.dumps({REFUSED: why})
    _with_store(group, lambda store: store.set(_refusal_key(name, rank), text))


def _refusal_key(name: str, rank: int) -> str:
    return f"allnorm/refusal/{name}/{rank}"


def _exchange(store: Any, own_key: str, own: Account, key: str) -> bytes:
    store.set(own_key, json.dumps(own))
    store.wait([key], datetime.timedelta(seconds=_ACCOUNT_SECONDS))
    return bytes(store.get(key))


def _with_store(group: dist.ProcessGroup, step: Callable[[Any], Any]) -> Any:
    """Returns the result of `step`; None if it fails or is slow: errors then have less detail."""
    with contextlib.suppress(Exception):
        return run_bounded(lambda: step(store_of(group)), 2 * _ACCOUNT_SECONDS)


def fault_error(
    fault: _native.Fault,
    timeout: datetime.timedelta,
    own: Account,
    seen: Account,
    watch: Watch | None = None,
) -> PeerTimeoutError:
    """Returns the error for a fault: who waited for whom, for what, and what was seen instead.

    `own` and `seen` are the accounts of this rank and of the peer.
    """
    expected = _describe(fault.expected_op, fault.expected_shape, fault.expected_tokens, own)
    # Memory without an announcement holds NO_SHAPE, or zeros.
    if fault.seen_shape == _native.NO_SHAPE or (fault.seen_shape == fault.seen_tokens == 0):
        words = "nothing"
    else:
        words = _describe(fault.seen_op, fault.seen_shape, fault.seen_tokens, seen)
    kind: type[PeerTimeoutError] = PeerTimeoutError
    rank, peer = f"rank {fault.rank}", f"rank {fault.peer}"
    what = f"{rank} timed out after {timeout.total_seconds():g} s waiting for {peer}"
    differing = ""
    if fault.status == _native.DIVERGED:
        kind, what = PeerDivergedError, f"{rank} makes a different call than {peer}"
        differing = _differences(fault, own, seen)
        if not differing and not is_refusal(fault.seen_shape, fault.seen_tokens):
            # These properties are announced only as a hash.
            words += (
                ", but with a different eps, weight_bias, dtype of the weight or of the residual,"
            )
            words += " format or layout of the scales, post norm, scale or number of streams"
    elif fault.status == _native.PEER_DIED:
        process = "its process" if watch is None else watch.describe(fault.peer)
        kind, what = PeerDiedError, f"{rank} waited for {peer}, but {process} has ended"
    elif fault.status == _native.PEER_LEFT:
        left = "it has closed its communicator or was interrupted in a call"
        kind, what = PeerLeftError, f"{rank} waited for {peer}, but {left}"
    elif fault.status == _native.INTERRUPTED:
        what = f"{rank} was interrupted by an exception of a signal handler, waiting for {peer}"
    elif watch is not None and fault.peer in watch.blind:
        what += " (whose process cannot be watched from here, so that an exit goes unnoticed)"
    message = (
        f"{what}. Expected {expected}. Seen from {peer}: {words}. {differing}Results of this and "
        f"later calls are not valid; find out what {peer} did, and make a new Communicator over "
        "healthy ranks."
    )
    if fault.status == _native.TIMEOUT:
        message += f" {describe_progress(fault)}"
    return kind(
        message,
        rank=int(fault.rank),
        peer=int(fault.peer),
        op=int(fault.expected_op),
        expected=expected,
        seen=words,
    )


def describe_progress(fault: _native.Fault) -> str:
    """Describes how far the peer got before a timeout, and what may be holding it up."""
    if fault.seen_op == fault.expected_op and fault.seen_shape == fault.expected_shape:
        return (
            f"Rank {fault.peer} has started this operation but not finished its part: it is stuck "
            "or failed; or, on a GPU, some thread blocks of its kernel could not be scheduled."
        )
    return (
        f"Rank {fault.peer} has not started this operation: it does not make this call, or is "
        "late; or, on a GPU, its kernel cannot be scheduled while other kernels wait (those of "
        "another communicator on another stream, or of another process)."
    )


def _describe(op: int, shape: int, num_tokens: int, account: Account) -> str:
    if is_refusal(shape, num_tokens):
        why = account.get(REFUSED)
        return f"operation {op}: no call, it has refused it" + (f" ({why})" if why else "")
    if shape == _native.MISSING_CALL:
        return f"operation {op}: a call that it could not launch"
    return f"operation {op}: {describe({**tag_fields(shape, num_tokens), **account})}"


def _differences(fault: _native.Fault, own: Account, seen: Account) -> str:
    if is_refusal(fault.expected_shape, fault.expected_tokens) or is_refusal(
        fault.seen_shape, fault.seen_tokens
    ):
        return ""
    mine = {**tag_fields(fault.expected_shape, fault.expected_tokens), **own}
    theirs = {**tag_fields(fault.seen_shape, fault.seen_tokens), **seen}
    return differences(mine, int(fault.rank), theirs, int(fault.peer))
