"""The path through a process group: gather, then a local kernel over what was gathered.

For what the kernels cannot exchange themselves; the bits are the same. Rows travel as bytes: gloo
gathers no bfloat16, NCCL no float8, and no bit may change on the way.

The process group is the communicator's own, and made for its first unfused call: most communicators
never need it, which takes memory and connections.

The ranks tell each other first what they are about to do, by a channel of their own: gloo would end
the process where they gather different numbers of bytes, and mix rows of different shapes with as
many bytes; NCCL would wait until its watchdog ends the process. A call that is captured in a CUDA
graph has nobody who could tell.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import threading
import time

import torch

from allnorm import policy
from allnorm.core import _native
from allnorm.core.announcement import Announcement
from allnorm.core.arguments import row_shard, rows_of
from allnorm.core.between import LOOK_SECONDS, Exchange, own_store
from allnorm.core.channel import WORDS, Channel, Owner
from allnorm.core.prepared_call import Memory, PreparedCall, raise_status
from allnorm.core.rendezvous import Rendezvous
from allnorm.errors import AllnormError, PeerDivergedError, UnsupportedError
from allnorm.islands import Islands
from allnorm.quant import ScaleGeometry, swizzle, swizzled_rows


class NotConnectedError(AllnormError):
    """The ranks could not connect; raised on all of them."""


# Errors that every rank raises before anything was exchanged.
IN_STEP = NotConnectedError, UnsupportedError


class Connection:
    """What the unfused calls of a communicator go through, made when the first of them needs it.

    Args:
        meeting: of all ranks.
        device: of the tensors.
        backend: of what is made, one of between.BACKENDS.
        timeout: of the communicator.
    """

    def __init__(
        self,
        meeting: Rendezvous,
        device: torch.device,
        backend: str,
        timeout: datetime.timedelta,
    ) -> None:
        self._rank, self._world_size = meeting.rank, meeting.world_size
        self._store, self._prefix = meeting.store, meeting.prefix("unfused")
        self._device, self._backend, self._timeout = device, backend, timeout
        self._attempts = 0
        self._exchange: Exchange | None = None

    @property
    def failure(self) -> str:
        """Why the exchange was given up; empty if it was not."""
        return "" if self._exchange is None else self._exchange.failure

    @property
    def connected(self) -> Exchange:
        """The exchange, for a call that a CUDA graph captures.

        Raises:
            UnsupportedError: no call has needed it yet; nothing can be connected in a capture.
        """
        if self._exchange is None:
            raise UnsupportedError(
                "this call runs unfused, and the ranks are not connected for such calls yet, which "
                "they cannot be while a CUDA graph is captured: make one unfused call (any shape) "
                "with this communicator before the capture, on every rank."
            )
        return self._exchange

    def connect(self, channel: Channel, owner: Owner) -> Exchange:
        """The exchange. Collective: the ranks have agreed on a call that needs it.

        Raises:
            NotConnectedError: a rank could not make its part: on every rank, and ranks are in step.
            RuntimeError: the wait for the others has ended as `owner` says.
        """
        if self._exchange is not None:
            return self._exchange
        self._attempts += 1
        made: list[Exchange] = []
        errors: list[str] = []
        key = f"{self._prefix}/{self._attempts}/failed"

        def make() -> None:
            try:
                made.append(self._make())
            except Exception as error:  # noqa: BLE001 - told to every rank, and raised below
                errors.append(self._tell(key, error))

        # In a thread: neither backend ends its wait when a peer ends or cannot make its part.
        thread = threading.Thread(target=make, name="allnorm-connect", daemon=True)
        thread.start()
        owner.notes.enter(range(self._world_size))
        start = time.monotonic()
        try:
            while thread.is_alive() and not errors:
                thread.join(LOOK_SECONDS)
                if thread.is_alive():
                    owner.look_at_peers(time.monotonic() - start)
                    self._read_failure(key, errors)
        except BaseException as error:
            self._tell(key, error)  # they need not wait for this rank
            raise
        owner.notes.leave()
        succeeded = channel.gather([int(not errors), *(0,) * (WORDS - 1)], owner)
        if all(words[0] for words in succeeded):
            (self._exchange,) = made
            self._exchange.notes = owner.notes
            return self._exchange
        for exchange in made:
            exchange.abort("another rank has failed")
        self._read_failure(key, errors)
        raise NotConnectedError(
            "the ranks could not connect for calls that run unfused: "
            f"{errors[0] if errors else 'a rank failed'}. Nothing was computed. Find out what "
            f"keeps that rank from using {self._backend}, and call again on every rank."
        )

    def _make(self) -> Exchange:
        store = own_store(self._store, f"{self._prefix}/{self._attempts}", self._timeout)
        place = store, self._rank, self._world_size, self._device, self._backend, self._timeout
        if self._device.type == "cpu":
            return Exchange(*place, "the exchange of unfused calls")
        torch.cuda.set_device(self._device)  # of this thread
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            return Exchange(*place, "the exchange of unfused calls")

    def _tell(self, key: str, error: BaseException) -> str:
        """Lets the other ranks read why this one does not connect; returns it."""
        text = f"rank {self._rank}: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            self._store.set(key, text[:1000])
        return text

    def _read_failure(self, key: str, errors: list[str]) -> None:
        """Appends what another rank says of its failure, if this rank knows of none."""
        if not errors and self._store.check([key]):
            errors.append(self._store.get(key).decode(errors="replace"))

    def abort(self, why: str) -> None:
        """Ends it at once: those who wait for this rank get an error. Any thread."""
        if self._exchange is not None:
            self._exchange.abort(why)

    def close(self) -> None:
        """Releases the exchange. Idempotent."""
        if self._exchange is not None:
            self._exchange.close()


def run(
    prepared: PreparedCall,
    library: _native.Library,
    channel: Channel | None,
    connection: Connection | None,
    owner: Owner,
    x: torch.Tensor,
    memory: Memory,
    islands: Islands,
) -> int:
    """Runs a bound call; returns the status. Collective.

    Sums are those of step 1b: of each island, then of all of them. Every rank computes every row;
    where rows belong to ranks each rank computes its own, and the finished rows are gathered too.

    Raises:
        PeerDivergedError: on every rank, if all run unfused and do not make the same call. Nothing
            was computed, and ranks are in step again.
        PeerTimeoutError: a rank did not come.
    """
    if channel is None or connection is None:  # of one rank
        if prepared.native.op == _native.ALL_GATHER_ROWS:
            memory["out"].copy_(x)
            return _native.OK
        return int(library.local(prepared.address))
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        ranks = _Ranks(connection.connected, owner)
    else:
        agree(prepared, channel, owner)
        ranks = _Ranks(connection.connect(channel, owner), owner)
    if prepared.native.op == _native.ALL_GATHER_ROWS:
        ranks.all_gather_rows(x, memory["out"])
        return _native.OK
    status, rows = own_partial(prepared, library, x)
    if status == _native.OK:
        status = _sum_rows(prepared, library, ranks, rows, islands)
    if status != _native.OK or prepared.shard is None:
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


def refuse(channel: Channel | None, owner: Owner) -> None:
    """What a rank does instead of a call by this path that it alone refuses. Collective.

    Every rank that does not refuse raises PeerDivergedError.
    """
    if channel is not None:
        with contextlib.suppress(PeerDivergedError):
            _agree(Announcement.of_refusal(), channel, owner)


def agree(prepared: PreparedCall, channel: Channel, owner: Owner) -> None:
    """Raises on every rank unless all are about to make the same call. Collective."""
    _agree(Announcement.of(prepared), channel, owner)


def _agree(mine: Announcement, channel: Channel, owner: Owner) -> None:
    """Raises on every rank unless all have announced the same. Collective."""
    words = mine.words
    announced = [Announcement(tuple(theirs)) for theirs in channel.gather(words, owner)]
    others = [rank for rank, other in enumerate(announced) if other != mine]
    if not others:
        # Once more: now every rank knows that none was interrupted while it waited for the others.
        # Nobody could end the wait in the process group for one that will not come.
        channel.gather(words, owner)
        return
    rank, peer = owner.rank, others[0]
    raise PeerDivergedError(
        f"rank {rank} does another call than rank {peer}, both through the process group. Expected "
        f"{mine}. Seen from rank {peer}: {announced[peer]}. "
        f"{mine.differences(rank, announced[peer], peer)}"
        "Nothing was computed: make the same call on every rank.",
        rank=rank,
        peer=peer,
        op=0,
        expected=str(mine),
        seen=str(announced[peer]),
    )


def own_partial(
    prepared: PreparedCall, library: _native.Library, x: torch.Tensor
) -> tuple[int, torch.Tensor]:
    """A status, and this rank's partial sums; those of experts are summed first."""
    call = prepared.native
    if not call.top_k:
        return _native.OK, rows_of(x)
    rows = x.new_empty((prepared.num_tokens, call.hidden_size))
    summing = _native.Call.from_buffer_copy(call)
    for name in ("residual", "weight", "post_weight", "residual_out", "quantized", "scale"):
        setattr(summing, name, None)
    summing.op, summing.quant, summing.flags = _native.ALL_REDUCE, 0, 0
    summing.out, summing.out_stride = rows.data_ptr() or call.x, call.hidden_size
    return int(library.local(ctypes.addressof(summing))), rows


