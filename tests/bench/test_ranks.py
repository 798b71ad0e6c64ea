"""Tests the benchmark's code in ranks: all arms are right, and wrong results are detected."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

import allnorm
from allnorm import reference
from allnorm.bench import arms, bounds, clock, sharded_norm, streams
from allnorm.bench import run as ranks_bench
from allnorm.bench.case import Case, Outcome, make_case
from allnorm.bench.clock import Gemm
from allnorm.bench.modes import (
    YARDSTICKS,
    Mode,
    Shape,
    arm_names,
    known_arms,
    yardstick_names,
)
from allnorm.testing import run_ranks

CPU = torch.device("cpu")
ODD = Shape(5, 384, 1e-5, weight_bias=1.0)


def job(*modes: Mode, **changes: Any) -> ranks_bench.Job:
    settings: dict[str, Any] = {
        "shapes": (ODD, Shape(1, 256)),
        "dtype": "bfloat16",
        "numerics": "rounded",
        "arms": known_arms("cpu", modes),
    }
    return ranks_bench.Job(**{**settings, **changes}, modes=modes, device="cpu", seconds=0.01)


def run(what: ranks_bench.Job, world_size: int = 2) -> Any:
    """Returns the records of each rank."""
    return run_ranks(ranks_bench.run, world_size, args=(what,))


def odd_case(rank: int = 0) -> Case:
    return make_case(ODD, "bfloat16", "rounded", CPU, rank=rank, world_size=2, seed=0)


def idle(name: str, **changes: Any) -> arms.Arm:
    """Returns an arm that does nothing, with the given changes."""
    arm = arms.Arm(name, lambda index: None, lambda result: result)
    return dataclasses.replace(arm, **changes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize(
    ("world_size", "quants", "return_normed"),
    [
        (2, ("", "per_group:128", "per_token", "per_tensor"), False),
        (2, ("per_group:64:column_major", "per_group:16:column_major_tma:ue8m0"), True),
        (3, ("per_group:128:column_major_tma:ue8m0_packed", "per_token"), True),
    ],
)
def test_every_arm_is_right(
    world_size: int, quants: tuple[str, ...], return_normed: bool, sharded: bool
) -> None:
    modes = [Mode(quant, sharded, bool(quant) and return_normed) for quant in quants]
    ranks = run(job(*modes), world_size)
    plain = [[(r["shape"], r["mode"], r["arm"], r["reason"]) for r in records] for records in ranks]
    assert all(other == plain[0] for other in plain)
    expected = [
        (shape, number, arm)
        for shape in (0, 1)
        for number, mode in enumerate(modes)
        for arm in arm_names("cpu", mode)
    ]
    assert [row[:3] for row in plain[0]] == expected
    for record in ranks[0]:
        assert record["error"] == ""
        cannot = (sharded and record["arm"] == "allnorm:one_shot") or (
            "packed" in quants[0] and sharded and record["mode"] == 0 and "gloo" in record["arm"]
        )
        assert bool(record["reason"]) == cannot, record
        assert math.isnan(record["p50_us"]) == cannot


@pytest.mark.sampled(2)
@pytest.mark.parametrize("numerics", ["rounded", "vllm"])
def test_every_arm_is_right_with_post_norms_and_experts(numerics: str) -> None:
    """Runs every arm and yardstick, including calls in two launches."""
    changes = ({"post_norm": True}, {"experts": 3}, {"experts": 1})
    modes = [
        Mode(quant, sharded, **change)
        for change in changes
        for quant, sharded in (("", False), ("per_token", False), ("", True))
    ]
    what = job(*modes, shapes=(ODD, Shape(3, 640)), products=(0, 256), numerics=numerics)
    records = run(what)[0]
    for record in records:
        assert record["error"] == "", (record, modes[record["mode"]])
        one_shot = modes[record["mode"]].residual_sharded and record["arm"] == "allnorm:one_shot"
        assert bool(record["reason"]) == one_shot, record
    ran = {(record["mode"], record["arm"]) for record in records}
    for number, mode in enumerate(modes):
        assert {arm for at, arm in ran if at == number} == {*arm_names("cpu", mode), *YARDSTICKS}
    assert {"allnorm+norm", "sum+allnorm", "gloo+local"} <= {arm for _, arm in ran}


def test_every_arm_is_right_with_other_residuals_and_sharded_norms() -> None:
    modes = [
        *(Mode(quant, float32_residual=True) for quant in ("", "per_group:128")),
        *(Mode(quant, True, own_rows=True) for quant in ("", "per_group:64:column_major")),
        Mode(slices=2),
        Mode(streams=4),
        Mode(streams=3, next_input=True),
    ]
    records = run(job(*modes, shapes=(ODD,), products=(128,)))[0]
    for number, mode in enumerate(modes):
        ran = [record["arm"] for record in records if record["mode"] == number]
        assert ran == [*arm_names("cpu", mode), *yardstick_names(mode)]
    for record in records:
        assert record["error"] == "", (record, modes[record["mode"]])
        one_shot = modes[record["mode"]].residual_sharded and record["arm"] == "allnorm:one_shot"
        assert bool(record["reason"]) == one_shot, record


@pytest.mark.parametrize("numerics", ["rounded", "transformers"])
def test_one_wrong_bit_of_a_slice_is_found(numerics: str) -> None:
    mode = Mode(slices=2)
    plain = make_case(ODD, "float16", numerics, CPU, rank=1, world_size=2, seed=0)
    case = plain.of(mode)
    wanted = sharded_norm.expected(case, mode, 0)
    assert [tuple(x.shape) for x in wanted] == [(5, 384)] * 2
    assert sharded_norm.describe_error(wanted, wanted, exact=True) == ""
    other = [x.clone() for x in wanted]
    other[1].view(torch.int16)[4, 383] ^= 1
    assert sharded_norm.describe_error(other, wanted, exact=False) == ""
    error = sharded_norm.describe_error(other, wanted, exact=True)
    assert error == "slice 1 differs from the reference"
    other[1][4, 383] *= 1.01
    assert sharded_norm.describe_error(other, wanted, exact=False).startswith("slice 1: 1 of 1920")
    assert sharded_norm.describe_error(wanted[:1], wanted, exact=True)
    assert case.xs[0].shape == (5, 768)
    assert plain.of(mode) is case


def test_one_wrong_bit_of_a_stream_is_found() -> None:
    mode = Mode(streams=4)
    case = odd_case().of(mode)
    inputs = streams.stream_inputs(case, mode, 0)
    right = reference.all_reduce_hyper_connection(case.batches[0].xs, *inputs)
    assert streams.describe_error(case, mode, right, 0, exact=True) == ""
    near = streams.mix(reference.all_reduce(case.batches[0].xs), *inputs)
    assert streams.describe_error(case, mode, near, 0, exact=False) == ""
    right.view(torch.int16)[4, 3, 100] ^= 1
    assert "differ" in streams.describe_error(case, mode, right, 0, exact=True)
    assert streams.describe_error(case, mode, right, 0, exact=False) == ""
    right[4, 3, 100] += 1
    error = streams.describe_error(case, mode, right, 0, exact=False)
    assert error.startswith("streams: 1 of ")


def test_one_wrong_bit_of_the_next_input_is_found() -> None:
    mode = Mode(streams=4, next_input=True)
    case = odd_case().of(mode)
    mixed = reference.all_reduce_hyper_connection(
        case.batches[0].xs, *streams.stream_inputs(case, mode, 0)
    )
    given = streams.input_arguments(case, mode, 0)
    result = mixed, *allnorm.hyper_connection_input(mixed, **given)
    assert streams.describe_input_error(case, mode, result, 0) == ""
    assert "normed" in streams.describe_input_error(case, mode, result, 1)
    connection = result[2]
    connection.mix.view(torch.int32)[4, 3, 3] ^= 1
    wrong = "mix of the next input differs from the reference"
    assert streams.describe_input_error(case, mode, result, 0) == wrong
    connection.mix.view(torch.int32)[4, 3, 3] ^= 1
    result[1].view(torch.int16)[4, 100] ^= 1
    assert "normed" in streams.describe_input_error(case, mode, result, 0)


def test_the_next_input_of_many_tokens_is_sampled_on_cpu() -> None:
    mode = Mode(streams=2, next_input=True)
    case = make_case(Shape(100, 64), "float32", "rounded", CPU, 0, 2, seed=0).of(mode)
    mixed = reference.all_reduce_hyper_connection(
        case.batches[0].xs, *streams.stream_inputs(case, mode, 0)
    )
    given = streams.input_arguments(case, mode, 0)
    result = mixed, *allnorm.hyper_connection_input(mixed, **given)
    result[1][1] = 0.0
    assert streams.describe_input_error(case, mode, result, 0) == ""
    result[1][2] = 0.0
    assert "normed" in streams.describe_input_error(case, mode, result, 0)


def compiled_is_right(rank: int, world_size: int) -> list[str]:
    mode, errors = Mode(slices=2), []
    for shape in (ODD, Shape(1, 256), Shape(2, 640)):
        case = make_case(shape, "bfloat16", "rounded", CPU, rank, world_size, seed=0).of(mode)
        arm = sharded_norm.make_arm(None, case, mode, "gloo+inductor")  # type: ignore[arg-type]
        assert isinstance(arm, arms.Arm)
        errors.append(ranks_bench.check_arm(arm, case, mode))
    return errors


@pytest.mark.long  # 40 s: Inductor compiles six functions
def test_the_compiled_operations_of_a_sharded_norm_are_right() -> None:
    assert run_ranks(compiled_is_right, 2) == [[""] * 3] * 2


def test_a_float32_residual_is_one_that_16_bits_cannot_hold() -> None:
    case = odd_case().of(Mode(float32_residual=True))
    residual = case.batches[0].residual
    assert residual.dtype == case.expected[0][1].dtype == torch.float32
    assert not torch.equal(residual.bfloat16().float(), residual)
    assert case.original is not None
    assert case.original.expected[0][1].dtype == torch.bfloat16
    assert case.xs[0] is case.original.xs[0]


def test_rows_that_no_group_divides_run_without_quantization_only() -> None:
    shapes = (Shape(2, 2880),)
    records = run(job(Mode("per_group:128"), shapes=shapes, products=(0, 64)))[0]
    assert {record["error"] for record in records} == {""}
    ran = {record["arm"] for record in records if not record["reason"]}
    assert ran == {"allnorm16", *YARDSTICKS}
    reasons = {record["reason"] for record in records if record["arm"] not in ran}
    assert [reason[:16] for reason in reasons] == ["hidden_size 2880"]


def test_the_time_of_a_gemm_is_subtracted_and_inputs_are_restored() -> None:
    modes = Mode(), Mode("per_token")  # the second mode is checked after the first was timed
    arms = "allnorm", "gloo+local"
    what = job(*modes, shapes=(Shape(8, 512),), arms=arms, products=(512, 0))
    ranks = run(what)
    records = ranks[0]
    assert [(r["mode"], r["product"], r["arm"], r["error"], r["reason"]) for r in records] == [
        (mode, product, arm, "", "")
        for mode in (0, 1)
        for product in (512, 0)
        for arm in (*arms[: 2 - mode], *(YARDSTICKS if product else ()))
    ]
    for record, other in zip(*ranks, strict=True):
        assert math.isfinite(record["p50_us"])
        if record["product"]:
            assert record["product_us"] > 0
            assert record["beyond_empty_us"] == record["p50_us"] - record["empty_us"]
            assert record["over_ranks"] == (
                "longest" if record["arm"] in YARDSTICKS else "shortest"
            )
            assert record == other, "times are those of all ranks"
        else:
            assert record["over_ranks"] == ""
            assert "beyond_empty_us" not in record


def samples_of_ranks(rank: int, world_size: int) -> clock.Samples:
    waits, alone = idle("waits", in_step=True), idle("alone", in_step=False)
    own = {"waits": [[30.0, 20.0], [21.0, 29.0]][rank], "alone": [[5.0, 7.0], [6.0, 6.5]][rank]}
    return clock.over_all_ranks(own, [waits, alone])


def test_time_that_a_rank_waits_for_peers_does_not_count() -> None:
    """For each replay, the ranks' shortest time counts if they wait, otherwise the longest."""
    expected = {"waits": [21.0, 20.0], "alone": [6.0, 7.0]}
    assert run_ranks(samples_of_ranks, 2) == [expected, expected]


