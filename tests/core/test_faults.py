"""Tests that errors name missing, dead and diverging peers, after bounded waits.

`verify/test_verify_faults.py` runs the table of faults that `allnorm verify` injects.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_helpers import Case, device, on, run_and_check, synchronize, used_communicator

import allnorm
from allnorm import quant
from allnorm.core import _native, announcement, faults, workspace
from allnorm.core.announcement import Announcement
from allnorm.core.call import Call
from allnorm.core.prepared_call import PreparedCall
from allnorm.policy import Plan
from allnorm.testing import RankPool, gather

SECONDS = 1.5
TIMEOUT = datetime.timedelta(seconds=SECONDS)
SLACK_SECONDS = 10.0  # allowed delay on a busy machine, in addition to the timeout
PATIENT = datetime.timedelta(seconds=60)  # for calls that must not time out on a busy machine


def faulty_call(
    c: allnorm.Communicator, case: Case
) -> tuple[allnorm.PeerTimeoutError, float, torch.Tensor, torch.Tensor]:
    """Runs a call that must fail; returns the error, the time in seconds and both results."""
    out, residual_out = (torch.zeros(case.shape, dtype=case.dtype, device=c.device) for _ in "ab")
    synchronize()
    start = time.monotonic()
    with pytest.raises(allnorm.PeerTimeoutError) as caught:
        run_and_check(c, lambda: case.run(c, out=out, residual_out=residual_out))
    seconds = time.monotonic() - start
    synchronize()
    return caught.value, seconds, out, residual_out


def assert_poisoned(c: allnorm.Communicator, case: Case) -> None:
    """Checks that check() and later calls raise without waiting; closes the communicator."""
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
    # A busy machine delays some attempts, but a call that waits would delay all of them.
    assert min(seconds) < c.timeout.total_seconds() / 2
    c.close()


@pytest.mark.sampled(2)
@on(cpu=(2, 3), gpu=(2, 4))
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "unfused"])
def test_a_peer_that_never_comes(rank: int, world_size: int, algorithm: str) -> None:
    case, absent = Case((5, 512), algorithm=algorithm), world_size - 1
    c = used_communicator(
        TIMEOUT.total_seconds(), *(case.but(call=call).check for call in range(3))
    )
    named = absent
    if rank != absent:
        error, seconds, out, residual_out = faulty_call(c, case)
        named = error.peer
        assert torch.isnan(out).all()
        assert torch.isnan(residual_out).all()
        assert type(error) is allnorm.PeerTimeoutError
        assert error.rank == rank
        assert error.expected != error.seen
        assert all(text in str(error) for text in (f"rank {rank}", f"rank {named}", "5x512"))
        assert 0.9 * TIMEOUT.total_seconds() <= seconds < TIMEOUT.total_seconds() + SLACK_SECONDS
        assert_poisoned(c, case)
    survivors = gather(named)[:absent]
    # A survivor may name another survivor that it waited for, but never itself.
    assert absent in survivors
    assert all(peer != survivor for survivor, peer in enumerate(survivors))


@pytest.mark.sampled(5)
@on(cpu=(2, 3), gpu=(2,))
@pytest.mark.parametrize(
    ("algorithm", "sharded"),
    [
        *(("one_shot", False), ("two_shot", False), ("two_shot", True)),
        *(("unfused", False), ("unfused", True)),
    ],
)
def test_quantized_results_of_a_failed_call_are_nan(
    rank: int, world_size: int, algorithm: str, sharded: bool
) -> None:
    """Checks that the scales are NaN, or the rows if the caller passes the scale."""
    specs = (
        allnorm.Fp8PerGroup(128, "column_major_tma"),
        allnorm.Fp8PerGroup(128, "column_major_tma", "ue8m0_packed"),
        allnorm.Fp8PerToken(),
        allnorm.Fp8PerTensor(torch.ones(1, device=device())),
        allnorm.MxFp8(),
        allnorm.NvFp4(torch.ones(1, device=device())),
    )
    for spec in specs:
        case = Case((5, 512), quant=spec, sharded=sharded, algorithm=algorithm, return_normed=True)
        c = used_communicator(SECONDS / 3, case.check)
        if rank == world_size - 1:
            dist.barrier()
            continue
        a = case.call_arguments(c)
        memory = {
            "quantized_out": torch.ones(
                quant.quantized_shape(spec, case.shape), device=c.device
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
        assert "all_reduce_add_rms_norm_quant of 5x512" in caught.value.expected
        scale = memory.get("scale_out")
        if scale is None:
            assert torch.isnan(memory["quantized_out"].float()).all()
            assert a["quant"].scale == 1.0, "the caller's scale must not be overwritten"
        elif scale.dtype == torch.int32:
            assert (scale == -1).all(), "must hold four exponents that mean NaN"
        elif isinstance(spec, allnorm.NvFp4 | allnorm.Fp8PerGroup) and quant.is_swizzled(spec):
            rows = quant.swizzled_rows(scale, len(scale) // 512)[:5, : 512 // 32]
            code = 0xFF if scale.dtype == torch.uint8 else 0x7F
            assert (rows == code).all(), "must hold exponents that mean NaN"
            if memory["quantized_out"].dtype == torch.uint8:
                assert (memory["quantized_out"] == 0).all(), "e2m1 has no NaN"
        else:
            assert torch.isnan(scale).all()
        assert torch.isnan(memory["normed_out"]).all()
        assert torch.isnan(memory["residual_out"]).all()
        assert_poisoned(c, case)
        dist.barrier()


def killed_while_opening(rank: int, world_size: int) -> None:
    """Kills rank 0 after all ranks have opened its shared memory, before its name is removed."""
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
    assert set(Path("/dev/shm").glob("allnorm-*")) <= before, "rank 1 must remove it"
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    path = Path(f"/dev/shm/allnorm-{int(gone.stdout)}-stays")
    path.touch()
    workspace._remove_leftovers()
    assert path.exists(), "a new file must stay"
    os.utime(path, (0, 0))
    mine = Path(f"/dev/shm/allnorm-{os.getpid()}-stays")
    mine.touch()
    os.utime(mine, (0, 0))
    try:
        workspace._remove_leftovers()
        assert not path.exists()
        assert mine.exists(), "the process of this file is alive"
    finally:
        mine.unlink()


GROUPS = allnorm.Fp8PerGroup(128)
UE8M0 = allnorm.Fp8PerGroup(128, scale_format="ue8m0")
# The field's name in the message, rank 0's change, and the values on ranks 0 and 1.
VALUES: dict[str, tuple[str, dict[str, object], str, str]] = {
    "eps": ("eps", {"eps": 1e-5}, "1e-05", "1e-06"),
    "eps in its last digit": ("eps", {"eps": 1.0000001e-6}, "1.0000001e-06", "1e-06"),
    "weight_bias": ("weight_bias", {"weight_bias": 1.0}, "1", "0"),
    "sign of weight_bias": ("weight_bias", {"weight_bias": -0.0}, "-0", "0"),
    "weight": ("dtype of the weight", {"float32_weight": True}, "float32", "bfloat16"),
    "scales": ("format of the scales", {"quant": UE8M0}, "ue8m0", "float32"),
    "groups": (
        *("quantization", {"quant": allnorm.Fp8PerGroup(64)}),
        *("groups of 64", "groups of 128"),
    ),
    "per token": ("quantization", {"quant": allnorm.Fp8PerToken()}, "per token", "groups of 128"),
    "normed": ("normed", {"return_normed": True}, "wanted", "not wanted"),
    "numerics": ("numerics", {"numerics": "vllm"}, "vllm", "rounded"),
    "residual": ("residual", {"residual": False}, "none", "given"),
    "num_tokens": ("num_tokens", {"shape": (5, 512)}, "5", "3"),
    "no rows": ("num_tokens", {"shape": (0, 512)}, "0", "3"),
    "hidden_size": ("hidden_size", {"shape": (3, 1024)}, "1024", "512"),
    "dtype": ("dtype", {"dtype": torch.float16}, "float16", "bfloat16"),
    "algorithm": ("algorithm", {"algorithm": "one_shot"}, "one_shot", "two_shot"),
    "sharded": ("algorithm", {"sharded": True}, "two_shot with a sharded residual", "two_shot"),
    "op": ("op", {"quant": None}, "all_reduce_add_rms_norm", "all_reduce_add_rms_norm_quant"),
}
# Values that CallTags contain only as a hash.
HASHED = frozenset(list(VALUES)[:6])


@pytest.mark.sampled(2)
@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("what", VALUES)
def test_errors_name_the_values_that_differ(rank: int, world_size: int, what: str) -> None:
    name, change, first, second = VALUES[what]
    case = Case((3, 512), algorithm="two_shot", quant=GROUPS)
    mine = case.but(**change) if rank == 0 else case
    own, other = (first, second) if rank == 0 else (second, first)
    for repeats in (0, 4):
        with allnorm.Communicator(device=device(), timeout=PATIENT) as c:
            for _ in range(repeats):  # both calls are prepared: neither may be taken for the other
                case.check(c)
                case.but(**change).check(c)
            with pytest.raises(allnorm.PeerDivergedError) as caught:
                run_and_check(c, lambda c=c: mine.run(c))
            words = f"{name} is {own} on rank {rank} and {other} on rank {1 - rank}"
            if repeats and c.device.type == "cuda" and what in HASHED:
                # The fault may be of either prepared call, and each rank reports both values.
                words = "but with a different eps, weight_bias, dtype of the weight or of the"
            assert words in str(caught.value), str(caught.value)
            with pytest.raises(allnorm.PeerDivergedError) as again:
                c.check()
            assert str(again.value) == str(caught.value)
            assert_poisoned(c, case)
    with allnorm.Communicator(device=device()) as fresh:
        case.check(fresh)


def fault_of(call: _native.Call) -> _native.Fault:
    """Returns a fault as a rank records it when both ranks have the same call tag."""
    # abi/tag.h: a norm in bfloat16, two_shot, rounded
    shape = 2 << 28 | 1 << 26 | 1 << 22 | 2 << 20 | call.hidden_size
    tag = {"op": 7, "shape": shape, "tokens": call.num_tokens}
    fields = {f"{side}_{key}": value for side in ("expected", "seen") for key, value in tag.items()}
    return _native.Fault(status=_native.DIVERGED, rank=0, peer=1, **fields)


def announced(eps: float, num_tokens: int = 3, hidden_size: int = 512) -> Announcement:
    x = torch.zeros(num_tokens, hidden_size, dtype=torch.bfloat16)
    call = Call(op="all_reduce_add_rms_norm", source=x, residual=x, weight=x[0], eps=eps)
    prepared = PreparedCall(call, Plan("two_shot", "a test", 1))
    prepared.bind(call, {"out": x, "residual_out": x})
    return Announcement.of(prepared)


def test_values_of_calls_with_equal_tags() -> None:
    fault = fault_of(_native.Call(num_tokens=3, hidden_size=512))
    others = [announced(1e-3, hidden_size=256), announced(1e-4, num_tokens=9)]
    both = [announced(1e-5), announced(1e-6), announced(1e-5)]
    assert faults.account_of(fault, [*others, both[0]])["eps"] == "1e-05"
    assert faults.account_of(fault, [*others, *both])["eps"] == "1e-05 or 1e-06"
    # A chunked call makes launches with fewer rows than the call has.
    assert faults.account_of(fault, others)["eps"] == "0.0001"
    assert faults.account_of(fault, others[:1]) == {}


def test_a_divergence_without_the_values_of_the_peer() -> None:
    fault = fault_of(_native.Call(num_tokens=3, hidden_size=512))
    own = {"eps": "1e-05"}
    start = time.monotonic()
    assert faults.ask(None, "0", fault, own) == {}
    assert time.monotonic() - start < SLACK_SECONDS
    error = faults.fault_error(fault, TIMEOUT, own, {})
    assert "eps 1e-05" in error.expected
    assert "but with a different eps, weight_bias, dtype of the weight or of the" in error.seen
    error = faults.fault_error(fault, TIMEOUT, own, {"eps": "1e-06"})
    assert "eps is 1e-05 on rank 0 and 1e-06 on rank 1" in str(error)
    assert "different" not in error.seen


def test_common_eps_and_biases_have_different_hashes() -> None:
    """Computes the hash in csrc/abi/tag.h for common pairs, which must not collide."""
    values = (0.0, 1e-8, 1e-7, 1e-6, 1.1e-6, 1e-5, 1.5e-5, 1e-4, 1e-3, 1e-12, 2e-5, 5e-6, 1.0)
    hashes = set()
    for eps in values:
        for bias in (0.0, 1.0, -1.0, -0.0, 0.5):
            pair = int.from_bytes(struct.pack("<ff", eps, bias), "little")
            hashes.add(((pair ^ pair >> 29) * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 43)
    assert len(hashes) == len(values) * 5


# Changes on all ranks, then on the last rank only. `test_compared_fields.py` changes every field.
UNFUSED_DIVERGENCES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "4x512 bfloat16": ({}, {"shape": (4, 512)}),
    "6x256 bfloat16": ({}, {"shape": (6, 256)}),  # the same size in bytes
    "with a sharded residual": ({}, {"sharded": True}),
    "residual, numerics rounded, without residual": ({"sharded": True}, {"residual": False}),
    "eps 1.0000001e-06": ({}, {"eps": 1.0000001e-6}),
    "all_reduce_add_rms_norm_quant of 3x512 bfloat16": ({}, {"quant": GROUPS}),
    "per token, without normed": ({"quant": GROUPS}, {"quant": allnorm.Fp8PerToken()}),
    "format of the scales ue8m0": ({"quant": GROUPS}, {"quant": UE8M0}),
}


@pytest.mark.sampled(2)
@on(cpu=(2, 3))
@pytest.mark.parametrize("what", UNFUSED_DIVERGENCES)
def test_a_diverging_unfused_call_fails_on_every_rank(
    rank: int, world_size: int, what: str
) -> None:
    """Checks the errors when the last rank's call differs, and that the next call works."""
    common, change = UNFUSED_DIVERGENCES[what]
    case, last = Case((3, 512), algorithm="unfused").but(**common), world_size - 1
    mine = case.but(**change) if rank == last else case
    with allnorm.Communicator(device=device(), timeout=PATIENT) as c:
        for call in range(3):
            case.but(call=call).check(c)
            with pytest.raises(allnorm.PeerDivergedError) as caught:
                mine.but(call=call).run(c)
            error = caught.value
            assert (error.rank, error.peer) == (rank, 0 if rank == last else last)
            other, own = (error.seen, error.expected)[:: -1 if rank == last else 1]
            assert what in other
            assert what not in own
            assert error.expected in str(error)
            assert error.seen in str(error)
            assert c.check() is None
            case.but(algorithm="auto").check(c)


