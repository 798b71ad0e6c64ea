"""Dense models of SGLang 0.5.17, which reduces their sums where they arise, not at the norm.

In 0.5.23 a layer hands its partial sum to the next one, and the gate is all that is needed. In
0.5.17 the row-parallel layer of a dense model reduces, and the norm after it does not know. The two
are told of each other here: the layer leaves its sum, the norm completes it.

Only classes whose forward was read are touched, by their exact type: nothing but the norm may look
at what such a layer returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from allnorm.integrations.sglang.fusion import complete_sums_in

_MODELS = "sglang.srt.models."


@dataclass(frozen=True)
class Family:
    """What the forward of a decoder layer does with its sums and norms.

    Attributes:
        attention: its attention's sum goes to `post_attention_layernorm` only. False: SGLang
            leaves that one to the norm already.
        tuple_input: the layer hands whatever its first norm returns to `qkv_proj`.
    """

    attention: bool
    tuple_input: bool


FAMILIES = {
    _MODELS + "llama.LlamaDecoderLayer": Family(attention=True, tuple_input=True),
    _MODELS + "qwen2.Qwen2DecoderLayer": Family(attention=True, tuple_input=True),
    # It asks the first norm's result for its shape.
    _MODELS + "qwen3.Qwen3DecoderLayer": Family(attention=False, tuple_input=False),
}
STACKS = (_MODELS + "llama.LlamaModel", _MODELS + "qwen2.Qwen2Model", _MODELS + "qwen3.Qwen3Model")


@dataclass(frozen=True)
class Site:
    """A row-parallel layer and the norm that is to complete its sum."""

    linear: Any
    norm: Any


def sites(model: torch.nn.Module, world_size: int, *, hidden_states_leave: bool) -> list[Site]:
    """The pairs in a model that can be wired; changes nothing.

    Args:
        model: as SGLang loaded it.
        world_size: of the tensor-parallel group.
        hidden_states_leave: something may read the sum between two layers, as speculative decoding
            does: then only sums within a layer are taken.
    """
    found = []
    for stack in model.modules():
        if _path(stack) in STACKS:
            found += list(_sites_of(stack, hidden_states_leave))
    return [site for site in found if _leaves_its_sum(site.linear, world_size)]


def wire(pairs: list[Site]) -> None:
    """Lets each linear layer leave its sum, and each norm complete it."""
    for site in pairs:
        site.linear.reduce_results = False
        complete_sums_in(site.norm)


def consumers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """Norms of a model and the only layer that reads each, where that is known.

    0.5.23 keeps that layer at the norm. For the families above it is known.
    """
    for module in model.modules():
        family = FAMILIES.get(_path(module))
        if "_quant_linear" in module.__dict__:
            yield module, module.__dict__["_quant_linear"]
        elif family is not None and not hasattr(module, "attn_boundary"):
            layer: Any = module
            if family.tuple_input:
                yield layer.input_layernorm, layer.self_attn.qkv_proj
            yield layer.post_attention_layernorm, layer.mlp.gate_up_proj


def _sites_of(stack: Any, hidden_states_leave: bool) -> Iterator[Site]:
    if getattr(stack, "layers_to_capture", None):
        hidden_states_leave = True
    layers = list(stack.layers)[stack.start_layer : stack.end_layer]
    families = [FAMILIES.get(_path(layer)) for layer in layers]
    for index, (layer, family) in enumerate(zip(layers, families, strict=True)):
        if family is None or hasattr(layer, "attn_boundary"):
            continue
        if family.attention:
            yield Site(layer.self_attn.o_proj, layer.post_attention_layernorm)
        if hidden_states_leave:
            continue
        if index + 1 < len(layers):
            if families[index + 1] is not None:
                yield Site(layer.mlp.down_proj, layers[index + 1].input_layernorm)
        elif stack.pp_group.is_last_rank:
            yield Site(layer.mlp.down_proj, stack.norm)


def _leaves_its_sum(linear: Any, world_size: int) -> bool:
    """Whether a layer reduces over exactly the ranks of the communicator, and can leave it."""
    return (
        _path(linear) == "sglang.srt.layers.linear.RowParallelLinear"
        and linear.reduce_results
        and linear.tp_size == world_size
        and linear.input_is_parallel
        and not linear.skip_bias_add
        and not getattr(linear, "use_dp_attention_reduce", False)
        and not getattr(linear, "use_decode_attn_tp", False)
    )


def _path(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
