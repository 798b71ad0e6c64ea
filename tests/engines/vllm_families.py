"""Compiles decoder layers from vLLM's model files with vLLM's pass manager, on CPU ranks.

A stand-in replaces attention, at which vLLM would split its graphs. Both of a layer's reductions
are therefore in one graph.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pathlib
from collections.abc import Callable
from typing import Any

import torch
import vllm_ranks

import allnorm.integrations.vllm as plugin
from allnorm.integrations.vllm import engine
from allnorm.testing import shared_input

HIDDEN = vllm_ranks.HIDDEN
bf16 = torch.bfloat16

# Maps a family to its model file, its layer class, and entries of config.json.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma2": ("gemma2", "Gemma2DecoderLayer", {"query_pre_attn_scalar": 64}),
    "gemma3_text": ("gemma3", "Gemma3DecoderLayer", {"query_pre_attn_scalar": 64}),
    "gemma4_text": ("gemma4", "Gemma4DecoderLayer", {"global_head_dim": 64}),
    "glm4": ("glm4", "Glm4DecoderLayer", {"attention_bias": True}),
    "exaone4": ("exaone4", "Exaone4DecoderLayer", {"sliding_window": 1024}),
    "olmo3": ("olmo3", "Olmo3DecoderLayer", {}),
    "granite": ("granite", "GraniteDecoderLayer", {"residual_multiplier": 0.22}),
    # MiniCPM's own configuration class would be remote code.
    "minicpm": (
        "minicpm",
        "MiniCPMDecoderLayer",
        {"model_type": "llama", "scale_depth": 1.4, "num_experts": 0},
    ),
}
# Families whose layers return the sum and the residual separately. Other layers add them.
ADDED_BY_THE_NEXT = ("gemma2", "gemma3_text", "glm4")


def has(family: str) -> bool:
    """Returns whether this vLLM has a model file for the family."""
    models = pathlib.Path(inspect.getfile(importlib.import_module("vllm"))).parent
    return (models / "model_executor" / "models" / f"{FAMILIES[family][0]}.py").exists()


def write_model(place: pathlib.Path, family: str) -> str:
    """Creates a folder with the configuration of a small model of the family; returns its path."""
    model = vllm_ranks.write_model(place)
    path = pathlib.Path(model, "config.json")
    config = json.loads(path.read_text())
    config |= {"model_type": family, "hidden_activation": "gelu_pytorch_tanh"}
    path.write_text(json.dumps(config | FAMILIES[family][2]))
    return model


class Attend(torch.nn.Module):
    """A stand-in for attention: computes each token from its own query, key and value."""

    def __init__(self, num_heads: int, head_size: int, *_: Any, **more: Any) -> None:
        super().__init__()
        self.copies = num_heads // (more.get("num_kv_heads") or num_heads)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q * k.repeat(1, self.copies) + v.repeat(1, self.copies)


class Unrotated(torch.nn.Module):
    """A stand-in for rotary embeddings, where Inductor would omit some of PyTorch's roundings."""

    def forward(self, positions: torch.Tensor, *tensors: torch.Tensor) -> Any:
        return tensors


def make_layer(config: Any, family: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Returns a layer of the family, and the final norm of its model."""
    file, name, _ = FAMILIES[family]
    module = importlib.import_module(f"vllm.model_executor.models.{file}")
    module.Attention = Attend
    module.get_rope = lambda *_, **__: Unrotated()
    kind = getattr(module, name)
    hf_config = config.model_config.hf_config
    known = {
        "config": hf_config,
        "vllm_config": config,
        "cache_config": config.cache_config,
        "quant_config": None,
    }
    given = {key: known[key] for key in inspect.signature(kind).parameters if key in known}
    torch.set_default_dtype(bf16)
    try:
        with torch.device("cpu"):
            layer: Any = kind(**given, prefix="model.layers.0")
            norm = getattr(module, "GemmaRMSNorm", None) or module.RMSNorm
            last = norm(HIDDEN, eps=hf_config.rms_norm_eps)
    finally:
        torch.set_default_dtype(torch.float32)
    for name in ("q_norm", "k_norm", "v_norm"):  # the stand-in replaces head norms too
        if hasattr(layer.self_attn, name):
            setattr(layer.self_attn, name, torch.nn.Identity())
    middle = 0.0 if "Gemma" in type(last).__name__ else 1.0
    for name, parameter in torch.nn.ModuleList([layer, last]).named_parameters():
        noise = shared_input(parameter.shape, bf16, name).to(parameter.dtype)
        is_norm = "norm" in name or parameter is last.weight
        parameter.data.copy_(middle + noise / 8 if is_norm else noise / 16)
    return layer, last


def make_block(config: Any, family: str) -> Callable[..., Any]:
    """Returns a block that calls the layer and the final norm as the family's model does."""
    layer, last = make_layer(config, family)
    takes_residual = "residual" in inspect.signature(layer.forward).parameters

    def block(positions: torch.Tensor, x: torch.Tensor) -> Any:
        residual = None
        if takes_residual:
            hidden, residual = layer(positions, x, None)
        else:
            hidden = layer(positions, x)
        if family in ADDED_BY_THE_NEXT:
            return last(hidden, residual)
        return last(hidden), hidden

    return block


def round_as_pytorch(every: bool) -> None:
    """Makes later compilations round like PyTorch, or as Inductor does by default."""
    torch._inductor.config.emulate_precision_casts = every
    torch._inductor.config.fallback_by_default = every


def fuse(rank: int, world_size: int, family: str, model: str) -> dict[str, Any]:
    """Compiles a layer, and compares its results with those of the uncompiled layer.

    By default, Inductor omits roundings between operators. The layer is therefore also compiled
    with all roundings, so that only fused calls can cause differences. The uncompiled layer needs
    this setting too, because vLLM itself compiles some activations and norms (`CustomOp`).
    """
    plugin.register()
    config = vllm_ranks.make_config(model)
    found: dict[str, Any] = {}
    with vllm_ranks.worker(config), config.kernel_config.ir_op_priority.set_priority():
        block = make_block(config, family)
        x = shared_input((7, HIDDEN), bf16, "x")
        round_as_pytorch(True)
        with torch.no_grad():  # cloned, because vLLM's norms overwrite their arguments
            expected = [each.clone() for each in block(torch.arange(7), x.clone())]
        for name in ("default", "eager rounding"):
            round_as_pytorch(name == "eager rounding")
            engine.STATE.reports = []
            actual = vllm_ranks.compiled(config, block)(torch.arange(7), x.clone())
            sites = [site for report in engine.STATE.reports for site in report.sites]
            pairs = list(zip(actual, expected, strict=True))
            found[name] = {
                "numerics": [site.numerics for site in sites],
                "boundary": [site.boundary for site in sites],
                "missed": [site.reason for site in sites if not site.fused],
                "notes": [site.note for site in sites if site.note],
                "different": [float((mine != theirs).float().mean()) for mine, theirs in pairs],
                "furthest": [
                    float((mine - theirs).float().abs().max() / theirs.float().abs().max())
                    for mine, theirs in pairs
                ],
            }
    return found
