"""Verdicts: what all ranks of a group do alike at a moment that not all of them need come to.

A rank compiles a graph, and its peers most likely do, but one of them may run it eagerly, or have
it from a cache. A collective would wait for that rank for ever, or take its next, unrelated call
for an answer. So ranks write their answers into the group's store, which needs no peer, and read
those of the others. Every wait ends after `patience_s`. The first proposal of a verdict stands
(compare and set), also for ranks that come later, so no two ranks can act on different ones. A rank
that did not answer in time is not waited for again until it has answered something: a rank is
waited for once, not once per graph.

There are two kinds of questions. They differ in what they take a silent rank to have done.

- `decide`, for engines: all ranks ask the same questions in the same order, and a question that is
  asked again is a different one. A silent rank has the graph from a cache of an earlier run, where
  the verdict was to fuse (`allnorm.integrations.vllm.generation`). Then the ranks that came fuse
  too, and a rank that cannot raises: its peers would wait for it in a fused call.
- `settle`, for any program: a question is what a rank would do with a graph, and the same text has
  the same verdict for ever. Compilations may come in any order, and on some ranks alone. A silent
  rank runs the graph as it was written, so no rank fuses it; unless it has fused a graph with the
  same reductions before, which it may be running now. Then ranks that came too raise.
"""

from __future__ import annotations

import collections
import hashlib
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
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


@dataclass(frozen=True)
class Step:
    """What a rank would do with a reduction of a graph.

    Attributes:
        action: the call it would put there, in words that ranks with equal calls share; empty if
            it would leave the reduction as it is.
        reason: why it would leave it.
    """

    action: str = ""
    reason: str = ""


