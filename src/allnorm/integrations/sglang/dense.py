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

from allnorm.integrations.sglang.fusion import Before, complete_alone_in, complete_sums_in

_MODELS = "sglang.srt.models."


@dataclass(frozen=True)
class Family:
    """What the forward of a decoder layer does with its sums and norms.

    Attributes:
        attention: its attention's sum goes to `norm` only, past `post_attention`. False: SGLang
            leaves that one to the norm already.
        tuple_input: the layer hands whatever its first norm returns to `qkv_proj`.
        reader: whether `mlp.gate_up_proj` is the only reader of `norm`, which takes FP8 then.
        norm: of the residual, behind the attention; empty: the layer adds by itself.
        post_attention: a norm of the attention's sum, before the residual is added.
        post_mlp: the same of the MLP's.
        scale: the attribute of the layer that both sums are multiplied by.
    """

    attention: bool = True
    tuple_input: bool = False
    reader: bool = False
    norm: str = "post_attention_layernorm"
    post_attention: str = ""
    post_mlp: str = ""
    scale: str = ""


_GEMMA = Family(
    norm="pre_feedforward_layernorm",
    post_attention="post_attention_layernorm",
    post_mlp="post_feedforward_layernorm",
)
# They add what their post norms return themselves, out of sight: those alone are fused.
_ADDS_ITSELF = Family(
    norm="", post_attention="post_attention_layernorm", post_mlp="post_feedforward_layernorm"
)
FAMILIES = {
    _MODELS + "llama.LlamaDecoderLayer": Family(tuple_input=True, reader=True),
    _MODELS + "qwen2.Qwen2DecoderLayer": Family(tuple_input=True, reader=True),
    # It asks the first norm's result for its shape.
    _MODELS + "qwen3.Qwen3DecoderLayer": Family(attention=False, reader=True),
    _MODELS + "gemma2.Gemma2DecoderLayer": _GEMMA,
    _MODELS + "gemma3_causal.Gemma3DecoderLayer": _GEMMA,
    _MODELS + "glm4.Glm4DecoderLayer": Family(
        post_attention="post_self_attn_layernorm", post_mlp="post_mlp_layernorm"
    ),
    _MODELS + "granite.GraniteDecoderLayer": Family(scale="residual_multiplier"),
    _MODELS + "exaone4.Exaone4DecoderLayer": _ADDS_ITSELF,
    _MODELS + "olmo2.Olmo2DecoderLayer": _ADDS_ITSELF,
}
STACKS = tuple(
    _MODELS + name
    for name in (
        *("llama.LlamaModel", "qwen2.Qwen2Model", "qwen3.Qwen3Model", "gemma2.Gemma2Model"),
        *("gemma3_causal.Gemma3TextModel", "glm4.Glm4Model", "granite.GraniteModel"),
        *("exaone4.Exaone4Model", "olmo2.Olmo2Model"),
    )
)


@dataclass(frozen=True)
class Site:
    """A row-parallel layer and the norm that is to complete its sum.

    Attributes:
        linear: the layer.
        norm: adds the residual; None: `post` completes the sum.
        post: norms the sum before the residual is added; None: nothing does.
        layer: of the model.
        scale: the attribute of it that the sum is multiplied by; empty: nothing is.
    """

    linear: Any
    norm: Any
    post: Any = None
    layer: Any = None
    scale: str = ""


def sites(model: torch.nn.Module, world_size: int, *, hidden_states_leave: bool) -> list[Site]:
    """Returns the pairs in a model that can be wired; changes nothing.

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
    found = [site for site in found if _leaves_its_sum(site.linear, world_size)]
    # A scale is one attribute for both sums of a layer.
    scaled = [id(site.layer) for site in found if site.scale]
    return [site for site in found if not site.scale or scaled.count(id(site.layer)) == 2]


def wire(pairs: list[Site]) -> None:
    """Lets each linear layer leave its sum, and each norm complete it."""
    scales = [getattr(site.layer, site.scale) if site.scale else 1.0 for site in pairs]
    for site, scale in zip(pairs, scales, strict=True):
        site.linear.reduce_results = False
        if site.norm is None:
            complete_alone_in(site.post)
        elif site.post is None and scale == 1.0:
            complete_sums_in(site.norm)
        else:
            complete_sums_in(site.norm, Before(site.post, scale))
        if site.scale:  # the norm multiplies, once the sum is complete
            setattr(site.layer, site.scale, 1.0)


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
            if family.reader:
                yield layer.post_attention_layernorm, layer.mlp.gate_up_proj


def _sites_of(stack: Any, hidden_states_leave: bool) -> Iterator[Site]:
    if getattr(stack, "layers_to_capture", None):
        hidden_states_leave = True
    # Stacks without these are never cut into stages.
    start, end = getattr(stack, "start_layer", 0), getattr(stack, "end_layer", None)
    layers = list(stack.layers)[start:end]
    is_last = not hasattr(stack, "pp_group") or stack.pp_group.is_last_rank
    families = [FAMILIES.get(_path(layer)) for layer in layers]
    for index, (layer, family) in enumerate(zip(layers, families, strict=True)):
        if family is None or hasattr(layer, "attn_boundary"):
            continue
        after_attention = getattr(layer, family.post_attention, None)
        after_mlp = getattr(layer, family.post_mlp, None)
        if not family.norm:  # complete when they leave the layer
            yield Site(layer.self_attn.o_proj, None, after_attention)
            yield Site(layer.mlp.down_proj, None, after_mlp)
            continue
        more: Any = (layer, family.scale)
        if family.attention:
            norm = getattr(layer, family.norm)
            yield Site(layer.self_attn.o_proj, norm, after_attention, *more)
        if hidden_states_leave:
            continue
        if index + 1 < len(layers):
            if families[index + 1] is not None:
                norm = layers[index + 1].input_layernorm
                yield Site(layer.mlp.down_proj, norm, after_mlp, *more)
        elif is_last:
            yield Site(layer.mlp.down_proj, stack.norm, after_mlp, *more)


def _leaves_its_sum(linear: Any, world_size: int) -> bool:
    """Returns whether a layer reduces over exactly the ranks of the communicator, and can leave it."""
    return (
        _path(linear) == "sglang.srt.layers.linear.RowParallelLinear"
        and linear.reduce_results
        and _num_ranks(linear) == world_size
        and linear.input_is_parallel
        and not linear.skip_bias_add
        and not getattr(linear, "use_dp_attention_reduce", False)
        and not getattr(linear, "use_decode_attn_tp", False)
    )


def _num_ranks(linear: Any) -> int:
    """Over how many ranks of the tensor-parallel group a layer reduces; 0: of another group."""
    if hasattr(linear, "tp_size"):
        return int(linear.tp_size)
    if linear.parallel_group not in (None, "tp"):  # 0.5.23 keeps the group by its name
        return 0
    return int(linear.tp_group.world_size)


def _path(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
