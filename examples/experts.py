"""The end of a mixture of experts: the weighted sum over experts is part of the fused call.

    torchrun --nproc-per-node 2 examples/experts.py

Each rank holds a part of the experts (expert parallelism). Checks the results bit by bit against
`allnorm.reference`, and against the whole layer in plain PyTorch up to rounding.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import allnorm
from allnorm.testing import assert_same_bits

NUM_TOKENS, HIDDEN_SIZE, NUM_EXPERTS, TOP_K, EPS = 16, 512, 8, 2, 1e-6

# One GPU per rank if there are enough, otherwise CPU ranks. torchrun sets the variables.
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")

torch.manual_seed(0)  # equal on every rank, including the experts, which keeps the check simple
options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
experts = torch.randn(NUM_EXPERTS, HIDDEN_SIZE, HIDDEN_SIZE, **options) / HIDDEN_SIZE**0.5
router = torch.randn(NUM_EXPERTS, HIDDEN_SIZE, **options) / HIDDEN_SIZE**0.5
norm = torch.randn(HIDDEN_SIZE, **options)
hidden, residual = torch.randn(2, NUM_TOKENS, HIDDEN_SIZE, **options)
# The router chooses experts: weights (float32) and experts per token, both [NUM_TOKENS, TOP_K].
weights, chosen = F.linear(hidden, router).float().softmax(-1).topk(TOP_K)


def expert_rows(rank: int, num_ranks: int) -> allnorm.ExpertSum:
    """Returns the outputs of one rank's experts, not yet summed."""
    # Each rank holds the same number of consecutive experts.
    is_local = chosen * num_ranks // NUM_EXPERTS == rank
    token, _ = is_local.nonzero(as_tuple=True)
    rows = torch.bmm(experts[chosen[is_local]], hidden[token, :, None]).squeeze(-1)
    # index[t, k]: the row of choice k of token t; -1 if its expert is on a different rank.
    index = torch.full_like(chosen, -1, dtype=torch.int32)
    index[is_local] = torch.arange(len(rows), dtype=torch.int32, device=device)
    return allnorm.ExpertSum(rows, weights, index)


with allnorm.Communicator(device=device) as comm:
    mine = expert_rows(comm.rank, comm.world_size)
    # One launch reads the rows through the index, weights and sums them, and does all the rest.
    normed, new_residual = comm.all_reduce_add_rms_norm(mine, residual, norm, EPS)

    of_all_ranks = [expert_rows(rank, comm.world_size) for rank in range(comm.world_size)]
    expected = allnorm.reference.all_reduce_add_rms_norm(of_all_ranks, residual, norm, EPS)
    assert_same_bits(normed, expected[0], "normed")
    assert_same_bits(new_residual, expected[1], "new residual")

    outputs = torch.einsum("tkij,tj->tki", experts[chosen].float(), hidden.float())
    whole = residual.float() + (weights[..., None] * outputs).sum(1)
    torch.testing.assert_close(new_residual.float(), whole, rtol=0.02, atol=0.05)

    dist.barrier()  # every rank has passed its checks
    if comm.rank == 0:
        print(
            f"OK: bit-identical to the reference, and close to the whole layer in PyTorch "
            f"({NUM_EXPERTS} experts, {comm.world_size} ranks on {device.type})"
        )
dist.destroy_process_group()
