"""Tests the check of the next layer's input: correct results pass, and wrong bits are found."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import torch
from rank_helpers import device, on

import allnorm
from allnorm.verify.context import Context, Job, Recorder
from allnorm.verify.streams import stream_input

make, quantize = allnorm.hyper_connection_input, allnorm.quantize


def run() -> dict[str, Any]:
    """Runs the check on all ranks; returns its record. Collective."""
    job = Job(device().type, seed=3, full=False, seconds=1.0, stress=0)
    with allnorm.Communicator(device=device()) as comm:
        recorder = Recorder("input from streams")
        stream_input(Context(comm, job, random.Random(job.seed)), recorder)
        return recorder.finish()


@on(cpu=(2,), gpu=(2,))
def test_the_next_input_is_right(rank: int, world_size: int) -> None:
    found = run()
    assert found["failures"] == 0, found["details"]
    # Four ranges of tokens, for four pairs of dtypes at seven sizes and for one at the largest.
    # Each is quantized too.
    assert found["cases"] == 2 * 4 * (7 * 4 + 1)


@on(cpu=(2,))
def test_one_wrong_bit_is_found(rank: int, world_size: int) -> None:
    def spoiling(*arguments: Any, **more: Any) -> Any:
        """Increases a coefficient of the last token, on the last rank."""
        normed, (post, mix) = make(*arguments, **more)
        if rank == world_size - 1:
            last = mix[-1:, -1, -1]
            last.copy_(last.nextafter(last + 1))
        return normed, allnorm.HyperConnection(post, mix)

    with mock.patch.object(allnorm, "hyper_connection_input", spoiling):
        found = run()
    # Calls without tokens stay right, and so do some with a special token alone.
    assert found["cases"] / 4 <= found["failures"] <= 3 * found["cases"] / 8
    text = found["details"][1]
    assert text.startswith("rank 1: tokens "), text
    assert "of 17x2x120, torch." in text, text
    assert ": mix: 1 of " in text, text


@on(cpu=(2,))
def test_one_wrong_byte_is_found(rank: int, world_size: int) -> None:
    def spoiling(*arguments: Any) -> Any:
        """Changes the first quantized element, on the last rank."""
        quantized, scale = quantize(*arguments)
        if rank == world_size - 1 and quantized.numel():
            quantized.view(torch.uint8).view(-1)[0] ^= 1
        return quantized, scale

    with mock.patch.object(allnorm, "quantize", spoiling):
        found = run()
    assert found["failures"] >= found["cases"] / 4
    assert ": quantized: 1 of " in found["details"][1], found["details"][1]
