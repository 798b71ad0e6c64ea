"""Times chains of layers with and without prefetch of the next weight.

A layer is o_proj, a call, gate_up, down, a call and qkv, without attention and activation. Every
layer has weights of its own, so that each GEMM reads its weight from memory. On GPUs a chain is one
CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import allnorm
from allnorm import policy
from allnorm.bench import clock
from allnorm.bench.arms import Arm
from allnorm.bench.e2e import models
from allnorm.bench.e2e.models import Transformer
from allnorm.testing import DTYPES, OnMessage, agree, gather, report, run_ranks, same_bits, timing
from allnorm.testing.rank import device

ARMS = {"prefetch:off": False, "prefetch:on": True}
CALLS_PER_LAYER = 2
_SECONDS = 3600.0  # time limit of a run

Site = tuple[Tensor, Tensor, Tensor]
"""A call of a chain: the partial sum, the normed rows, and the new residual."""


@dataclass(frozen=True)
class Job:
    """The settings of a benchmark of layers, equal on every rank."""

    models: tuple[str, ...]  # names of dense models of `e2e`
    tokens: tuple[int, ...]  # numbers of rows
    dtype: str  # name of the dtype of activations and weights
    device: str  # "cuda" or "cpu"
    numerics: str = "rounded"  # rounding mode of the calls
    layers: int = 8  # layers per chain
    seconds: float = 0.5  # on CPU: approximate time per chain
    tuning_dir: str | None = None  # as in Communicator
    max_blocks: int = 0  # as in Communicator; 0 for no limit


@dataclass(frozen=True)
class ChainTimes:
    """The times of one model's chain with a number of rows, equal on every rank."""

    model: str  # name of the model
    hidden_size: int  # columns of the calls
    num_tokens: int  # rows
    layers: int  # layers in the chain
    prefetch_bytes: int  # bytes that a call of the arm "prefetch:on" loads, at most
    is_default: bool  # whether calls with this hint prefetch unless the benchmark forces them to
    # Microseconds per layer: percentiles of the slowest rank, by arm.
    us: dict[str, dict[str, float]]
    errors: dict[str, str]  # what is wrong with an arm's results, or ""

    @property
    def gain_us(self) -> float:
        """The time that prefetch saves per call; negative if it costs time."""
        off, on = (self.us[arm]["p50_us"] for arm in ARMS)
        return (off - on) / CALLS_PER_LAYER

    def rows(self, world_size: int) -> Iterator[dict[str, Any]]:
        """Yields a row of the results file for each arm."""
        for arm, ahead in ARMS.items():
            yield {
                "mode": "layers",
                "model": self.model,
                "num_tokens": self.num_tokens,
                "hidden_size": self.hidden_size,
                "world_size": world_size,
                "layers": self.layers,
                "arm": arm,
                **self.us[arm],
                "over_ranks": "slowest",
                "prefetch_bytes": self.prefetch_bytes if ahead else 0,
                "is_default": self.is_default == ahead,
                "gain_per_site_us": self.gain_us if ahead else 0.0,
                "error": self.errors[arm],
                "correct": not self.errors[arm],
            }


def find(name: str, world_size: int) -> Transformer:
    """Returns a dense model that can be divided among the ranks.

    Raises:
        ValueError: the name is unknown, or the model has experts or cannot be divided.
    """
    model = models.find(name)
    if model.num_experts:
        raise ValueError(f"{name} has experts: expected a model with one MLP per layer")
    models.check_world_size(model, world_size)
    return model


def num_bytes(model: Transformer, job: Job, world_size: int) -> int:
    """Returns the bytes of a rank's weights."""
    shapes = _shapes(model, world_size).values()
    return job.layers * DTYPES[job.dtype].itemsize * sum(rows * columns for rows, columns in shapes)


def measure(job: Job, world_size: int, on_message: OnMessage | None = None) -> list[ChainTimes]:
    """Starts ranks that time the chains; returns the times by model and number of rows.

    `on_message` takes a rank and its progress, or times under `chain` as soon as they are complete.

    Raises:
        RankError: a rank raised an error, died or timed out.
    """
    ranks: list[list[ChainTimes]] = run_ranks(
        run, world_size, device=job.device, args=(job,), timeout=_SECONDS, on_message=on_message
    )
    return ranks[0]