def _sum_rows(
    prepared: PreparedCall,
    library: _native.Library,
    ranks: _Ranks,
    rows: torch.Tensor,
    islands: Islands,
) -> int:
    """Gathers the partial sums of all rows, and finishes those of this rank, chunk by chunk."""
    call, world_size, num_tokens = prepared.native, ranks.world_size, prepared.num_tokens
    lo, hi = (0, num_tokens) if prepared.shard is None else prepared.shard
    saved = {name: getattr(call, name) for name in _ROW_FIELDS}
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
            # Padding follows the last row; where rows belong to ranks it is zeroed at the end.
            whole = prepared.shard is None and last == num_tokens
            call.scale_padding_rows = saved["scale_padding_rows"] if whole else 0
            move_results(prepared, call, saved, first, first - lo, width)
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
    """The reduced rows of all ranks' partials, as the only source, `[1, rows, hidden_size]`."""
    values = partials.float()
    # Not values[list(island)]: no graph can capture numbers that come from the host.
    sums = [add(library, stream, torch.stack([values[i] for i in island])) for island in islands]
    # Exact or to nearest even, whatever modes the process has set: as the library rounds.
    return add(library, stream, torch.stack(sums)).to(partials.dtype).unsqueeze(0)


def add(library: _native.Library, stream: int, sources: torch.Tensor) -> torch.Tensor:
    """The sum of float32 `[n, rows, hidden_size]`, contiguous, over the first dimension, in order.

    By the library, which keeps denormals whatever the process has asked torch for.
    """
    count, rows, hidden_size = sources.shape
    total = sources.new_empty((rows, hidden_size))
    if not total.numel():
        return total
    call = _native.Call(
        struct_bytes=ctypes.sizeof(_native.Call),
        op=_native.ALL_REDUCE,
        dtype=_native.DTYPE["float32"],
        weight_dtype=_native.DTYPE["float32"],
        num_tokens=rows,
        hidden_size=hidden_size,
        x=sources.data_ptr(),
        out=total.data_ptr(),
        x_stride=hidden_size,
        out_stride=hidden_size,
        source_stride=rows * hidden_size,
        num_sources=count,
        stream=stream,
    )
    raise_status(library, int(library.local(ctypes.addressof(call))))
    return total


