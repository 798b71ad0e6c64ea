"""Replaces the operator with which vLLM norms q and k of MiniMax-M2 over the ranks.

Its rows are spread over the ranks, and it reduces their mean squares itself, so graphs show no
reduction. vLLM computes `x * rsqrt(mean + eps) * weight` in float32 and rounds once, with its own
kernel or in PyTorch: numerics "rounded".
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import allnorm
from allnorm.compile import Site
from allnorm.compile.shapes import FLOATS
from allnorm.compile.vocabulary import qualified_name, schema_of

OPERATOR = "vllm::minimax_qk_norm_fusion"
_PARAMETERS = (
    *("qkv", "q_weight", "k_weight", "q_size", "kv_size", "tp_rank", "tp_world", "eps"),
    "workspace",
)


def replace(graph: fx.Graph, communicator: allnorm.Communicator, group: str) -> list[Site]:
    """Replaces each such operator with a call of `rms_norm_sharded`. Returns the report's entries.

    The graph's nodes have metadata ("val"). `group` is the name of the tensor-parallel group.
    """
    sites = []
    for node in find(graph):
        reason = _replace(graph, node, communicator)
        q, _ = node.meta["val"]
        shape = tuple(size if isinstance(size, int) else str(size) for size in q.shape)
        fused = {"numerics": "rounded", "boundary": "rows over ranks of 2 tensors"}
        more: dict[str, Any] = {"reason": reason} if reason else fused
        sites.append(Site((node.name,), shape, q.dtype, group, **more))
    return sites


def find(graph: fx.Graph) -> list[fx.Node]:
    """Returns the nodes that call vLLM's operator, in graph order."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return [node for node in calls if qualified_name(node.target) == OPERATOR]


def _replace(graph: fx.Graph, node: fx.Node, communicator: allnorm.Communicator) -> str:
    """Replaces one node; returns why that is impossible, without any change, or ""."""
    names = [each.name for each in schema_of(node.target).arguments]
    if tuple(names) != _PARAMETERS:
        return f"{OPERATOR} takes ({', '.join(names)}): expected ({', '.join(_PARAMETERS)})"
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    tensors = [given[name] for name in _PARAMETERS[:3]]
    qkv, *weights = (tensor.meta["val"] for tensor in tensors)
    if given["tp_world"] != communicator.world_size:
        return f"it norms rows over {given['tp_world']} ranks, not {communicator.world_size}"
    dtypes = {weight.dtype for weight in weights}
    if qkv.dtype not in FLOATS or not dtypes <= {qkv.dtype, torch.float32}:
        return f"it norms rows in {qkv.dtype} with weights in {', '.join(map(str, dtypes))}"

    def add(target: Callable[..., Any], *args: Any) -> fx.Node:
        with graph.inserting_before(node):
            made = graph.call_function(target, args)
        with qkv.fake_mode:
            made.meta["val"] = target(*fx.node.map_arg(args, lambda each: each.meta["val"]))
        return made

    slices, end = [], 0
    for size in (given["q_size"], given["kv_size"]):
        start, end = end, end + size
        slices.append(add(torch.ops.aten.slice.Tensor, tensors[0], 1, start, end))
    # A bias of -0.0 changes no weight, not even one of -0.0.
    arguments = (slices, tensors[1:], given["eps"], -0.0, "rounded", communicator.name)
    call = add(torch.ops.allnorm.rms_norm_sharded.default, *arguments)
    results = [add(operator.getitem, call, index) for index in range(2)]
    for user in list(node.users):
        index: Any = user.args[1]
        user.replace_all_uses_with(results[index])
        graph.erase_node(user)
    graph.erase_node(node)
    return ""
