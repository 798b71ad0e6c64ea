"""Verdicts: decisions that are equal on all ranks, even if some ranks do not take part.

When a rank compiles a graph, its peers usually do too. But a peer may run the graph eagerly, or
load it from a cache. A collective would wait for that rank forever, or mistake its next, unrelated
call for an answer. So ranks write their answers into the group's store, which needs no peer, and
read the other ranks' answers. Every wait ends after `patience_s`. The first verdict that a rank
proposes wins (compare and set). Ranks that come later follow it too, so ranks never act on
different verdicts. If a rank did not answer in time, its peers do not wait for it again until it
answers a question. So it delays them once, not once per graph.

There are two kinds of questions, with different assumptions about a silent rank.

- `decide`, for engines: all ranks ask the same questions in the same order, and a repeated question
  counts as a new one. A silent rank has loaded the graph from the cache of an earlier run, in which
  the verdict was to fuse (`allnorm.integrations.vllm.generation`). So the other ranks fuse too. A
  rank that cannot fuse raises, because its peers would wait for it in a fused call.
- `settle`, for any program: a question lists what a rank would do with a graph, and equal questions
  have the same verdict forever. Ranks may compile in any order, and some may not compile at all. A
  silent rank runs the graph unchanged, so no rank fuses it. But if the silent rank has fused a
  graph with the same reductions before, it may be running that graph now, and the other ranks
  raise.
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

# Maximum delay between ranks that compile the same graphs, one after the other. It is well below
# the timeout of calls, because peers may be waiting in a call meanwhile.
PATIENCE_S = 60.0
_POLL_S = 0.01


@dataclass(frozen=True)
class Answer:
    """The outcome of a rank's attempt to fuse a graph."""

    obstacle: str = ""  # why it failed; empty if it succeeded
    result: str = ""  # describes the fused graph; equal on ranks with equal graphs


@dataclass(frozen=True)
class Step:
    """A rank's intention for one reduction in a graph."""

    action: str = ""  # describes the call that it would insert; empty: it keeps the reduction
    reason: str = ""  # why it keeps it


class Verdicts:
    """The verdicts of one group, in a `torch.distributed.Store` that all its ranks share.

    Ranks wait `patience_s` for each other.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, patience_s: float = PATIENCE_S
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._patience_s = patience_s
        self._asked: collections.Counter[str] = collections.Counter()
        self._absent: dict[int, str] = {}  # maps a silent rank to its answer count then
        self._settled: dict[str, tuple[str, bool]] = {}  # keyed by the key of the question

    def decide(self, question: str, mine: Answer) -> str:
        """Decides whether all ranks do what this one attempted; bounded in time.

        Ranks that attempt the same pass the same `question`; `mine` is this rank's outcome.

        Returns:
            Why no rank does it, equal on all ranks that ask; empty if all do.

        Raises:
            AllnormError: peers do it, some of them since an earlier run, and this rank cannot.
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
                f"{mine.obstacle or f'this rank would fuse differently: {mine.result}'}. But the "
                "other ranks fuse it, so this rank cannot continue without: they decided before it "
                f"came, or use a compile cache (silent: {silent}). Start again: everything is then "
                "compiled anew."
            )
        return str(reason)

    def settle(self, kind: str, steps: Sequence[Step]) -> str:
        """Decides whether all ranks do what this one would do with a graph; bounded in time.

        Args:
            kind: the graph's reductions, which are the same even if graphs differ between ranks.
            steps: what this rank would do with each reduction.

        Returns:
            Why no rank does it, equal on all ranks with equal steps; empty if all ranks do.

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
        """Returns `mine` if all ranks have the same word, otherwise a new word for all ranks."""
        self._store.set(f"word/{self._rank}", mine)
        missing = self._wait("word")
        words = {self._read(f"word/{rank}") for rank in range(self._world_size)}
        proposal = mine if not missing and words == {mine} and mine else uuid.uuid4().hex
        return self._store.compare_set("word/verdict", "", proposal).decode()

    def restore(self, agreed: Mapping[str, str]) -> None:
        """Restores what all ranks agreed on in an earlier run.

        `agreed` maps the key of a graph to the key of its kind if the graph is fused, else to "";
        see `places_of`.
        """
        for place, kind_place in agreed.items():
            self._settled[place] = ("", False)
            if kind_place:
                self._store.set(kind_place, place)

    def _settle(self, kind: str, place: str, steps: Sequence[Step]) -> tuple[str, bool]:
        """Returns the verdict on a graph, and whether it is an error."""
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
        """Returns the key of a peer's answer if the peer has come to a different graph, or "".

        That peer waits for this rank there, or has given up because this rank is here.
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
        """Waits for all answers that may still come, and returns the answers received."""
        self._wait(place)
        found = {rank: self._read(f"{place}/{rank}") for rank in range(self._world_size)}
        given = {rank: Answer(*json.loads(text)) for rank, text in found.items() if text}
        return {**given, self._rank: mine}

    def _wait(self, place: str, look: Callable[[], str] = str) -> set[int] | str:
        """Waits until all ranks have answered, or until waiting is pointless.

        Args:
            place: key of the question.
            look: returns why waiting is pointless, or "".

        Returns:
            The silent ranks, or none once there is a verdict; or the text that `look` returned.
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
        """Returns the value of a key; empty if there is none."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _proposal(self, answers: dict[int, Answer]) -> tuple[str, str | None]:
        """Returns why no rank does it, and the result of the ranks that can, if known."""
        able = [answer for _, answer in sorted(answers.items()) if not answer.obstacle]
        result = able[0].result if able else None
        if len(answers) < self._world_size:
            return "", result
        reason = first_reason([answers[rank].obstacle for rank in range(self._world_size)])
        if not reason and any(answer.result != result for answer in able):
            reason = "ranks would fuse it in different ways"
        return reason, result


def first_reason(reasons: list[str]) -> str:
    """Returns the first reason, with its rank unless all have the same; empty if there is none."""
    for rank, reason in enumerate(reasons):
        if reason:
            everywhere = all(other == reason for other in reasons)
            return reason if everywhere else f"{reason} (rank {rank} of the group)"
    return ""


def places_of(kind: str, steps: Sequence[Step]) -> tuple[str, str]:
    """Returns the store keys of a kind of graphs and of a graph; see `Verdicts.settle`."""
    content = json.dumps([kind, [step.action for step in steps]])
    return f"kind/{_digest(kind)}", f"content/{_digest(content)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _ranks(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
