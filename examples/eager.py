"""One fused call: all-reduce, residual add and RMSNorm.

    torchrun --nproc-per-node 2 examples/eager.py

Checks the results bit by bit against `allnorm.reference`, which is plain PyTorch.
"""

import os

import torch
import torch.distributed as dist

import allnorm
from allnorm.testing import assert_same_bits

NUM_TOKENS, HIDDEN_SIZE, EPS = 16, 4096, 1e-6

# One GPU per rank if there are enough, otherwise CPU ranks. torchrun sets the variables.
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")

with allnorm.Communicator(device=device) as comm:  # collective: every rank creates it
    # The residual and the weight are replicated: equal on every rank, hence the equal seed.
    torch.manual_seed(0)
    residual = torch.randn(NUM_TOKENS, HIDDEN_SIZE, dtype=torch.bfloat16, device=device)
    weight = torch.randn(HIDDEN_SIZE, dtype=torch.bfloat16, device=device)
    # x is what a row-parallel linear layer returns: this rank's partial sum.
    torch.manual_seed(1 + comm.rank)
    x = torch.randn_like(residual)

    normed, new_residual = comm.all_reduce_add_rms_norm(x, residual, weight, EPS)

    # The same in separate steps, from the partial sums of all ranks.
    partials = [torch.empty_like(x) for _ in range(comm.world_size)]
    dist.all_gather(partials, x)
    expected = allnorm.reference.all_reduce_add_rms_norm(partials, residual, weight, EPS)
    assert_same_bits(normed, expected[0], "normed")
    assert_same_bits(new_residual, expected[1], "new residual")

    dist.barrier()  # every rank has passed its checks
    if comm.rank == 0:
        plan = comm.plan(NUM_TOKENS, HIDDEN_SIZE, x.dtype)
        print(
            f"OK: bit-identical to the reference ({NUM_TOKENS}x{HIDDEN_SIZE}, {comm.world_size} "
            f"ranks on {device.type}, {plan.algorithm}: {plan.reason})"
        )
dist.destroy_process_group()