@on(cpu=(2,))
def test_a_different_unfused_operation(rank: int, world_size: int) -> None:
    case = Case((4, 512), sharded=True, algorithm="unfused")
    with allnorm.Communicator(device=device(), timeout=PATIENT) as c:
        shard = case.own_rows(c, case.x(rank)).clone()
        two_rows = case.but(shape=(2, 512)).own_rows(c, case.x(rank)[:2])
        calls: dict[str, Callable[[], object]] = {
            "all_gather_rows of 4x512 bfloat16": lambda: c.all_gather_rows(
                shard, 4, algorithm="unfused"
            ),
            "all_gather_rows of 2x512 bfloat16": lambda: c.all_gather_rows(
                two_rows, 2, algorithm="unfused"
            ),
            "all_reduce of 4x512 bfloat16 by unfused": lambda: c.all_reduce(
                case.x(rank), algorithm="unfused"
            ),
            "all_reduce of 0x512 bfloat16 by unfused": lambda: c.all_reduce(
                case.x(rank)[:0], algorithm="unfused"
            ),
            "all_reduce_add_rms_norm of 4x512 bfloat16 by unfused with a sharded residual, "
            "numerics rounded, with residual, eps 1e-06, weight_bias 0, dtype of the weight "
            "bfloat16": lambda: case.run(c),
        }
        for both in itertools.permutations(calls, 2):
            with pytest.raises(allnorm.PeerDivergedError) as caught:
                calls[both[rank]]()
            assert (caught.value.expected, caught.value.seen) == (both[rank], both[1 - rank])
        for call in calls.values():
            call()