@pytest.mark.parametrize("quant", ["", "per_group:64", "per_tensor"])
def test_the_local_yardstick_is_checked(quant: str) -> None:
    case = odd_case(rank=1)
    mode = Mode(quant, return_normed=bool(quant))
    local = arms.yardstick("local", case, mode)
    result = local.call(1)
    assert ranks_bench.describe_error(local, result, case, 1, mode) == ""
    assert ranks_bench.describe_error(local, result, case, 0, mode)
    result[1 if not quant else 3].view(torch.int16)[0, 0] ^= 1
    error = ranks_bench.describe_error(local, result, case, 1, mode)
    assert error.endswith("differs from the reference")


def test_samples_in_excess_of_a_gemm() -> None:
    case = odd_case()
    gemm, before = Gemm(case, 32), [x.clone() for x in case.xs]
    seen: list[torch.Tensor] = []
    arm = idle("reads x", call=lambda index: seen.append(case.xs[index].clone()))
    gemm.before(arm).call(1)
    assert not torch.equal(seen[0], before[1])
    assert torch.equal(case.xs[0], before[0])
    copies = [x.clone() for x in case.xs]
    gemm.before(idle("reads copies", call=lambda index: None, inputs=copies)).call(0)
    assert not torch.equal(copies[0], before[0])
    assert torch.equal(case.xs[0], before[0])
    gemm.restore()
    assert all(torch.equal(x, old) for x, old in zip(case.xs, before, strict=True))
    times = {gemm.alone().name: [9.0, 10.0, 30.0], arm.name: [12.0, 11.5]}
    assert gemm.subtract(times) == ({arm.name: [2.0, 1.5]}, 10.0)


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_a_collective_after_a_gemm_reads_its_output(
    sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collective works in place, on a copy: the GEMM must have written that copy."""

    seen: list[torch.Tensor] = []

    def see(*tensors: torch.Tensor) -> None:
        seen.append(tensors[-1].clone())

    monkeypatch.setattr(arms.dist, "all_reduce", see)
    monkeypatch.setattr(arms, "reduce_scatter_into", see)
    case, mode = odd_case(), Mode(residual_sharded=sharded, own_rows=sharded)
    gemm = Gemm(case, 32)
    arm = gemm.before(arms.make_arm(None, case, mode, "gloo+local"))  # type: ignore[arg-type]
    gemm.alone().call(0)
    written = case.xs[0].clone()
    gemm.restore()
    arm.call(0)
    assert torch.equal(seen[0][: ODD.num_tokens], written)


class Wrong(allnorm.Communicator):
    """A communicator that returns a normed row with one wrong bit on one rank."""

    def all_reduce_add_rms_norm(self, *arguments: Any, **options: Any) -> Any:
        normed, residual = super().all_reduce_add_rms_norm(*arguments, **options)
        if self.rank == 1:
            normed.view(torch.int16)[0, 0] ^= 1
        return normed, residual


def run_wrong(rank: int, world_size: int, what: ranks_bench.Job) -> Any:
    allnorm.Communicator = Wrong
    return ranks_bench.run(rank, world_size, what)


def test_one_wrong_bit_on_one_rank_makes_an_arm_wrong_on_all() -> None:
    what = job(Mode(), arms=("allnorm", "gloo+local"))
    for records in run_ranks(run_wrong, 2, args=(what,)):
        own, other = records[:2]
        assert own["error"] == "rank 1: normed differs from the reference"
        assert math.isnan(own["p50_us"])
        assert other["error"] == ""


def test_missing_and_wrong_parts_of_a_result_are_named() -> None:
    case = odd_case()
    normed, residual = case.expected[0]
    quantized, scale = case.quantized("per_token")[0]
    mode = Mode("per_token", return_normed=True)

    def complaint(got: Outcome, exact: bool = True) -> str:
        return ranks_bench.describe_error(idle("allnorm", exact=exact), got, case, 0, mode)

    whole = Outcome(residual, normed, quantized, scale)
    assert complaint(whole) == complaint(whole, exact=False) == ""
    other = quantized.clone()
    other.view(torch.uint8)[1, 1] ^= 1
    for part, value, expected in (
        ("normed", None, "normed is missing"),
        ("scale", None, "scale is missing"),
        ("quantized", other, "quantized differs from the reference"),
        ("scale", scale.double(), "scale differs from the reference"),
    ):
        assert complaint(dataclasses.replace(whole, **{part: value})) == expected
    assert bounds.describe_error(whole, case, 0, "per_token") == ""


class Event:
    """A fake CUDA event: the first graph takes 2 us per replay, the second graph fails."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at_ms = math.nan

    def record(self) -> None:
        self.at_ms = Event.now_ms

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms

    def synchronize(self) -> None:
        if math.isinf(Event.now_ms):
            raise RuntimeError("unspecified launch failure")


class Graph:
    def __init__(self, ms: float) -> None:
        self.ms = ms

    def replay(self) -> None:
        Event.now_ms += self.ms


def test_a_kernel_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "now_ms", 0.0)
    calls = clock.calls_per_graph(1)
    good, bad = (idle("good"), Graph(2e-3 * calls)), (idle("bad"), Graph(math.inf))
    samples = clock.time_cuda([good], 1, rounds=2)
    assert samples == {"good": [pytest.approx(2.0)] * 6}
    with pytest.raises(RuntimeError, match="launch failure") as caught:
        clock.time_cuda([good, bad], 1)
    assert caught.value.__notes__ == ["while bad was timed"]


