"""Calls over several islands: sums inside each, float32 sums between them, the rest inside again.

A call is cut into pieces of rows. Of each piece

1. launch A (`ALLNORM_SUM_ROWS`): every rank gets the float32 sums, not rounded, of the rows that it
   owns in its island: contiguous blocks, as `row_shard` of the piece among the ranks of an island;
2. ranks of equal place, which own the same rows, exchange these sums (core/between.py);
3. launch B (`ALLNORM_ISLAND_SUMS`): the owner adds the sums of all islands in order, rounds once,
   and what follows is done inside the island as in a call of one island.

Islands of one rank have no launch A, since a rank's partial is its sum: rows of the dtype of x
cross, and launch B is the local kernel over those of all ranks.

Every island does 3 for all rows: a row that is finished in one need not cross to another. Where the
residual is sharded, a piece is the rows of the ranks of one island, so that a block of launch A is
the `row_shard` of a rank there. Their residual goes to the ranks of equal place beforehand; they
finish the rows as well, and only the rank that has the residual keeps the new one.

Before a call the ranks tell each other what they are about to do, as before an unfused one: what
follows is then the same on all of them, and has the same size. On GPUs of several machines they do
so once for each kind of call, and in a graph when it is captured not at all.

Between more than two islands many rows cross in two hops: an owner gets the sums of a part of its
rows from all islands, adds and rounds them, and sends the others what they have become.

The exchange of one piece overlaps launch B of the piece before it and launch A of the one behind
it. In the stream of a rank launches A and B are in the same order on all ranks, and an exchange
waits for nothing but the launches A of those who take part: so whatever has room on a GPU first,
the oldest piece can always be finished.
"""

from __future__ import annotations

import ctypes
import datetime
import itertools
from collections.abc import Callable, Generator, Iterator

import torch
import torch.distributed as dist

from allnorm import policy
from allnorm.core import _native, chunks, workspace
from allnorm.core.agreement import agree
from allnorm.core.announcement import Announcement
from allnorm.core.between import Between, Look, places, segments
from allnorm.core.channel import Channel, Waits
from allnorm.core.prepared_call import (
    CUDA_ALIGN_BYTES,
    Memory,
    PreparedCall,
    as_launch_a,
    as_launch_b,
)
from allnorm.core.rendezvous import Rendezvous
from allnorm.core.shards import row_shard
from allnorm.core.tensors import rows_of
from allnorm.islands import Islands


class Hierarchy:
    """One rank's place among islands, and what it exchanges over.

    Args:
        meeting: of all ranks.
        islands: of equal size, more than one rank each.
        memory: of this rank's island.
        device: of the tensors.
        backend: of the process group, for the device.
        timeout: of the communicator.

    Attributes:
        islands: as given.
        ranks: of this rank's island, by their place.
    """

    def __init__(
        self,
        meeting: Rendezvous,
        islands: Islands,
        memory: workspace.Workspace,
        device: torch.device,
        backend: str,
        timeout: datetime.timedelta,
    ) -> None:
        self.islands, self.memory = islands, memory
        self.number, self.place = places(islands, meeting.rank)
        self.ranks = islands[self.number]
        self._agreed: set[Announcement] = set()
        self.between = Between(meeting, islands, device, backend, timeout)

    def agree_once(self, prepared: PreparedCall, channel: Channel, waits: Waits) -> None:
        """As `agreement.agree`; between machines, where that is slow, once for each kind of call.

        All ranks have agreed on the same kinds, since each of them was agreed on by all.
        """
        mine = Announcement.of(prepared)
        if channel.is_slow and mine in self._agreed:
            return
        agree(prepared, channel, waits)
        self._agreed.add(mine)

    def place_of(self, rank: int) -> int | None:
        """Where a rank of the group is in this island; None if it is in another one."""
        return self.ranks.index(rank) if rank in self.ranks else None


