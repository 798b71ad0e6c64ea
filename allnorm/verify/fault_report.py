"""What ranks see of one that fails, and after how long."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from allnorm.testing import OnMessage, RankError, RankPool
from allnorm.verify import faults

SLACK_SECONDS = 1.0  # within the timeout and this a fault must be known; a death within this
_RUN_SECONDS = 120.0
_SHARED_MEMORY = Path("/dev/shm")

Row = dict[str, Any]
_KINDS = {
    "PeerDivergedError": "diverged",
    "PeerDiedError": "process ended",
    "PeerLeftError": "left",
    "PeerTimeoutError": "timeout",
}


def run(
    world_size: int,
    device: str,
    timeout_s: float,
    words: tuple[str, ...] = (),
    share_gpus: bool = False,
    on_message: OnMessage = lambda rank, message: None,
) -> list[Row]:
    """Provokes every fault with every algorithm it applies to.

    Args:
        world_size: ranks, the last of which fails; at least 2.
        device: "cuda" or "cpu".
        timeout_s: of the communicators.
        words: only faults whose names hold one of them; empty: all.
        share_gpus: several ranks may be on one GPU.
        on_message: takes a rank and what is said of its progress: `text`, `done` and `total`.

    Returns:
        A row for each: `fault`, `algorithm`, `seconds` (of the slowest rank), `saw` (in words),
        `problems` (what did not hold), and `ranks`, what each of them saw.
    """
    names = [*faults.DIVERGENCES, *faults.ABSENCES, *faults.DEATHS]
    cases = [
        (fault, algorithm)
        for fault in names
        for algorithm in faults.ALGORITHMS
        if faults.applies(fault, algorithm) and (not words or any(word in fault for word in words))
    ]
    rows = []
    with RankPool(world_size, device, timeout=_RUN_SECONDS, share_gpus=share_gpus) as pool:
        for done, (fault, algorithm) in enumerate(cases):
            on_message(0, {"text": f"{fault}, {algorithm}", "done": done, "total": len(cases)})
            rows.append(_provoke(pool, fault, algorithm, timeout_s))
    return rows


def _provoke(pool: RankPool, fault: str, algorithm: str, timeout_s: float) -> Row:
    culprit = pool.world_size - 1
    may_die = [culprit] if fault in faults.DEATHS else []
    pids: set[int] = set()
    row: Row = {"fault": fault, "algorithm": algorithm, "timeout_s": timeout_s}
    try:
        arguments = (pool.device, fault, algorithm, timeout_s)
        seen = pool.run(
            faults.provoke, *arguments, may_die=may_die, on_message=lambda _, pid: pids.add(pid)
        )
    except RankError as error:
        return {**row, "seconds": None, "saw": "", "ranks": [], "problems": [str(error)]}
    limit_s = SLACK_SECONDS + (0.0 if fault in faults.DEATHS else timeout_s)
    problems = _problems(seen, fault, culprit, limit_s)
    problems += [f"left behind: {name}" for name in _left_by(pids)]
    ranks = [{"rank": rank, **one} for rank, one in enumerate(seen) if one is not None]
    return {
        **row,
        "seconds": max((one["seconds"] for one in ranks), default=None),
        "saw": _saw(ranks[0]) if ranks else "",
        "ranks": ranks,
        "problems": problems,
    }


def _left_by(pids: Iterable[int]) -> list[str]:
    """Names of shared memory that these processes made and that are still there."""
    return sorted(path.name for pid in pids for path in _SHARED_MEMORY.glob(f"allnorm-{pid}-*"))


def _problems(seen: list[Row | None], fault: str, culprit: int, limit_s: float) -> list[str]:
    """What each rank should have seen and did not."""
    expected = faults.expected_errors(fault)
    problems = []
    for rank, one in enumerate(seen):
        if one is None:
            if rank != culprit:
                problems.append(f"rank {rank} saw nothing")
            continue
        found = list(one["problems"])
        if one["error"] not in expected:
            found.append(f"{one['error'] or 'nothing'} instead of {' or '.join(expected)}")
        if rank != culprit and one["peer"] != culprit:
            found.append(f"names rank {one['peer']} instead of {culprit}")
        if one["seconds"] > limit_s:
            found.append(f"took {one['seconds']:.2f} s, more than {limit_s:g}")
        problems += [f"rank {rank}: {text}" for text in found]
    return problems


def _saw(one: Row) -> str:
    return f"{_KINDS.get(one['error'], 'nothing')}, names rank {one['peer']}; seen: {one['seen']}"
