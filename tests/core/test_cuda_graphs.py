"""Tests CUDA graphs replayed with new inputs, in any order, with eager calls in between."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from rank_helpers import Case, assert_ranks_agree, comm, device, on

import allnorm
from allnorm import reference
from allnorm.testing import assert_same_bits


def capture(call: Callable[[], Any], warmups: int = 0) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


# Maps the predecessor's port and the edge type (1: programmatic) to when a node begins.
_BEGINS = {(0, 0): "ended", (1, 1): "triggered", (2, 1): "begun"}


class KernelNode(NamedTuple):
    """A kernel of a captured graph.

    Attributes:
        name: the kernel's name.
        before: handles of the preceding nodes.
        begins: what the preceding kernel must have done before this one can begin: "ended",
            "triggered" its dependents, or "begun". With multiple predecessors, the one that
            triggers counts.
    """

    name: str
    before: tuple[int, ...]
    begins: str


def kernel_nodes(graph: torch.cuda.CUDAGraph) -> dict[int, KernelNode]:
    """Returns a graph's kernels by handle, in capture order. Requires keep_graph=True."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def ask(function: str, *arguments: Any) -> None:
        error = getattr(cuda, function)(*arguments)
        assert error == 0, f"{function}: {error}"

    def handles(function: str, of: int, *more: Any) -> tuple[list[int], Any]:
        count = ctypes.c_size_t()
        ask(function, ctypes.c_void_p(of), None, *(None for _ in more), ctypes.byref(count))
        found = (ctypes.c_void_p * count.value)()
        others = [kind(count.value) for kind in more]
        if count.value:
            ask(function, ctypes.c_void_p(of), found, *others, ctypes.byref(count))
        return [int(handle or 0) for handle in found], others

    nodes = {}
    for node in handles("cuGraphGetNodes", graph.raw_cuda_graph())[0]:
        kind = ctypes.c_int()
        ask("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value != 0:
            continue
        params = (ctypes.c_void_p * 16)()  # the function comes first
        ask("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), params)
        name = ctypes.c_char_p()
        ask("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(params[0]))
        # An edge has 8 bytes: the predecessor's port, this node's port, the edge type.
        before, (edges,) = handles(
            "cuGraphNodeGetDependencies_v2", node, lambda n: ctypes.create_string_buffer(8 * n + 1)
        )
        found = {_BEGINS[edges.raw[8 * i], edges.raw[8 * i + 2]] for i in range(len(before))}
        begins = next((each for each in ("triggered", "begun") if each in found), "ended")
        nodes[node] = KernelNode((name.value or b"").decode(), tuple(before), begins)
    return nodes


def snapshot(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Copies a tensor with its whole storage, including memory after the last row."""
    if tensor is None:
        return None
    storage = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


class Site:
    """A captured call with static inputs, which are overwritten before each replay."""

    def __init__(self, c: allnorm.Communicator, case: Case, warmups: int = 0) -> None:
        self.c, self.case = c, case
        self.x, self.arguments = case.x(c.rank), case.call_arguments(c)
        self.graph, self.results = capture(
            lambda: case.method(c)(self.x, **self.arguments), warmups
        )

    def replay(self, call: int) -> tuple[Case, *tuple[torch.Tensor | None, ...]]:
        """Replays with the inputs of `call`; copies the results without synchronizing."""
        case = self.case.but(call=call)
        self.x.copy_(case.x(self.c.rank))
        if case.residual:
            self.arguments["residual"].copy_(case.call_arguments(self.c)["residual"])
        self.graph.replay()
        return case, *map(snapshot, self.results)


@on(gpu=range(2, 9))
def test_replay_with_new_inputs(rank: int, world_size: int) -> None:
    c = comm()
    for algorithm in ("one_shot", "two_shot", "auto"):
        for case in (
            Case((1, 4096), algorithm=algorithm),
            Case((33, 2880), algorithm=algorithm, numerics="vllm", residual=False),
            Case((300, 1024), torch.float32, algorithm=algorithm),
        ):
            site = Site(c, case, warmups=algorithm == "auto")
            pending = []
            for call in range(8):
                pending.append(site.replay(call))
                if call % 3 == 1:  # an eager call between the replays
                    eager = Case((5, 512), call=call)
                    pending.append((eager, *eager.run(c)))
            for ran, normed, total in pending:
                ran.compare(c, normed, total)
                assert_ranks_agree(c, normed, total)


@on(gpu=[1, 2])
def test_calls_begin_early(rank: int, world_size: int) -> None:
    """Checks that calls begin before the preceding kernel has ended.

    After an allnorm call or a dependent launch, a call is itself a dependent launch.
    """
    c = comm()
    residual, weight = (torch.zeros(n, 4096, dtype=torch.bfloat16, device="cuda") for n in (16, 1))

    def norm(x: torch.Tensor) -> torch.Tensor:
        return c.all_reduce_add_rms_norm(x, residual, weight[0], 1e-6)[0]

    def local(x: torch.Tensor) -> torch.Tensor:
        return allnorm.add_rms_norm(x, residual, weight[0], 1e-6)[0]

    def layers() -> None:
        for columns in (2048, 7168):  # on an H100, cuBLAS splits only the second GEMM
            x = torch.zeros(16, columns, dtype=torch.bfloat16, device="cuda")
            w = torch.zeros(4096, columns, dtype=torch.bfloat16, device="cuda")
            for call in (norm, local):
                call(torch.relu(call(call(x @ w.t()))))

    layers()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        layers()
    nodes = kernel_nodes(graph)
    calls = [node for node in nodes.values() if "allnorm" in node.name]
    assert len(calls) == 12
    begun = 0
    for node in calls:
        (before,) = (nodes[handle] for handle in node.before)
        triggers = "allnorm" in before.name or before.begins == "triggered"
        wanted = "triggered" if triggers else "begun"
        assert node.begins == wanted, f"{node.name} after {before.name}: {node.begins}"
        begun += not triggers
    assert 4 <= begun <= 8  # after relu, and after GEMMs that are not split
    assert all(n.begins != "begun" for n in nodes.values() if "allnorm" not in n.name)
    del graph


@on(gpu=range(2, 9))
def test_replays_of_quantized_and_sharded_calls(rank: int, world_size: int) -> None:
    """Replays quantizing and sharded calls, with eager calls of other shapes in between."""
    c = comm()
    sites = [
        Site(c, Case((tokens, 2944), quant=spec, sharded=sharded, algorithm=algorithm), warmups=1)
        for tokens, spec in (
            (1, allnorm.Fp8PerGroup(128, "column_major_tma", "ue8m0_packed")),
            (37, allnorm.Fp8PerGroup(128, "column_major_tma")),
            (130, allnorm.Fp8PerToken()),
            (5, allnorm.Fp8PerTensor(torch.tensor([0.02]))),
            (66, None),
        )
        for sharded, algorithm in ((False, "one_shot"), (False, "two_shot"), (True, "auto"))
    ]
    draw, pending = random.Random(2), []
    for call in range(60):
        pending.append(draw.choice(sites).replay(call))
        if call % 4 == 1:
            eager = Case((9, 512), quant=allnorm.Fp8PerGroup(64), sharded=call % 8 == 1, call=call)
            pending.append((eager, *eager.run(c)))
    for ran, *results in pending:
        ran.compare(c, *results)
        assert_ranks_agree(c, *ran.agreed(results))


@on(gpu=(2, 3, 8))
def test_a_given_scale_may_change_between_replays(rank: int, world_size: int) -> None:
    """Checks that a replay reads the current scale. The graph also gathers a sharded residual."""
    c = comm()
    case = Case((21, 1024), sharded=True)
    x, a = case.x(rank), case.call_arguments(c)
    scale = torch.ones(1, device=c.device)
    a["quant"] = allnorm.Fp8PerTensor(scale)

    def model() -> tuple[torch.Tensor, torch.Tensor]:
        out = c.all_reduce_add_rms_norm_quant(x, **a)
        return out.quantized, c.all_gather_rows(out.residual, 21)

    model()
    graph, results = capture(model)
    for value in (0.5, 0.01, 3.0):
        scale.fill_(value)
        graph.replay()
        want = reference.all_reduce_add_rms_norm_quant(
            case.xs(world_size), quant=a["quant"], **case.norm_arguments()
        )
        assert_same_bits(results[0], want.quantized, f"divided by {value}")
        assert_same_bits(results[1], want.residual, "the gathered residual")


@on(gpu=(2, 8))
def test_first_replay_and_replay_after_idling(rank: int, world_size: int) -> None:
    """Tests incidents 7 and 13: no earlier eager call, and ranks that idle between replays."""
    with allnorm.Communicator(device=device()) as c:
        site = Site(c, Case((4, 4096)))
        for call, idle_seconds in enumerate((0.0, 1.0, 0.0)):
            time.sleep(idle_seconds + 0.2 * rank)
            case, normed, total = site.replay(call)
            case.compare(c, normed, total)


@on(gpu=(2, 4, 8))
@pytest.mark.parametrize("early_trigger", [True, False], ids=["early", "late"])
def test_chains_of_dependent_calls(rank: int, world_size: int, early_trigger: bool) -> None:
    """Each call reads the previous call's results, so an early read shows (incident 15)."""
    c, length = comm(early_trigger=early_trigger), 50
    shapes = (("one_shot", 1), ("one_shot", 16), ("two_shot", 64), ("two_shot", 300), ("auto", 3))
    for algorithm, tokens in shapes:
        start = Case((tokens, 4096), algorithm=algorithm)
        x, a = start.x(rank), start.norm_arguments()
        weight = a["weight"]

        def chain(
            x: torch.Tensor = x,
            residual: torch.Tensor = a["residual"],
            weight: torch.Tensor = weight,
            algorithm: str = algorithm,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            for _ in range(length):
                x, residual = c.all_reduce_add_rms_norm(
                    x, residual, weight, 1e-6, algorithm=algorithm
                )
            return x, residual

        graph, results = capture(chain)
        graph.replay()
        graph.replay()
        xs, residual = start.xs(world_size), start.residual_tensor()
        for _ in range(length):
            normed, residual = reference.all_reduce_add_rms_norm(xs, residual, weight, 1e-6)
            xs = [normed] * world_size
        assert_same_bits(results[0], normed, f"normed after {length} calls")
        assert_same_bits(results[1], residual, f"residual_out after {length} calls")
        eager = chain()
        assert_same_bits(eager[0], normed, "eager chain")
        assert_same_bits(eager[1], residual, "eager chain")


@on(gpu=(2, 8))
def test_changing_streams(rank: int, world_size: int) -> None:
    """Checks that a communicator orders its calls on different streams (incident 11)."""
    c = comm()
    side = [torch.cuda.Stream() for _ in range(2)]
    pending = []
    for call in range(30):
        case = Case((3, 2048), call=call)
        stream = side[call % 2] if call % 3 else torch.cuda.default_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x, a = case.x(rank), case.norm_arguments()
            pending.append((case, *c.all_reduce_add_rms_norm(x, **a)))
    torch.cuda.synchronize()
    for case, normed, total in pending:
        case.compare(c, normed, total)


@on(gpu=(2, 4))
def test_graphs_after_close(rank: int, world_size: int) -> None:
    """Checks that graphs' memory stays valid while other communicators come and go."""
    for _ in range(3):
        c = allnorm.Communicator(timeout=20, workspace_bytes=8 << 20)
        sites = [
            Site(c, Case((tokens, 4096), algorithm=algorithm))
            for tokens, algorithm in ((1, "one_shot"), (130, "two_shot"))
        ]
        c.close()
        with allnorm.Communicator(workspace_bytes=8 << 20) as other:
            other.all_reduce(sites[0].x)
        for call in range(3):
            for site in sites:
                case, *results = site.replay(call)
                torch.cuda.synchronize()
                case.compare(c, *results)


@on(gpu=[2])
@pytest.mark.own_gpus  # NCCL broadcasts the weight
def test_reduce_overhead(rank: int, world_size: int) -> None:
    """Captures all calls in torch.compile's CUDA graph trees; replays them with new inputs."""
    import torch._dynamo.utils as dynamo_utils

    torch._dynamo.reset()
    torch._inductor.config.triton.slow_path_cudagraph_asserts = True
    weight = torch.randn(2880, device="cuda").bfloat16()
    dist.broadcast(weight, 0)
    with allnorm.Communicator(device=device(), timeout=60) as c, torch.no_grad():

        def layer(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            normed, residual = c.all_reduce_add_rms_norm(x * 2, residual, weight, 1e-6)
            return normed * 2, residual

        def inputs(tokens: int, call: int) -> tuple[torch.Tensor, torch.Tensor]:
            own, common = (torch.Generator("cuda").manual_seed(s) for s in (8 * call + rank, call))
            shape = tokens, weight.shape[0]
            x = torch.randn(shape, device="cuda", generator=own).bfloat16()
            return x, torch.randn(shape, device="cuda", generator=common).bfloat16()

        compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True, dynamic=False)
        for call in range(24):
            given = inputs((1, 7, 64)[call % 3], call)
            torch.compiler.cudagraph_mark_step_begin()
            results = [t.clone() for t in compiled(*given)]
            for name, result, wanted in zip("xr", results, layer(*given), strict=True):
                assert_same_bits(result, wanted, f"{name} of call {call}")
            assert_ranks_agree(c, *results)
        assert dynamo_utils.counters["inductor"]["cudagraph_skips"] == 0
        calls = c.stats().calls
        assert calls["one_shot"] + calls["two_shot"] >= 48, calls


@on(gpu=[2])
def test_no_communicator_is_created_during_a_capture(rank: int, world_size: int) -> None:
    x = torch.full((4, 2880), float(rank + 1), device="cuda")
    graph = torch.cuda.CUDAGraph()
    message = "before the capture begins"
    with pytest.raises(allnorm.AllnormError, match=message), torch.cuda.graph(graph):
        allnorm.Communicator(device=device(), timeout=60)
    torch.cuda.synchronize()
    with allnorm.Communicator(device=device(), timeout=60) as c:
        assert_same_bits(c.all_reduce(x), torch.full_like(x, world_size * (world_size + 1) / 2), "")
