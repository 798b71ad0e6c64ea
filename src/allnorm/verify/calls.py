"""Calls of every kind: `run_cases` compares them with the reference, `Cases` draws random ones.

`case.py` defines a call, and `corners.py` holds a table of named calls. All of them are used by the
tests, and by the checks and soaks of `allnorm verify`.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import allnorm
from allnorm.core import hip
from allnorm.names import ALGORITHMS, GROUP_SIZES, NUMERICS, NVFP4_LAYOUTS, SCALE_LAYOUTS, SWIZZLED
from allnorm.quant import Quant, empty_scale, quantized_dtype
from allnorm.testing import DTYPES, gather
from allnorm.testing.bits import as_integers
from allnorm.testing.rank import device
from allnorm.verify.case import VALUES, Case, Experts, rows_of
from allnorm.verify.memory import Layout, Memory
from allnorm.verify.unlike_norms import slice_sizes

EPS = 1e-5
SCALE_NAMES = (
    *itertools.product(
        (layout for layout in SCALE_LAYOUTS if layout != SWIZZLED), ("float32", "ue8m0")
    ),
    ("column_major_tma", "ue8m0_packed"),
)
"""Pairs of layout and format for per-group scales, without tiled layouts."""
HIDDEN_SIZES = (120, 512, 2880, 2944, 4096, 7168, 8192)
TOKENS = {
    "cuda": (1, 2, 3, 4, 7, 8, 16, 17, 33, 64, 130, 257, 512, 1024),
    "cpu": (1, 2, 3, 5, 8, 17, 40),
}
_INPUT_PRODUCTS = {"cuda": 1 << 24, "cpu": 1 << 19}
"""Maximum products per token of a next layer's input, whose reference is slow on CPU."""
BURST = 48
"""Number of calls that `run_cases` issues before it waits for any of them."""

# ---- many calls ----------------------------------------------------------------------------------