def results_of(call: _native.Call) -> dict[str, int]:
    """Where a call begins to write, and its residual, by name."""
    return {name: getattr(call, name) for name in _MOVED}


def move_results(
    prepared: PreparedCall,
    call: _native.Call,
    saved: dict[str, int],
    row: int,
    residual_row: int,
    width: int,
) -> None:
    """Lets a call write from `row` on, and the residual from `residual_row` on.

    Args:
        prepared: whose call it is.
        call: of it, or a copy.
        saved: where it wrote from row 0 on.
        row: of all rows.
        residual_row: of those that this rank holds.
        width: bytes of an element.
    """
    moves = [
        ("residual", residual_row, call.residual_stride, width),
        ("residual_out", residual_row, call.residual_out_stride, width),
        ("out", row, call.out_stride, width),
        ("quantized", row, call.quantized_stride, 1),
    ]
    if prepared.scale is not None and prepared.scale.tiles:
        call.first_scale_row = row
    elif prepared.scale is not None:
        moves.append(("scale", row, call.scale_row_stride, prepared.scale.dtype.itemsize))
    for name, index, stride, elem_bytes in moves:
        if saved[name]:
            setattr(call, name, saved[name] + index * stride * elem_bytes)


class _Ranks:
    """The ranks of one call, and what they exchange over."""

    def __init__(self, exchange: Exchange, owner: Owner) -> None:
        self._exchange, self._owner = exchange, owner
        self.rank, self.world_size = owner.rank, owner.world_size

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """All ranks' [n, width], as [world_size, n, width]."""
        rows = rows.contiguous()
        if rows.stride(-1) != 1:  # one element is contiguous with any stride, but then is not bytes
            rows = rows.clone(memory_format=torch.contiguous_format)
        return self._exchange.gather(rows, self._owner.look_at_peers)

    def complete(self, rows: torch.Tensor) -> None:
        """Fetches the rows of a [num_tokens, width] tensor that belong to other ranks from them."""
        shards = [
            row_shard(rows.shape[0], self.world_size, rank) for rank in range(self.world_size)
        ]
        height = shards[0][1]  # of the longest; shorter ones are padded
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
        """Puts every rank's rows, each [hi - lo, hidden_size], into [num_tokens, hidden_size]."""
        lo, hi = row_shard(out.shape[0], self.world_size, self.rank)
        out[lo:hi].copy_(shard)
        self.complete(out)


def _complete_tiles(scale: torch.Tensor, prepared: PreparedCall, ranks: _Ranks) -> None:
    """Fetches the scales of rows that belong to other ranks, and zeroes what belongs to no row."""
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


# Of the C call: what is moved from chunk to chunk, and what else differs between them.
_MOVED = ("residual", "residual_out", "out", "quantized", "scale")
_ROW_FIELDS = (
    *(*_MOVED, "x", "top_k"),
    *("x_stride", "num_tokens", "num_sources", "source_stride", "scale_padding_rows"),
    "first_scale_row",
)
