"""Arms of `rms_norm_sharded`, such as q and k normed over all ranks' heads, and what it replaces.

The slices of a rank lie side by side in one tensor [num_tokens, slices * hidden_size], as the GEMM
for q and k writes them, so the rows of each are strided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import allnorm
from allnorm import reference
from allnorm.bench import bounds
from allnorm.bench.arms import Arm, no_outcome
from allnorm.bench.case import Case
from allnorm.bench.modes import Mode
from allnorm.testing import same_bits


def make_arm(comm: allnorm.Communicator, case: Case, mode: Mode, name: str) -> Arm | str:
    """Returns the arm with a name of `modes.arm_names`, or the reason why it cannot run.

    - "allnorm", "allnorm:one_shot", "allnorm:unfused": as for other modes.
    - "nccl+torch": PyTorch's sums of squares, one all-reduce of all of them, and PyTorch's norms.
    - "nccl+inductor": the same, with the operations before and after the all-reduce compiled.
    """
    if not name.startswith("allnorm"):
        compiles = name.endswith("+inductor")
        separate, check = _separate(case, mode, compiles), _check(case, mode, exact=False)
        return Arm(name, separate, no_outcome, foreign=compiles, check=check)
    algorithm = name.partition(":")[2] or "auto"
    sizes = [case.shape.hidden_size] * mode.slices
    try:
        plan = comm.plan(case.shape.num_tokens, sizes, case.dtype, algorithm=algorithm)
    except allnorm.UnsupportedError as error:
        return str(error)
    if algorithm not in ("auto", plan.algorithm):
        return plan.reason
    tensors = [x.split(sizes, -1) for x in case.xs]
    weights, shape = _weights(case, mode), case.shape
    options: dict[str, Any] = {"numerics": case.numerics, "algorithm": algorithm}

    def call(index: int) -> list[Tensor]:
        return comm.rms_norm_sharded(
            tensors[index], weights[index], shape.eps, shape.weight_bias, **options
        )

    return Arm(name, call, no_outcome, check=_check(case, mode, exact=True))


def expected(case: Case, mode: Mode, index: int) -> list[Tensor]:
    """Returns the reference's normed slices of this rank."""
    sizes, shape = [case.shape.hidden_size] * mode.slices, case.shape
    normed = reference.rms_norm_sharded(
        [x.split(sizes, -1) for x in case.batches[index].xs],
        [_weights(case, mode, rank)[index] for rank in range(case.world_size)],
        *(shape.eps, shape.weight_bias),
        numerics=case.numerics,
    )
    return normed[case.rank]


def describe_error(got: Sequence[Tensor], wanted: Sequence[Tensor], exact: bool) -> str:
    """Describes the first slice that is wrong; "" if there is none.

    Unless `exact`, elements may differ by what six roundings make: of the slice's product with the
    reciprocal root, its product with the weight and the weight plus its bias, on both sides. The
    float32 sums of squares differ by much less.
    """
    if len(got) != len(wanted):
        return f"{len(got)} slices instead of {len(wanted)}"
    for number, (mine, right) in enumerate(zip(got, wanted, strict=True)):
        if exact and not same_bits(mine, right):
            return f"slice {number} differs from the reference"
        info = torch.finfo(right.dtype)
        limit = 6.3 * info.eps / 2 * right.float().abs() + info.smallest_normal
        if not exact and (error := bounds.compare(f"slice {number}", mine, right, limit)):
            return error
    return ""


def _check(case: Case, mode: Mode, exact: bool) -> Callable[[Any, int], str]:
    """Returns the check of an arm's results."""
    return lambda result, index: describe_error(result, expected(case, mode, index), exact)


def _weights(case: Case, mode: Mode, rank: int | None = None) -> list[tuple[Tensor, ...]]:
    """Returns a rank's slices of the weights for each buffer set; None: this rank's."""
    turn = case.rank if rank is None else rank
    sizes = [case.shape.hidden_size] * mode.slices
    return [batch.weight.roll(turn).split(sizes) for batch in case.batches]


def _separate(case: Case, mode: Mode, compiles: bool) -> Callable[[int], list[Tensor]]:
    """Returns the call of separate operations, as models write it."""
    sizes, eps = [case.shape.hidden_size] * mode.slices, case.shape.eps
    tensors = [x.split(sizes, -1) for x in case.xs]
    bias = case.shape.weight_bias
    weights = [[w + bias if bias else w for w in each] for each in _weights(case, mode)]

    dtype, ranks = case.dtype, case.world_size

    def means_of(slices: Sequence[Tensor]) -> Tensor:
        return torch.cat([x.float().pow(2).mean(-1, keepdim=True) for x in slices], -1)

    def norms(slices: Sequence[Tensor], means: Tensor, gains: Sequence[Tensor]) -> list[Tensor]:
        scales = torch.rsqrt(means / ranks + eps).split(1, -1)
        each = zip(slices, scales, gains, strict=True)
        return [(x.float() * scale * gain).to(dtype) for x, scale, gain in each]

    if compiles:
        torch.compiler.reset()  # after eight shapes, functions would no longer be compiled
        means_of = torch.compile(means_of, dynamic=False)
        norms = torch.compile(norms, dynamic=False)

    def call(index: int) -> list[Tensor]:
        means = means_of(tensors[index])
        dist.all_reduce(means)
        return norms(tensors[index], means, weights[index])

    return call