class _Placed:
    """One call's tensors on this rank, laid out as its Memory describes, and its results."""

    def __init__(self, case: Case, comm: allnorm.Communicator) -> None:
        self.case, self.comm, memory = case, comm, case.memory
        arguments = case.call_arguments(comm)
        self.x = case.x_of(comm)
        if case.experts is None:
            self.x = memory.x.place(self.x)
        if arguments.get("residual") is not None:
            arguments["residual"] = memory.residual.place(arguments["residual"])
        if arguments.get("weight") is not None:
            offset = Layout(offset=memory.weight_offset)
            arguments["weight"] = offset.place(arguments["weight"])
        if case.op == "norm" and (case.call + comm.rank) % 3 == 0:
            # A hint for the L2 cache, which ranks need not agree on.
            arguments["prefetch"] = arguments.get("weight", arguments.get("residual"))
        self.inputs = {
            n: arguments[n] for n in ("residual", "weight") if arguments.get(n) is not None
        }
        if case.experts is None:
            self.inputs["x"] = self.x
        self.given = self._memory_for_results()
        self.arguments = {**arguments, **self.given}
        self.before = {name: tensor.clone() for name, tensor in self.inputs.items()}
        self.around = {name: _around(tensor) for name, tensor in self._written()}

    def _memory_for_results(self) -> dict[str, torch.Tensor]:
        case, memory = self.case, self.case.memory
        like = torch.full(case.shape, 7.0, dtype=case.dtype, device=device())
        own = case.own_rows(self.comm, like) if case.sharded else like
        like = like if case.gather else own
        rows = like.view(-1, case.hidden_size) if case.op == "all_gather_rows" else like
        given = {}
        if memory.out != "new":
            name = "out" if case.quant is None else "normed_out"
            given[name] = self.x if memory.out == "x" else memory.results.place(rows)
        if memory.out != "new" and case.quant is not None:
            width = case.hidden_size // 2 if isinstance(case.quant, allnorm.NvFp4) else None
            dtype = quantized_dtype(case.quant)
            quantized = (like if width is None else like[..., :width]).to(dtype)
            given["quantized_out"] = memory.results.place(quantized)
            if not isinstance(case.quant, allnorm.Fp8PerTensor):
                scale = empty_scale(case.quant, rows_of(like.shape), case.hidden_size, device())
                dirty = torch.empty(0, dtype=torch.uint8, device=device())
                dirty.set_(scale.untyped_storage()).fill_(0xEE)  # padding rows too
                given["scale_out"] = scale
        if case.has_norm and memory.residual_out != "new":
            if case.residual and case.float32_residual:
                own = own.float()
            in_place = memory.residual_out == "residual"
            given["residual_out"] = (
                self.inputs["residual"] if in_place else memory.results.place(own)
            )
        return given

    def _written(self) -> Iterable[tuple[str, torch.Tensor]]:
        return ((n, tensor) for n, tensor in self.given.items() if n != "scale_out")

    def call(self) -> None:
        """Runs the call."""
        self.result = self.case.method(self.comm)(self.x, **self.arguments)

    def wrong(self) -> list[str]:
        """Describes the errors in the results and in the memory around them."""
        case, given = self.case, self.given
        if "normed_out" in given:
            case = case.but(return_normed=True)
        results = list(self.result) if case.has_norm else [self.result]
        found = case.wrong(self.comm, results)
        listed: tuple[str, ...] = ("out", "residual_out") if case.has_norm else ("out",)
        if case.quant is not None:
            listed = ("quantized_out", "scale_out", "residual_out", "normed_out")
        new = {n: r for n, r in zip(listed, results, strict=True) if r is not None}
        if isinstance(case.quant, allnorm.Fp8PerTensor):
            given = {**given, "scale_out": self.arguments["quant"].scale}
        found += [f"{n} is not what was given" for n in given if new.pop(n) is not given[n]]
        for name, result in new.items():
            if name != "scale_out" and not result.is_contiguous():
                found.append(f"{name} is not contiguous")
        overwritten = {id(tensor) for tensor in given.values()}
        for name, tensor in self.inputs.items():
            bits, before = as_integers(tensor), as_integers(self.before[name])
            if id(tensor) not in overwritten and not torch.equal(bits, before):
                found.append(f"{name} was modified")
        for name, around in self.around.items():
            if not torch.equal(_around(given[name]), around):
                found.append(f"memory around {name} was written")
        pointers = [t.data_ptr() for t in (*self.inputs.values(), *new.values()) if t.numel()]
        if len(set(pointers)) != len(pointers):
            found.append("a new result shares memory")
        return found

    def agreed(self) -> list[torch.Tensor]:
        """Returns the results that must be equal on every rank."""
        return self.case.agreed(list(self.result) if self.case.has_norm else [self.result])


