"""A group of ranks over two hosts, or two islands of one host.

    torchrun --nproc-per-node 4 examples/two_hosts.py

This simulates two hosts on one machine: the lower and the upper half of the ranks. For real hosts,
run on each of them, with its own --node-rank:

    torchrun --nnodes 2 --node-rank 0 --master-addr HOST --nproc-per-node 4 examples/two_hosts.py

Checks the results bit by bit against `allnorm.reference`.
"""

import os

import torch
import torch.distributed as dist

import allnorm
from allnorm.testing import assert_same_bits

NUM_TOKENS, HIDDEN_SIZE, EPS = 16, 4096, 1e-6

# One GPU per rank if there are enough, otherwise CPU ranks. torchrun sets the variables. LOCAL_RANK
# numbers the ranks of a host from 0, like its GPUs.
world_size, local_size = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
gpu = torch.cuda.device_count() >= local_size
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")

# "auto", the default, finds the ranks that share a host. Explicit islands are for simulations and
# unusual machines. They must be the same on every rank.
half, is_simulated = world_size // 2, local_size == world_size
islands = [list(range(half)), list(range(half, world_size))] if is_simulated else "auto"
with allnorm.Communicator(device=device, islands=islands) as comm:
    torch.manual_seed(0)  # replicated tensors: equal on every rank
    residual = torch.randn(NUM_TOKENS, HIDDEN_SIZE, dtype=torch.bfloat16, device=device)
    weight = torch.randn(HIDDEN_SIZE, dtype=torch.bfloat16, device=device)
    torch.manual_seed(1 + comm.rank)  # this rank's partial sum
    x = torch.randn_like(residual)

    normed, new_residual = comm.all_reduce_add_rms_norm(x, residual, weight, EPS)

    # The sum is added island by island, so the reference must know the islands.
    partials = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(partials, x)
    expected = allnorm.reference.all_reduce_add_rms_norm(
        partials, residual, weight, EPS, islands=comm.islands
    )
    assert_same_bits(normed, expected[0], "normed")
    assert_same_bits(new_residual, expected[1], "new residual")

    plan = comm.plan(NUM_TOKENS, HIDDEN_SIZE, x.dtype)
    assert len(comm.islands) == 2, comm.islands
    assert plan.algorithm == "hierarchical", plan

    dist.barrier()  # every rank has passed its checks
    if comm.rank == 0:
        print(
            f"OK: bit-identical to the reference ({plan.algorithm}, islands {comm.islands}, "
            f"{world_size} ranks on {device.type})"
        )
dist.destroy_process_group()
