"""Functions that sglang_latency.py runs in SGLang's ranks, as custom weight loaders.

SGLang calls a custom loader with the model on every rank. These loaders receive no weights: one
fills in random weights, the others inspect the rank. They write their results as one JSON file per
rank to the folder `SGLANG_LATENCY_DIR`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from typing import Any

import torch
import weights

_trace = contextlib.ExitStack()
_reports: list[Any] = []


def _rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    rank: int = get_parallel().tp_rank
    return rank


def _write(kind: str, found: Any) -> None:
    folder = pathlib.Path(os.environ["SGLANG_LATENCY_DIR"])
    (folder / f"{kind}-{_rank()}.json").write_text(json.dumps(found))


def fill_weights(model: torch.nn.Module, _: Any) -> None:
    """Fills the dummy weights."""
    weights.fill(model, _rank())
    torch.cuda.synchronize()


def facts(model: torch.nn.Module, _: Any) -> None:
    """Writes which all-reduce and plugin this engine uses, and any recorded fault."""
    from sglang.srt.runtime_context import get_parallel

    custom = get_parallel().tp_group.ca_comm
    found: dict[str, Any] = {
        "custom_all_reduce": type(custom).__name__
        if custom is not None and not custom.disabled
        else None,
        "multicast": bool(getattr(custom, "has_multicast", False)),
        "allnorm": "not loaded",
        "sites": 0,
        "fault": "",
    }
    with contextlib.suppress(ImportError):
        from allnorm.integrations.sglang import fusion

        active = fusion.current()
        if active is not None:
            found["allnorm"], found["sites"] = repr(active.communicator), len(active.sites)
            try:
                active.communicator.check()
            except Exception as error:  # noqa: BLE001 - reported to the caller
                found["fault"] = f"{type(error).__name__}: {error}"
    _write("facts", found)


def start_trace(model: torch.nn.Module, _: Any) -> None:
    """Starts counting kernels."""
    import allnorm

    _reports.append(_trace.enter_context(allnorm.trace()))


def stop_trace(model: torch.nn.Module, _: Any) -> None:
    """Writes kind, name, calls and microseconds of reductions and norms since `start_trace`."""
    _trace.close()
    report = _reports.pop()
    _write("trace", [(e.kind, e.what, e.calls, e.time_us) for e in report.entries])


LOADERS = tuple(
    f"sglang_worker.{function.__name__}"
    for function in (fill_weights, facts, start_trace, stop_trace)
)
