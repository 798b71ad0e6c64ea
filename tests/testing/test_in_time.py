"""Tests that all ranks try again if one of them is late before a test's error."""

from __future__ import annotations

import time

import pytest
import torch
from rank_helpers import on

import allnorm
from allnorm.errors import AllnormError
from allnorm.testing import RankFailedError
from allnorm.testing.in_time import used_communicators


@on(cpu=(2,))
def test_every_rank_tries_again_if_one_is_late(rank: int, world_size: int) -> None:
    attempts = 0

    def prepare(made: list[allnorm.Communicator]) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1 and rank == 1:
            time.sleep(1.0)
        made.append(allnorm.Communicator(device="cpu", timeout=0.3))

    (c,) = used_communicators(prepare)
    with c:
        assert attempts >= 2
        assert c.all_reduce(torch.ones(1, 8)).eq(world_size).all()


@on(cpu=(2,))
def test_the_last_error_is_raised_on_every_rank(rank: int, world_size: int) -> None:
    attempts = 0

    def prepare(made: list[allnorm.Communicator]) -> None:
        nonlocal attempts
        attempts += 1
        if rank == 1:
            raise AllnormError("late")

    with pytest.raises(RankFailedError, match="rank 1: late"):
        used_communicators(prepare)
    assert attempts == 5
