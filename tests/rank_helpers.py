"""Helpers for test functions that run inside ranks: communicators, cases, checks."""

from __future__ import annotations

import functools
import gc
import hashlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allnorm
from allnorm import names, reference
from allnorm.testing import RankPool, gather
from allnorm.testing.in_time import used_communicators
from allnorm.testing.rank import device
from allnorm.verify.calls import can_run, run_cases
from allnorm.verify.case import Case, Experts

__all__ = ["Case", "Experts", "can_run", "device"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MODES = reference.NUMERICS
ALGORITHMS = ("auto", *names.ALGORITHMS)
dtype_ids = {"argvalues": DTYPES, "ids": [str(dtype)[6:] for dtype in DTYPES]}


def on(
    *, cpu: Iterable[int] = (), gpu: Iterable[int] = (), may_die: Iterable[int] = ()
) -> Callable[[Any], Any]:
    """Runs a test once per device and world size.

    A test whose parameters begin with `rank, world_size` runs in every rank, and its other
    parameters must be picklable. Any other test gets the fixture `pool` and starts ranks itself.

    Args:
        cpu: numbers of CPU ranks.
        gpu: numbers of GPU ranks.
        may_die: ranks whose process may die in a test that runs in ranks; -1 is the last rank.
    """
    pools = pytest.mark.parametrize(
        "pool",
        [pytest.param(("cpu", n), id=f"cpu{n}", marks=pytest.mark.world_size(n)) for n in cpu]
        + [
            pytest.param(
                ("cuda", n), id=f"cuda{n}", marks=(pytest.mark.gpu, pytest.mark.world_size(n))
            )
            for n in gpu
        ],
        indirect=True,
    )

    def decorate(test: Any) -> Any:
        first, *others = inspect.signature(test).parameters.values()
        if first.name != "rank":
            return pools(test)

        @functools.wraps(test)
        def run(pool: RankPool, **arguments: Any) -> None:
            dying = [rank % pool.world_size for rank in may_die]
            pool.run(test, kwargs=arguments, may_die=dying)

        pool = inspect.Parameter("pool", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([pool, *others[1:]])
        test.__qualname__ += ".__wrapped__"  # the name by which ranks find it
        return pools(run)

    return decorate


def destroy_groups(rank: int, world_size: int) -> None:
    """Runs in ranks: destroys all process groups except the default one.

    The threads of a group poll every few milliseconds for as long as the ranks live. A transformers
    model creates six groups.
    """
    groups = [g for g in dist.distributed_c10d._world.pg_map if g is not dist.group.WORLD]
    for group in groups:
        dist.destroy_process_group(group)
    if groups:
        gc.collect()  # frees models that keep the groups alive


@functools.cache
def comm(**arguments: Any) -> allnorm.Communicator:
    """Returns a communicator, cached by its arguments. Collective."""
    return allnorm.Communicator(device=device(), **arguments)


def assert_ranks_agree(c: allnorm.Communicator, *tensors: torch.Tensor) -> None:
    """Checks that tensors are bit-identical on all ranks, including NaN payloads. Collective."""
    digest = hashlib.blake2b()
    for tensor in tensors:
        # cloned, because a contiguous tensor of one element can have any stride
        dense = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
        digest.update(dense.view(torch.uint8).cpu().numpy().tobytes())
    digests = gather(digest.hexdigest(), c.group)
    assert len(set(digests)) == 1, f"the ranks hold different bits: {digests}"


def same_on_every_rank(value: Any) -> Any:
    """Returns `value`; fails unless every rank passes an equal one. Collective."""
    values = gather(value)
    assert all(other == value for other in values), values
    return value


def message_of(error: type[BaseException] | tuple[type[BaseException], ...], call: Any) -> str:
    """Returns the message of the error that `call` must raise."""
    with pytest.raises(error) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def synchronize() -> None:
    """Waits for this rank's GPU, if there is one."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def run_and_check(c: allnorm.Communicator, call: Callable[[], object]) -> None:
    """Runs a call and checks for errors.

    A call that fails raises on CPU. On CUDA, check() raises after the kernel has ended.
    """
    call()
    synchronize()
    c.check()


def used_communicator(
    timeout: float,
    *calls: Callable[[allnorm.Communicator], object],
    create: Callable[..., allnorm.Communicator] = allnorm.Communicator,
    **arguments: Any,
) -> allnorm.Communicator:
    """Returns a communicator with a short timeout that has run these calls; see in_time.py."""

    def prepare(made: list[allnorm.Communicator]) -> None:
        made.append(create(timeout=timeout, **{"device": device(), **arguments}))
        for call in calls:
            call(made[0])

    return used_communicators(prepare)[0]


def check_cases(rank: int, world_size: int, cases: list[Case], **arguments: Any) -> int:
    """Checks cases in ranks; returns how many ran. All others must be refused.

    `arguments` are arguments of the communicator.
    """
    c = comm(**arguments)
    ran, wrong = run_cases(c, cases)
    assert not wrong, "\n".join([f"{len(wrong)} are wrong:", *wrong[:5]])
    assert c.check() is None
    return ran