def run(rank: int, world_size: int, job: Job) -> list[ChainTimes]:
    """Times every chain. Collective."""
    with allnorm.Communicator(
        device=device(),
        numerics=job.numerics,
        tuning_dir=job.tuning_dir,
        max_blocks=job.max_blocks or None,
    ) as comm:
        found = time_chains(comm, job)
        comm.check()
    return found


def time_chains(comm: allnorm.Communicator, job: Job) -> list[ChainTimes]:
    """Times every chain with a communicator. Collective."""
    found: list[ChainTimes] = []
    total = len(job.models) * len(job.tokens)
    for name in job.models:
        layers = _Layers.make(find(name, comm.world_size), job, comm)
        for num_tokens in job.tokens:
            report({"text": f"{name}, {num_tokens} rows", "done": len(found), "total": total})
            found.append(_time_chain(comm, Chain(comm, layers, num_tokens), job))
            report({"chain": found[-1]})
        del layers
    return found


@dataclass(frozen=True)
class _Layers:
    """This rank's weights of a model's layers."""

    model: Transformer
    dtype: torch.dtype
    gemms: list[dict[str, Tensor]]  # weights [out_features, in_features] by name, for each layer
    norms: list[tuple[Tensor, Tensor]]  # weights of the norms, equal on every rank

    @staticmethod
    def make(model: Transformer, job: Job, comm: allnorm.Communicator) -> _Layers:
        dtype, here = DTYPES[job.dtype], comm.device
        mine = torch.Generator(here).manual_seed(1000 + comm.rank)
        common = torch.Generator(here).manual_seed(1)

        def matrix(rows: int, columns: int) -> Tensor:
            made = torch.empty(rows, columns, dtype=dtype, device=here)
            return made.normal_(std=columns**-0.5, generator=mine)

        def norm() -> Tensor:
            made = torch.empty(model.hidden_size, dtype=dtype, device=here)
            return made.normal_(1.0, 0.1, generator=common)

        shapes = _shapes(model, comm.world_size)
        gemms = [
            {name: matrix(*shape) for name, shape in shapes.items()} for _ in range(job.layers)
        ]
        return _Layers(model, dtype, gemms, [(norm(), norm()) for _ in range(job.layers)])


def _shapes(model: Transformer, world_size: int) -> dict[str, tuple[int, int]]:
    """Returns the shapes of a rank's weights in a layer."""
    hidden, inner = model.hidden_size, model.intermediate_size // world_size
    queries = model.num_heads * model.head_dim // world_size
    both = 2 * model.num_kv_heads * model.head_dim // world_size
    return {
        "o_proj": (hidden, queries),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "qkv": (queries + both, hidden),
    }


