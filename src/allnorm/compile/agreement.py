"""Makes all ranks fuse a graph in the same way.

If one rank makes a fused call and a peer makes an unfused one, both hang.

Graphs may differ between ranks, and not every rank compiles every graph. Before a rank changes its
graph, the ranks of each process group therefore compare their plans for each reduction: see
`allnorm.core.verdicts`.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import json
import pathlib
import weakref
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from allnorm import config
from allnorm.communicator import Communicator
from allnorm.compile.generation import Generation
from allnorm.core.rendezvous import store_of
from allnorm.core.verdicts import PATIENCE_S, Step, Verdicts, places_of

_elsewhere = contextvars.ContextVar("decides_elsewhere", default=False)
# Both are keyed by group, then by the name of the caller's communicator ("" without one).
_verdicts = weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Verdicts]]()
_generations = weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Generation]]()


@contextlib.contextmanager
def decides_elsewhere() -> Iterator[None]:
    """Makes `settle` skip the agreement, for callers that make their ranks agree in another way."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def settle(
    group: dist.ProcessGroup,
    communicator: Communicator | None,
    reductions: Sequence[str],
    steps: Sequence[Step],
) -> str:
    """Decides whether all ranks of a group fuse a graph in the same way. Waits for a limited time.

    Args:
        group: the process group of the ranks that decide.
        communicator: the caller's communicator; None if the pass chooses one for the group.
        reductions: descriptions of the graph's reductions over this group, equal on all ranks.
        steps: this rank's plan for each of these reductions.

    Returns:
        The reason why no rank fuses any of them; empty if every rank follows `steps`.

    Raises:
        AllnormError: see `Verdicts.settle`.
    """
    if _elsewhere.get() or dist.get_world_size(group) == 1:
        return ""
    key, kind = _key(communicator), json.dumps(reductions)
    verdicts, generation = verdicts_of(group, communicator), _generations.get(group, {}).get(key)
    try:
        if generation is None:
            return verdicts.settle(kind, steps)
        with generation.deciding() as agreed:
            reason = verdicts.settle(kind, steps)
            fuses = any(step.action for step in steps)
            if not reason or not fuses:
                kind_place, place = places_of(kind, steps)
                agreed[place] = kind_place if fuses else ""
        return reason
    except (RuntimeError, EOFError, OSError) as error:
        return f"ranks cannot agree: the store of process group {group.group_name} fails ({error})"


def verdicts_of(group: dist.ProcessGroup, communicator: Communicator | None) -> Verdicts:
    """Returns the `Verdicts` with which a group decides on graphs that use this communicator."""
    name = _key(communicator)
    known = _verdicts.setdefault(group, {})
    if name not in known:
        timeout = config.read_settings().timeout or config.DEFAULT_TIMEOUT
        if communicator is not None:
            timeout = communicator.timeout
        # The keys must differ from the keys of a destroyed group with the same name.
        ranks = hashlib.sha256(str(dist.get_process_group_ranks(group)).encode()).hexdigest()[:8]
        prefix = f"allnorm/compile/{group.group_name}/{ranks}/{name}"
        known[name] = Verdicts(
            PrefixStore(prefix, store_of(group)),
            dist.get_rank(group),
            dist.get_world_size(group),
            # A rank that does not reply may be waiting in a call: give up before that wait times
            # out.
            patience_s=min(PATIENCE_S, timeout.total_seconds() / 4),
        )
    return known[name]


def word(communicator: Communicator, folder: pathlib.Path, traits: object) -> str:
    """Returns a cache key for compiled code that matches the peers' code: see `generation`.

    Collective among the ranks that compile with this communicator. Waits for a limited time.

    Args:
        communicator: the caller's communicator.
        folder: this rank's compile cache folder.
        traits: everything else that the compiled code depends on.
    """
    group, key = communicator.group, _key(communicator)
    if group is None or communicator.world_size == 1:
        return ""
    known = _generations.setdefault(group, {})
    if key not in known:
        ranks = dist.get_process_group_ranks(group)
        digest = hashlib.sha256(repr((traits, key, ranks)).encode()).hexdigest()[:16]
        place = folder / "allnorm" / digest / str(communicator.rank)
        known[key] = Generation(place, verdicts_of(group, communicator))
    return f"{known[key].word} rank {communicator.rank}"


def _key(communicator: Communicator | None) -> str:
    return "" if communicator is None else communicator.name
