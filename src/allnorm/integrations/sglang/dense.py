"""Wires SGLang 0.5.17's dense models, whose row-parallel layers reduce their own sums.

In 0.5.23 a layer returns its partial sum if the gate allows it, and the norm after it completes the
sum. In 0.5.17 the row-parallel layers of dense models do the reduction themselves. This module
makes such a layer return its partial sum, and makes the norm after the layer complete the sum.

Only the norm may read the output of such a layer. Therefore this module changes only classes whose
forward is known, and matches them by exact type.
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
    """A class of decoder layers, described by how its forward uses its sums and norms.

    Attributes:
        attention: whether this module wires the attention's sum to `norm`. False: SGLang itself
            leaves that sum to the norm.
        tuple_input: whether the layer passes the first norm's result to `qkv_proj` unchanged. The
            result may then be the tuple `(fp8, scale)`.
        reader: whether only `mlp.gate_up_proj` reads the result of `norm`, which may then be FP8.
        norm: the name of the norm after the attention's residual add; empty if the layer adds the
            residual itself.
        post_attention: the name of the norm of the attention's sum before the residual add.
        post_mlp: the name of the norm of the MLP's sum before the residual add.
        scale: the name of the layer's attribute by which both sums are multiplied.
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
# These layers add the post norm's result in their own forward, so only the post norm is fused.
_ADDS_ITSELF = Family(
    norm="", post_attention="post_attention_layernorm", post_mlp="post_feedforward_layernorm"
)
FAMILIES = {
    _MODELS + "llama.LlamaDecoderLayer": Family(tuple_input=True, reader=True),
    _MODELS + "qwen2.Qwen2DecoderLayer": Family(tuple_input=True, reader=True),
    # Qwen3's attention reads the shape of the first norm's result: it must be a tensor.
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
    """A row-parallel layer and the norm that completes its sum.

    Attributes:
        norm: the norm that adds the residual; None if `post` completes the sum.
        post: the norm of the sum before the residual is added, or None.
        layer: the decoder layer.
        scale: as in `Family`, the name of the layer's attribute; empty without one.
    """

    linear: Any
    norm: Any
    post: Any = None
    layer: Any = None
    scale: str = ""


def sites(model: torch.nn.Module, world_size: int, *, hidden_states_leave: bool) -> list[Site]:
    """Returns the sites in a model that can be wired. Changes nothing.

    `hidden_states_leave` means that other code, such as speculative decoding, may read the hidden
    states between two layers. Then only sums within a layer are wired.
    """
    stacks = [module for module in model.modules() if _path(module) in STACKS]
    found = [site for stack in stacks for site in _sites_of(stack, hidden_states_leave)]
    found = [site for site in found if _can_leave_its_sum(site.linear, world_size)]
    # One attribute scales both sums of a layer, so both are wired or neither is.
    scaled = [id(site.layer) for site in found if site.scale]
    return [site for site in found if not site.scale or scaled.count(id(site.layer)) == 2]


def wire(pairs: list[Site]) -> None:
    """Makes each linear layer return its partial sum, and each norm complete that sum."""
    scales = [getattr(site.layer, site.scale) if site.scale else 1.0 for site in pairs]
    for site, scale in zip(pairs, scales, strict=True):
        site.linear.reduce_results = False
        if site.norm is None:
            complete_alone_in(site.post)
        elif site.post is None and scale == 1.0:
            complete_sums_in(site.norm)
        else:
            complete_sums_in(site.norm, Before(site.post, scale))
        if site.scale:  # the fused call scales the sum
            setattr(site.layer, site.scale, 1.0)


def consumers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """Yields each norm whose result is read only by one known layer, together with that layer.

    In 0.5.23 an attribute of the norm refers to the layer. For 0.5.17, `FAMILIES` determines it.
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


# If SGLang keeps residuals in float32 (its on-policy mode), so are the results of these layers' two
# norms. Attention and MLP round them to bfloat16 before they use them.
_ROUND_FIRST = (_MODELS + "qwen3.Qwen3DecoderLayer",)


def rounded_norms(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields the norms whose readers round a float32 result to 16 bits before they use it."""
    for module in model.modules():
        if _path(module) in _ROUND_FIRST:
            layer: Any = module
            yield from (layer.input_layernorm, layer.post_attention_layernorm)


# Maps a linear layer of SGLang's decoder layers to the norm that it follows: the first that exists.
# Gemma's `post_attention_layernorm` precedes `pre_feedforward_layernorm`; a call includes both.
_NEXT_GEMMS = {
    "self_attn.qkv_proj": ("input_layernorm",),
    "mlp.gate_up_proj": ("pre_feedforward_layernorm", "post_attention_layernorm"),
}


def next_gemms(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """Yields the norms of decoder layers and of the model, each with the next linear layer.

    This decides only what is prefetched, so other code may read the norm's result too, and models
    of any class are searched. Layers of experts are not found: which weights they read depends on
    the tokens.
    """
    for module in model.modules():
        for gemm, norms in _NEXT_GEMMS.items():
            linear = _child(module, gemm)
            found = [_child(module, norm) for norm in norms]
            norm = next((each for each in found if each is not None), None)
            if linear is not None and norm is not None:
                yield norm, linear
    last, head = _child(model, "model.norm"), _child(model, "lm_head")
    if last is not None and head is not None:
        yield last, head


def _child(module: torch.nn.Module, path: str) -> torch.nn.Module | None:
    for name in path.split("."):
        child = getattr(module, name, None)
        if not isinstance(child, torch.nn.Module):
            return None
        module = child
    return module


def _sites_of(stack: Any, hidden_states_leave: bool) -> Iterator[Site]:
    if getattr(stack, "layers_to_capture", None):
        hidden_states_leave = True
    # Models without these attributes do not support pipeline stages.
    start, end = getattr(stack, "start_layer", 0), getattr(stack, "end_layer", None)
    layers = list(stack.layers)[start:end]
    is_last = not hasattr(stack, "pp_group") or stack.pp_group.is_last_rank
    families = [FAMILIES.get(_path(layer)) for layer in layers]
    for index, (layer, family) in enumerate(zip(layers, families, strict=True)):
        if family is None or hasattr(layer, "attn_boundary"):
            continue
        after_attention = getattr(layer, family.post_attention, None)
        after_mlp = getattr(layer, family.post_mlp, None)
        if not family.norm:  # the post norms complete both sums
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


def _can_leave_its_sum(linear: Any, world_size: int) -> bool:
    """Returns whether a layer reduces over all the communicator's ranks and may skip that."""
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
    """Returns how many tensor-parallel ranks a layer reduces over; 0 if it uses other groups."""
    if hasattr(linear, "tp_size"):
        return int(linear.tp_size)
    if linear.parallel_group not in (None, "tp"):  # 0.5.23 stores the group's name
        return 0
    return int(linear.tp_group.world_size)


def _path(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
