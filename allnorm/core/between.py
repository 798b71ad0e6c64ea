"""The exchange between islands: among ranks of equal place, over the group's own backend.

Each place has a process group of its own, made once, when the communicator is opened: over the
store of the communicator's group and not by torch.distributed.new_group, which ranks outside of the
group would have to call too.
"""

from __future__ import annotations

import datetime
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from allnorm.core.rendezvous import Rendezvous
from allnorm.islands import Islands

# How a wait for gloo looks: at once for a while, then now and then, and at processes rarely.
_SPIN_SECONDS, _PAUSE_SECONDS, _LOOK_SECONDS = 5e-4, 1e-4, 0.1
BACKENDS = ("gloo", "nccl")


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of what a group sends tensors of a device with; empty if it has none for them."""
    try:
        return str(group._get_backend(torch.device(device.type)).name())
    except RuntimeError:
        return ""


class Between:
    """One rank's end of the exchange with those of the same place in other islands.

    Args:
        meeting: of all ranks.
        islands: of equal size.
        device: of the tensors.
        backend: one of BACKENDS.
        timeout: of the communicator.

    Attributes:
        num_islands: how many ranks exchange.
        ranks: their numbers in the whole group, by island.
    """

    def __init__(
        self,
        meeting: Rendezvous,
        islands: Islands,
        device: torch.device,
        backend: str,
        timeout: datetime.timedelta,
    ) -> None:
        own = next(number for number, island in enumerate(islands) if meeting.rank in island)
        place = islands[own].index(meeting.rank)
        self.num_islands, self.ranks = len(islands), [island[place] for island in islands]
        store = PrefixStore(meeting.prefix(f"between{place}"), meeting.store)
        self._on_host = device.type == "cpu"
        self._backend = backend
        if backend == "gloo":
            made: Any = dist.ProcessGroupGloo(store, own, self.num_islands, timeout)
        else:
            made = _new_nccl(store, own, self.num_islands)
        # In a list of its own that is emptied at the interpreter's exit too: gloo's threads must
        # have ended by then, or they abort it.
        self._groups: list[Any] = [made]
        self._end = weakref.finalize(self, self._groups.clear)
        # Connections are made by the first exchange, which no deadline of a call should see.
        first = torch.zeros(1, dtype=torch.float32, device=device)
        self.gather(first, lambda seconds: None)
        if not self._on_host:
            torch.cuda.synchronize(device)

    def gather(self, rows: torch.Tensor, look: Callable[[float], None]) -> torch.Tensor:
        """Every island's contiguous tensor of equal shape, `[num_islands, *shape]`. Collective.

        Args:
            rows: this rank's.
            look: called now and then while the host waits, with the seconds so far; raises to end
                the wait.

        Raises:
            RuntimeError: the backend gives up.
        """
        gathered = rows.new_empty((self.num_islands, *rows.shape))
        if rows.numel():
            sent, received = (t.view(torch.uint8).view(-1) for t in (rows, gathered))
            self._finish(self._group._allgather_base(received, sent), look)
        return gathered

    def exchange_parts(self, rows: torch.Tensor, look: Callable[[float], None]) -> torch.Tensor:
        """Part i of `rows`, equal parts of the first dimension, goes to island i. Collective.

        Returns:
            This island's part of every island, `[num_islands, rows of a part, ...]`.
        """
        received = torch.empty_like(rows)
        if rows.numel():
            self._finish(self._group.alltoall_base(received, rows, [], []), look)
        return received.view(self.num_islands, -1, *rows.shape[1:])

    @property
    def can_exchange_parts(self) -> bool:
        """Whether `exchange_parts` works: gloo does it on the host only."""
        return self._on_host or self._backend == "nccl"

    @property
    def _group(self) -> Any:
        if not self._groups:
            raise RuntimeError("the exchange between islands was given up")
        return self._groups[0]

    def _finish(self, work: Any, look: Callable[[float], None]) -> None:
        if self._backend == "nccl":
            work.wait()  # of the current stream, not of the host
        else:
            wait(work, look)

    def abort(self) -> None:
        """Ends it at once: those who wait for this rank get an error. Idempotent."""
        for group in self._groups:
            group.abort()
        self.close()

    def close(self) -> None:
        """Releases the process group. Idempotent."""
        self._end()


def _new_nccl(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    return dist.ProcessGroupNCCL(store, rank, size, options)


def wait(work: Any, look: Callable[[float], None]) -> None:
    """Waits for gloo, which notices a death only next to it, and looks at what else ends waits."""
    start = time.monotonic()
    looked = start
    while not work.is_completed():
        now = time.monotonic()
        if now - looked > _LOOK_SECONDS:
            look(now - start)
            looked = now
        time.sleep(0 if now - start < _SPIN_SECONDS else _PAUSE_SECONDS)
    work.wait()


def places(islands: Islands, rank: int) -> tuple[int, int]:
    """The number of a rank's island, and its place there."""
    number = next(i for i, island in enumerate(islands) if rank in island)
    return number, islands[number].index(rank)


def segments(islands: Islands, bounds: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The rows of each island, whose ranks follow each other, from those of each rank."""
    return [(bounds[island[0]][0], bounds[island[-1]][1]) for island in islands]
