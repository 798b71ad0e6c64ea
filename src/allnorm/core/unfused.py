"""Unfused calls: a gather through a process group, then a local kernel over the gathered rows.

They replace fused calls that cannot run, with bit-identical results. Rows are sent as bytes,
because gloo cannot gather bfloat16, NCCL cannot gather float8, and no bit may change.

The process group belongs to the communicator. The first unfused call creates it, because most
communicators never need it, and it takes memory and connections.

The ranks first announce the call on a channel. Otherwise different calls would do damage: if
they send different numbers of bytes, gloo aborts the process, and NCCL waits until its watchdog
aborts it; if the numbers are equal, rows of different shapes are mixed. Captured calls are not
announced.
"""

from __future__ import annotations

import torch

from allnorm import policy
from allnorm.core import _native
from allnorm.core.agreement import agree
from allnorm.core.between import GroupExchange
from allnorm.core.channel import Channel, Waits
from allnorm.core.chunks import ROW_FIELDS, add, move_results, own_partial
from allnorm.core.connection import Connection, NotConnectedError
from allnorm.core.prepared_call import Memory, PreparedCall
from allnorm.core.shards import row_shard
from allnorm.core.tensors import rows_of
from allnorm.errors import UnsupportedError
from allnorm.islands import Islands
from allnorm.quant import ScaleGeometry, swizzle, swizzled_rows

# Errors that every rank raises before any exchange.
IN_STEP = NotConnectedError, UnsupportedError


def run(
    prepared: PreparedCall,
    library: _native.Library,
    channel: Channel | None,
    connection: Connection | None,
    waits: Waits,
    x: torch.Tensor,
    memory: Memory,
    islands: Islands,
) -> int:
    """Runs a bound call and returns its status. Collective.

    Sums follow step 1b: per island, then over the islands. Every rank computes every row. If rows
    have owners, each rank computes only its own rows; a call with gather=True then gathers them.

    Raises:
        PeerDivergedError: all ranks run unfused, but different calls; every rank raises. Nothing
            was computed, and the ranks are in step again.
        PeerTimeoutError: a rank did not come.
    """
    if channel is None or connection is None:  # one rank
        if prepared.native.op == _native.ALL_GATHER_ROWS:
            memory["out"].copy_(x)
            return _native.OK
        return int(library.local(prepared.address))
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        ranks = _Ranks(connection.connected, waits)
    else:
        agree(prepared, channel, waits)
        ranks = _Ranks(connection.connect(channel, waits), waits)
    if prepared.native.op == _native.ALL_GATHER_ROWS:
        ranks.all_gather_rows(x, memory["out"])
        return _native.OK
    if prepared.native.op == _native.RMS_NORM_SHARDED:
        return _norm_slices(prepared, library, ranks, x.device)
    status, rows = own_partial(prepared, library, x)
    if status == _native.OK:
        status = _sum_rows(prepared, library, ranks, rows, islands)
    if status != _native.OK or prepared.shard is None or not prepared.gathers:
        return status
    for field in ("out", "quantized_out"):
        if field in memory:
            ranks.complete(rows_of(memory[field]))
    if prepared.scale is not None and prepared.scale.tiles:
        _complete_tiles(memory["scale_out"], prepared, ranks)
    elif prepared.scale is not None:
        ranks.complete(memory["scale_out"])
        _zero_padding(memory["scale_out"], prepared.scale)
    return _native.OK


def _norm_slices(
    prepared: PreparedCall, library: _native.Library, ranks: _Ranks, device: torch.device
) -> int:
    """Gathers the ranks' sums of squares, and norms this rank's slices."""
    call = prepared.native
    units = call.num_slices * call.num_tokens
    if not units:
        return _native.OK
    sums = torch.empty((1, units), dtype=torch.float32, device=device)
    try:
        call.square_sums, call.num_sources = sums.data_ptr(), 0
        status = int(library.local(prepared.address))
        if status != _native.OK:
            return status
        gathered = ranks.gather(sums)
        call.square_sums, call.num_sources = gathered.data_ptr(), ranks.world_size
        call.source_stride = units
        return int(library.local(prepared.address))
    finally:
        call.square_sums, call.num_sources, call.source_stride = None, 1, 0