class Chain:
    """A chain of layers with fixed inputs."""

    def __init__(self, comm: allnorm.Communicator, layers: _Layers, num_tokens: int) -> None:
        self.layers, self.num_tokens = layers, num_tokens
        self._comm = comm
        make: dict[str, Any] = {"dtype": layers.dtype, "device": comm.device}
        mine = torch.Generator(comm.device).manual_seed(comm.rank)
        common = torch.Generator(comm.device).manual_seed(2)
        columns = layers.gemms[0]["o_proj"].shape[1]
        self._attended = torch.empty(num_tokens, columns, **make).normal_(generator=mine)
        shape = (num_tokens, layers.model.hidden_size)
        self._residual = torch.empty(shape, **make).normal_(generator=common)

    def run(self, ahead: bool) -> list[Site]:
        """Runs the chain and returns its calls; `ahead`: they prefetch the next weight."""
        attended, residual, sites = self._attended, self._residual, []
        for gemms, norms in zip(self.layers.gemms, self.layers.norms, strict=True):
            x = F.linear(attended, gemms["o_proj"])
            normed, residual = self._call(
                x, residual, norms[0], gemms["gate_up"] if ahead else None
            )
            sites.append((x, normed, residual))
            inner = F.linear(normed, gemms["gate_up"])[:, : gemms["down"].shape[1]]
            x = F.linear(inner, gemms["down"])
            normed, residual = self._call(x, residual, norms[1], gemms["qkv"] if ahead else None)
            sites.append((x, normed, residual))
            attended = F.linear(normed, gemms["qkv"])[:, : gemms["o_proj"].shape[1]]
        return sites

    def error(self, sites: list[Site]) -> str:
        """Compares every call with an unfused one; returns the first difference. Collective."""
        residual, errors = self._residual, []
        weights = [weight for norms in self.layers.norms for weight in norms]
        for number, ((x, normed, total), weight) in enumerate(zip(sites, weights, strict=True)):
            want = self._call(x, residual, weight, None, algorithm="unfused")
            for name, mine, expected in zip(("norm", "sum"), (normed, total), want, strict=True):
                if not same_bits(mine, expected):
                    errors.append(f"the {name} of call {number} differs from an unfused call's")
            residual = total
        return errors[0] if errors else ""

    def _call(
        self, x: Tensor, residual: Tensor, weight: Tensor, prefetch: Tensor | None, **more: Any
    ) -> tuple[Tensor, Tensor]:
        eps = self.layers.model.eps
        return self._comm.all_reduce_add_rms_norm(
            x, residual, weight, eps, prefetch=prefetch, **more
        )


def _time_chain(comm: allnorm.Communicator, chain: Chain, job: Job) -> ChainTimes:
    """Times a chain with both arms, then checks the results of the timed runs. Collective."""
    model, tables = chain.layers.model, comm._endpoint.chooser.traits.tables
    size = (chain.num_tokens, model.hidden_size, chain.layers.dtype)
    is_default = comm.prefetch_bytes(*size) > 0
    comm._use_tables(forced(tables, chain.num_tokens))
    try:
        trial = _Trial(chain)
        samples = trial.time(job)
        errors = {name: agree(chain.error(sites)) for name, sites in trial.sites.items()}
        off, on = (trial.sites[name][-1] for name in ARMS)
        if not errors["prefetch:on"]:
            same = all(map(same_bits, off, on))
            errors["prefetch:on"] = agree("" if same else "the chain's result differs without it")
        return ChainTimes(
            *(model.name, model.hidden_size, chain.num_tokens, job.layers),
            comm.prefetch_bytes(*size),
            is_default,
            {name: _slowest(times) for name, times in samples.items()},
            errors,
        )
    finally:
        comm._use_tables(tables)


def forced(tables: tuple[policy.Table, ...], num_tokens: int) -> tuple[policy.Table, ...]:
    """Returns tables with the same choices, but calls with up to this many rows prefetch."""
    link_gbps = tables[0].link_gbps if tables else 0.0
    return (policy.Table("a trial", {}, link_gbps, num_tokens), *tables)


@dataclass
class _Trial:
    """The timed runs of a chain, and the results of the last one of each arm."""

    chain: Chain
    sites: dict[str, list[Site]] = field(default_factory=dict)

    def time(self, job: Job) -> clock.Samples:
        """Returns microseconds per layer for each arm. Collective."""
        arms = [self._arm(name, ahead) for name, ahead in ARMS.items()]
        for arm in arms:  # the kernels must have run before a capture
            arm.call(0)
        if job.device == "cpu":
            samples = clock.time_cpu(arms, job.seconds)
            return {name: [us / job.layers for us in times] for name, times in samples.items()}
        graphs = []
        for arm in arms:
            with timing.capture() as graph:
                arm.call(0)
            graphs.append((arm, graph))
        return clock.time_cuda(graphs, self.chain.num_tokens, calls=job.layers)

    def _arm(self, name: str, ahead: bool) -> Arm:
        def call(index: int) -> None:
            self.sites[name] = self.chain.run(ahead)

        return Arm(name, call, lambda result: result)


def _slowest(times_us: list[float]) -> dict[str, float]:
    """Returns percentiles, each of the rank on which it is largest. Collective."""
    ranks = gather(timing.percentiles(times_us))
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}
