"""Functions that vllm_latency.py runs in vLLM's workers, as an extension of the worker class."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import weights


class WorkerTools:
    """A mixin for vLLM's worker (worker_extension_cls), imported from PYTHONPATH."""

    # vLLM's worker has these.
    get_model: Callable[[], torch.nn.Module]
    vllm_config: Any

    def fill_weights(self, seed: int = 0) -> int:
        """Fills the dummy weights; returns the number of filled tensors."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank()
        filled = weights.fill(self.get_model(), rank, prefix=f"{seed} ")
        torch.cuda.synchronize()
        return filled

    def facts(self) -> dict[str, Any]:
        """Returns which all-reduce, compilation mode and plugin this engine uses."""
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group().device_communicator
        custom = getattr(group, "ca_comm", None)
        compilation = self.vllm_config.compilation_config
        facts = {
            "custom_all_reduce": custom is not None and not custom.disabled,
            "mode": str(compilation.mode),
            "cudagraph_mode": str(compilation.cudagraph_mode),
            "fuse_allreduce_rms": compilation.pass_config.fuse_allreduce_rms,
            "norms_lowered_to": str(self.vllm_config.kernel_config.ir_op_priority),
            "custom_ops": list(compilation.custom_ops),
            "fp8_linear": sorted({type(kernel).__name__ for kernel in self._fp8_kernels()}),
            "allnorm": "not loaded",
        }
        with contextlib.suppress(ImportError):
            from allnorm.integrations.vllm import engine

            outcome = engine.STATE.outcome
            if outcome is not None:
                facts["allnorm"] = outcome.reason or repr(outcome.communicator)
                facts["sites"] = [
                    str(site) for report in engine.STATE.reports for site in report.sites
                ][:12]
        return facts

    def _fp8_kernels(self) -> list[Any]:
        methods: list[Any] = [
            getattr(module, "quant_method", None) for module in self.get_model().modules()
        ]
        return [method.fp8_linear for method in methods if hasattr(method, "fp8_linear")]

    def start_trace(self) -> None:
        """Starts counting kernels."""
        import allnorm

        self._trace = contextlib.ExitStack()
        self._report = self._trace.enter_context(allnorm.trace())

    def stop_trace(self) -> list[tuple[str, str, int, float]]:
        """Returns kind, name, calls and microseconds of reductions and norms since the start."""
        self._trace.close()
        return [(e.kind, e.what, e.calls, e.time_us) for e in self._report.entries]

    def check_allnorm(self) -> str:
        """Returns the fault that the communicator's device has recorded; empty if none."""
        with contextlib.suppress(ImportError):
            from allnorm.integrations.vllm import engine

            outcome = engine.STATE.outcome
            if outcome is not None and outcome.communicator is not None:
                try:
                    outcome.communicator.check()
                except Exception as error:  # noqa: BLE001 - reported to the caller
                    return f"{type(error).__name__}: {error}"
        return ""
