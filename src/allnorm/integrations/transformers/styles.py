"""Tensor-parallel styles and expert parallelism that leave the sum over ranks to the next norm.

They replace the stock classes in transformers' registries. They differ from the stock classes only
in inference, and only for modules that have a site.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed import expert_parallel
from transformers.distributed import tensor_parallel as stock
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

import allnorm
from allnorm.errors import AllnormError, PeerDivergedError
from allnorm.integrations.transformers.partial import PartialSum
from allnorm.integrations.transformers.sites import Site
from allnorm.integrations.transformers.wiring import SITE

# Communicators, keyed by group name. They outlive their models: either all ranks must create a
# communicator or none, but the garbage collector frees a model at a different time on each rank.
_links: dict[str, allnorm.Communicator] = {}


class _LeavesTheSum(stock.TensorParallelLayer):
    """A mixin for styles whose output is a sum over ranks, and stays a partial sum in inference."""

    def install_forward(self, module: torch.nn.Module, mesh: Any) -> torch.nn.Module:
        """Gives the module's site its communicator, then calls the stock method."""
        link_site(module, mesh)
        return super().install_forward(module, mesh)

    def transform_output_post_forward(self, module: torch.nn.Module, output: Any, mesh: Any) -> Any:
        """Returns a partial sum in inference; otherwise calls the stock method."""
        is_local = isinstance(output, torch.Tensor) and not isinstance(output, DTensor)
        if is_local and self.should_use_local_tensors(module):
            site = fusing_site(module)
            if site is not None:
                return leave_sum(output, site)
        return super().transform_output_post_forward(module, output, mesh)


class FusedRowwise(_LeavesTheSum, stock.RowwiseParallel):
    """The styles `rowwise` and `rowwise_split_input`, which shard the weight's input dimension.

    As in the stock style, the GEMM omits the bias, which is added to the sum instead.
    """


class FusedExperts(_LeavesTheSum, stock.MoeExpertsParallel):
    """The style `moe_tp_experts`: each rank holds a shard of every expert."""


class FusedAllReduceEP(expert_parallel.AllReduceEP):
    """The implementation `all_reduce`: every rank runs its own experts on the whole batch."""

    def __init__(self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._experts = experts
        link_site(experts, tp_mesh)  # tp_mesh and ep_mesh have the same ranks

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> Any:
        """Returns a partial sum in inference; otherwise calls the stock implementation."""
        site = fusing_site(self._experts)
        if site is None:
            return super().__call__(hidden_states, top_k_index, top_k_weights)
        count: Any = self.num_local_experts
        elsewhere = (top_k_index // count) != self.ep_mesh.get_local_rank()
        index = torch.where(elsewhere, count, top_k_index % count)
        weights = top_k_weights.masked_fill(elsewhere, 0.0)
        return leave_sum(self.experts_forward(hidden_states, index, weights), site)


class FusedAutoEP(expert_parallel.AutoEP):
    """The implementation `auto`: the stock class chooses one of the other implementations."""

    def __init__(self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        chosen: Any = self  # the type checker may not know the stock class's attributes
        if chosen.all_reduce is not None and chosen.megamoe is None:
            chosen.all_reduce = FusedAllReduceEP(experts, ep_mesh, tp_mesh)


def registries() -> list[tuple[Any, dict[str, Any]]]:
    """Returns transformers' registries, and the entries to replace in each."""
    split = FusedRowwise(input_layouts=Replicate(), output_layouts=Replicate())
    styles = {
        "rowwise": FusedRowwise(input_layouts=Shard(-1), output_layouts=Replicate()),
        "rowwise_split_input": split,
        "moe_tp_experts": FusedExperts(),
    }
    implementations = {"auto": FusedAutoEP, "all_reduce": FusedAllReduceEP}
    return [
        (ALL_PARALLEL_STYLES, styles),
        (expert_parallel.EPImplementationInterface(), implementations),
    ]


def fusing_site(module: torch.nn.Module) -> Site | None:
    """Returns a module's site if its output may now stay a partial sum. Equal on all ranks."""
    site: Site | None = getattr(module, SITE, None)
    return site if site is not None and site.fuses() else None


def leave_sum(value: torch.Tensor, site: Site) -> PartialSum | torch.Tensor:
    """Returns a PartialSum, or the reduced sum if hooks on this rank will receive it."""
    if not site.has_hooks():
        return PartialSum(value, site)
    try:
        return site.reduce(value)
    except PeerDivergedError as error:
        error.add_note(
            f"Hooks of this rank receive the sum of {site.name} before it is normed or scaled, "
            "which the fused call of the peers does not return. Register the hooks on every rank "
            "or on none."
        )
        raise


def link_site(module: torch.nn.Module, mesh: Any) -> None:
    """Gives a module's site its communicator. Collective."""
    site: Site | None = getattr(module, SITE, None)
    if site is None:
        warnings.warn(
            f"allnorm: a reducing {type(module).__name__} has no fusable site and runs without "
            "allnorm: the model's class is not in allnorm.integrations.transformers.FAMILIES "
            "(subclasses do not count), or the model was built before enable(). Call enable() "
            "first, then load the model.",
            stacklevel=2,
        )
        return
    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    site.link = _communicator(group, mesh.device_type)
    site.reason = ""


def _communicator(group: dist.ProcessGroup, device_type: str) -> allnorm.Communicator:
    """Returns a group's communicator. Collective.

    The communicator is kept until the group ends or some rank can no longer use it.
    """
    device = torch.device(device_type)
    if device_type == "cuda":  # transformers has bound this process to its GPU
        device = torch.device("cuda", torch.cuda.current_device())
    link = _links.get(group.group_name)
    # Either all ranks have a communicator for a group with this name or none has. But one rank may
    # have closed its communicator, and on CUDA ranks may detect a failure at different times.
    if link is None or not _all_can_use(link, group, device):
        with torch.device("cpu"):  # models may be built with "meta" as the default device
            link = allnorm.Communicator(group, device)
        _links[group.group_name] = link
    return link


def _all_can_use(
    link: allnorm.Communicator, group: dist.ProcessGroup, device: torch.device
) -> bool:
    """Returns whether every rank can use `link` for `group`. Collective."""
    try:
        link.check()
        usable = link.group == group  # an earlier group with this name may be destroyed
    except AllnormError:
        usable = False
    answer = torch.tensor([usable], dtype=torch.int32, device=device)
    dist.all_reduce(answer, dist.ReduceOp.MIN, group=group)
    return bool(answer.item())
