"""Reports which of a model's reductions are fused, and why the others are not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from allnorm.errors import UnsupportedError
from allnorm.integrations.transformers.sites import Site
from allnorm.integrations.transformers.wiring import SITES

_EMBEDDING = "its vocabulary is sharded: DTensor reduces its output, once per forward pass"


@dataclass(frozen=True)
class SiteReport:
    """One reduction of a model.

    Attributes:
        name: the name of the module that reduces.
        reason: why it is not fused; "" if it is.
        calls: number of fused calls outside compiled graphs whose norm was used.
        unfused_calls: number of all other calls outside compiled graphs: for example, calls in
            which a hook needed the sum, or could have changed the residual before the norm.
    """

    name: str
    reason: str
    calls: int
    unfused_calls: int


@dataclass(frozen=True)
class Report:
    """A model's sites, in the order in which they run."""

    sites: tuple[SiteReport, ...]

    @property
    def fused(self) -> tuple[SiteReport, ...]:
        """The sites that make fused calls in inference."""
        return tuple(site for site in self.sites if not site.reason)

    @property
    def missed(self) -> tuple[SiteReport, ...]:
        """The sites that run as they do without allnorm; each has a `reason`."""
        return tuple(site for site in self.sites if site.reason)

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} of {len(self.sites)} reductions fused"]
        lines += [f"  {site.name}: {site.reason}" for site in self.missed]
        lines += [
            f"  {site.name}: in {site.unfused_calls} of {site.calls + site.unfused_calls} calls "
            "the fused norm was not used: a hook or other code read the sum, or could have changed "
            "it"
            for site in self.fused
            if site.unfused_calls
        ]
        return "\n".join(lines)


def report(model: torch.nn.Module) -> Report:
    """Reports which of a loaded model's reductions are fused. Not collective.

    Raises:
        UnsupportedError: the model has no fusable site; the message lists possible reasons.
    """
    sites: list[Site] = []
    missed: list[SiteReport] = []
    for module in model.modules():
        sites += getattr(module, SITES, [])
        embedding = _sharded_embedding(module)
        if embedding is not None:
            missed.append(SiteReport(embedding, _EMBEDDING, 0, 0))
    if not sites:
        raise UnsupportedError(
            f"{type(model).__name__} has no fusable site: its class is not in "
            "allnorm.integrations.transformers.FAMILIES (subclasses do not count), or it was built "
            "before enable(). Call enable() first, then load the model."
        )
    known = [
        SiteReport(s.name, s.obstacle() or s.last_obstacle, s.calls, s.unfused_calls) for s in sites
    ]
    return Report((*missed, *known))


def _sharded_embedding(model: torch.nn.Module) -> str | None:
    """Returns the name of a wired model's embedding if its vocabulary is sharded, else None."""
    if not getattr(model, SITES, None):
        return None
    for name, module in model.named_children():
        weight = module.weight if isinstance(module, torch.nn.Embedding) else None
        if isinstance(weight, DTensor) and any(p.is_shard(0) for p in weight.placements):
            return name
    return None
