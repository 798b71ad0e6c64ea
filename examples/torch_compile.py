"""A fused call between two linear layers, in one graph of torch.compile.

    torchrun --nproc-per-node 2 examples/torch_compile.py

Checks the compiled layer bit by bit against the same layer without torch.compile. To fuse a model
whose code calls `dist.all_reduce` and a norm itself, use the graph pass: docs/compile.md.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import allnorm
from allnorm.testing import assert_same_bits

HIDDEN_SIZE, EPS = 1024, 1e-6

# One GPU per rank if there are enough, otherwise CPU ranks. torchrun sets the variables.
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")

with allnorm.Communicator(device=device) as comm:
    local_size = HIDDEN_SIZE // comm.world_size
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    torch.manual_seed(1 + comm.rank)  # each rank has its own slices of the two linear layers
    down = torch.randn(HIDDEN_SIZE, local_size, **options) / HIDDEN_SIZE**0.5
    up = torch.randn(local_size, HIDDEN_SIZE, **options) / HIDDEN_SIZE**0.5
    torch.manual_seed(0)
    norm = torch.randn(HIDDEN_SIZE, **options)

    def layer(
        x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Runs a row-parallel layer, the fused call, and a column-parallel layer."""
        partial = F.linear(x, down)
        normed, residual = comm.all_reduce_add_rms_norm(partial, residual, norm, EPS)
        return F.linear(normed, up), normed, residual

    # fullgraph: raises if any call, such as allnorm's, cannot be part of the graph.
    compiled = torch.compile(layer, fullgraph=True)
    for num_tokens in (1, 16):  # compiled for the first size, then for any number of tokens
        torch.manual_seed(num_tokens)
        residual = torch.randn(num_tokens, HIDDEN_SIZE, **options)
        torch.manual_seed(1000 * (1 + comm.rank) + num_tokens)
        x = torch.randn(num_tokens, local_size, **options)
        names = ("output", "normed", "residual")
        for name, actual, expected in zip(
            names, compiled(x, residual), layer(x, residual), strict=True
        ):
            assert_same_bits(actual, expected, f"{name} of {num_tokens} tokens")

    dist.barrier()  # every rank has passed its checks
    if comm.rank == 0:
        print(
            f"OK: torch.compile(fullgraph=True) and eager are bit-identical "
            f"(1 and 16 tokens, {comm.world_size} ranks on {device.type})"
        )
dist.destroy_process_group()
