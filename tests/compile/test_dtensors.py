"""Tests that graphs with DTensor weights fuse only if they use whole, plain tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_helpers import comm, destroy_groups, on
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.fx import symbolic_trace

from allnorm.compile import fuse
from allnorm.testing import assert_same_bits

from .helpers import EPS, HIDDEN, Inputs, check_fused, check_missed, llama, reduce

ROW = {"direct": None, "module": None, "to_local": "rounded", "_local_tensor": "rounded"}
ROW |= {"full_tensor": "rounded", "written out": "transformers"}


class Block(torch.nn.Module):
    """A reduction, a residual and a norm whose weight is a DTensor."""

    def __init__(self, weight: torch.Tensor, how: str, *, in_place: bool) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(HIDDEN, EPS, dtype=torch.bfloat16, device="meta")
        self.norm.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.how, self.in_place = how, in_place

    def forward(self, x, residual):
        x = x * 2
        x = x.copy_(reduce(x)) if self.in_place else reduce(x)
        total, weight = x + residual, self.norm.weight
        if self.how == "module":
            return self.norm(total), total
        if self.how == "written out":
            return llama(total, weight.to_local()), total
        if self.how == "_local_tensor":
            weight = weight._local_tensor
        elif self.how != "direct":
            weight = getattr(weight, self.how)()
        return F.rms_norm(total, (HIDDEN,), weight, EPS), total


@on(cpu=(2,))
@pytest.mark.parametrize("in_place", [False, True], ids=["functional", "in place"])
@pytest.mark.parametrize("how", ROW)
def test_weights(rank: int, world_size: int, how: str, in_place: bool) -> None:
    x, residual, weight = Inputs().make(rank)
    mesh = init_device_mesh("cpu", (world_size,))
    for placement in (Replicate(), Shard(0)):
        block = Block(distribute_tensor(weight, mesh, [placement]), how, in_place=in_place)
        module = symbolic_trace(block)
        is_whole = isinstance(placement, Replicate) or how == "full_tensor"
        if in_place:
            reason = "weight is a DTensor: pass its whole local tensor"
            check_missed(module, [x, residual], reason, communicator=comm())
            continue
        if ROW[how] is not None and is_whole:
            check_fused(module, [x, residual], ROW[how], communicator=comm())
            continue
        if ROW[how] is not None:
            continue  # the unfused graph fails too: a weight's shard has the wrong size
        remedy = "to_local" if is_whole else "full_tensor"
        reason = rf"weight, a DTensor with placements .*weight\.{remedy}\(\)"
        check_missed(module, [x, residual], reason, communicator=comm())
        with torch.no_grad(), implicit_replication():
            module(x, residual)
    destroy_groups(rank, world_size)


class Calls(torch.nn.Module):
    """A module that calls a graph: FSDP cannot wrap a GraphModule."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, given):
        return self.module(*given)


@on(cpu=(2,))
def test_gathered_weights(rank: int, world_size: int) -> None:
    """Tests a graph that is fused while its FSDP weights are gathered, and gathers them to run."""
    x, residual, weight = Inputs().make(rank)
    mesh = init_device_mesh("cpu", (world_size,))
    block = Block(weight, "module", in_place=False)
    with torch.no_grad():
        expected = block(x, residual)
    module = symbolic_trace(block)
    outer: Any = fully_shard(torch.nn.Sequential(Calls(module)), mesh=mesh)
    check_missed(module, [x, residual], "Shard.*gathered", communicator=comm())
    outer.unshard()
    assert fuse(module, [x, residual], comm()).fused
    for _ in range(2):
        outer.reshard()
        with torch.no_grad():
            actual = outer((x, residual))
        torch.testing.assert_close(actual[0], expected[0], rtol=2e-2, atol=2e-2)
        assert_same_bits(actual[1], expected[1], "sum")
    destroy_groups(rank, world_size)


@on(cpu=(2,))
def test_partials(rank: int, world_size: int) -> None:
    """Tests that nothing fuses if the reduced tensor or the residual is a DTensor."""
    x, residual, weight = Inputs().make(rank)
    mesh = init_device_mesh("cpu", (world_size,))
    module = symbolic_trace(Block(weight, "module", in_place=False))
    whole = distribute_tensor(residual, mesh, [Replicate()])
    check_missed(module, [x, whole], "add computes with residual, a DTensor", communicator=comm())
    check_missed(module, [whole, residual], "it reduces mul, a DTensor", communicator=comm())
    destroy_groups(rank, world_size)
