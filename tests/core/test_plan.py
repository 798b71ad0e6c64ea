"""Tests that `plan()` returns the algorithm a call would run, or raises the call's error."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import pytest
import torch
from rank_helpers import DTYPES, Case, Experts, comm, on, same_on_every_rank

import allnorm
from allnorm import names, policy
from allnorm.core import _native, hierarchical
from allnorm.core.call import Call
from allnorm.core.dispatch import Chooser

# Rows of about 2,720 or 5,440 columns fit into a 64 KiB workspace for some algorithms only.
WIDTHS = (64, 1000, 2304, 2720, 2880, 4000, 5376, 8000, 12_000, 33_000)
QUANTS = (
    None,
    allnorm.Fp8PerToken(),
    allnorm.Fp8PerGroup(32),
    allnorm.Fp8PerTensor(torch.tensor(0.5)),
    allnorm.MxFp8(),
    allnorm.NvFp4(torch.tensor(7.0)),
)
ALONE, PAIRS = ((0,), (1,)), ((0, 1), (2, 3))


def cases(count: int) -> list[Case]:
    """Returns cases with all widths and algorithms, and other fields random but equal on ranks."""
    rng = random.Random(1)
    found = []
    for width, algorithm in itertools.islice(
        itertools.cycle(itertools.product(WIDTHS, ("auto", *names.REQUESTS))), count
    ):
        quant = rng.choice(QUANTS)
        if width % 32:
            quant = rng.choice((None, allnorm.Fp8PerToken(), allnorm.Fp8PerGroup(128)))
        post_norm = rng.random() < 0.3
        found.append(
            Case(
                (rng.choice((0, 1, 2, 5, 33)), width),
                rng.choice(DTYPES),
                residual=rng.random() < 0.8,
                algorithm=algorithm,
                quant=quant,
                return_normed=quant is not None and rng.random() < 0.5,
                sharded=rng.random() < 0.5,
                post_norm=post_norm,
                scale=rng.choice((1.0, 0.5)),
                experts=rng.choice((None, None, Experts())),
                call=len(found),
            )
        )
    return found


def plan_of(c: allnorm.Communicator, case: Case) -> policy.Plan | Exception:
    try:
        return c.plan(
            *case.shape,
            case.dtype,
            case.spec(),
            case.sharded,
            return_normed=case.return_normed,
            algorithm=case.algorithm,
            post_norm=case.norm_before(),
            scale=case.scale,
            experts=case.experts is not None,
        )
    except (ValueError, TypeError, allnorm.UnsupportedError) as error:
        return error


def ran(c: allnorm.Communicator, case: Case) -> tuple[str, int] | Exception:
    """Runs a case; returns its algorithm and the number of launches or pieces, or the error."""
    pieces = []
    piece = hierarchical._Run._piece

    def noted(one: Any, number: int, *rest: Any) -> Any:
        pieces.append(number)
        return piece(one, number, *rest)

    before = c.stats().calls
    try:
        with mock.patch.object(hierarchical._Run, "_piece", noted):
            case.check(c)
    except (ValueError, TypeError, allnorm.UnsupportedError) as error:
        return error
    calls = {name: number - before[name] for name, number in c.stats().calls.items()}
    ((name, number),) = [(name, number) for name, number in calls.items() if number]
    return name, len(pieces) if name == "hierarchical" else number


@pytest.mark.sampled(3)
@on(cpu=(2, 3, 4))
@pytest.mark.parametrize("workspace_bytes", [64 << 10, 4 << 20], ids=["64 KiB", "4 MiB"])
@pytest.mark.parametrize("over_islands", [False, True], ids=["one island", "islands"])
def test_plan_is_what_runs(
    rank: int, world_size: int, over_islands: bool, workspace_bytes: int
) -> None:
    alone = tuple((rank,) for rank in range(world_size))
    islands = (PAIRS if world_size == 4 else alone) if over_islands else "auto"
    c = comm(workspace_bytes=workspace_bytes, islands=islands)
    found: dict[str, int] = {}  # how often each algorithm ran or an error was raised
    for case in cases(160):
        plan, got = plan_of(c, case), ran(c, case)
        if isinstance(plan, Exception) or isinstance(got, Exception):
            assert (type(plan), str(plan)) == (type(got), str(got)), case
            found["error"] = found.get("error", 0) + 1
            continue
        name, number = got
        found[name] = found.get(name, 0) + 1
        assert name == plan.algorithm, (case, plan)
        if name in names.FUSED:  # a call without rows still launches, to compare the ranks' calls
            assert number == max(1, plan.num_chunks), (case, plan)
        elif name == "hierarchical":
            assert number == plan.num_chunks, (case, plan)
    kinds = {"hierarchical", "unfused"} if over_islands else {*names.FUSED, "unfused"}
    assert set(same_on_every_rank(found)) == {*kinds, "error"}


def test_plan_takes_every_argument_that_the_choice_depends_on() -> None:
    """For example, a tuning table's cluster size applies to plain calls only."""
    step = policy.Step(None, "one_shot", 0, 4)
    table = policy.Table("measured", {("bfloat16", "norm"): [policy.Curve(4096, (step,))]})
    traits = policy.Traits("cuda", 4, tables=(table,))
    chooser = Chooser(_native.library("cpu"), traits, 1 << 30)
    asked: list[Call] = []

    class Stub:
        """A fake endpoint that only chooses plans."""

        def check_open(self) -> None:
            pass

        def choose(self, call: Call) -> policy.Plan:
            asked.append(call)
            return chooser.choose(call)

    c = object.__new__(allnorm.Communicator)
    c._endpoint = Stub()
    norm = allnorm.PostNorm(torch.ones(4096, dtype=torch.bfloat16), 1e-6)
    x = torch.zeros(8, 4096, dtype=torch.bfloat16)
    op = "all_reduce_add_rms_norm"
    common: dict[str, Any] = {"op": op, "residual": x, "weight": x[0]}
    for more, call in (
        ({}, Call(source=x, **common)),
        ({"scale": 0.5}, Call(source=x, scale=0.5, **common)),
        ({"post_norm": norm}, Call(source=x, post_norm=norm, **common)),
        ({"experts": True}, Call(source=allnorm.ExpertSum(x.unsqueeze(1)), **common)),
        (
            {"residual_dtype": torch.float32},
            Call(source=x, **{**common, "residual": x.float()}),
        ),
    ):
        plan = c.plan(8, 4096, **more)
        assert plan == chooser.choose(call), more
        assert plan.cluster_size == (0 if more else 4), more
    assert len(asked) == 5


@on(cpu=(2,), gpu=(2, 8))
def test_row_wider_than_the_workspace(rank: int, world_size: int) -> None:
    """Checks that calls with too wide rows run unfused, and that the plan gives the reason."""
    small = comm(workspace_bytes=64 << 10)
    case = Case((3, 65536))
    plan = small.plan(3, 65536, case.dtype)
    assert plan.algorithm == "unfused"
    assert "65536" in plan.reason, plan.reason