def test_arms_run_in_a_different_order_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "now_ms", 0.0)

    def orders() -> list[list[str]]:
        seen: list[str] = []
        made = [idle(name, reset=functools.partial(seen.append, name)) for name in "abcd"]
        clock.time_cuda([(arm, Graph(1.0)) for arm in made], 1, rounds=4)
        return [seen[start : start + 4] for start in range(0, 16, 4)]

    found = orders()
    assert all(sorted(order) == list("abcd") for order in found)
    assert len({tuple(order) for order in found}) > 1
    assert orders() == found, "as on every other rank"


def test_a_kernel_that_fails_in_eager_calls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "start_together", lambda: None)
    waits = iter([None, RuntimeError("unspecified launch failure")])

    def synchronize() -> None:
        if failure := next(waits):
            raise failure

    with pytest.raises(RuntimeError, match="launch failure") as caught:
        clock.time_eager(idle("bad"), synchronize)
    assert caught.value.__notes__ == ["while bad was timed"]


def eager(rank: int, world_size: int) -> dict[str, float]:
    return clock.time_eager(idle("nothing"), lambda: None)


def test_calls_without_a_graph() -> None:
    figures = run_ranks(eager, 2)[0]
    assert 0 < figures["host_us"] < 1000
    assert figures["eager_us"] > 0
