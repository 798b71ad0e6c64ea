"""Checks and times the fused call on this machine. Needs no GPU, and takes seconds.

    torchrun --nproc-per-node 2 examples/quickstart.py

1. Computes all-reduce, residual add and RMSNorm in three ways: with one call of allnorm, with
   `allnorm.reference` (the definition of every bit, in plain PyTorch), and with gloo or NCCL plus
   PyTorch.
2. Checks that the first two are bit-identical, and that the third is equal up to rounding.
3. Times the first and the third, and prints one line.
"""

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

import allnorm
from allnorm.testing import assert_same_bits

NUM_TOKENS, HIDDEN_SIZE, EPS, NUM_CALLS = 1, 4096, 1e-6, 200

# One GPU per rank if there are enough, otherwise CPU ranks. torchrun sets the variables.
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")


def median_us(call: Callable[[], object]) -> float:
    """Returns the median time of a call in microseconds, including the wait for its results."""
    times = []
    for _ in range(NUM_CALLS):
        start = time.perf_counter()
        call()
        if gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[NUM_CALLS // 4 :])  # the first calls warm up


with allnorm.Communicator(device=device) as comm:
    torch.manual_seed(0)  # replicated tensors: equal on every rank
    residual = torch.randn(NUM_TOKENS, HIDDEN_SIZE, dtype=torch.bfloat16, device=device)
    weight = torch.randn(HIDDEN_SIZE, dtype=torch.bfloat16, device=device)
    torch.manual_seed(1 + comm.rank)  # this rank's partial sum
    x = torch.randn_like(residual)

    def fused() -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `normed` and the new residual."""
        return comm.all_reduce_add_rms_norm(x, residual, weight, EPS)

    def separate(partial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `normed` and the new residual; overwrites `partial` with the sum."""
        dist.all_reduce(partial)
        total = partial + residual
        return F.rms_norm(total, (HIDDEN_SIZE,), weight, EPS), total

    partials = [torch.empty_like(x) for _ in range(comm.world_size)]
    dist.all_gather(partials, x)
    expected = allnorm.reference.all_reduce_add_rms_norm(partials, residual, weight, EPS)
    normed, total = fused()
    assert_same_bits(normed, expected[0], "normed")
    assert_same_bits(total, expected[1], "residual")
    torch.testing.assert_close((normed, total), separate(x.clone()), rtol=0.02, atol=0.1)

    zeros = torch.zeros_like(x)  # stays zero, however often it is reduced in place
    speedup = median_us(lambda: separate(zeros)) / median_us(fused)
    if comm.rank == 0:
        print(
            f"OK: bit-identical, {speedup:.0f}x as fast as {dist.get_backend()} + PyTorch "
            f"({NUM_TOKENS}x{HIDDEN_SIZE}, {comm.world_size} ranks on {device.type.upper()})"
        )
dist.destroy_process_group()
