"""Stands where vLLM's pass manager looks for its own all-reduce fusion."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import fx

import allnorm
import allnorm.compile
from allnorm.integrations.vllm import engine, switch
from allnorm.integrations.vllm.norms import decompositions

NAME = "AllReduceFusionPass"
_OPERATOR = "vllm::all_reduce"


def patch_pass_manager(module: ModuleType) -> None:
    """Replaces the pass by a choice between it and allnorm's. Idempotent."""
    stock = getattr(module, NAME, None)  # vLLM imports it on CUDA only
    if stock is not None and not isinstance(stock, _Choice):
        setattr(module, NAME, _Choice(stock))


class _Choice:
    """Makes the pass: allnorm's, vLLM's own where allnorm cannot, or none where neither would."""

    def __init__(self, stock: Callable[[Any], Any]) -> None:
        self.stock = stock

    def __call__(self, vllm_config: Any) -> Any:
        outcome = engine.STATE.outcome
        if outcome is not None and outcome.communicator is not None:
            return _pass_class()(vllm_config, outcome.communicator)
        if switch.stock_default(vllm_config):
            return self.stock(vllm_config)
        return _pass_class()(vllm_config, None)


@functools.cache
def _pass_class() -> Any:
    """The class; made late, because its base is vLLM's."""
    from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass
    from vllm.distributed.parallel_state import get_tp_group

    class AllnormFusionPass(VllmInductorPass):
        """Fuses the reductions over the tensor-parallel group; without a communicator, none."""

        def __init__(self, vllm_config: Any, communicator: allnorm.Communicator | None) -> None:
            super().__init__(vllm_config)
            self.communicator = communicator

        def is_applicable_for_range(self, compile_range: Any) -> bool:
            return self.communicator is not None  # at every size

        @VllmInductorPass.time_and_log
        def __call__(self, graph: fx.Graph) -> None:
            if self.communicator is None:
                return
            saved = _copy(graph)
            module = graph.owning_module
            assert module is not None  # of a graph that Inductor compiles
            try:
                report = allnorm.compile.fuse(
                    module,
                    None,
                    self.communicator,
                    all_reduce_ops=[_OPERATOR],
                    all_reduce_groups=[get_tp_group().unique_name],
                    decompositions=decompositions(),
                )
            except Exception as error:  # noqa: BLE001 - every rank compiles the same graph
                _restore(graph, saved)
                engine.warn(f"a graph is not fused: {type(error).__name__}: {error}")
            else:
                engine.STATE.reports.append(report)

        def uuid(self) -> str:
            return engine.key()

    return AllnormFusionPass


def _copy(graph: fx.Graph) -> fx.Graph:
    saved = fx.Graph()
    _append(saved, graph)
    return saved


def _restore(graph: fx.Graph, saved: fx.Graph) -> None:
    """Puts a graph back as it was; the object stays the same."""
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    _append(graph, saved)


def _append(graph: fx.Graph, other: fx.Graph) -> None:
    """Copies all nodes of another graph, with what is known of them."""
    copied: Any = graph.graph_copy(other, {}, return_output_node=True)
    if copied is not None:
        result, output = copied
        graph.output(result).meta.update(output.meta)