def run(
    prepared: PreparedCall,
    library: _native.Library,
    handle: int,
    hierarchy: Hierarchy,
    channel: Channel,
    waits: Waits,
    inputs: tuple[torch.Tensor | None, ...],
    memory: Memory,
) -> int:
    """Runs a bound call; returns the status. Collective.

    Args:
        prepared: bound.
        library: of the backend.
        handle: of the native communicator of this rank's island.
        hierarchy: of this rank.
        channel: over which all ranks announce the call.
        waits: ends waits, and raises what they end with.
        inputs: as the kernels read them.
        memory: what they write.

    Raises:
        PeerDivergedError: on every rank, if the ranks do not make the same call. Nothing was
            computed, and ranks are in step again.
        PeerTimeoutError: a rank did not come.
        RuntimeError: the exchange between islands failed.
    """
    x, residual = inputs[0], inputs[1]
    assert x is not None
    if x.device.type == "cpu":
        agree(prepared, channel, waits)
    elif not torch.cuda.is_current_stream_capturing():
        hierarchy.agree_once(prepared, channel, waits)
    is_cuda = x.device.type == "cuda"
    one = _Run(prepared, library, handle, hierarchy, waits.look_at_peers, is_cuda)
    if prepared.native.op == _native.ALL_GATHER_ROWS:
        return one.gather_rows(x, memory["out"])
    return one.reduce(x, residual, memory)


def parts(
    prepared: PreparedCall,
    library: _native.Library,
    handle: int,
    hierarchy: Hierarchy,
    look: Look,
    bind: Callable[[], tuple[torch.Tensor | None, ...]],
) -> dict[str, Callable[[], object]]:
    """Launch A, the exchange and launch B of a call in one piece, each by itself, for benchmarks.

    Args:
        prepared: of more than one rank an island; not bound.
        library: of the backend.
        handle: of the native communicator of this rank's island.
        hierarchy: of this rank.
        look: as `Between.gather` takes it.
        bind: binds it; returns the inputs as they are read.
    """
    x = bind()[0]
    assert x is not None
    first, end = row_shard(prepared.num_tokens, len(hierarchy.ranks), hierarchy.place)
    shape = end - first, prepared.native.hidden_size
    sums = torch.ones(shape, dtype=torch.float32, device=x.device)

    def one() -> _Run:
        bind()  # to the stream that is current now
        return _Run(prepared, library, handle, hierarchy, look, x.device.type == "cuda")

    def exchange() -> torch.Tensor:
        steps = one().exchange(sums, x.dtype, prepared.num_tokens)
        while True:
            try:
                next(steps)
            except StopIteration as finished:
                return finished.value

    exchanged = exchange()
    return {
        "sums": lambda: one().run_a(0, prepared.num_tokens, sums),
        "exchange": exchange,
        "rest": lambda: one().run_b(0, prepared.num_tokens, exchanged),
    }


