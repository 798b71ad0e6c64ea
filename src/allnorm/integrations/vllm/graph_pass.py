"""Fuses the graphs that vLLM compiles. Import this module only where vLLM runs: it imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass
from vllm.distributed.parallel_state import get_tp_group

import allnorm
import allnorm.compile
from allnorm.compile import FusionReport
from allnorm.compile.agreement import decides_elsewhere
from allnorm.core.verdicts import Answer
from allnorm.errors import UnsupportedError
from allnorm.integrations.engines import in_words
from allnorm.integrations.vllm import engine, norms, qk_norm, quants

_OPERATOR = "vllm::all_reduce"


class AllnormFusionPass(VllmInductorPass):
    """A pass that fuses the reductions over the tensor-parallel group, for every batch size.

    The communicator is not an attribute of the pass, because Inductor copies passes.
    """

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """Returns whether the engine has a communicator; batch sizes do not matter."""
        return engine.communicator() is not None

    @VllmInductorPass.time_and_log
    def __call__(self, graph: fx.Graph) -> None:
        """Fuses a graph if all ranks that compile it can; otherwise leaves it unchanged.

        Collective among the ranks that compile it. Waits for a limited time: see
        `allnorm.core.verdicts`.

        Raises:
            AllnormError: this rank cannot fuse the graph, but its peers have fused it already.
        """
        communicator, verdicts = engine.communicator(), engine.STATE.verdicts
        if communicator is None or verdicts is None:
            return
        engine.STATE.graphs += 1
        reductions = _reductions(graph)
        saved, report = None, FusionReport()
        try:
            saved = _append(fx.Graph(), graph)
            report = _fuse(graph, communicator)
            # The parts of the fused calls that must be equal on all ranks.
            parts = (f"{site.numerics} {site.quant} {site.boundary}" for site in report.sites)
            made = "; ".join(parts)
            answer = Answer(result=made)
        except Exception as error:  # noqa: BLE001 - sent to all ranks, so none fuses
            answer = Answer(obstacle=in_words(error))
        # A graph without reductions makes no fused call, so ranks may handle it differently.
        reason = verdicts.decide(reductions, answer) if reductions else answer.obstacle
        if reason:
            if saved is not None:
                for node in reversed(list(graph.nodes)):
                    graph.erase_node(node)
                _append(graph, saved)
            engine.runs_unfused(reason)
        else:
            engine.STATE.reports.append(report)

    def uuid(self) -> str:
        """Returns the cache key for Inductor.

        The key differs between ranks, because a rank that used a peer's cached code would not take
        part in the verdict.
        """
        return f"{engine.key()} rank {get_tp_group().rank_in_group}"


def _fuse(graph: fx.Graph, communicator: allnorm.Communicator) -> FusionReport:
    module = graph.owning_module
    if module is None:
        raise UnsupportedError("the graph does not belong to a module")
    group = get_tp_group().unique_name
    with decides_elsewhere():
        report = allnorm.compile.fuse(
            module,
            None,
            communicator,
            all_reduce_ops=[_OPERATOR],
            all_reduce_groups=[group],
            decompositions=norms.decompositions() | quants.decompositions(),
            approximate_quant=True,
        )
    return FusionReport([*qk_norm.replace(graph, communicator, group), *report.sites])


def _reductions(graph: fx.Graph) -> str:
    """Returns a key for the graph that is equal on all ranks: a description of its reductions.

    Other parts may differ between ranks, such as constants, or a bias that only one rank adds.
    """

    def described(value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return "a sum"
        sizes = [size if isinstance(size, int) else "any" for size in value.shape]
        return f"{value.dtype} {sizes}"

    name = _OPERATOR.replace("::", ".") + "."
    found = [node for node in graph.nodes if f"{node.target}.".startswith(name)]
    results = [node.meta.get("val") for node in found]
    results += [each for node in qk_norm.find(graph) for each in node.meta["val"]]
    return "; ".join(map(described, results))


def _append(graph: fx.Graph, other: fx.Graph) -> fx.Graph:
    """Appends copies of all nodes of `other` to `graph`, with their metadata; returns `graph`."""
    copied: Any = graph.graph_copy(other, {}, return_output_node=True)
    if copied is not None:
        result, output = copied
        graph.output(result).meta.update(output.meta)
    return graph
