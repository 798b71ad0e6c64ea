"""Calls over multiple islands: sum in each, exchange float32 sums, and finish in each.

A call's rows are split into pieces. For each piece:

1. Launch A (`ALLNORM_SUM_ROWS`): every rank gets the unrounded float32 sums of the rows that it
   owns in its island. These rows are a contiguous block: the rank's `row_shard` of the piece over
   the island's ranks.
2. Ranks with the same index in their islands own the same rows. They exchange their sums
   (core/between.py).
3. Launch B (`ALLNORM_ISLAND_SUMS`): the owner adds the sums of all islands in order and rounds
   once. The rest runs inside the island, as in a call with one island.

Islands of one rank have no launch A, because the rank's partial is the sum. They exchange rows in
the dtype of x, and launch B is the local kernel over the rows of all ranks.

Every island runs step 3 for all rows, so no finished row crosses between islands. If the residual
is sharded, a piece consists of the rows that one island's ranks hold. Each block of launch A is
then the `row_shard` of one of these ranks. Its residual rows are sent to the ranks with the same
index in other islands beforehand. Those ranks finish the rows as well, but only the rank that holds
the residual keeps the new residual. If results are not gathered, only this rank finishes its rows.

Ranks announce a call before it runs, as they do for unfused calls. So they all run the same steps
with the same sizes. With GPUs on multiple hosts, they announce each kind of call only once. They
never announce captured calls.

With more than two islands, large pieces cross in two hops: an owner receives all islands' sums of
part of its rows, adds and rounds them, and sends the results to the other islands.

The exchange of a piece overlaps launch B of the previous piece and launch A of the next one. Every
rank issues launches A and B in the same order, and an exchange waits only for the launches A of its
ranks. So whichever launch the GPUs run first, the oldest piece can always finish.
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
    only_reduce,
)
from allnorm.core.rendezvous import Rendezvous
from allnorm.core.shards import row_shard
from allnorm.core.tensors import rows_of
from allnorm.islands import Islands


class Hierarchy:
    """The position of a rank among islands, and its exchange with other islands.

    Attributes:
        number: number of this rank's island.
        ranks: ranks of this island.
        index: index of this rank in its island.
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
        self.number, self.index = places(islands, meeting.rank)
        self.ranks = islands[self.number]
        self._agreed: set[Announcement] = set()
        self.between = Between(meeting, islands, device, backend, timeout)

    def agree_once(self, prepared: PreparedCall, channel: Channel, waits: Waits) -> None:
        """Runs `agreement.agree`, but over a slow channel only once per kind of call.

        All ranks have agreed on the same kinds of calls, because all of them took part each time.
        """
        mine = Announcement.of(prepared)
        if channel.is_slow and mine in self._agreed:
            return
        agree(prepared, channel, waits)
        self._agreed.add(mine)

    def place_of(self, rank: int) -> int | None:
        """Returns the index of a rank in this island; None if the rank is in a different island."""
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
    """Runs a bound call and returns its status. Collective.

    Raises:
        PeerDivergedError: the ranks make different calls; every rank raises. Nothing was computed,
            and the ranks are in step again.
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
    """Returns launch A, the exchange and launch B of a call in one piece, for benchmarks.

    `bind` binds the call and returns its inputs. Islands must have more than one rank.
    """
    x = bind()[0]
    assert x is not None
    first, end = row_shard(prepared.num_tokens, len(hierarchy.ranks), hierarchy.index)
    shape = end - first, prepared.native.hidden_size
    sums = torch.ones(shape, dtype=torch.float32, device=x.device)

    def one() -> _Run:
        bind()  # to the current stream
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
    """One run of a bound call."""

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
        self._kept: list[torch.Tensor] = []  # tensors that must live until their launches

    # ---- sums ------------------------------------------------------------------------------------

    def reduce(self, x: torch.Tensor, residual: torch.Tensor | None, memory: Memory) -> int:
        """Runs a call that reduces; returns the status."""
        prepared = self._prepared
        sharded = prepared.shard is not None
        pieces = self._pieces(self._call.hidden_size)
        residuals = None
        if sharded and residual is not None and prepared.gathers:
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
        """Runs a piece; yields a status wherever other pieces may continue while it waits."""
        hierarchy, hidden_size = self._hierarchy, self._call.hidden_size
        first, end = row_shard(hi - lo, len(hierarchy.ranks), hierarchy.index)
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
        """Returns each island's sums of this rank's rows, or their rounded total over all islands.

        Yields wherever other pieces may continue while it waits.

        Args:
            sums: sums of this island.
            dtype: dtype that the total is rounded to.
            piece_rows: number of rows in the piece, which determines the number of hops. The number
                of this rank's rows must not: all ranks of an island must wait equally often.
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
        """Runs launch B of a piece."""
        if not self._prepared.gathers:
            return self._finish_own(number, sums, x.dtype)
        if self._call.op == _native.HYPER_CONNECTION and not self._alone:
            return self._finish_streams(lo, hi, sums, x.dtype)
        call = self._launch_b(lo, hi, sums)
        if self._prepared.shard is not None:
            self._shard_residual(call, number, residuals, x, sums.shape[1])
        if self._alone:
            return int(self._library.local(ctypes.addressof(call)))
        if not (self._is_cuda and (call.quantized or 0) % CUDA_ALIGN_BYTES):
            return self._run(call)
        # The first FP8 row of a shard may not be aligned for packed stores.
        rows = rows_of(memory["quantized_out"])[lo:hi]
        apart = self._keep(rows.new_empty(rows.shape))
        call.quantized, call.quantized_stride = apart.data_ptr(), apart.stride(0)
        status = self._run(call)
        rows.view(torch.uint8).copy_(apart.view(torch.uint8))
        return status

    def _finish_own(self, number: int, sums: torch.Tensor, dtype: torch.dtype) -> int:
        """Finishes this rank's rows, which no other rank needs, with the local kernel."""
        if number != self._hierarchy.number:
            return int(_native.OK)
        if not self._alone:  # the local kernel reads no float32 sums of rows in 16 bits
            sums = self._keep(sums.contiguous())
            total = self._keep(chunks.add(self._library, self._call.stream, sums))
            sums = self._keep(total.to(dtype)).unsqueeze(0)
        call = self._launch_b(0, sums.shape[1], sums)
        call.flags &= ~_native.ISLAND_SUMS
        call.scale_padding_rows = self._call.scale_padding_rows
        return int(self._library.local(ctypes.addressof(call)))

    def _finish_streams(self, lo: int, hi: int, sums: torch.Tensor, dtype: torch.dtype) -> int:
        """Finishes a hyper-connection: launch B reduces, and the local kernel mixes streams."""
        shape = hi - lo, self._call.hidden_size
        reduced = self._keep(torch.empty(shape, dtype=dtype, device=sums.device))
        call = self._launch_b(lo, hi, sums)
        only_reduce(call)
        call.out, call.out_stride = reduced.data_ptr(), call.hidden_size
        status = self._run(call)
        if status != _native.OK:
            return status
        call = self._launch_b(lo, hi, reduced.unsqueeze(0))
        call.flags &= ~_native.ISLAND_SUMS
        return int(self._library.local(ctypes.addressof(call)))

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
        """Runs launch A for rows `lo` to `hi`; returns the status."""
        return self._run(self._launch_a(lo, hi, sums))

    def run_b(self, lo: int, hi: int, sums: torch.Tensor) -> int:
        """Runs launch B for rows `lo` to `hi` with a replicated residual; returns the status."""
        return self._run(self._launch_b(lo, hi, sums))

    def _launch_a(self, lo: int, hi: int, sums: torch.Tensor) -> _native.Call:
        """Returns the C call that sums rows `lo` to `hi` in this island."""
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
        """Returns the C call that finishes rows `lo` to `hi`."""
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

    # ---- rows with owners ------------------------------------------------------------------------

    def _gather_shards(self, own: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Gathers the shards of all ranks with this index, in island order; pads shorter ones."""
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
        """Points launch B of an island's rows to their residual and to memory for the new one."""
        if residuals is not None:
            call.residual = residuals[number].data_ptr()
            call.residual_stride = call.hidden_size
        if number != self._hierarchy.number:
            wide = call.flags & _native.FLOAT32_RESIDUAL
            dtype = torch.float32 if wide else x.dtype
            unused = self._keep(x.new_empty((max(1, rows), call.hidden_size), dtype=dtype))
            call.residual_out, call.residual_out_stride = unused.data_ptr(), call.hidden_size

    def gather_rows(self, shard: torch.Tensor, out: torch.Tensor) -> int:
        """Exchanges rows with other islands, then gathers them within this one."""
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
    """Runs the pieces as a pipeline, each one step behind the last; returns the first error.

    The newest piece goes first, because its wait is for work that started before that of others.
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
    """Returns the number of bytes per element, for a dtype code."""
    return 4 if dtype == _native.DTYPE["float32"] else 2


def backend_obstacle(group: dist.ProcessGroup, backend: str, backends: tuple[str, ...]) -> str:
    """Returns why a backend cannot exchange sums between islands; empty if it can."""
    if backend in backends:
        return ""
    return (
        f"the process group sends tensors of this device with {backend or 'nothing'}: "
        f"expected {' or '.join(backends)}"
    )