class _Run:
    """One call."""

    def __init__(
        self,
        prepared: PreparedCall,
        library: _native.Library,
        handle: int,
        hierarchy: Hierarchy,
        look: Look,
        is_cuda: bool,
    ) -> None:
        self._prepared, self._library, self._handle = prepared, library, handle
        self._hierarchy, self._between, self._look = hierarchy, hierarchy.between, look
        self._call = prepared.native
        self._saved = chunks.results_of(prepared.native)
        self._is_cuda = is_cuda
        self._alone = len(hierarchy.ranks) == 1
        self._kept: list[torch.Tensor] = []  # until their launches have been made

    # ---- sums ------------------------------------------------------------------------------------

    def reduce(self, x: torch.Tensor, residual: torch.Tensor | None, memory: Memory) -> int:
        """Of a call that sums; returns the status."""
        prepared = self._prepared
        sharded = prepared.shard is not None
        pieces = self._pieces(self._call.hidden_size)
        residuals = None
        if sharded and residual is not None:
            residuals = self._gather_shards(rows_of(residual), prepared.num_tokens)
        partials = x
        if self._alone:
            status, partials = chunks.own_partial(prepared, self._library, x)
            if status != _native.OK:
                return status
        return _in_turn(
            self._piece(number, lo, hi, partials, residuals, memory)
            for number, (lo, hi) in enumerate(pieces)
            if lo < hi
        )

    def _piece(
        self,
        number: int,
        lo: int,
        hi: int,
        partials: torch.Tensor,
        residuals: torch.Tensor | None,
        memory: Memory,
    ) -> Iterator[int]:
        """Makes a piece; yields a status wherever others may be continued while it waits."""
        hierarchy, hidden_size = self._hierarchy, self._call.hidden_size
        first, end = row_shard(hi - lo, len(hierarchy.ranks), hierarchy.place)
        if self._alone:
            sums = partials[lo:hi].contiguous()
        else:
            shape = end - first, hidden_size
            sums = self._keep(torch.empty(shape, dtype=torch.float32, device=partials.device))
            status = self.run_a(lo, hi, sums)
            if status != _native.OK:
                yield status
                return
        sums = yield from self.exchange(sums, partials.dtype, hi - lo)
        yield self._finish(number, lo, hi, sums, residuals, partials, memory)

    def exchange(
        self, sums: torch.Tensor, dtype: torch.dtype, piece_rows: int
    ) -> Generator[int, None, torch.Tensor]:
        """The sums of this rank's rows by island; or of all islands, rounded, as the only ones.

        Yields where others may be continued while it waits.

        Args:
            sums: of this island.
            dtype: what the sum of all islands is rounded to.
            piece_rows: the rows of the piece. The number of hops follows from it, and not from this
                rank's rows: ranks of one island must wait equally often between launches.
        """
        count, rows = self._between.num_islands, sums.shape[0]
        in_parts = self._between.can_exchange_parts and policy.is_sooner_in_parts(
            count,
            len(self._hierarchy.ranks),
            piece_rows * sums.shape[1],
            sums.element_size(),
            dtype.itemsize,
        )
        if not in_parts:
            received = self._between.start_gather(sums)
            yield _native.OK
            return self._keep(received(self._look))
        padded = sums
        if rows % count:
            padded = self._keep(sums.new_zeros((rows + count - rows % count, sums.shape[1])))
            padded[:rows].copy_(sums)
        received = self._between.start_parts(padded)
        yield _native.OK
        parts = self._keep(received(self._look))
        total = chunks.add(self._library, self._call.stream, self._keep(parts.float()))
        finish = self._between.start_gather(self._keep(total.to(dtype)))
        yield _native.OK
        whole = self._keep(finish(self._look)).view(1, *padded.shape)
        return self._keep(whole.to(sums.dtype))[:, :rows]

    def _finish(
        self,
        number: int,
        lo: int,
        hi: int,
        sums: torch.Tensor,
        residuals: torch.Tensor | None,
        x: torch.Tensor,
        memory: Memory,
    ) -> int:
        """Launch B: what the sums of a piece become."""
        call = self._launch_b(lo, hi, sums)
        if self._prepared.shard is not None:
            self._shard_residual(call, number, residuals, x, sums.shape[1])
        if self._alone:
            return int(self._library.local(ctypes.addressof(call)))
        if not (self._is_cuda and (call.quantized or 0) % CUDA_ALIGN_BYTES):
            return self._run(call)
        # The first FP8 row of a shard may lie where no pack can be stored.
        rows = rows_of(memory["quantized_out"])[lo:hi]
        apart = self._keep(rows.new_empty(rows.shape))
        call.quantized, call.quantized_stride = apart.data_ptr(), apart.stride(0)
        status = self._run(call)
        rows.view(torch.uint8).copy_(apart.view(torch.uint8))
        return status

    def _pieces(self, hidden_size: int) -> list[tuple[int, int]]:
        prepared, hierarchy = self._prepared, self._hierarchy
        if prepared.shard is not None:
            return segments(hierarchy.islands, self._shards(prepared.num_tokens))
        step = policy.hierarchical_rows(
            "cuda" if self._is_cuda else "cpu",
            len(hierarchy.ranks),
            prepared.num_tokens,
            hidden_size,
        )
        lows = range(0, prepared.num_tokens, step)
        return [(lo, min(lo + step, prepared.num_tokens)) for lo in lows]

    def _shards(self, num_tokens: int) -> list[tuple[int, int]]:
        world_size = sum(map(len, self._hierarchy.islands))
        return [row_shard(num_tokens, world_size, rank) for rank in range(world_size)]

    def run_a(self, lo: int, hi: int, sums: torch.Tensor) -> int:
        """Launch A of rows `lo` to `hi`; returns the status."""
        return self._run(self._launch_a(lo, hi, sums))

    def run_b(self, lo: int, hi: int, sums: torch.Tensor) -> int:
        """Launch B of rows that belong to nobody."""
        return self._run(self._launch_b(lo, hi, sums))

    def _launch_a(self, lo: int, hi: int, sums: torch.Tensor) -> _native.Call:
        """The sums of rows `lo` to `hi` in this island."""
        call = as_launch_a(self._call)
        width = _width(call.dtype)
        call.num_tokens = hi - lo
        call.out, call.out_stride = sums.data_ptr() or call.x, call.hidden_size
        if not call.top_k:
            call.x += lo * call.x_stride * width
            return call
        if call.expert_index:
            call.expert_index += lo * call.expert_index_stride * 4
        else:
            call.x += lo * call.top_k * call.x_stride * width
            call.num_rows = (hi - lo) * call.top_k
        if call.expert_weights:
            call.expert_weights += lo * call.expert_weights_stride * 4
        if call.shared:
            call.shared += lo * call.shared_stride * width
        return call

    def _launch_b(self, lo: int, hi: int, sums: torch.Tensor) -> _native.Call:
        """What becomes of the sums of rows `lo` to `hi`."""
        call = as_launch_b(self._call)
        width = _width(call.dtype)
        if self._alone:
            call.flags &= ~_native.ISLAND_SUMS
        call.x = sums.data_ptr() or call.x
        call.x_stride, call.num_sources = call.hidden_size, sums.shape[0]
        call.source_stride = sums.stride(0) if sums.numel() else 0
        call.num_tokens = hi - lo
        whole = hi == self._prepared.num_tokens
        call.scale_padding_rows = self._call.scale_padding_rows if whole else 0
        residual_row = 0 if self._prepared.shard is not None else lo
        chunks.move_results(self._prepared, call, self._saved, lo, residual_row, width)
        return call

    def _run(self, call: _native.Call) -> int:
        if self._is_cuda:  # the host does not wait
            return int(self._library.run(self._handle, ctypes.addressof(call)))
        notes = self._between.notes
        notes.enter(self._hierarchy.ranks)
        status = int(self._library.run(self._handle, ctypes.addressof(call)))
        if status == _native.OK:
            notes.leave()
        return status

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        return tensor

    # ---- rows that belong to ranks ---------------------------------------------------------------

    def _gather_shards(self, own: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The rows of the ranks of this place, by island; shorter ones are padded."""
        lo, hi = self._shards(num_tokens)[0]
        padded = own.new_empty((hi - lo, own.shape[1]))
        padded[: own.shape[0]].copy_(own)
        return self._keep(self._between.gather(self._keep(padded), self._look))

    def _shard_residual(
        self,
        call: _native.Call,
        number: int,
        residuals: torch.Tensor | None,
        x: torch.Tensor,
        rows: int,
    ) -> None:
        """Lets launch B of the rows of one island read their residual, and write it where it is."""
        if residuals is not None:
            call.residual = residuals[number].data_ptr()
            call.residual_stride = call.hidden_size
        if number != self._hierarchy.number:
            unused = self._keep(x.new_empty((max(1, rows), call.hidden_size)))
            call.residual_out, call.residual_out_stride = unused.data_ptr(), call.hidden_size

    def gather_rows(self, shard: torch.Tensor, out: torch.Tensor) -> int:
        """Those of equal place exchange their rows, then each island gathers them."""
        prepared, hierarchy = self._prepared, self._hierarchy
        gathered = self._gather_shards(rows_of(shard), prepared.num_tokens)
        shards = self._shards(prepared.num_tokens)
        for number, (lo, hi) in enumerate(segments(hierarchy.islands, shards)):
            if lo == hi:
                continue
            if self._alone:
                out[lo:hi].copy_(gathered[number][: hi - lo])
                continue
            call = _native.Call.from_buffer_copy(self._call)
            call.algorithm = _native.ALGORITHM["two_shot"]
            call.num_tokens = hi - lo
            call.x, call.x_stride = gathered[number].data_ptr(), call.hidden_size
            call.out += lo * call.out_stride * _width(call.dtype)
            status = self._run(call)
            if status != _native.OK:
                return status
        return _native.OK


def _in_turn(pieces: Iterator[Iterator[int]]) -> int:
    """Makes pieces, each a step behind the one before it; returns the first status that is not OK.

    The newest goes first: what it waits for was begun before what the older ones wait for.
    """
    under_way: list[Iterator[int]] = []
    while under_way := [*itertools.islice(pieces, 1), *under_way]:
        for piece in list(under_way):
            status = next(piece, None)
            if status is None:
                under_way.remove(piece)
            elif status != _native.OK:
                return status
    return int(_native.OK)


def _width(dtype: int) -> int:
    """Bytes of an element."""
    return 4 if dtype == _native.DTYPE["float32"] else 2


def backend_obstacle(group: dist.ProcessGroup, backend: str, backends: tuple[str, ...]) -> str:
    """Why a backend cannot carry sums between islands; empty if it can."""
    if backend in backends:
        return ""
    return (
        f"the process group sends tensors of this device with {backend or 'nothing'}: "
        f"expected {' or '.join(backends)}"
    )
