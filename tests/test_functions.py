"""Tests calls as functions, and a group's communicator: made on demand, closed with its group."""

from __future__ import annotations

import gc
import os
import pathlib
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from limits import HANG_SECONDS
from rank_helpers import Case, comm, message_of, on
from torch.distributed.device_mesh import init_device_mesh

import allnorm
from allnorm import reference
from allnorm.testing import assert_same_bits, run_ranks
from allnorm.testing.rank import device

CASES = (
    Case((3, 120)),
    Case((5, 64), sharded=True, numerics="vllm"),
    Case((4, 128), quant=allnorm.Fp8PerGroup(32), return_normed=True, residual=False),
)


@on(cpu=(1, 2, 3), gpu=(2,))
def test_functions(rank: int, world_size: int) -> None:
    c = allnorm.Communicator.for_group(device=device())
    for _ in range(4):
        for case in CASES:
            arguments = case.call_arguments(c)
            name = case.method(c).__name__
            case.compare(c, *getattr(allnorm, name)(case.x(rank), **arguments))
            given = {"out": case.x(rank)} if case.quant is None else {"normed_out": case.x(rank)}
            results = getattr(allnorm, name)(case.x(rank), **arguments, **given)
            case.compare(c, *results)
            assert any(result is value for result in results for value in given.values())
    case = CASES[0]
    whole = allnorm.all_reduce(case.x(rank), algorithm="two_shot")
    assert_same_bits(whole, reference.all_reduce(case.xs(world_size)), "all_reduce")
    lo, hi = allnorm.row_shard(3)
    assert (lo, hi) == c.row_shard(3)
    assert_same_bits(allnorm.all_gather_rows(whole[lo:hi], 3), whole, "all_gather_rows")
    assert "num_tokens=-1" in message_of(ValueError, lambda: allnorm.row_shard(-1))
    assert "expected a torch.Tensor" in message_of(TypeError, lambda: allnorm.all_reduce([1.0]))


