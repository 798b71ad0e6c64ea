"""Tests a call's host cost: it allocates only its results and never waits for the device."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from rank_helpers import Case, comm, on

import allnorm
from allnorm.core import fast_call

# Kinds of calls, each with its number of results.
KINDS = (
    (Case(shape=(8, 4096), algorithm="one_shot"), 2),
    (Case(shape=(8, 4096), algorithm="two_shot"), 2),
    (Case(shape=(8, 4096), residual=False), 2),
    (Case(shape=(600, 4096)), 2),
    (Case(shape=(8, 4096), sharded=True), 2),
    (Case(shape=(8, 4096), quant=allnorm.Fp8PerGroup(128)), 3),
    (Case(shape=(8, 4096), quant=allnorm.Fp8PerGroup(128), return_normed=True), 4),
    (Case(shape=(8, 4096), quant=allnorm.Fp8PerGroup(128, "column_major")), 3),
    (Case(shape=(7, 4096), quant=allnorm.Fp8PerGroup(128, "column_major_tma")), 3),
    (Case(shape=(8, 4096), quant=allnorm.Fp8PerToken(), sharded=True), 3),
    (Case(shape=(8, 4096), quant=allnorm.Fp8PerTensor(torch.tensor([0.5]))), 2),
)


def calls(rank: int) -> list[tuple[Callable[[], Any], int, Case]]:
    """Returns a function for each kind of call, with its number of results and its case.

    All calls are prepared.
    """
    c = comm()
    found: list[tuple[Callable[[], Any], int, Case]] = []
    for case, results in KINDS:
        call = functools.partial(case.method(c), case.x(rank), **case.call_arguments(c))
        found.append((call, results, case))
        for _ in range(3):
            case.compare(c, *call())
    x = KINDS[0][0].x(rank)
    found.append((lambda: c.all_reduce(x), 1, KINDS[0][0]))
    found[-1][0]()
    return found


@on(cpu=(2,), gpu=(2,))
def test_no_operators(rank: int, world_size: int) -> None:
    """A call runs no torch operators except to allocate results where no faster way exists."""
    makes = {"aten::empty_strided", "aten::as_strided"}
    for call, results, case in calls(rank):
        # Not a dispatch mode, because under one the call itself becomes an operator.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        names = [event.name for event in profile.events() if "::" in event.name]
        assert set(names) <= makes, (case, names)
        assert names.count("aten::empty_strided") <= results, (case, names)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.zeros(1)
    assert "aten::zeros" in {event.name for event in profile.events()}, "the profiler sees nothing"


@on(cpu=(2,))
def test_no_memory_but_results(rank: int, world_size: int) -> None:
    for call, results, case in calls(rank):
        # tests/core/fast_call_alone.py counts the results of calls that C dispatches.
        with (
            fast_call.watched(),
            mock.patch.object(torch, "empty_strided", wraps=torch.empty_strided) as made,
        ):
            call()
        assert made.call_count == results, case


@on(gpu=(2,))
def test_no_device_memory_but_results(rank: int, world_size: int) -> None:
    for call, results, case in calls(rank):
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        kept = call()
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
        assert after - before == results, case
        del kept


@pytest.mark.own_gpus  # on shared GPUs, gloo replaces NCCL, and gloo waits for the device
@on(gpu=(2,))
def test_no_synchronization(rank: int, world_size: int) -> None:
    """Checks that calls return while the device is still busy with earlier work."""
    pairs = calls(rank)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        start = time.perf_counter()
        torch.cuda._sleep(1 << 30)  # clock cycles, more than half a second
        busy = torch.cuda.Event()
        busy.record()
        for call, _, _ in pairs:
            call()
        took, done = time.perf_counter() - start, busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert not done, f"the calls waited for the device: {took:.3f} s"
    comm().check()