def _sum_rows(
    prepared: PreparedCall,
    library: _native.Library,
    ranks: _Ranks,
    rows: torch.Tensor,
    islands: Islands,
) -> int:
    """Gathers the partial sums of all rows, and finishes this rank's rows, in chunks."""
    call, world_size, num_tokens = prepared.native, ranks.world_size, prepared.num_tokens
    lo, hi = (0, num_tokens) if prepared.shard is None else prepared.shard
    saved = {name: getattr(call, name) for name in ROW_FIELDS}
    hidden_size, width = rows.shape[-1], rows.element_size()
    step = max(1, policy.UNFUSED_GATHER_BYTES // (world_size * hidden_size * width))
    try:
        for begin in range(0, num_tokens, step):
            gathered = ranks.gather(rows[begin : begin + step])
            end = begin + gathered.shape[1]
            first, last = max(begin, lo), min(end, hi)
            if first >= last:
                continue
            sources = gathered[:, first - begin : last - begin]
            if 1 < max(map(len, islands)) < world_size:
                sources = _reduced(library, call.stream, sources, islands)
            call.x = sources.data_ptr()
            call.x_stride, call.source_stride = hidden_size, sources.stride(0)
            call.num_tokens, call.num_sources, call.top_k = last - first, len(sources), 0
            # Padding follows the last row; if rows have owners, it is zeroed at the end.
            whole = last == hi and (prepared.shard is None or not prepared.gathers)
            call.scale_padding_rows = saved["scale_padding_rows"] if whole else 0
            result_row = first if prepared.gathers else first - lo
            move_results(prepared, call, saved, result_row, first - lo, width)
            status = int(library.local(prepared.address))
            if status != _native.OK:
                return status
    finally:
        for name, value in saved.items():
            setattr(call, name, value)
    return _native.OK


def _reduced(
    library: _native.Library, stream: int, partials: torch.Tensor, islands: Islands
) -> torch.Tensor:
    """Returns the sums of all partials as the only source, `[1, rows, hidden_size]`."""
    values = partials.float()
    # Not values[list(island)]: a capture does not allow copying the indices from the host.
    sums = [add(library, stream, torch.stack([values[i] for i in island])) for island in islands]
    # Exact, or rounded to nearest even as the library does, whatever modes the process has set.
    return add(library, stream, torch.stack(sums)).to(partials.dtype).unsqueeze(0)


class _Ranks:
    """The ranks of one call, and their exchange."""

    def __init__(self, exchange: GroupExchange, waits: Waits) -> None:
        self._exchange, self._waits = exchange, waits
        self.rank, self.world_size = waits.rank, waits.world_size

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Gathers all ranks' [n, width] tensors as [world_size, n, width]."""
        rows = rows.contiguous()
        if rows.stride(-1) != 1:  # one element: contiguous, but cannot be viewed as bytes
            rows = rows.clone(memory_format=torch.contiguous_format)
        return self._exchange.gather(rows, self._waits.look_at_peers)

    def complete(self, rows: torch.Tensor) -> None:
        """Fetches the rows of a [num_tokens, width] tensor that other ranks own."""
        shards = [
            row_shard(rows.shape[0], self.world_size, rank) for rank in range(self.world_size)
        ]
        height = shards[0][1]  # height of the longest shard; shorter ones are padded
        row_bytes = rows.shape[1] * rows.element_size()
        step = max(1, policy.UNFUSED_GATHER_BYTES // (self.world_size * row_bytes))
        lo, hi = shards[self.rank]
        for begin in range(0, height, step):
            count = min(step, height - begin)
            own = rows[min(lo + begin, hi) : min(lo + begin + count, hi)]
            padded = torch.empty((count, rows.shape[1]), dtype=rows.dtype, device=rows.device)
            padded[: own.shape[0]].copy_(own)
            gathered = self.gather(padded)
            for rank, (first, end) in enumerate(shards):
                if rank != self.rank:
                    place = rows[min(first + begin, end) : min(first + begin + count, end)]
                    place.copy_(gathered[rank, : place.shape[0]])

    def all_gather_rows(self, shard: torch.Tensor, out: torch.Tensor) -> None:
        """Gathers every rank's rows, [hi - lo, hidden_size], into [num_tokens, hidden_size]."""
        lo, hi = row_shard(out.shape[0], self.world_size, self.rank)
        out[lo:hi].copy_(shard)
        self.complete(out)


def _complete_tiles(scale: torch.Tensor, prepared: PreparedCall, ranks: _Ranks) -> None:
    """Fetches the scales of rows that other ranks own, and zeroes the padding."""
    assert prepared.scale is not None
    if not prepared.num_tokens:
        return
    rows = swizzled_rows(scale, prepared.scale.tiles)
    ranks.complete(rows[: prepared.num_tokens])
    rows[prepared.num_tokens :].zero_()
    scale.view(torch.uint8).copy_(swizzle(rows))


def _zero_padding(scale: torch.Tensor, geometry: ScaleGeometry) -> None:
    if geometry.padding_rows and scale.numel():
        end = scale.storage_offset() + scale.shape[0]
        shape = (geometry.padding_rows, scale.shape[1])
        scale.as_strided(shape, geometry.stride, end).zero_()