@on(cpu=(2,))
def test_compiled_functions(rank: int, world_size: int) -> None:
    """Compiles one graph, which looks up the communicator of its group when it runs."""
    group = dist.new_group(list(range(world_size)))
    case = Case((3, 64), sharded=True)
    c = comm()
    arguments = case.call_arguments(c)

    def program(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        normed, shard = allnorm.all_reduce_add_rms_norm(
            x, residual, weight, case.eps, residual_sharded=True, group=group
        )
        return normed, shard, allnorm.all_gather_rows(shard, x.shape[0], group=group)

    for backend in ("eager", "aot_eager", "inductor"):
        torch._dynamo.reset()
        with torch.no_grad():
            fast = torch.compile(program, backend=backend, fullgraph=True)
            results = fast(case.x(rank), arguments["residual"], arguments["weight"])
        case.compare(c, *results[:2])
        assert_same_bits(results[2], case.expected(world_size)[1], "gathered")
    made = allnorm.Communicator.for_group(group, device())
    assert made.name == group.group_name, "the graph made it"
    made.close()


@pytest.mark.parametrize("closes", [False, True], ids=["open", "closed"])
@on(cpu=(2,), gpu=(2,))
def test_compiled_calls_of_a_group_with_two_communicators(
    rank: int, world_size: int, closes: bool
) -> None:
    """A traced call uses the group's own communicator, even if the group has or had others."""
    group = dist.new_group(list(range(world_size)))
    case = Case((3, 64))
    other = allnorm.Communicator(group, device(), numerics="unrounded")
    if closes:
        other.close()
    residual, weight = case.call_arguments(comm())["residual"], case.weight()
    torch._dynamo.reset()
    with torch.no_grad():
        fast = torch.compile(
            lambda x: allnorm.all_reduce_add_rms_norm(x, residual, weight, case.eps, group=group),
            backend="eager",
            fullgraph=True,
        )
        case.compare(comm(), *fast(case.x(rank)))
    assert allnorm.Communicator.for_group(group, device()).name == group.group_name
    allnorm.Communicator.for_group(group, device()).close()
    other.close()


@on(cpu=(1, 2), gpu=(2,))
def test_for_group(rank: int, world_size: int) -> None:
    for_group = allnorm.Communicator.for_group
    group = dist.new_group(list(range(world_size)))
    first = for_group(group, device())
    assert for_group(group, device()) is first
    assert for_group(group, str(device())) is first
    assert allnorm.communicator.communicator(group.group_name) is first
    other = allnorm.Communicator(group, device())
    assert first.name == group.group_name
    assert other.name == f"{group.group_name}#2"
    assert for_group(group, device()) is first
    Case().check(first)
    Case().check(other)
    first.close()
    again = for_group(group, device())
    assert again is not first
    assert again.name == group.group_name
    Case().check(again)
    # The operators find the group's current communicator by the group's name.
    x = Case().x(rank)
    summed = torch.ops.allnorm.all_reduce(x, group.group_name)
    assert_same_bits(summed, reference.all_reduce(Case().xs(world_size)), "by the group's name")
    other.close()
    text = message_of(
        allnorm.CommunicatorClosedError, lambda: torch.ops.allnorm.all_reduce(x, other.name)
    )
    assert f"{other.name!r}: it was closed" in text
    again.close()
    text = message_of(
        allnorm.CommunicatorClosedError, lambda: torch.ops.allnorm.all_reduce(x, "nobody")
    )
    assert "'nobody'" in text


@on(cpu=(1, 2), gpu=(2,))
def test_communicators_end_with_their_groups(rank: int, world_size: int) -> None:
    """A group's communicator is closed with the group, and a new group gets a new one."""
    kept = []
    for _ in range(2):
        group = dist.new_group(list(range(world_size)))
        made = allnorm.Communicator.for_group(group, device())
        Case().check(made)
        found = weakref.ref(made)
        del made
        gc.collect()
        assert found() is not None, "the group keeps its communicator alive"
        kept.append(found())
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert kept[-1].is_closed
        assert kept[-1].group is None
    assert kept[0] is not kept[1]


@on(cpu=(2,), gpu=(2,))
def test_device_meshes(rank: int, world_size: int) -> None:
    kind = device().type
    mesh = init_device_mesh(kind, (world_size,))
    with allnorm.Communicator(mesh, device()) as c:
        assert c.group is mesh.get_group()
        Case().check(c)
    assert_same_bits(
        allnorm.all_reduce(Case().x(rank), group=mesh),
        reference.all_reduce(Case().xs(world_size)),
        "over a mesh",
    )
    both = init_device_mesh(kind, (1, world_size), mesh_dim_names=("dp", "tp"))
    allnorm.all_reduce(Case().x(rank), group=both["tp"])
    text = message_of(ValueError, lambda: allnorm.Communicator(both, device()))
    assert "2 dimensions, ('dp', 'tp')" in text
    assert "mesh['tp']" in text


def leave_it_open(rank: int, world_size: int) -> int:
    allnorm.all_reduce(Case((2, 64)).x(rank))
    return rank


PROGRAM = """
import torch, torch.distributed as dist, allnorm
if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(2, 64)
    allnorm.all_reduce_add_rms_norm(x, None, x[0], 1e-6)
    if {destroys}:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        allnorm.all_reduce(x)
    print("done")
"""


@pytest.mark.parametrize("destroys", [False, True])
def test_a_program_may_end_without_closing(tmp_path: pathlib.Path, destroys: bool) -> None:
    code = PROGRAM.format(destroys=destroys)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
        cwd=tmp_path,  # outside the tree, so that PYTHONPATH decides which allnorm is imported
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(allnorm.__file__).parent.parent)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert "Error" not in done.stderr
    assert run_ranks(leave_it_open, 2, device="cpu") == [0, 1]
