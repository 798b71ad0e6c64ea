"""Tests the lifetime of communicators: creation, concurrency, subgroups, settings, closing."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import pathlib
import random
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_helpers import (
    ALGORITHMS,
    MODES,
    Case,
    assert_ranks_agree,
    comm,
    device,
    message_of,
    on,
    same_on_every_rank,
)

import allnorm
from allnorm.core import _native, fast_call
from allnorm.testing import assert_same_bits, gather


@on(cpu=(1, 2, 3), gpu=(1, 2, 8))
def test_attributes(rank: int, world_size: int) -> None:
    with allnorm.Communicator(device=device()) as c:
        assert (c.rank, c.world_size) == (rank, world_size)
        assert c.device == device()
        assert c.group is dist.group.WORLD
        assert c.check() is None
        same_on_every_rank(c.name)  # compiled graphs contain the name
        assert isinstance(repr(c), str)
        Case().check(c)


@on(cpu=(2,), gpu=(2,))
def test_default_device(rank: int, world_size: int) -> None:
    if device().type == "cuda" or not torch.cuda.is_available():
        assert allnorm.Communicator().device == device()


@on(cpu=(1, 2), gpu=(1, 2))
def test_closed(rank: int, world_size: int) -> None:
    case = Case((2, 64))
    with allnorm.Communicator(device=device()) as c:
        case.check(c)
    c.close()
    c.close()
    for call in (
        lambda: case.run(c),
        lambda: c.all_reduce(case.x(rank)),
        lambda: c.plan(1, 64),
        lambda: c.row_shard(4),
        c.check,
        c.__enter__,
    ):
        with pytest.raises(allnorm.CommunicatorClosedError, match="closed"):
            call()
    with pytest.raises(allnorm.CommunicatorClosedError, match="closed"):
        torch.ops.allnorm.all_reduce(case.x(rank), c.name)
    with allnorm.Communicator(device=device()) as second:
        assert second.name != c.name
        case.check(second)


@on(cpu=(2,), gpu=(2,))
def test_nothing_accumulates(rank: int, world_size: int) -> None:
    def mappings_and_files() -> int:
        mappings = pathlib.Path("/proc/self/maps").read_text().splitlines()
        return len(mappings) + len(os.listdir("/proc/self/fd"))

    before = 0
    gc.freeze()  # otherwise each collection visits the objects of earlier tests
    for i in range(24):
        c = allnorm.Communicator(device=device(), workspace_bytes=1 << 20)
        Case((1, 64), call=i).check(c)
        if i % 2:
            c.close()
        del c
        gc.collect()
        if i == 7:
            before = mappings_and_files()
    gc.unfreeze()
    assert mappings_and_files() - before < 12


@on(cpu=(2, 5))
def test_names_of_shared_memory_are_removed(rank: int, world_size: int) -> None:
    with allnorm.Communicator(device=device()) as c:
        Case().check(c)
        lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    lines = [line for line in lines if "/dev/shm/" in line]
    assert lines, "the workspace is in POSIX shared memory"
    assert all(line.endswith("(deleted)") for line in lines), lines


@on(cpu=(2, 3), gpu=(2, 3, 8))
def test_two_communicators_interleaved(rank: int, world_size: int) -> None:
    """Incident 11: a communicator must not see a different communicator's flags or data."""
    a = allnorm.Communicator(device=device())
    b = allnorm.Communicator(device=device(), workspace_bytes=1 << 20)
    draw = random.Random(3)
    pending = []
    for call in range(60):
        c = draw.choice((a, b))
        case = Case(
            (draw.choice((1, 3, 8)), 256),
            algorithm=draw.choice(("one_shot", "two_shot")),
            call=call,
        )
        pending.append((c, case, case.run(c)))
    for c, case, results in pending:
        case.compare(c, *results)
    a.close()
    Case(call=99).check(b)
    b.close()


@on(cpu=(2, 3, 4), gpu=(3, 4, 8))
def test_subgroups(rank: int, world_size: int) -> None:
    outer, inner = [0, world_size - 1], list(range(1, world_size))
    groups = [dist.new_group(ranks) for ranks in (outer, inner)]
    whole = comm()
    for ranks, group in zip((outer, inner), groups, strict=True):
        if rank not in ranks:
            with pytest.raises(ValueError, match="not in the group"):
                allnorm.Communicator(group=group, device=device())
            continue
        with allnorm.Communicator(group=group, device=device()) as c:
            assert (c.rank, c.world_size) == (ranks.index(rank), len(ranks))
            for algorithm in ALGORITHMS if len(ranks) > 1 else ("auto", "unfused"):
                case = Case((5, 264), algorithm=algorithm)
                results = case.check(c)
                assert_ranks_agree(c, *results)
    Case().check(whole)


