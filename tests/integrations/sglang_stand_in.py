"""Fakes for the parts of SGLang that the plugin uses."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allnorm.integrations import sglang as plugin
from allnorm.integrations.sglang import fusion, norms, start


class PlainNorm(torch.nn.Module):
    """A fake of SGLang's RMSNorm; it has the attributes that the plugin reads."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        self.variance_epsilon = 1e-6
        self.variance_size_override = self.override_orig_dtype = None
        self.fp32_residual = self.cast_x_before_out_mul = False
        self.has_weight = True
        for name, value in changes.items():
            setattr(self, name, value)

    def forward(self, x: Any, residual: Any = None, post: Any = None) -> Any:
        return "stock", x, residual


class GemmaNorm(PlainNorm):
    pass


def stock_norm(norm_module, x, residual, post_residual_addition, weight, use_attn_tp_group=True):
    return "stock norm"


def stock_quantized(
    norm_module, x, residual, weight, group_size=128, use_attn_tp_group=True, keep_bf16=False
):
    return "stock quantized"


class Runner:
    def _pre_initialize_flashinfer_allreduce_workspace(self) -> None:
        return None


class Registry:
    """A fake of SGLang's hook registry; it applies each hook immediately."""

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: str) -> None:
        assert hook_type == "around"
        where, name = target.rsplit(".", 1)
        holder = sys.modules.get(where) or Runner
        original = getattr(holder, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        setattr(holder, name, wrapper)


LAYERNORM = "sglang.srt.layers.layernorm"
COMMUNICATOR = "sglang.srt.layers.communicator"
RUNNER = "sglang.srt.model_executor.runner.base_runner"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, types.ModuleType]]:
    """Installs fakes for the SGLang modules and functions that the plugin uses."""
    contents: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": "0.0.1"},
        "sglang.srt": {},
        "sglang.srt.layers": {},
        LAYERNORM: {
            "_forward_with_allreduce_fusion": stock_norm,
            "_forward_with_allreduce_fusion_quant_per_group": stock_quantized,
            "RMSNorm": PlainNorm,
            "GemmaRMSNorm": GemmaNorm,
        },
        COMMUNICATOR: {"apply_flashinfer_allreduce_fusion": lambda batch_size: False},
        "sglang.srt.layers.dp_attention": {"is_dp_attention_enabled": lambda: False},
        "sglang.srt.layers.linear": {"RowParallelLinear": object},
        "sglang.srt.runtime_context": {"get_parallel": object, "get_exec": object},
        "sglang.srt.model_executor": {},
        "sglang.srt.model_executor.runner": {},
        RUNNER: {"BaseRunner": Runner},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": Registry,
            "HookType": SimpleNamespace(AROUND="around"),
        },
    }
    made = {}
    for name, values in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        made[name] = module
        if "." in name:
            parent, child = name.rsplit(".", 1)
            setattr(made[parent], child, module)
    name = "_pre_initialize_flashinfer_allreduce_workspace"
    monkeypatch.setattr(Runner, name, Runner.__dict__[name])
    monkeypatch.setattr(plugin, "_registered", [])
    monkeypatch.setattr(plugin, "announcer", type(plugin.announcer)(plugin.logger))
    monkeypatch.setattr(start, "announcer", plugin.announcer)
    norms.classes.cache_clear()
    yield made
    norms.classes.cache_clear()
    fusion.activate(None)
