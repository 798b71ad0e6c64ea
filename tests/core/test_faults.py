"""Peers that never come, die, or come with another call: bounded waits and named errors."""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_helpers import Case, device, on

import allnorm
from allnorm import quant
from allnorm.core import _native, announcement, faults, workspace
from allnorm.core.announcement import Announcement
from allnorm.core.call import Call
from allnorm.core.prepared_call import PreparedCall
from allnorm.policy import Plan
from allnorm.testing import RankPool

TIMEOUT = datetime.timedelta(seconds=1.5)
# Beyond the timeout itself: polling granularity, a busy machine.
SLACK_SECONDS = 10.0
ABSENT: list[allnorm.Communicator] = []


def synchronize() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def run_and_check(c: allnorm.Communicator, call: Callable[[], object]) -> None:
    """On CPU the call raises, on CUDA check() does once the kernel has ended."""
    call()
    synchronize()
    c.check()


def faulty_call(
    c: allnorm.Communicator, case: Case
) -> tuple[allnorm.PeerTimeoutError, float, torch.Tensor, torch.Tensor]:
    """A call that must fail: the error, the seconds it took, and what its outputs hold."""
    out, residual_out = (torch.zeros(case.shape, dtype=case.dtype, device=c.device) for _ in "ab")
    synchronize()
    start = time.monotonic()
    with pytest.raises(allnorm.PeerTimeoutError) as caught:
        run_and_check(c, lambda: case.run(c, out=out, residual_out=residual_out))
    seconds = time.monotonic() - start
    synchronize()
    return caught.value, seconds, out, residual_out


def assert_poisoned(c: allnorm.Communicator, case: Case) -> None:
    """After a fault: check() and the next calls raise, each time, and wait for nobody."""
    assert c.timeout is not None
    seconds = []
    for _ in range(5):
        with pytest.raises(allnorm.PeerTimeoutError):
            c.check()
        start = time.monotonic()
        for algorithm in (case.algorithm, "unfused"):
            with pytest.raises(allnorm.PeerTimeoutError):
                case.but(algorithm=algorithm).run(c)
        seconds.append(time.monotonic() - start)
    # A machine that is busy delays some of them; a call that waits does so each time.
    assert min(seconds) < c.timeout.total_seconds() / 2
    c.close()


def absent_peer(rank: int, world_size: int, algorithm: str, die: bool) -> dict[str, object] | None:
    absent = world_size - 1
    case = Case((5, 512), algorithm=algorithm)
    c = allnorm.Communicator(device=device(), timeout=TIMEOUT)
    for call in range(3):
        case.but(call=call).check(c)
    dist.barrier()
    if rank == absent:
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        ABSENT.append(c)  # one that is let go is closed, which its peers learn at once
        return None
    error, seconds, out, residual_out = faulty_call(c, case)
    assert torch.isnan(out).all(), "the outputs of a failed call are NaN"
    assert torch.isnan(residual_out).all(), "the outputs of a failed call are NaN"
    assert_poisoned(c, case)
    # The process stays usable: a new communicator over the healthy ranks works.
    survivors = list(range(absent))
    group = dist.new_group(survivors, use_local_synchronization=True)
    with allnorm.Communicator(group=group, device=device(), timeout=TIMEOUT) as healthy:
        case.but(algorithm="auto").check(healthy)
        assert healthy.check() is None
    return {"error": error, "seconds": seconds}