def _around(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a view's storage as bytes, with the view's own elements zeroed."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    whole = whole.set_(tensor.untyped_storage()).clone()
    where = tensor.shape, tensor.stride(), tensor.storage_offset()
    whole.as_strided(*where).copy_(torch.zeros(tensor.shape, device=tensor.device).to(tensor.dtype))
    return whole.view(torch.uint8)


def can_run(
    comm: allnorm.Communicator,
    algorithm: str,
    hidden_size: int,
    dtype: torch.dtype,
    sharded: bool = False,
) -> bool:
    """Returns whether the contract requires the algorithm to run; otherwise it must be refused."""
    if algorithm in ("auto", "unfused") or comm.world_size == 1:
        return True
    if len(comm.islands) > 1:
        return algorithm == "hierarchical"
    if algorithm == "hierarchical" or (sharded and algorithm == "one_shot"):
        return False
    return comm.device.type == "cpu" or hidden_size * dtype.itemsize % 16 == 0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call on this rank."""

    case: Case
    wrong: str  # errors in the results and memory; "" if none
    digest: int  # hash of the results that ranks must agree on; 0 if the call was refused


def outcomes(
    comm: allnorm.Communicator,
    cases: Sequence[Case],
    pause: Callable[[], None] = lambda: None,
) -> Iterator[Outcome]:
    """Runs the calls in bursts without barriers, and compares results and memory. Collective.

    `pause` runs before each call.
    """
    for begin in range(0, len(cases), BURST):
        placed = []
        for case in cases[begin : begin + BURST]:
            owned = case.sharded or case.op == "all_gather_rows"
            if can_run(comm, case.algorithm, case.hidden_size, case.dtype, owned):
                placed.append(_Placed(case, comm))
            else:
                yield Outcome(case, _not_refused(case, comm), 0)
        for one in placed:
            pause()
            one.call()
        for one in placed:
            wrong = [*one.wrong(), *_other_plan(one.case, comm)]
            yield Outcome(one.case, "; ".join(wrong), _digest(one.agreed()))


def run_cases(
    comm: allnorm.Communicator,
    cases: Sequence[Case],
    pause: Callable[[], None] = lambda: None,
) -> tuple[int, list[str]]:
    """Runs the calls like `outcomes`, and also compares the results of all ranks.

    Returns:
        The number of calls that ran, and the errors found; both are equal on every rank. Ranks must
        agree on results bit for bit, except for the payloads of NaNs.
    """
    mine = list(outcomes(comm, cases, pause))
    every = gather([(one.wrong, one.digest) for one in mine])
    found = []
    for number, one in enumerate(mine):
        here = [theirs[number] for theirs in every]
        found += [f"rank {r}: {one.case}: {wrong}" for r, (wrong, _) in enumerate(here) if wrong]
        if len({digest for _, digest in here}) > 1:
            found.append(f"{one.case}: ranks hold different bits")
    return sum(one.digest != 0 for one in mine), found


def _not_refused(case: Case, comm: allnorm.Communicator) -> str:
    """Returns an error unless the call is refused with a message that names the algorithm."""
    try:
        case.run(comm)
    except allnorm.UnsupportedError as error:
        return "" if case.algorithm in str(error) else f"refused as {error}"
    return "not refused"


def _other_plan(case: Case, comm: allnorm.Communicator) -> list[str]:
    """Describes how a call's plan differs from the algorithm that the call requests."""
    if case.algorithm == "auto" or comm.world_size == 1 or case.op != "norm":
        return []
    plan = comm.plan(
        *(case.num_tokens, case.hidden_size, case.dtype, case.spec(), case.sharded),
        algorithm=case.algorithm,
        residual_dtype=torch.float32 if case.float32_residual else None,
    )
    return [] if plan.algorithm == case.algorithm else [f"planned as {plan}"]


def _digest(tensors: Sequence[torch.Tensor]) -> int:
    """Hashes the bits of results; all NaNs count as equal, because payloads are unspecified.

    On GPUs, a rank that sends a NaN equal to the "empty" word sends a different NaN instead, but
    keeps its own.
    """
    digest = hashlib.blake2b(digest_size=7)
    for tensor in tensors:
        # Cloned, because even a contiguous tensor with one element may have an odd stride.
        dense = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
        if dense.dtype in (torch.float32, torch.float16, torch.bfloat16):
            dense[dense.isnan()] = torch.nan
        digest.update(dense.view(torch.uint8).cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "big") | 1


# ---- random calls --------------------------------------------------------------------------------


def specs(hidden_size: int, where: torch.device | str = "cpu") -> list[Quant]:
    """Returns all quantization specs for rows with this many columns."""
    fitting = [size for size in GROUP_SIZES if hidden_size % size == 0]
    groups = [allnorm.Fp8PerGroup(size, *names) for size in fitting for names in SCALE_NAMES]
    static = allnorm.Fp8PerTensor(torch.full((1,), 0.03, device=where))
    blocks: list[Quant] = [allnorm.MxFp8()] if hidden_size % 32 == 0 else []
    if hidden_size % 16 == 0:
        given = torch.full((1,), 600.0, device=where)
        blocks += [allnorm.NvFp4(given, layout) for layout in NVFP4_LAYOUTS]
    return [*blocks, *groups, allnorm.Fp8PerToken(), static]


class Cases:
    """Draws random cases that cover the whole API.

    For each field, every value is drawn once before any value is repeated, so a hundred cases cover
    all values. The state of `rng` is equal on all ranks. No case has more than `max_elems`
    elements. Scales given by the caller are on the device `where`.
    """

    def __init__(
        self,
        rng: random.Random,
        where: torch.device,
        max_elems: int,
        tokens: Sequence[int] | None = None,
        hidden_sizes: Sequence[int] = HIDDEN_SIZES,
        algorithms: Sequence[str] = ("auto", *ALGORITHMS),
    ) -> None:
        self._rng, self._where, self._max_elems = rng, where, max_elems
        self._tokens = TOKENS[where.type] if tokens is None else tokens
        self._hidden_sizes, self._algorithms = hidden_sizes, algorithms
        self._decks: dict[Any, list[Any]] = {}
        self._quantizes = hip.quantizes(where.type)

    def draw(self) -> Case:
        """Draws a call with ordinary values in new memory: a norm, or sometimes an all_reduce."""
        hidden_size = self._deal("hidden_size", self._hidden_sizes)
        fitting = [t for t in self._tokens if t * hidden_size <= self._max_elems]
        norm = self._rng.random() < 0.85
        quantized = norm and self._rng.random() < 0.45 and self._quantizes
        case = Case(
            (self._deal(("tokens", len(fitting)), fitting), hidden_size),
            DTYPES[self._deal("dtype", tuple(DTYPES))],
            residual=self._rng.random() < 0.75,
            algorithm=self._deal("algorithm", self._algorithms),
            op="norm" if norm else "all_reduce",
        )
        if not norm:
            return case
        return case.but(
            float32_weight=self._rng.random() < 0.4,
            weight_bias=self._deal("weight_bias", (0.0, 0.0, 0.0, 1.0, 0.25, -0.0)),
            eps=self._deal("eps", (EPS, EPS, 1e-6, 0.0, 0.3)),
            numerics=self._deal("numerics", NUMERICS),
            quant=self._spec(hidden_size) if quantized else None,
            return_normed=self._rng.random() < 0.4,
            sharded=self._rng.random() < 0.35,
            post_norm=self._rng.random() < 0.25,
            scale=self._deal("scale", (1.0,) * 6 + (0.22, -1.5)),
            second_norm=self._rng.random() < 0.7,
            experts=self._deal("experts", _NO_EXPERTS + EXPERTS),
            float32_residual=self._rng.random() < 0.25,
            gather=self._rng.random() < 0.6,
        ).possible()

    def draw_slices(self) -> Case:
        """Draws a call of `rms_norm_sharded` with ordinary values."""
        algorithms = [a for a in self._algorithms if a not in ("two_shot", "hierarchical")]
        case = self.draw()
        return Case(
            case.shape,
            case.dtype,
            float32_weight=case.float32_weight,
            weight_bias=case.weight_bias,
            eps=case.eps,
            numerics=case.numerics,
            algorithm=self._deal("algorithm of slices", algorithms),
            op="rms_norm_sharded",
        )

    def draw_streams(self) -> Case:
        """Draws a call of `all_reduce_hyper_connection`, sometimes with the next layer's input."""
        case = self.draw()
        streams = self._deal("streams", (2, 3, 4, 4, 8))
        products = streams * (streams + 1) ** 2 * case.hidden_size
        return Case(
            case.shape,
            case.dtype,
            float32_weight=case.float32_weight,
            weight_bias=case.weight_bias,
            eps=case.eps,
            numerics=case.numerics,
            algorithm=self._deal("algorithm of streams", self._algorithms),
            float32_residual=self._rng.random() < 0.5,
            op="all_reduce_hyper_connection",
            streams=streams,
            next_input=self._rng.random() < 0.5 and products <= _INPUT_PRODUCTS[self._where.type],
            experts=self._rng.choice(EXPERTS) if self._rng.random() < 0.25 else None,
        )

    def draw_any(self) -> Case:
        """Draws a call with any values, shape and memory."""
        case = self.draw().but(
            kind=self._deal("kind", ("normal",) * 10 + VALUES),
            call=self._rng.randrange(1000),
            memory=Memory(
                x=self._layout(),
                residual=self._layout(),
                weight_offset=self._deal("weight", (0, 0, 1, 8)),
                out=self._deal("out", ("new", "new", "own", "x")),
                residual_out=self._deal("residual_out", ("new", "new", "own", "residual")),
                results=self._layout(),
            ),
        )
        tokens = case.num_tokens
        if case.experts is None and self._rng.random() < 0.25:
            lead = self._deal(
                "lead", ((tokens, 1), (1, tokens, 1), (tokens, 2), (2, 3), (0, 3), ())
            )
            if rows_of((*lead, 1)) <= max(tokens, 6):
                case = case.but(shape=(*lead, case.hidden_size))
        if case.op == "all_reduce" and self._rng.random() < 0.4:
            case = case.but(op="all_gather_rows", shape=(case.num_tokens, case.hidden_size))
            if case.algorithm == "one_shot":
                case = case.but(algorithm="auto")
            if case.memory.out == "x":
                case = case.but(memory=replace(case.memory, out="own"))
        return case.possible()

    def _spec(self, hidden_size: int) -> Quant:
        """Draws a spec; draws size and layout independently, so that every combination occurs."""
        kind = self._deal("quant", ("group", "group", "group", "token", "tensor", "mx", "nv", "nv"))
        if kind == "group":
            fitting = [size for size in GROUP_SIZES if hidden_size % size == 0]
            if fitting:
                size = self._deal(("size", len(fitting)), fitting)
                return allnorm.Fp8PerGroup(size, *self._deal("layout", SCALE_NAMES))
        if kind == "mx" and hidden_size % 32 == 0:
            return allnorm.MxFp8()
        if kind == "nv" and hidden_size % 16 == 0:
            given = torch.full((1,), self._deal("global", (600.0, 1.0, 2688.0)), device=self._where)
            return allnorm.NvFp4(given, self._deal("nvfp4", NVFP4_LAYOUTS))
        if kind == "tensor":
            given = torch.full((1,), self._deal("static", (0.03, 0.5, -3.0)), device=self._where)
            return allnorm.Fp8PerTensor(given)
        return allnorm.Fp8PerToken()

    def _layout(self) -> Layout:
        pad = self._deal("pad", (0, 0, 0, 8, 64, 1, 7, 3))
        offset = self._deal("offset", (0, 0, 0, 8, 1, 3))
        return Layout(pad, offset, self._rng.random() < 0.3)

    def _deal(self, name: Any, values: Sequence[Any]) -> Any:
        deck = self._decks.get(name)
        if not deck:
            deck = self._decks[name] = list(values)
        return deck.pop(self._rng.randrange(len(deck)))


EXPERTS: list[Any] = [
    *(Experts(1), Experts(2, False, True), Experts(8, True, True), Experts(1, False, True, False)),
    *(Experts(16, indexed=False), Experts(3, False, indexed=False)),
]
_NO_EXPERTS = [None] * (6 * len(EXPERTS))


CHANGES: tuple[dict[str, Any], ...] = (
    {"post_norm": True},
    {"post_norm": True, "second_norm": False},
    {"scale": 0.22},
    {"post_norm": True, "scale": -1.5, "experts": Experts()},
    {"experts": Experts()},
    {"float32_residual": True, "numerics": "transformers"},
    {"float32_residual": True, "post_norm": True, "experts": Experts()},
)
"""Fields of a Case, for one case per kind of residual update."""


def algorithms(case: Case, comms: Sequence[allnorm.Communicator]) -> set[str]:
    """Returns the algorithms that would run the call; "unfused" if the requested one cannot."""
    return {_algorithm(case, comm) for comm in comms}


def _algorithm(case: Case, comm: allnorm.Communicator) -> str:
    try:
        if case.op == "rms_norm_sharded":
            sizes = slice_sizes(case.hidden_size)
            return comm.plan(
                *(case.num_tokens, sizes, case.dtype), algorithm=case.algorithm
            ).algorithm
        if case.op == "all_reduce_hyper_connection":
            return comm.plan(
                *(case.num_tokens, case.hidden_size, case.dtype),
                streams=case.streams,
                residual_dtype=torch.float32 if case.float32_residual else None,
                experts=case.experts is not None,
                algorithm=case.algorithm,
            ).algorithm
        plan = comm.plan(
            *(case.num_tokens, case.hidden_size, case.dtype, case.quant, case.sharded),
            return_normed=case.return_normed and case.quant is not None,
            algorithm=case.algorithm,
        )
    except allnorm.UnsupportedError:
        return "unfused"
    return plan.algorithm