@pytest.mark.sampled(2)
@on(cpu=(2, 3), gpu=(2,))
def test_unfused_calls_between_machines(rank: int, world_size: int) -> None:
    """Checks that ranks on different machines announce their calls through the store."""
    case = Case((5, 512), algorithm="unfused")
    with mock.patch("allnorm.core.workspace._host_identity", return_value=f"host {rank}"):
        c = used_communicator(
            TIMEOUT.total_seconds(), *(case.but(call=call).check for call in range(3))
        )
    other = case.but(eps=1e-5 if rank == 0 else 1e-6)
    with pytest.raises(allnorm.PeerDivergedError):
        other.run(c)
    case.check(c)
    dist.barrier()
    if rank == 1:
        dist.barrier()
        c.close()
        return
    with pytest.raises(allnorm.PeerTimeoutError) as caught:
        case.run(c)
    assert type(caught.value) is allnorm.PeerTimeoutError
    assert caught.value.peer == 1 or rank != 0
    assert "all_reduce_add_rms_norm of 5x512" in caught.value.expected
    assert caught.value.expected in str(caught.value)
    with pytest.raises(allnorm.PeerTimeoutError):
        c.check()
    dist.barrier()
    c.close()


def test_call_tags_are_described_in_errors() -> None:
    """Packs a CallShape of csrc/protocol/call_tag.h field by field."""

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


