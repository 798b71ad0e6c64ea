"""Communicators with short timeouts that have worked before a test provokes an error."""

from __future__ import annotations

from collections.abc import Callable

from allnorm.communicator import Communicator
from allnorm.errors import AllnormError
from allnorm.testing.agreement import RankFailedError, agree

_ATTEMPTS = 5


def used_communicators(prepare: Callable[[list[Communicator]], None]) -> list[Communicator]:
    """Returns the communicators that `prepare` has created and used. Collective over WORLD.

    On a busy machine a constructor or a call may exceed a short timeout, perhaps on some ranks
    only. If `prepare` raises an AllnormError on any rank, every rank closes its communicators and
    tries again.

    Args:
        prepare: creates the communicators, appends each to the list that it is given, and makes
            calls on them.

    Raises:
        RankFailedError: every attempt failed; has the error of the last one.
    """
    reason = ""
    for _ in range(_ATTEMPTS):
        made: list[Communicator] = []
        late = ""
        try:
            prepare(made)
        except AllnormError as error:  # a timeout, or that a peer gave up in the constructor
            late = str(error)
        reason = agree(late)
        if not reason:
            return made
        for one in made:
            one.close()
    raise RankFailedError(f"{_ATTEMPTS} attempts failed, the last one since {reason}")
