"""Expert parallelism for ranks that share one batch: leaves the sum over ranks to the next norm."""

from __future__ import annotations

from typing import Any

import torch
from transformers.distributed import expert_parallel as stock

from allnorm.integrations.transformers.styles import fusing_site, leave_sum, link_site


class FusedAllReduceEP(stock.AllReduceEP):
    """The implementation `all_reduce`: every rank runs its own experts on the whole batch."""

    def __init__(self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._experts = experts
        link_site(experts, tp_mesh)  # tp_mesh and ep_mesh have the same ranks

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> Any:
        """Returns a partial sum in inference; else what the stock implementation returns."""
        site = fusing_site(self._experts)
        if site is None:
            return super().__call__(hidden_states, top_k_index, top_k_weights)
        count: Any = self.num_local_experts
        elsewhere = (top_k_index // count) != self.ep_mesh.get_local_rank()
        index = torch.where(elsewhere, count, top_k_index % count)
        weights = top_k_weights.masked_fill(elsewhere, 0.0)
        return leave_sum(self.experts_forward(hidden_states, index, weights), site)


class FusedAutoEP(stock.AutoEP):
    """The implementation `auto`: the stock class chooses one of the other implementations."""

    def __init__(self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        chosen: Any = self  # the type checker may not know the stock class's attributes
        if chosen.all_reduce is not None and chosen.megamoe is None:
            chosen.all_reduce = FusedAllReduceEP(experts, ep_mesh, tp_mesh)


def fused_implementations() -> dict[str, Any]:
    """Returns the entries to replace in the registry, by name."""
    return {"auto": FusedAutoEP, "all_reduce": FusedAllReduceEP}
