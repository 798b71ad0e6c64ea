"""allnorm's pass, as vLLM's pass manager runs them. Imports vLLM; imported where vLLM runs."""

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
from allnorm.integrations.vllm import engine, norms, quants

_OPERATOR = "vllm::all_reduce"


class AllnormFusionPass(VllmInductorPass):
    """Fuses the reductions over the tensor-parallel group, at every size.

    Without a communicator it does nothing. It is not held here: Inductor copies its passes.
    """

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """Returns whether it runs for batches of these sizes."""
        return engine.communicator() is not None

    @VllmInductorPass.time_and_log
    def __call__(self, graph: fx.Graph) -> None:
        """Fuses what it can, if all ranks that compile this graph can; else leaves it as it was.

        Collective among these ranks, and bounded in time: see `allnorm.core.verdicts`.

        Raises:
            AllnormError: this rank cannot, and others have it fused already.
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
            answer = Answer(result=_in_words(report))
        except Exception as error:  # noqa: BLE001 - told to all ranks, which then go on without
            answer = Answer(obstacle=in_words(error))
        # Without reductions there is nothing that ranks could do differently, or wait in.
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
        """For Inductor's cache. No rank may take a peer's code: it would miss the verdict."""
        return f"{engine.key()} rank {get_tp_group().rank_in_group}"


def _fuse(graph: fx.Graph, communicator: allnorm.Communicator) -> FusionReport:
    module = graph.owning_module
    if module is None:
        raise UnsupportedError("the graph belongs to no module")
    with decides_elsewhere():
        return allnorm.compile.fuse(
            module,
            None,
            communicator,
            all_reduce_ops=[_OPERATOR],
            all_reduce_groups=[get_tp_group().unique_name],
            decompositions=norms.decompositions() | quants.decompositions(),
            approximate_quant=True,
        )


def _reductions(graph: fx.Graph) -> str:
    """What ranks know the graph by: its reductions, which are the same on all of them.

    The rest is not: constants differ, and one rank alone may add a bias.
    """
    name = _OPERATOR.replace("::", ".") + "."
    found = [node for node in graph.nodes if f"{node.target}.".startswith(name)]
    values = [node.meta.get("val") for node in found]
    return "; ".join(
        f"{value.dtype} {[size if isinstance(size, int) else 'any' for size in value.shape]}"
        if isinstance(value, torch.Tensor)
        else "a sum"
        for value in values
    )


def _in_words(report: FusionReport) -> str:
    """What was fused, by all that calls of two ranks must have in common."""
    return "; ".join(f"{site.numerics} {site.quant}" for site in report.sites)


def _append(graph: fx.Graph, other: fx.Graph) -> fx.Graph:
    """Copies all nodes of another graph, with what is known of them; returns the one with them."""
    copied: Any = graph.graph_copy(other, {}, return_output_node=True)
    if copied is not None:
        result, output = copied
        graph.output(result).meta.update(output.meta)
    return graph