@on(cpu=(2,), gpu=(2,))
def test_default_numerics(rank: int, world_size: int) -> None:
    results = {}
    case = Case((8, 4096))
    arguments = {**case.norm_arguments(), "numerics": None}
    for mode in MODES:
        with allnorm.Communicator(device=device(), numerics=mode) as c:
            results[mode], _ = c.all_reduce_add_rms_norm(case.x(rank), **arguments)
            want, _ = case.but(numerics=mode).expected(world_size)
            assert_same_bits(results[mode], want, f"Communicator(numerics={mode!r})")
            case.but(numerics="transformers").check(c)  # a call's argument takes precedence
    assert not torch.equal(results["rounded"], results["vllm"])


@on(cpu=(2,), gpu=(2,))
def test_wrong_arguments_of_the_constructor(rank: int, world_size: int) -> None:
    second = datetime.timedelta(seconds=1)
    attempts: dict[str, tuple[type[Exception] | tuple[type[Exception], ...], dict[str, object]]] = {
        "numerics": (ValueError, {"numerics": "exact"}),
        **{
            f"timeout {wrong}": (ValueError, {"timeout": wrong})
            for wrong in (0, -0.5, float("nan"), float("inf"), True, "5", -second, 0 * second)
        },
        "workspace": (ValueError, {"workspace_bytes": 100}),
        "workspace_zero": (ValueError, {"workspace_bytes": 0}),
        "workspace_negative": (ValueError, {"workspace_bytes": -(1 << 20)}),
        "workspace_type": (TypeError, {"workspace_bytes": "1GB"}),
        "max_blocks_zero": (ValueError, {"max_blocks": 0}),
        "max_blocks_negative": (ValueError, {"max_blocks": -1}),
        "max_blocks_type": (TypeError, {"max_blocks": 64.0}),
        "device": (allnorm.UnsupportedError, {"device": "meta"}),
        "group": ((ValueError, TypeError), {"group": "world"}),
    }
    texts = []
    for error, arguments in attempts.values():
        arguments = {"device": device(), **arguments}
        texts.append(message_of(error, lambda a=arguments: allnorm.Communicator(**a)))
    assert "'exact'" in same_on_every_rank(texts)[0]
    with allnorm.Communicator(device=device()) as c:
        Case().check(c)


@on(cpu=(3,), gpu=(3,))
def test_one_failing_rank_fails_all(rank: int, world_size: int) -> None:
    numerics = "exact" if rank == 1 else "rounded"
    text = message_of(
        (allnorm.AllnormError, ValueError),
        lambda: allnorm.Communicator(device=device(), numerics=numerics),
    )
    texts = gather(text)
    assert texts[1].startswith("ValueError")
    assert texts[0] == texts[2]
    assert "rank 1" in texts[0]
    with allnorm.Communicator(device=device()) as c:
        Case().check(c)


def other_build(rank: int) -> Any:
    """Simulates a library of a different version on every rank except the first."""
    info = _native.library(device().type).build_info()
    if rank:
        info["version"] = "9.9.9"
    return mock.patch.object(_native.Library, "build_info", return_value=info)


DIFFERENT: dict[str, Callable[[int], object]] = {
    "workspace_bytes": lambda rank: (1 + rank) << 20,
    "numerics": lambda rank: MODES[rank],
    "max_blocks": lambda rank: 1 + rank,
    "first_op": lambda rank: 7 + rank,
    "early_trigger": lambda rank: rank == 0,
    "dependent_launch": lambda rank: rank != 0,
}


@on(cpu=(2,), gpu=(2,))
def test_ranks_must_pass_the_same(rank: int, world_size: int) -> None:
    memory = shared_memory()
    texts = [
        message_of(
            ValueError,
            lambda n=name, v=value: allnorm.Communicator(device=device(), **{n: v(rank)}),
        )
        for name, value in DIFFERENT.items()
    ]
    with other_build(rank):
        texts.append(message_of(ValueError, lambda: allnorm.Communicator(device=device())))
    assert shared_memory() == memory
    for name, text in zip([*DIFFERENT, "library"], same_on_every_rank(texts), strict=True):
        assert f"different: {name} is " in text
    assert "workspace_bytes is 1048576 on rank 0, 2097152 on rank 1. Pass the same" in texts[0]
    assert "first_op is 7 on rank 0, 8 on rank 1." in texts[3]
    assert "9.9.9" in texts[-1]
    assert "same build" in texts[-1]
    with allnorm.Communicator(device=device(), first_op=(1 << 32) + rank * (1 << 32)) as c:
        Case().check(c)  # operation numbers wrap, so both ranks pass the same


def shared_memory() -> list[str]:
    """Returns this process's mappings of communicators' memory."""
    with open("/proc/self/maps") as file:
        return [line.split()[0] for line in file if "/allnorm-" in line]