class Verdicts:
    """The verdicts of one group.

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
        self._settled: dict[str, tuple[str, bool]] = {}  # by the place of the question

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
        place = f"{_digest(question)}/{self._asked[question]}"
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

    def settle(self, kind: str, steps: Sequence[Step]) -> str:
        """Decides whether all ranks do what this one would do with a graph; bounded in time.

        Args:
            kind: the reductions of the graph, which graphs that differ by rank have in common.
            steps: what this rank would do with each reduction.

        Returns:
            Why no rank does it, the same on all ranks with equal steps; empty if all ranks do.

        Raises:
            AllnormError: silent ranks may be running code in which such reductions are fused.
        """
        kind_place, place = places_of(kind, steps)
        verdict = self._settled.get(place)
        if verdict is None:
            self._store.set(f"{place}/{self._rank}", json.dumps([kind, *map(astuple, steps)]))
            self._asked[place] += 1
            self._store.set(f"count/{self._rank}", str(self._asked.total()))
            self._store.set(f"at/{self._rank}", place)
            verdict = self._settled[place] = self._settle(kind, place, steps)
            if verdict == ("", False) and any(step.action for step in steps):
                self._store.set(kind_place, place)
        reason, is_error = verdict
        if is_error:
            raise AllnormError(reason)
        return reason

    def common(self, mine: str) -> str:
        """Returns the word of all ranks if they all give the same; else a new one, for all."""
        self._store.set(f"word/{self._rank}", mine)
        missing = self._wait("word")
        words = {self._read(f"word/{rank}") for rank in range(self._world_size)}
        proposal = mine if not missing and words == {mine} and mine else uuid.uuid4().hex
        return self._store.compare_set("word/verdict", "", proposal).decode()

    def restore(self, agreed: Mapping[str, str]) -> None:
        """Takes over what all ranks agreed on in an earlier run.

        Args:
            agreed: by graph, its kind if any of it is fused, else "": see `places_of`.
        """
        for place, kind_place in agreed.items():
            self._settled[place] = ("", False)
            if kind_place:
                self._store.set(kind_place, place)

    def _settle(self, kind: str, place: str, steps: Sequence[Step]) -> tuple[str, bool]:
        """The verdict on a graph that stands, and whether it is an error."""
        interrupted = "a rank was interrupted while the ranks agreed whether to fuse"
        proposal: tuple[str, bool, str] = (interrupted, False, "")
        try:
            missing = self._wait(place, lambda: self._differing(place))
            if isinstance(missing, str):
                proposal = (self._difference(missing, kind, steps), False, missing)
            elif missing:
                proposal = (*self._silence(missing, kind, steps), "")
            else:
                proposal = ("", False, "")
        finally:
            stands = self._store.compare_set(f"{place}/verdict", "", json.dumps(proposal))
        reason, is_error, _ = json.loads(stands)
        return str(reason), bool(is_error)

    def _differing(self, place: str) -> str:
        """Returns the answer of a peer that has come to a different graph instead; or nothing.

        The peer waits there for this rank as this rank does here for the peer; or has given up
        because this rank is here.
        """
        for peer in set(range(self._world_size)) - {self._rank}:
            theirs = self._read(f"at/{peer}")
            if not theirs or theirs == place or theirs in self._asked:
                continue
            verdict = self._read(f"{theirs}/verdict")
            if not verdict or json.loads(verdict)[2] == f"{place}/{self._rank}":
                return f"{theirs}/{peer}"
        return ""

    def _difference(self, answer: str, kind: str, steps: Sequence[Step]) -> str:
        their_kind, *their_steps = json.loads(self._read(answer))
        text = f"all ranks must fuse alike, and rank {answer.split('/')[-1]} of the group"
        if their_kind != kind:
            return f"{text} compiles a graph with different reductions"
        for step, (action, reason) in zip(steps, their_steps, strict=True):
            if step.action and not action:
                return f"{text} cannot: {reason}"
        return f"{text} would fuse it differently"

    def _silence(self, missing: set[int], kind: str, steps: Sequence[Step]) -> tuple[str, bool]:
        text = (
            f"all ranks must fuse alike, and {_ranks(missing)} of the group did not compile such a "
            f"graph within {self._patience_s:g} s"
        )
        if not self._read(places_of(kind, steps)[0]):
            return text, False
        return (
            f"{text}. Their code for other graphs with the same reductions is fused, so that they "
            "may be waiting in a fused call while this rank runs a different graph. Compile on all "
            "ranks alike, or do not fuse this function."
        ), True

    def _answers(self, place: str, mine: Answer) -> dict[int, Answer]:
        """The answers that there are when no peer is waited for any longer."""
        self._wait(place)
        found = {rank: self._read(f"{place}/{rank}") for rank in range(self._world_size)}
        given = {rank: Answer(*json.loads(text)) for rank, text in found.items() if text}
        return {**given, self._rank: mine}

    def _wait(self, place: str, look: Callable[[], str] = str) -> set[int] | str:
        """Waits until all ranks have answered, or no longer makes sense.

        Args:
            place: of the question.
            look: returns why the wait is without hope; or nothing.

        Returns:
            The silent ranks; none once there is a verdict. Or what `look` returned.
        """
        until = time.monotonic() + self._patience_s
        missing = set(range(self._world_size)) - {self._rank}
        while True:
            missing -= {peer for peer in missing if self._store.check([f"{place}/{peer}"])}
            if not missing or self._read(f"{place}/verdict"):
                return set()
            problem = look()
            if problem:
                return problem
            counts = {peer: self._read(f"count/{peer}") for peer in missing}
            if all(self._absent.get(peer) == count for peer, count in counts.items()):
                return missing
            if time.monotonic() > until:
                self._absent |= counts
                return missing
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


def places_of(kind: str, steps: Sequence[Step]) -> tuple[str, str]:
    """Returns the keys of the store for a kind of graphs and for a graph: see `Verdicts.settle`."""
    content = json.dumps([kind, [step.action for step in steps]])
    return f"kind/{_digest(kind)}", f"content/{_digest(content)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _ranks(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
