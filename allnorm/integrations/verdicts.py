"""Verdicts: what all ranks of a group do alike at a moment that not all of them need come to.

A rank compiles a graph, and its peers most likely do, but one of them may have it from a cache. A
collective would wait for that rank for ever, or take its next, unrelated call for an answer. So
ranks write their answers into the store of torch.distributed, which needs nobody else, and read
those of the others. The contract:

- A question is asked by the same text on all ranks. Asked again it is another question, the second
  of that text; that is counted on each rank.
- Every rank that comes writes its answer, and waits until all have answered, or its patience is at
  an end. Who did not answer by then is not waited for again until it has answered something: a
  rank is waited for once, not once for each graph.
- Then it proposes a verdict. The first proposal stands (compare and set), also for those who come
  later, so that no two ranks can act on different ones.
- Who did not come is taken to have done it in an earlier run, with the same result: a cache may
  hold nothing else (`allnorm.integrations.vllm.generation`). Then those who came do it too, and
  one that cannot raises: its peers would wait for it in a fused call.
"""

from __future__ import annotations

import collections
import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

from allnorm.errors import AllnormError

# How much later than its peers a rank may come to a graph: they compile the same ones, one after
# the other. Well below the timeout of a call, in which the peers may be waiting meanwhile.
PATIENCE_S = 60.0
_POLL_S = 0.01


@dataclass(frozen=True)
class Answer:
    """What a rank found out by trying.

    Attributes:
        obstacle: why it cannot; empty if it can.
        result: what it made, in words that are the same on every rank that made the same.
    """

    obstacle: str = ""
    result: str = ""


class Verdicts:
    """Those of one group.

    Args:
        store: a `torch.distributed.Store` that all ranks of the group have.
        rank: in the group.
        world_size: of the group.
        patience_s: how long ranks wait for each other.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, patience_s: float = PATIENCE_S
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._patience_s = patience_s
        self._asked: collections.Counter[str] = collections.Counter()
        self._absent: dict[int, str] = {}  # and how often it had answered when it was given up

    def decide(self, question: str, mine: Answer) -> str:
        """Whether all ranks do what this one tried to; bounded in time.

        Args:
            question: what was tried; ranks that mean the same use the same text.
            mine: what became of it.

        Returns:
            Why none does it, the same on all ranks that ask; empty if all do.

        Raises:
            AllnormError: peers did it, some of them in an earlier run, and this rank cannot.
        """
        name = hashlib.sha256(question.encode()).hexdigest()[:16]
        place = f"{name}/{self._asked[question]}"
        self._asked[question] += 1
        self._store.set(f"{place}/{self._rank}", json.dumps([mine.obstacle, mine.result]))
        self._store.set(f"count/{self._rank}", str(self._asked.total()))
        answers = self._answers(place, mine)
        proposal = json.dumps(self._proposal(answers))
        stands = self._store.compare_set(f"{place}/verdict", "", proposal)
        reason, result = json.loads(stands)
        if not reason and (mine.obstacle or result not in (None, mine.result)):
            silent = sorted(set(range(self._world_size)) - set(answers))
            raise AllnormError(
                f"{mine.obstacle or f'this rank would fuse in another way: {mine.result}'}. But "
                "the others fuse it, so that this rank cannot go on without: they decided before "
                f"it came, or have it from a compile cache (silent: {silent}). Start again: "
                "everything is compiled anew then."
            )
        return str(reason)

    def _answers(self, place: str, mine: Answer) -> dict[int, Answer]:
        """Those that there are when nobody is waited for any longer."""
        answers = {self._rank: mine}
        until = time.monotonic() + self._patience_s
        while True:
            for peer in set(range(self._world_size)) - set(answers):
                answer = self._read(f"{place}/{peer}")
                if answer:
                    answers[peer] = Answer(*json.loads(answer))
            missing = set(range(self._world_size)) - set(answers)
            counts = {peer: self._read(f"count/{peer}") for peer in missing}
            missing -= {peer for peer in missing if self._absent.get(peer) == counts[peer]}
            if not missing or self._read(f"{place}/verdict"):
                return answers
            if time.monotonic() > until:
                self._absent |= {peer: counts[peer] for peer in missing}
                return answers
            time.sleep(_POLL_S)

    def _read(self, key: str) -> str:
        """What is written there; empty if nothing is."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _proposal(self, answers: dict[int, Answer]) -> tuple[str, str | None]:
        """Why none does it, or what all have made as far as that is known."""
        able = [answer for _, answer in sorted(answers.items()) if not answer.obstacle]
        result = able[0].result if able else None
        if len(answers) < self._world_size:
            return "", result
        reason = first_reason([answers[rank].obstacle for rank in range(self._world_size)])
        if not reason and any(answer.result != result for answer in able):
            reason = "ranks would fuse it in different ways"
        return reason, result


def first_reason(reasons: list[str]) -> str:
    """The first rank's that has one, and whose it is; empty if none has."""
    for rank, reason in enumerate(reasons):
        if reason:
            everywhere = all(other == reason for other in reasons)
            return reason if everywhere else f"{reason} (rank {rank} of the group)"
    return ""
