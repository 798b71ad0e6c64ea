"""What of a model is fused, and why the rest is not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from allnorm.errors import UnsupportedError
from allnorm.integrations.transformers.sites import Site
from allnorm.integrations.transformers.wiring import SITES

_EMBEDDING = "the vocabulary is sharded: its rows are summed once per forward pass, by DTensor"


@dataclass(frozen=True)
class SiteReport:
    """One reduction of a model.

    Attributes:
        name: of the module that reduces.
        reason: why it is not fused; "" if it is.
        calls: fused calls outside compiled graphs, whose norm was used.
        unfused_calls: reductions outside compiled graphs whose norm was not part of the call, or
            was not used: a hook, for example, wanted the sum, or could have changed the residual.
    """

    name: str
    reason: str
    calls: int
    unfused_calls: int


@dataclass(frozen=True)
class Report:
    """The sites of a model, in the order in which they run."""

    sites: tuple[SiteReport, ...]

    @property
    def fused(self) -> tuple[SiteReport, ...]:
        """Sites that make the fused call in inference."""
        return tuple(site for site in self.sites if not site.reason)

    @property
    def missed(self) -> tuple[SiteReport, ...]:
        """Sites that run as without allnorm; each says why."""
        return tuple(site for site in self.sites if site.reason)

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} of {len(self.sites)} reductions fused"]
        lines += [f"  {site.name}: {site.reason}" for site in self.missed]
        lines += [
            f"  {site.name}: in {site.unfused_calls} of {site.calls + site.unfused_calls} calls "
            "the fused norm was not used: a hook or other code took the sum, or could have changed "
            "it"
            for site in self.fused
            if site.unfused_calls
        ]
        return "\n".join(lines)


def report(model: torch.nn.Module) -> Report:
    """What of a model is fused.

    Args:
        model: as `from_pretrained` returned it.

    Raises:
        UnsupportedError: it has no site that could be fused; says why.

    Not collective.
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
            f"{type(model).__name__} has no fusable site: its architecture is not among "
            "allnorm.integrations.transformers.FAMILIES (subclasses of theirs are not), or it was "
            "built before enable()."
        )
    known = [
        SiteReport(s.name, s.obstacle() or s.last_obstacle, s.calls, s.unfused_calls) for s in sites
    ]
    return Report((*missed, *known))


def _sharded_embedding(model: torch.nn.Module) -> str | None:
    """Returns the name of the embedding of a wired model, if its vocabulary is spread over ranks."""
    if not getattr(model, SITES, None):
        return None
    for name, module in model.named_children():
        weight = module.weight if isinstance(module, torch.nn.Embedding) else None
        if isinstance(weight, DTensor) and any(p.is_shard(0) for p in weight.placements):
            return name
    return None
