"""allnorm's pass, as vLLM's pass manager runs them. Imports vLLM; imported where vLLM runs."""

from __future__ import annotations

from typing import Any

from torch import fx
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass
from vllm.distributed.parallel_state import get_tp_group

import allnorm.compile
from allnorm.integrations.vllm import engine, norms, quants

_OPERATOR = "vllm::all_reduce"


class AllnormFusionPass(VllmInductorPass):
    """Fuses the reductions over the tensor-parallel group, at every size.

    Without a communicator it does nothing. It is not held here: Inductor copies its passes.
    """

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """Whether it runs for batches of these sizes."""
        return engine.communicator() is not None

    @VllmInductorPass.time_and_log
    def __call__(self, graph: fx.Graph) -> None:
        """Fuses what it can; leaves the graph as it was if that fails."""
        module, communicator = graph.owning_module, engine.communicator()
        if module is None or communicator is None:
            return
        saved = fx.Graph()
        _append(saved, graph)
        try:
            report = allnorm.compile.fuse(
                module,
                None,
                communicator,
                all_reduce_ops=[_OPERATOR],
                all_reduce_groups=[get_tp_group().unique_name],
                decompositions=norms.decompositions() | quants.decompositions(),
                approximate_quant=True,
            )
        except Exception as error:  # noqa: BLE001 - every rank compiles the same graph
            for node in reversed(list(graph.nodes)):
                graph.erase_node(node)
            _append(graph, saved)
            engine.warn(f"a graph is not fused: {type(error).__name__}: {error}")
        else:
            engine.STATE.reports.append(report)

    def uuid(self) -> str:
        """For Inductor's cache."""
        return engine.key()


def _append(graph: fx.Graph, other: fx.Graph) -> None:
    """Copies all nodes of another graph, with what is known of them."""
    copied: Any = graph.graph_copy(other, {}, return_output_node=True)
    if copied is not None:
        result, output = copied
        graph.output(result).meta.update(output.meta)
