"""A GEMM that triggers the launch of the fused op early, and the time that this saves.

    torchrun --nproc-per-node 2 examples/dependent_product.py

In a model, the fused op follows a row-parallel linear layer. A cuBLAS GEMM does not trigger its
dependent launch, so an eager call waits for the end of the GEMM. The Triton kernel of
`allnorm.bench.triton_product` triggers it as soon as its own input is complete. The fused op then
starts while the GEMM runs, and waits for the GEMM's end before it reads anything. In CUDA graphs
the call starts early in any case, through a programmatic edge. The call itself does not change.

Prints, per number of tokens, the time of a GEMM and a fused call in CUDA graphs: for the Triton
kernel with and without the early trigger, and for PyTorch's GEMM. Exits with 0 if the calls are
bit-identical to `unfused`. Needs Triton and GPUs of compute capability 9.0 or later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import allnorm
from allnorm.bench.triton_product import linear
from allnorm.testing import max_over_ranks, same_bits, time_cuda_graph

HIDDEN_SIZE, IN_FEATURES = 4096, 7168
TOKENS = (1, 16, 64)
NUM_SETS = 2  # sets of weights, used alternately so that they do not stay in the L2 cache
EPS = 1e-6


Step = Callable[[int], object]
"""A timed step on one set of weights."""


def measure(step: Step, num_tokens: int) -> float:
    """Returns the slower rank's median time of a step in CUDA graphs, in microseconds."""
    sets = [partial(step, index) for index in range(NUM_SETS)]
    return max_over_ranks(time_cuda_graph(sets, num_tokens)).p50_us


def run(comm: allnorm.Communicator, weights: list[torch.Tensor], num_tokens: int) -> bool:
    """Prints the times of one number of tokens; returns whether this rank's results are right."""
    options: dict[str, Any] = {"device": comm.device, "dtype": torch.bfloat16}
    torch.manual_seed(1 + comm.rank)
    x = torch.randn(num_tokens, IN_FEATURES, **options)
    torch.manual_seed(0)  # equal on every rank
    residual = torch.randn(num_tokens, HIDDEN_SIZE, **options)
    norm_weight = torch.randn(HIDDEN_SIZE, **options)
    partial_sum = torch.empty(num_tokens, HIDDEN_SIZE, **options)

    def gemm(index: int, is_dependent: bool) -> None:
        linear(x, weights[index], partial_sum, is_dependent=is_dependent)

    def call(algorithm: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
        return comm.all_reduce_add_rms_norm(
            partial_sum, residual, norm_weight, EPS, algorithm=algorithm
        )

    right = True
    for is_dependent in (False, True):
        gemm(0, is_dependent)
        right &= all(map(same_bits, call(), call("unfused")))

    def with_pytorch(index: int) -> None:
        torch.mm(x, weights[index].t(), out=partial_sum)
        call()

    def with_triton(index: int, is_dependent: bool) -> None:
        gemm(index, is_dependent)
        call()

    steps: dict[str, Step] = {
        "PyTorch GEMM + fused op": with_pytorch,
        "Triton GEMM + fused op": partial(with_triton, is_dependent=False),
        "Triton GEMM with early trigger + fused op": partial(with_triton, is_dependent=True),
        "Triton GEMM alone": partial(gemm, is_dependent=False),
    }
    for name, step in steps.items():
        us = measure(step, num_tokens)
        if comm.rank == 0:
            print(f"{num_tokens:>3} tokens, {name}: {us:.2f} us", flush=True)
    return right


def main() -> int:
    """Runs one rank; returns its exit code."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    with allnorm.Communicator(device=device) as comm:
        shape = (HIDDEN_SIZE, IN_FEATURES)
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        weights = [torch.randn(shape, **options) / IN_FEATURES**0.5 for _ in range(NUM_SETS)]
        right = [run(comm, weights, num_tokens) for num_tokens in TOKENS]
        comm.check()
    dist.destroy_process_group()
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