@on(cpu=(2,), gpu=(2,))
def test_nothing_is_seen_of_a_peer_that_never_called(rank: int, world_size: int) -> None:
    with allnorm.Communicator(device=device(), timeout=TIMEOUT / 3) as c:
        if rank == 0:
            assert faulty_call(c, Case((3, 512)))[0].seen == "nothing"
        dist.barrier()


@on(cpu=(2, 3), gpu=(2,))
def test_a_late_peer_is_waited_for(rank: int, world_size: int) -> None:
    case = Case((3, 512))
    with allnorm.Communicator(device=device(), timeout=PATIENT) as c:
        for call in range(3):
            if rank == call % world_size:
                time.sleep(0.7)  # by then, waiting ranks no longer spin but sleep
            case.but(call=call).check(c)


@pytest.mark.parametrize("begun", [False, True])
def test_a_timeout_tells_whether_the_peer_has_begun(begun: bool) -> None:
    """Also checks that timeout errors, unlike divergence errors, mention the GPU."""
    fault = _native.Fault()
    fault.status, fault.rank, fault.peer = _native.TIMEOUT, 0, 1
    fault.expected_op, fault.seen_op = 7, 7 if begun else 6
    fault.expected_tokens = fault.seen_tokens = 4
    fault.expected_shape = fault.seen_shape = 2 << 20 | 64
    text = str(faults.fault_error(fault, TIMEOUT, {}, {}))
    assert ("Rank 1 has started this operation" in text) == begun
    assert ("Rank 1 has not started this operation" in text) != begun
    assert "GPU" in text
    fault.status = _native.DIVERGED
    assert "GPU" not in str(faults.fault_error(fault, TIMEOUT, {}, {}))


@pytest.mark.parametrize(
    "kind", [allnorm.PeerTimeoutError, allnorm.PeerDiedError, allnorm.PeerLeftError]
)
def test_errors_can_be_pickled(kind: type[allnorm.PeerTimeoutError]) -> None:
    error = kind("text", rank=1, peer=2, op=3, expected="a", seen="b")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert isinstance(copy, allnorm.PeerTimeoutError)
    assert (str(copy), vars(copy)) == ("text", vars(error))
