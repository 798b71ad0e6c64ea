"""What a recorded fault says to the user, and how ranks that diverged tell each other more.

A fault holds what ranks announce of a call, which is not all that they compare: of eps, weight_bias
and some more there is a hash only. So ranks that have diverged publish an account of their own
call, by way of the process group's store, and read the other's. Nothing of it happens before.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from allnorm import _native
from allnorm.announcement import Announcement
from allnorm.errors import PeerDivergedError, PeerTimeoutError
from allnorm.refusal import is_refusal

Account = dict[str, str]
"""What a rank says of its call beside what the fault says, by name; REFUSED: why it made none."""

REFUSED = "refused"
# On CPU peers know within moments that they have diverged; on CUDA at their next call or check().
_ACCOUNT_SECONDS = 2.0


def account_of(fault: _native.Fault, calls: Sequence[Announcement]) -> Account:
    """What this rank has to say of the call of a fault.

    Args:
        fault: that was recorded.
        calls: those that may have been it; more than one may look alike in the fault.
    """
    announced = _native.shape_fields(fault.expected_shape, fault.expected_tokens)
    alike = [call for call in calls if _looks_like(call, announced)]
    # The launches of a call that is cut into chunks announce the rows of theirs.
    whole = [call for call in alike if call.num_tokens == fault.expected_tokens]
    account: dict[str, dict[str, None]] = {}
    for call in whole or alike:
        for name, text in call.hashed().items():
            account.setdefault(name, {})[text] = None
    return {name: " or ".join(texts) for name, texts in account.items()}


def _looks_like(call: Announcement, announced: dict[str, str]) -> bool:
    fields = call.announced()
    return all(
        fields[name] == text
        for name, text in announced.items()
        if name in fields and name != "num_tokens"
    )


def ask(group: dist.ProcessGroup, name: str, fault: _native.Fault, own: Account) -> Account:
    """Publishes this rank's account of its call, and returns the peer's, or {} if none comes.

    Bounded: a peer may be busy, and on CUDA it may not know yet.

    Args:
        group: of the communicator.
        name: of the communicator, the same on every rank.
        fault: of kind DIVERGED.
        own: what `account_of` says.
    """
    key = f"allnorm/fault/{name}/{fault.expected_op}"
    theirs = f"{key}/{fault.peer}"
    if is_refusal(fault.seen_shape, fault.seen_tokens):
        theirs = _refusal_key(name, fault.peer)
    text = _with_store(group, lambda store: _exchange(store, f"{key}/{fault.rank}", own, theirs))
    return {} if text is None else dict(json.loads(text))


def publish_refusal(group: dist.ProcessGroup, name: str, rank: int, why: str) -> None:
    """Lets peers that diverge from this rank's next call read why it makes none. Bounded.

    Args:
        group: of the communicator.
        name: of the communicator, the same on every rank.
        rank: this one.
        why: what it raises.
    """
    text = json.dumps({REFUSED: why})
    _with_store(group, lambda store: store.set(_refusal_key(name, rank), text))


def _refusal_key(name: str, rank: int) -> str:
    return f"allnorm/refusal/{name}/{rank}"


def _exchange(store: Any, own_key: str, own: Account, key: str) -> bytes:
    store.set(own_key, json.dumps(own))
    store.wait([key], datetime.timedelta(seconds=_ACCOUNT_SECONDS))
    return bytes(store.get(key))


def _with_store(group: dist.ProcessGroup, step: Callable[[Any], Any]) -> Any:
    """What `step` returns; None if it fails, or takes too long.

    In a thread, because a store whose process is stopped answers to no deadline. Without the store,
    which is no public interface, errors say less.
    """
    found = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(step(dist.distributed_c10d._get_process_group_store(group)))

    thread = threading.Thread(target=run, name="allnorm-account", daemon=True)
    thread.start()
    thread.join(2 * _ACCOUNT_SECONDS)
    return found[0] if found else None


def fault_error(
    fault: _native.Fault, timeout: datetime.timedelta, own: Account, seen: Account
) -> PeerTimeoutError:
    """The error for a fault: who waited for whom, for what, and what was seen instead.

    Args:
        fault: that was recorded.
        timeout: of the communicator.
        own: what `account_of` says.
        seen: the peer's, {} if not known.
    """
    expected = _describe(fault.expected_op, fault.expected_shape, fault.expected_tokens, own)
    # Memory in which no call was ever announced: zeros, or ones as no call announces them.
    if fault.seen_shape == _native.NO_SHAPE or (fault.seen_shape == fault.seen_tokens == 0):
        words = "nothing"
    else:
        words = _describe(fault.seen_op, fault.seen_shape, fault.seen_tokens, seen)
    kind: type[PeerTimeoutError] = PeerTimeoutError
    verb = f"waited {timeout.total_seconds():g} s in vain for"
    differences = ""
    if fault.status == _native.DIVERGED:
        kind, verb = PeerDivergedError, "does another call than"
        differences = _differences(fault, own, seen)
        if not differences and not is_refusal(fault.seen_shape, fault.seen_tokens):
            # These are announced as a hash.
            words += ", but another eps, weight_bias, dtype of the weight or format of the scales"
    message = (
        f"rank {fault.rank} {verb} rank {fault.peer}. Expected {expected}. Seen from rank "
        f"{fault.peer}: {words}. {differences}Results of this and later calls are not valid; find "
        f"out what rank {fault.peer} did, and make a new Communicator over healthy ranks."
    )
    return kind(
        message,
        rank=int(fault.rank),
        peer=int(fault.peer),
        op=int(fault.expected_op),
        expected=expected,
        seen=words,
    )


def _describe(op: int, shape: int, num_tokens: int, account: Account) -> str:
    if is_refusal(shape, num_tokens):
        why = account.get(REFUSED)
        return f"operation {op}: no call, it has refused it" + (f" ({why})" if why else "")
    more = "".join(f", {name} {text}" for name, text in account.items())
    return f"operation {op}: {_native.describe_shape(shape, num_tokens)}{more}"


def _differences(fault: _native.Fault, own: Account, seen: Account) -> str:
    if is_refusal(fault.expected_shape, fault.expected_tokens) or is_refusal(
        fault.seen_shape, fault.seen_tokens
    ):
        return ""
    mine = {**_native.shape_fields(fault.expected_shape, fault.expected_tokens), **own}
    theirs = {**_native.shape_fields(fault.seen_shape, fault.seen_tokens), **seen}
    texts = [
        f"{name} is {text} on rank {fault.rank} and {theirs[name]} on rank {fault.peer}"
        for name, text in mine.items()
        if name in theirs and theirs[name] != text
    ]
    return f"What differs: {'; '.join(texts)}. " if texts else ""
