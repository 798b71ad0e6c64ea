"""The unfused ways that `bench` compares with, out of torch.distributed's collectives."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from allnorm.bench import arms, sharded
from allnorm.bench.arms import Arm, Reduction
from allnorm.bench.case import Case
from allnorm.bench.modes import Mode
from allnorm.testing import copy_all


def baseline(case: Case, mode: Mode, name: str) -> Arm | str:
    """The arm of that name, or why it cannot run this.

    "nccl+torch": all-reduce, PyTorch's add and RMSNorm; "nccl+local": all-reduce, allnorm's local
    add + norm kernel. "+quant": the results are quantised too, by a kernel of its own after the
    first, within the local kernel of the second. With a sharded residual the all-reduce is a
    reduce-scatter before the norm and an all-gather after it.
    """
    local = "+local" in name
    if mode.residual_sharded:
        return sharded.baseline(case, mode, name, local)
    reduction = all_reduce(case, name)
    if local:
        return arms.then_norm(reduction, case, mode, name)
    arm = torch_norm(reduction, case, name)
    return arms.then_quantize(arm, case, mode, name) if mode.quant else arm


def all_reduce(case: Case, name: str) -> Reduction:
    """`torch.distributed.all_reduce`, in place on a copy of this rank's partial sum."""
    copies = [x.clone() for x in case.xs]

    def call(index: int) -> torch.Tensor:
        dist.all_reduce(copies[index])
        return copies[index]

    return Reduction(name, call, reset=partial(copy_all, copies, case.xs), foreign=False)


def torch_norm(reduction: Reduction, case: Case, name: str) -> Arm:
    """A reduction, then PyTorch's add and RMSNorm."""
    residuals = [batch.residual for batch in case.batches]
    weights, size = case.unbiased_weights(), (case.shape.hidden_size,)
    reduce, eps = reduction.call, case.shape.eps

    def call(index: int) -> Any:
        summed = residuals[index] + reduce(index)
        return F.rms_norm(summed, size, weights[index], eps), summed

    return reduction.then(call, name)
