"""A matrix product that lets the fused op begin early, and what that brings.

    torchrun --nproc-per-node 2 examples/dependent_product.py

In a model the fused op follows a row-parallel linear. The products of cuBLAS let nothing begin
before they end, so that all of the call's start is waited for. A kernel of programmatic dependent
launch can say when the next one may begin: here the product of a Triton kernel does as soon as it
has its own input. The fused op then starts while the product runs, and waits for its end before it
reads anything (`griddepcontrol.wait`). Nothing about the call is different.

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
import triton
import triton.language as tl

import allnorm
from allnorm.testing import max_over_ranks, same_bits, time_cuda_graph

HIDDEN_SIZE, IN_FEATURES = 4096, 7168
TOKENS = (1, 16, 64)
NUM_SETS = 2  # of weights, which take turns: together they do not stay in the L2 cache
EPS = 1e-6


@triton.jit
def _linear(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    num_tokens,
    out_features,
    in_features,
    TOKENS: tl.constexpr,  # noqa: N803
    OUT: tl.constexpr,  # noqa: N803
    IN: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
):
    """`out = x @ weight.T` of one block of tokens and one of features of the output."""
    if IS_DEPENDENT:
        # x is what the kernel before has written. From here on the one behind may begin.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(0) * OUT + tl.arange(0, OUT)
    inner = tl.arange(0, IN)
    x_rows = x + rows[:, None] * in_features + inner[None, :]
    weight_rows = weight + columns[None, :] * in_features + inner[:, None]
    total = tl.zeros((TOKENS, OUT), tl.float32)
    for _ in range(in_features // IN):
        part = tl.load(x_rows, mask=rows[:, None] < num_tokens, other=0.0)
        total += tl.dot(part, tl.load(weight_rows))
        x_rows += IN
        weight_rows += IN
    at = out + rows[:, None] * out_features + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=rows[:, None] < num_tokens)


def linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, is_dependent: bool
) -> torch.Tensor:
    """`x @ weight.T`, in `out`.

    Args:
        x: [num_tokens, in_features], bfloat16; in_features a multiple of 128.
        weight: [out_features, in_features], bfloat16; out_features a multiple of 32.
        out: [num_tokens, out_features], bfloat16.
        is_dependent: it begins before the kernel in front of it has ended, waits for that, and lets
            the one behind begin. Safe in CUDA graphs.
    """
    (num_tokens, in_features), out_features = x.shape, weight.shape[0]
    tokens = min(64, max(16, triton.next_power_of_2(num_tokens)))
    grid = (out_features // 32, triton.cdiv(num_tokens, tokens))
    _linear[grid](
        *(x, weight, out, num_tokens, out_features, in_features),
        TOKENS=tokens,
        OUT=32,
        IN=128,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        num_stages=5,
        launch_pdl=is_dependent,
    )
    return out


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