@on(cpu=(2,), gpu=(2,))
def test_a_failed_start_leaves_nothing(rank: int, world_size: int) -> None:
    """If the last steps of creation fail, all memory from earlier steps is freed."""

    def fail(*args: object, **named: object) -> None:
        raise OSError("no more of these")

    Case().check(comm())
    before, texts, closed = shared_memory(), [], []
    library = _native.library(device().type)
    destroy = library.comm_destroy
    counting = mock.patch.object(
        library, "comm_destroy", lambda handle: closed.append(handle) or destroy(handle)
    )
    with counting:
        broken = mock.patch.object(library, "comm_create", fail)
        with broken if rank == 1 else contextlib.nullcontext():
            kinds = (allnorm.AllnormError, OSError)
            texts.append(message_of(kinds, lambda: allnorm.Communicator(device=device())))
        assert len(closed) == (rank != 1), "what was opened is closed"
        with mock.patch.object(fast_call, "new", fail):
            texts.append(message_of(OSError, lambda: allnorm.Communicator(device=device())))
        assert len(closed) == 1 + (rank != 1)
    assert all("no more of these" in text for text in texts)
    assert shared_memory() == before
    assert before or device().type == "cuda", "there must be mappings to compare"
    Case().check(comm())


def with_environment(change: dict[str, str], call: Callable[[], object]) -> object:
    os.environ.update(change)
    try:
        return call()
    finally:
        for name in change:
            del os.environ[name]


# Variables that Kubernetes sets for a service named allnorm, and a Dockerfile's variable.
POD = (
    *("ALLNORM_SERVICE_HOST", "ALLNORM_SERVICE_PORT", "ALLNORM_PORT", "ALLNORM_PORT_80_TCP_PROTO"),
    "ALLNORM_VERSION",
)


@on(cpu=(2,), gpu=(2,))
def test_environment(rank: int, world_size: int) -> None:
    def create() -> allnorm.Communicator:
        return allnorm.Communicator(device=device())

    texts = [
        message_of(ValueError, lambda change=change: with_environment(change, create))
        for change in (
            {"ALLNORM_WORKSPACE_BYTE": "1000000"},
            {"ALLNORM_WORKSPACE_BYTES": "lots"},
            {"ALLNORM_WORKSPACE_BYTES": "-5"},
            {"ALLNORM_TIMEOUT_SECONDS": "0"},
        )
    ]
    assert all(text.startswith("ConfigurationError") for text in same_on_every_rank(texts))
    assert "ALLNORM_WORKSPACE_BYTE:" in texts[0]
    assert "lots" in texts[1]
    c = with_environment(
        {"ALLNORM_WORKSPACE_BYTES": str(64 << 10), "ALLNORM_TIMEOUT_SECONDS": "2.5"}, create
    )
    assert isinstance(c, allnorm.Communicator)
    assert c.timeout == datetime.timedelta(seconds=2.5)
    tokens = 64
    assert c.plan(tokens, 4096, torch.bfloat16).num_chunks > 1
    Case((tokens, 4096)).check(c)
    c.close()
    # One rank is misconfigured: all ranks raise, and none hangs.
    own = {"ALLNORM_TIMEOUT_SECS": "1"} if rank == 0 else {}
    kinds = (allnorm.ConfigurationError, allnorm.AllnormError)
    assert "ALLNORM_TIMEOUT_SECS" in message_of(kinds, lambda: with_environment(own, create))
    pod = dict.fromkeys(POD, "tcp://10.0.0.7:80") if rank == 0 else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with with_environment(pod, create) as c:
                Case().check(c)
    said = [str(w.message) for w in caught if "ignores the environment" in str(w.message)]
    assert len(said) == (1 if rank == 0 else 0)
    assert all(name in said[0] for name in pod)


def test_needs_torch_distributed() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        allnorm.Communicator(device="cpu")


@on(cpu=(2,), gpu=(2,))
def test_positions_and_defaults(rank: int, world_size: int) -> None:
    """`quant` and `return_normed` may be passed by position and have the documented defaults."""
    c = comm()
    case = Case((3, 256))
    x, residual, weight = case.x(rank), case.residual_tensor(), case.weight()
    out = c.all_reduce_add_rms_norm_quant(x, residual, weight, 1e-6, allnorm.Fp8PerToken(), True)
    assert out.scale.shape == (3, 1)
    assert out.normed is not None
    out = c.all_reduce_add_rms_norm_quant(x, residual, weight, 1e-6)
    assert out.scale.shape == (3, 2)
    assert out.normed is None
    case.but(quant=allnorm.Fp8PerGroup(128)).compare(c, *out)
    with allnorm.Communicator(device=c.device, numerics="vllm") as other:
        out = other.all_reduce_add_rms_norm_quant(x, residual, weight, 1e-6)
        case.but(quant=allnorm.Fp8PerGroup(128), numerics="vllm").compare(other, *out)
