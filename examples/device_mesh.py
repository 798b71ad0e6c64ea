"""An nn.Module with sharded Parameters that finds its ranks through a DeviceMesh.

    torchrun --nproc-per-node 2 examples/device_mesh.py

Checks the tensor-parallel module against the whole one in plain PyTorch.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import allnorm

NUM_TOKENS, HIDDEN_SIZE, INNER_SIZE, EPS = 16, 512, 1024, 1e-6


class Mlp(nn.Module):
    """An MLP and the RMSNorm after it; each rank holds a slice of the two linear layers."""

    def __init__(
        self, tp: DeviceMesh, up: torch.Tensor, down: torch.Tensor, norm: torch.Tensor
    ) -> None:
        super().__init__()
        rank, ranks = tp.get_local_rank(), tp.size()
        self.tp = tp
        self.up = nn.Parameter(up.chunk(ranks, 0)[rank].clone())  # column-parallel
        self.down = nn.Parameter(down.chunk(ranks, 1)[rank].clone())  # row-parallel
        self.norm = nn.Parameter(norm)  # replicated

    def forward(
        self, normed: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the input of the next layer and the new residual; `normed` is this layer's."""
        partial = F.linear(F.silu(F.linear(normed, self.up)), self.down)
        # The first call creates the communicator of the mesh's group; later calls find it.
        return allnorm.all_reduce_add_rms_norm(partial, residual, self.norm, EPS, group=self.tp)


# LOCAL_RANK numbers the ranks of this host, and so its GPUs. The global rank does not: the second
# of two hosts has ranks 8 to 15, but GPUs 0 to 7.
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)  # before the mesh, whose groups use the current device
shape = (1, int(os.environ["WORLD_SIZE"]))
mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))

torch.manual_seed(0)  # equal on every rank; each takes its slices
options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
up = torch.randn(INNER_SIZE, HIDDEN_SIZE, **options) / HIDDEN_SIZE**0.5
down = torch.randn(HIDDEN_SIZE, INNER_SIZE, **options) / INNER_SIZE**0.5
norm = torch.randn(HIDDEN_SIZE, **options)
normed, residual = torch.randn(2, NUM_TOKENS, HIDDEN_SIZE, **options)
mlp = Mlp(mesh["tp"], up, down, norm)

# Results carry no gradient, and Parameters ask for one. Without this the call raises an error.
with torch.no_grad():
    actual = mlp(normed, residual)

# The whole MLP on one rank. Its sums have a different order, so it agrees up to rounding.
total = residual + F.linear(F.silu(F.linear(normed, up)), down)
expected = (F.rms_norm(total, (HIDDEN_SIZE,), norm, EPS), total)
torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.05)

dist.barrier()  # every rank has passed its checks
if dist.get_rank() == 0:
    print(f"OK: {mesh['tp'].size()} ranks on {device.type} agree with the whole module in PyTorch")
dist.destroy_process_group()  # also closes the communicator
