"""A matrix product that lets the fused op begin early, and what that brings.

    torchrun --nproc-per-node 2 examples/dependent_product.py

In a model the fused op follows a row-parallel linear. The products of cuBLAS let nothing begin
before they end. In a CUDA graph the fused op begins early behind them all the same, by an edge of
the graph; eagerly all of its start is waited for. A kernel of programmatic dependent launch can say
when the next one may begin: the one in `allnorm.bench.triton_product` does as soon as it has its
own input. The fused op then starts while the product runs, and waits for its end before it reads
anything (`griddepcontrol.wait`). Nothing about the call is different.

Prints, for some numbers of tokens, the time of a product and a call behind it, in CUDA graphs: the
same kernel with and without that, and PyTorch's product. Exits 0 if the call's bits are those of
`unfused` on what the product has written. Needs GPUs of compute capability 9.0 or later and Triton.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import allnorm
from allnorm.bench.triton_product import linear
from allnorm.testing import max_over_ranks, same_bits, time_cuda_graph

HIDDEN_SIZE, IN_FEATURES = 4096, 7168
TOKENS = (1, 16, 64)
NUM_SETS = 2  # of weights, which take turns: together they do not stay in the L2 cache
EPS = 1e-6


Step = Callable[[int], object]
"""What is timed, on one set of weights."""


def measure(step: Step, num_tokens: int) -> float:
    """Median microseconds of a step in CUDA graphs, of the slower rank."""
    sets = [partial(step, index) for index in range(NUM_SETS)]
    return max_over_ranks(time_cuda_graph(sets, num_tokens)).p50_us


def run(comm: allnorm.Communicator, weights: list[torch.Tensor], num_tokens: int) -> bool:
    """Prints the times of one number of tokens; whether all bits are right on this rank."""
    options = {"device": comm.device, "dtype": torch.bfloat16}
    torch.manual_seed(1 + comm.rank)
    x = torch.randn(num_tokens, IN_FEATURES, **options)
    torch.manual_seed(0)  # the same on every rank
    residual = torch.randn(num_tokens, HIDDEN_SIZE, **options)
    norm_weight = torch.randn(HIDDEN_SIZE, **options)
    partial_sum = torch.empty(num_tokens, HIDDEN_SIZE, **options)

    def product(index: int, is_dependent: bool) -> None:
        linear(x, weights[index], partial_sum, is_dependent=is_dependent)

    def call(algorithm: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
        return comm.all_reduce_add_rms_norm(
            partial_sum, residual, norm_weight, EPS, algorithm=algorithm
        )

    right = True
    for is_dependent in (False, True):
        product(0, is_dependent)
        right &= all(map(same_bits, call(), call("unfused")))

    def with_pytorch(index: int) -> None:
        torch.mm(x, weights[index].t(), out=partial_sum)
        call()

    def with_triton(index: int, is_dependent: bool) -> None:
        product(index, is_dependent)
        call()

    steps: dict[str, Step] = {
        "PyTorch's product": with_pytorch,
        "Triton's product": partial(with_triton, is_dependent=False),
        "the same, dependents let in": partial(with_triton, is_dependent=True),
        "Triton's product alone": partial(product, is_dependent=False),
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
        shape, options = (HIDDEN_SIZE, IN_FEATURES), {"device": device, "dtype": torch.bfloat16}
        weights = [torch.randn(shape, **options) / IN_FEATURES**0.5 for _ in range(NUM_SETS)]
        right = [run(comm, weights, num_tokens) for num_tokens in TOKENS]
        comm.check()
    dist.destroy_process_group()
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
