"""Fused calls in a CUDA graph, replayed with new inputs.

    torchrun --nproc-per-node 2 examples/cuda_graph.py

Checks the results of every replay bit by bit against `allnorm.reference`. CPU ranks make the same
calls without a graph.
"""

import os

import torch
import torch.distributed as dist

import allnorm
from allnorm.testing import assert_same_bits

NUM_TOKENS, HIDDEN_SIZE, EPS, NUM_REPLAYS = 16, 4096, 1e-6, 3

# One GPU per rank if there are enough, otherwise CPU ranks. torchrun sets the variables.
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")

with allnorm.Communicator(device=device) as comm:
    torch.manual_seed(0)  # replicated tensors: equal on every rank
    weight = torch.randn(HIDDEN_SIZE, dtype=torch.bfloat16, device=device)
    # A graph replays the same addresses, so inputs and results stay in these tensors.
    x = torch.zeros(NUM_TOKENS, HIDDEN_SIZE, dtype=torch.bfloat16, device=device)
    residual, normed = torch.zeros_like(x), torch.zeros_like(x)

    def step() -> None:
        """Replaces the residual with the new one, and writes `normed`."""
        comm.all_reduce_add_rms_norm(x, residual, weight, EPS, out=normed, residual_out=residual)

    run = step
    if gpu:
        step()  # the first call loads the kernels, which is not possible while capturing
        graph = torch.cuda.CUDAGraph()
        # thread_local: a thread of NCCL may call CUDA meanwhile. No tensor needs registration.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        run = graph.replay

    for replay in range(NUM_REPLAYS):
        torch.manual_seed(replay)
        residual.copy_(torch.randn_like(residual))
        torch.manual_seed(1000 * (1 + comm.rank) + replay)  # every rank has its own partial sum
        x.copy_(torch.randn_like(x))

        partials = [torch.empty_like(x) for _ in range(comm.world_size)]
        dist.all_gather(partials, x)
        expected = allnorm.reference.all_reduce_add_rms_norm(partials, residual, weight, EPS)
        run()  # every rank replays its graph, in the same order
        assert_same_bits(normed, expected[0], f"normed of replay {replay}")
        assert_same_bits(residual, expected[1], f"residual of replay {replay}")

    dist.barrier()  # every rank has passed its checks
    if comm.rank == 0:
        what = "replays of a CUDA graph" if gpu else "calls without a graph, because this is CPU,"
        print(
            f"OK: {NUM_REPLAYS} {what} are bit-identical to the reference "
            f"({NUM_TOKENS}x{HIDDEN_SIZE}, {comm.world_size} ranks on {device.type})"
        )
dist.destroy_process_group()