def absent_from_quantized(rank: int, world_size: int, sharded: bool, algorithm: str) -> str | None:
    """Quantized results say by their scale that they are none."""
    specs = (
        allnorm.Fp8PerGroup(128, "column_major_tma"),
        allnorm.Fp8PerGroup(128, "column_major_tma", "ue8m0_packed"),
        allnorm.Fp8PerToken(),
        allnorm.Fp8PerTensor(torch.ones(1, device=device())),
        allnorm.MxFp8(),
        allnorm.NvFp4(torch.ones(1, device=device())),
    )
    message = None
    for spec in specs:
        case = Case((5, 512), quant=spec, sharded=sharded, algorithm=algorithm, return_normed=True)
        c = allnorm.Communicator(device=device(), timeout=TIMEOUT / 3)
        case.check(c)
        dist.barrier()
        if rank == world_size - 1:
            dist.barrier()
            continue
        a = case.call_arguments(c)
        memory = {
            "quantized_out": torch.ones(
                quant.quantized_shape(spec, case.shape),
                device=c.device,
                dtype=torch.float32,
            ).to(quant.quantized_dtype(spec)),
            "normed_out": torch.zeros(case.shape, dtype=case.dtype, device=c.device),
            "residual_out": torch.zeros_like(a["residual"]),
        }
        if not isinstance(spec, allnorm.Fp8PerTensor):
            memory["scale_out"] = quant.empty_scale(spec, 5, 512, c.device).zero_()
        call = functools.partial(c.all_reduce_add_rms_norm_quant, case.x(rank), **{**a, **memory})
        with pytest.raises(allnorm.PeerTimeoutError) as caught:
            run_and_check(c, call)
        synchronize()
        message = caught.value.expected
        scale = memory.get("scale_out")
        if scale is None:
            assert torch.isnan(memory["quantized_out"].float()).all()
            assert a["quant"].scale == 1.0, "what the caller gave is not written"
        elif scale.dtype == torch.int32:
            assert (scale == -1).all(), "four exponents of NaN"
        elif isinstance(spec, allnorm.NvFp4 | allnorm.Fp8PerGroup) and quant.is_swizzled(spec):
            rows = quant.swizzled_rows(scale, len(scale) // 512)[:5, : 512 // 32]
            code = 0xFF if scale.dtype == torch.uint8 else 0x7F
            assert (rows == code).all(), "exponents of NaN"
            if memory["quantized_out"].dtype == torch.uint8:
                assert (memory["quantized_out"] == 0).all(), "e2m1 has no NaN"
        else:
            assert torch.isnan(scale).all()
        assert torch.isnan(memory["normed_out"]).all()
        assert torch.isnan(memory["residual_out"]).all()
        assert_poisoned(c, case)
        dist.barrier()
    return message


@on(cpu=(2, 3), gpu=(2,))
@pytest.mark.parametrize(
    ("sharded", "algorithm"), [(False, "one_shot"), (False, "two_shot"), (True, "two_shot")]
)
def test_quantized_results_of_a_failed_call_are_nan(
    pool: RankPool, sharded: bool, algorithm: str
) -> None:
    texts = pool.run(absent_from_quantized, sharded, algorithm)
    for text in texts[:-1]:
        assert text is not None
        assert "all_reduce_add_rms_norm_quant of 5x512" in text


@on(cpu=(2,))
@pytest.mark.parametrize("sharded", [False, True])
def test_quantized_results_of_a_failed_unfused_call_are_nan(pool: RankPool, sharded: bool) -> None:
    first, _ = pool.run(absent_from_quantized, sharded, "unfused")
    assert first is not None


@on(cpu=(2, 3))
def test_a_peer_that_never_comes_to_an_unfused_call(rank: int, world_size: int) -> None:
    case = Case((5, 512), algorithm="unfused")
    c = allnorm.Communicator(device=device(), timeout=TIMEOUT)
    case.check(c)
    dist.barrier()
    if rank == world_size - 1:
        ABSENT.append(c)
        return
    error, _, out, residual_out = faulty_call(c, case)
    assert error.peer == world_size - 1
    assert torch.isnan(out).all()
    assert torch.isnan(residual_out).all()
    assert_poisoned(c, case)


def assert_names_the_absent(
    pool: RankPool, results: list[dict[str, object] | None], died: bool = False
) -> None:
    absent = pool.world_size - 1
    assert results[absent] is None
    for rank, result in enumerate(results[:absent]):
        assert result is not None
        error, seconds = result["error"], result["seconds"]
        assert isinstance(error, allnorm.PeerTimeoutError)
        assert isinstance(seconds, float)
        # Survivors may wait for each other first, but nobody blames himself.
        assert error.rank == rank
        assert error.peer != rank
        assert error.expected != error.seen
        assert f"rank {rank}" in str(error)
        assert f"rank {error.peer}" in str(error)
        assert "5x512" in str(error)
        assert isinstance(error, allnorm.PeerDiedError) == died
        assert died or seconds >= TIMEOUT.total_seconds() * 0.9
        assert seconds < TIMEOUT.total_seconds() + SLACK_SECONDS
    blamed = {result["error"].peer for result in results[:absent] if result}
    assert absent in blamed


@on(cpu=(2, 3), gpu=(2, 4))
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_a_peer_that_never_comes(pool: RankPool, algorithm: str) -> None:
    assert_names_the_absent(pool, pool.run(absent_peer, algorithm, False))


@on(cpu=(3,), gpu=(3,))
def test_a_peer_that_is_killed(pool: RankPool) -> None:
    results = pool.run(absent_peer, "two_shot", True, timeout=60, may_die=[2])
    assert_names_the_absent(pool, results, died=True)
    left = [name for name in os.listdir("/dev/shm") if name.startswith("allnorm-")]
    mine = [name for name in left if name.split("-")[1] == str(os.getpid())]
    assert not mine


def killed_while_opening(rank: int, world_size: int) -> None:
    """Rank 0 dies after all have opened its shared memory, before it has removed the name."""
    library = _native.library("cpu")
    if rank == 0:
        library.shm_unlink = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(allnorm.PeerDiedError, match="rank 0") as caught:
        allnorm.Communicator(device="cpu")
    assert "starting" in str(caught.value)


@on(cpu=(2,))
def test_shared_memory_of_a_killed_creator_is_removed(pool: RankPool) -> None:
    before = set(Path("/dev/shm").glob("allnorm-*"))
    pool.run(killed_while_opening, may_die=[0])
    assert set(Path("/dev/shm").glob("allnorm-*")) <= before, "rank 1 has removed it"
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    path = Path(f"/dev/shm/allnorm-{int(gone.stdout)}-stays")
    path.touch()
    workspace._remove_leftovers()
    assert path.exists(), "a young one is let be"
    os.utime(path, (0, 0))
    mine = Path(f"/dev/shm/allnorm-{os.getpid()}-stays")
    mine.touch()
    os.utime(mine, (0, 0))
    try:
        workspace._remove_leftovers()
        assert not path.exists()
        assert mine.exists(), "its process lives"
    finally:
        mine.unlink()


DIVERGENCES = {
    "num_tokens": {"shape": (4, 512)},
    "no num_tokens": {"shape": (0, 512)},
    "hidden_size": {"shape": (3, 1024)},
    "dtype": {"dtype": torch.float16},
    "numerics": {"numerics": "vllm"},
    "residual": {"residual": False},
    "algorithm": {"algorithm": "two_shot"},
}


def diverging(rank: int, world_size: int, change: dict[str, object]) -> tuple[str, str, str]:
    case = Case((3, 512), algorithm="one_shot")
    mine = case.but(**change) if rank == 0 else case
    with allnorm.Communicator(device=device(), timeout=TIMEOUT) as c:
        case.check(c)
        error, _, _, _ = faulty_call(c, mine)
        assert_poisoned(c, case)
    with allnorm.Communicator(device=device()) as fresh:
        case.check(fresh)
    return type(error).__name__, error.expected, error.seen


@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("what", DIVERGENCES)
def test_diverging_calls_are_named(pool: RankPool, what: str) -> None:
    results = pool.run(diverging, DIVERGENCES[what])
    for kind, expected, seen in results:
        assert kind == "PeerDivergedError"
        assert expected != seen
    if what == "num_tokens":
        assert "4x512" in results[0][1]
        assert "3x512" in results[0][2]
        assert "4x512" in results[1][2]


QUANTIZED_DIVERGENCES = {
    "groups of 64": {"quant": allnorm.Fp8PerGroup(64)},
    "per token": {"quant": allnorm.Fp8PerToken()},
    "per tensor": {"quant": allnorm.Fp8PerTensor(torch.ones(1))},
    "with normed": {"return_normed": True},
    "with a sharded residual": {"sharded": True},
    "all_reduce_add_rms_norm of": {"quant": None},
    "without residual": {"residual": False},
}


def diverging_quantized(rank: int, world_size: int, change: dict[str, object]) -> tuple[str, str]:
    case = Case((3, 512), algorithm="two_shot", quant=allnorm.Fp8PerGroup(128))
    with allnorm.Communicator(device=device(), timeout=TIMEOUT) as c:
        case.check(c)
        mine = case.but(**change) if rank == 0 else case
        with pytest.raises(allnorm.PeerDivergedError) as caught:
            run_and_check(c, lambda: mine.run(c))
        assert_poisoned(c, case)
    with allnorm.Communicator(device=device()) as fresh:
        case.check(fresh)
    return caught.value.expected, caught.value.seen


@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("what", QUANTIZED_DIVERGENCES)
def test_diverging_quantization_is_named(pool: RankPool, what: str) -> None:
    results = pool.run(diverging_quantized, QUANTIZED_DIVERGENCES[what])
    assert what in results[0][0], "rank 0 says what it does itself"
    assert what in results[1][1], "rank 1 says what it saw"
    for text in (results[0][1], results[1][0]):
        assert what not in text
        assert "all_reduce_add_rms_norm_quant of 3x512 bfloat16 by two_shot" in text
        assert "groups of 128" in text


HASHED = {
    "eps": {"eps": 1e-5},
    "weight_bias": {"weight_bias": 1.0},
    "dtype of the weight": {"float32_weight": True},
    "format of the scales": {"quant": allnorm.Fp8PerGroup(128, scale_format="ue8m0")},
}


@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("what", HASHED)
def test_what_is_announced_as_a_hash_is_noticed(pool: RankPool, what: str) -> None:
    """The same bytes would cross the link: only the words of the call tell that results differ."""
    for _, seen in pool.run(diverging_quantized, HASHED[what]):
        assert what in seen
        assert "groups of 128" in seen


GROUPS = allnorm.Fp8PerGroup(128)
# What differs by its name in the message, what rank 0 changes, and the values of both ranks.
VALUES: dict[str, tuple[str, dict[str, object], str, str]] = {
    "eps": ("eps", {"eps": 1e-5}, "1e-05", "1e-06"),
    "eps in its last digit": ("eps", {"eps": 1.0000001e-6}, "1.0000001e-06", "1e-06"),
    "weight_bias": ("weight_bias", {"weight_bias": 1.0}, "1", "0"),
    "sign of weight_bias": ("weight_bias", {"weight_bias": -0.0}, "-0", "0"),
    "weight": ("dtype of the weight", {"float32_weight": True}, "float32", "bfloat16"),
    "scales": (
        "format of the scales",
        {"quant": allnorm.Fp8PerGroup(128, scale_format="ue8m0")},
        "ue8m0",
        "float32",
    ),
    "groups": (
        "quantization",
        {"quant": allnorm.Fp8PerGroup(64)},
        "groups of 64",
        "groups of 128",
    ),
    "per token": ("quantization", {"quant": allnorm.Fp8PerToken()}, "per token", "groups of 128"),
    "normed": ("normed", {"return_normed": True}, "wanted", "not wanted"),
    "numerics": ("numerics", {"numerics": "vllm"}, "vllm", "rounded"),
    "residual": ("residual", {"residual": False}, "none", "given"),
    "num_tokens": ("num_tokens", {"shape": (5, 512)}, "5", "3"),
    "hidden_size": ("hidden_size", {"shape": (3, 1024)}, "1024", "512"),
    "dtype": ("dtype", {"dtype": torch.float16}, "float16", "bfloat16"),
    "algorithm": ("algorithm", {"algorithm": "one_shot"}, "one_shot", "two_shot"),
    "sharded": (
        "algorithm",
        {"sharded": True},
        "two_shot with a sharded residual",
        "two_shot",
    ),
    "op": ("op", {"quant": None}, "all_reduce_add_rms_norm", "all_reduce_add_rms_norm_quant"),
}


def diverging_values(rank: int, world_size: int, what: str, repeats: int) -> str:
    _, change, _, _ = VALUES[what]
    case = Case((3, 512), algorithm="two_shot", quant=GROUPS)
    mine = case.but(**change) if rank == 0 else case
    with allnorm.Communicator(device=device(), timeout=TIMEOUT) as c:
        for _ in range(repeats):
            # All kinds have been seen before: what is prepared for others must not be taken for it.
            case.check(c)
            case.but(**change).check(c)
        with pytest.raises(allnorm.PeerDivergedError) as caught:
            run_and_check(c, lambda: mine.run(c))
        with pytest.raises(allnorm.PeerDivergedError) as again:
            c.check()
        assert str(again.value) == str(caught.value)
    return str(caught.value)


def assert_values_said(texts: list[str], what: str) -> None:
    name, _, first, second = VALUES[what]
    assert f"{name} is {first} on rank 0 and {second} on rank 1" in texts[0]
    assert f"{name} is {second} on rank 1 and {first} on rank 0" in texts[1]


@on(cpu=(2,))
@pytest.mark.parametrize("repeats", [0, 4])
@pytest.mark.parametrize("what", VALUES)
def test_diverging_values_are_said(pool: RankPool, what: str, repeats: int) -> None:
    assert_values_said(pool.run(diverging_values, what, repeats), what)


@on(gpu=(2,))
@pytest.mark.parametrize("what", VALUES)
def test_diverging_values_are_said_on_cuda(pool: RankPool, what: str) -> None:
    assert_values_said(pool.run(diverging_values, what, 0), what)


def fault_of(expected: _native.Call, seen: _native.Call | None = None, **more: int) -> Any:
    """A fault as a rank records it, which expects one tag and sees another."""
    seen = expected if seen is None else seen
    fields = {"rank": 0, "peer": 1, "expected_op": 7, "seen_op": 7, **more}
    for name, call in (("expected", expected), ("seen", seen)):
        # abi/tag.h: a norm in bfloat16, two_shot, rounded
        fields[f"{name}_shape"] = 2 << 28 | 1 << 26 | 1 << 22 | 2 << 20 | call.hidden_size
        fields[f"{name}_tokens"] = call.num_tokens
    return _native.Fault(status=_native.DIVERGED, **fields)


def announced(eps: float, num_tokens: int = 3, hidden_size: int = 512) -> Announcement:
    x = torch.zeros(num_tokens, hidden_size, dtype=torch.bfloat16)
    call = Call(op="all_reduce_add_rms_norm", source=x, residual=x, weight=x[0], eps=eps)
    prepared = PreparedCall(call, Plan("two_shot", "a test", 1))
    prepared.bind(call, {"out": x, "residual_out": x})
    return Announcement.of(prepared)


def test_accounts_of_calls_that_look_alike() -> None:
    call = _native.Call(num_tokens=3, hidden_size=512)
    fault = fault_of(call)
    others = [announced(1e-3, hidden_size=256), announced(1e-4, num_tokens=9)]
    both = [announced(1e-5), announced(1e-6), announced(1e-5)]
    assert faults.account_of(fault, [*others, both[0]])["eps"] == "1e-05"
    assert faults.account_of(fault, [*others, *both])["eps"] == "1e-05 or 1e-06"
    # launches of a call that is cut into chunks
    assert faults.account_of(fault, others)["eps"] == "0.0001"
    assert faults.account_of(fault, others[:1]) == {}


def test_a_divergence_without_the_peers_account() -> None:
    fault = fault_of(_native.Call(num_tokens=3, hidden_size=512))
    own = {"eps": "1e-05"}
    start = time.monotonic()
    assert faults.ask(None, "0", fault, own) == {}
    assert time.monotonic() - start < SLACK_SECONDS
    error = faults.fault_error(fault, TIMEOUT, own, {})
    assert "eps 1e-05" in error.expected
    assert "but with a different eps, weight_bias, dtype of the weight, format" in error.seen
    error = faults.fault_error(fault, TIMEOUT, own, {"eps": "1e-06"})
    assert "eps is 1e-05 on rank 0 and 1e-06 on rank 1" in str(error)
    assert "different" not in error.seen


def test_common_eps_and_biases_have_different_hashes() -> None:
    """With the formula of csrc/abi/tag.h: none of the pairs in use may be taken for another."""
    values = (0.0, 1e-8, 1e-7, 1e-6, 1.1e-6, 1e-5, 1.5e-5, 1e-4, 1e-3, 1e-12, 2e-5, 5e-6, 1.0)
    hashes = set()
    for eps in values:
        for bias in (0.0, 1.0, -1.0, -0.0, 0.5):
            pair = int.from_bytes(struct.pack("<ff", eps, bias), "little")
            hashes.add(((pair ^ pair >> 29) * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 43)
    assert len(hashes) == len(values) * 5


def diverging_gather(rank: int, world_size: int) -> str:
    case = Case((4, 512), sharded=True)
    with allnorm.Communicator(device=device(), timeout=TIMEOUT) as c:
        case.check(c)
        shard = case.own_rows(c, case.x(rank)).clone()
        with pytest.raises(allnorm.PeerDivergedError) as caught:
            run_and_check(c, lambda: c.all_gather_rows(shard, 4) if rank == 0 else case.run(c))
    return f"{caught.value.expected} / {caught.value.seen}"


QUANTIZED = {"quant": allnorm.Fp8PerGroup(128)}
UNFUSED_DIVERGENCES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "4x512 bfloat16": ({}, {"shape": (4, 512)}),
    "6x256 bfloat16": ({}, {"shape": (6, 256)}),  # as many bytes
    "3x512 float16": ({}, {"dtype": torch.float16}),  # as many bytes
    "numerics vllm": ({}, {"numerics": "vllm"}),
    "without residual": ({}, {"residual": False}),
    "with a sharded residual": ({}, {"sharded": True}),
    "residual, numerics rounded, without residual": ({"sharded": True}, {"residual": False}),
    "eps 0.001": ({}, {"eps": 1e-3}),
    "eps 1.0000001e-06": ({}, {"eps": 1.0000001e-6}),
    "dtype of the weight float32": ({}, {"float32_weight": True}),
    "weight_bias 1": ({}, {"weight_bias": 1.0}),
    "all_reduce_add_rms_norm_quant of 3x512 bfloat16": ({}, QUANTIZED),
    "groups of 64": (QUANTIZED, {"quant": allnorm.Fp8PerGroup(64)}),
    "per token, without normed": (QUANTIZED, {"quant": allnorm.Fp8PerToken()}),
    "format of the scales ue8m0": (
        QUANTIZED,
        {"quant": allnorm.Fp8PerGroup(128, scale_format="ue8m0")},
    ),
    "with normed": (QUANTIZED, {"return_normed": True}),
}


def diverging_unfused(
    rank: int, world_size: int, common: dict[str, object], change: dict[str, object]
) -> list[tuple[str, str, int, int]]:
    """The last rank does another call; all are told, and go on with the same communicator."""
    case = Case((3, 512), algorithm="unfused").but(**common)
    mine = case.but(**change) if rank == world_size - 1 else case
    told = []
    with allnorm.Communicator(device=device(), timeout=TIMEOUT) as c:
        for call in range(3):
            case.but(call=call).check(c)
            with pytest.raises(allnorm.PeerDivergedError) as caught:
                mine.but(call=call).run(c)
            error = caught.value
            told.append((error.expected, error.seen, error.rank, error.peer))
            assert error.expected in str(error)
            assert error.seen in str(error)
            assert c.check() is None, "nothing was lost"
            case.but(algorithm="auto").check(c)
    return told


@on(cpu=(2, 3))
@pytest.mark.parametrize("what", UNFUSED_DIVERGENCES)
def test_diverging_unfused_calls_are_named_on_every_rank(pool: RankPool, what: str) -> None:
    last = pool.world_size - 1
    results = pool.run(diverging_unfused, *UNFUSED_DIVERGENCES[what])
    for rank, told in enumerate(results):
        for expected, seen, teller, peer in told:
            assert teller == rank
            assert peer == (0 if rank == last else last)
            other, own = (expected, seen) if rank == last else (seen, expected)
            assert what in other
            assert what not in own


def diverging_unfused_op(rank: int, world_size: int) -> list[str]:
    case = Case((4, 512), sharded=True, algorithm="unfused")
    seen = []
    with allnorm.Communicator(device=device(), timeout=TIMEOUT) as c:
        shard = case.own_rows(c, case.x(rank)).clone()
        calls: dict[str, Callable[[], object]] = {
            "gather": lambda: c.all_gather_rows(shard, 4, algorithm="unfused"),
            "fewer": lambda: c.all_gather_rows(
                case.but(shape=(2, 512)).own_rows(c, case.x(rank)[:2]), 2, algorithm="unfused"
            ),
            "reduce": lambda: c.all_reduce(case.x(rank), algorithm="unfused"),
            "none": lambda: c.all_reduce(case.x(rank)[:0], algorithm="unfused"),
            "norm": lambda: case.run(c),
        }
        for first, second in itertools.permutations(calls, 2):
            with pytest.raises(allnorm.PeerDivergedError) as caught:
                calls[second if rank else first]()
            seen.append(caught.value.seen if rank else caught.value.expected)
        for call in calls.values():
            call()
    return seen


@on(cpu=(2,))
def test_another_unfused_operation(pool: RankPool) -> None:
    first, second = pool.run(diverging_unfused_op)
    assert first == second, "what one does is what the other sees"
    assert set(first) == {
        "all_gather_rows of 4x512 bfloat16",
        "all_gather_rows of 2x512 bfloat16",
        "all_reduce of 4x512 bfloat16 by unfused",
        "all_reduce of 0x512 bfloat16 by unfused",
        "all_reduce_add_rms_norm of 4x512 bfloat16 by unfused with a sharded residual, numerics "
        "rounded, with residual, eps 1e-06, weight_bias 0, dtype of the weight bfloat16",
    }


@on(cpu=(2,), gpu=(2,))
def test_gathering_rows_is_named(pool: RankPool) -> None:
    for text in pool.run(diverging_gather):
        assert "all_gather_rows of 4x512 bfloat16" in text
        assert "by two_shot with a sharded residual" in text


def test_a_call_is_described_as_the_ranks_announce_it() -> None:
    """The packing of CallShape in csrc/protocol/call_tag.h, field by field."""

    def describe(op: int, algorithm: int = 0, bits: int = 0) -> str:
        shape = 4096 | 2 << 20 | algorithm << 22 | bits | op << 28
        return announcement.describe(announcement.tag_fields(shape, 7))

    assert describe(0) == "all_reduce of 7x4096 bfloat16 by one_shot"
    assert describe(1, 2) == "all_gather_rows of 7x4096 bfloat16"
    plain = "all_reduce_add_rms_norm of 7x4096 bfloat16 by two_shot, numerics vllm, with residual"
    assert describe(2, 1, 3 << 24 | 1 << 26) == plain
    for i, group_size in enumerate((16, 32, 64, 128, 256, 512)):
        text = describe(3 + i, 2, 1 << 27)
        assert text.startswith("all_reduce_add_rms_norm_quant of 7x4096")
        assert text.endswith(f"groups of {group_size}, with normed")
        assert "two_shot with a sharded residual" in text
    assert describe(9).endswith("without residual, per token, without normed")
    assert describe(10).endswith("per tensor, without normed")
    assert describe(15, 3).startswith("op 15 of 7x4096 bfloat16 by unknown")


def diverging_op(rank: int, world_size: int) -> str:
    case = Case((3, 512))
    with allnorm.Communicator(device=device(), timeout=TIMEOUT) as c:
        case.check(c)
        plain, fused = c.all_reduce, case.but(algorithm="one_shot").run
        with pytest.raises(allnorm.PeerTimeoutError) as caught:
            run_and_check(
                c,
                lambda: plain(case.x(rank), algorithm="one_shot") if rank == 0 else fused(c),
            )
    with allnorm.Communicator(device=device()) as fresh:
        case.check(fresh)
    return f"{caught.value.expected} / {caught.value.seen}"


@on(cpu=(2, 3), gpu=(2, 4))
def test_another_operation(pool: RankPool) -> None:
    texts = pool.run(diverging_op)
    assert all("all_reduce" in text for text in texts)


@on(cpu=(2,), gpu=(2,))
def test_one_call_too_few(rank: int, world_size: int) -> None:
    """A rank that makes a call too few is waited for, and no later call is taken for it."""
    case = Case((3, 512), algorithm="one_shot")
    with allnorm.Communicator(device=device(), timeout=TIMEOUT) as c:
        case.check(c)
        if rank == 0:
            error, _, _, _ = faulty_call(c, case)
            assert error.peer == 1
    dist.barrier()
    with allnorm.Communicator(device=device()) as fresh:
        case.check(fresh)


def never_came(rank: int, world_size: int) -> str | None:
    case = Case((3, 512))
    with allnorm.Communicator(device=device(), timeout=TIMEOUT / 3) as c:
        if rank == 0:
            error, _, _, _ = faulty_call(c, case)
        dist.barrier()
    return error.seen if rank == 0 else None


@on(cpu=(2,), gpu=(2,))
def test_a_peer_that_never_made_a_call_has_shown_nothing(pool: RankPool) -> None:
    assert pool.run(never_came) == ["nothing", None]


@on(cpu=(2, 3), gpu=(2,))
def test_a_late_peer_is_waited_for(rank: int, world_size: int) -> None:
    case = Case((3, 512))
    with allnorm.Communicator(device=device(), timeout=datetime.timedelta(seconds=30)) as c:
        for call in range(3):
            if rank == call % world_size:
                time.sleep(0.7)  # long after every spin has given way to sleep
            case.but(call=call).check(c)


@pytest.mark.parametrize("begun", [False, True])
def test_a_timeout_says_how_far_the_peer_is(begun: bool) -> None:
    """And that on a GPU it may be that its kernel has found no room."""
    fault = _native.Fault()
    fault.status, fault.rank, fault.peer = _native.TIMEOUT, 0, 1
    fault.expected_op, fault.seen_op = 7, 7 if begun else 6
    fault.expected_tokens = fault.seen_tokens = 4
    fault.expected_shape = fault.seen_shape = 2 << 20 | 64
    text = str(faults.fault_error(fault, TIMEOUT, {}, {}))
    assert ("Rank 1 has begun this operation" in text) == begun
    assert ("Rank 1 has not begun this operation" in text) != begun
    assert "room" in text
    fault.status = _native.DIVERGED
    assert "room" not in str(faults.fault_error(fault, TIMEOUT, {}, {}))


def test_errors_survive_pickling() -> None:
    import pickle

    error = allnorm.PeerTimeoutError("text", rank=1, peer=2, op=3, expected="a", seen="b")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is allnorm.PeerTimeoutError
    assert str(copy) == "text"
    assert (copy.rank, copy.peer, copy.op, copy.expected, copy.seen) == (1, 2, 3, "a", "b")
