"""Creates a tiny model with random weights for each family, without downloads."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

LAYERS = 3

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.1,
}
_MOE = {"num_experts_per_tok": 2}
_MORE: dict[str, dict[str, Any]] = {
    "gpt_oss": {**_MOE, "num_local_experts": 4, "sliding_window": 32},
    "gemma4": {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "exaone4": {"sliding_window": 32},
    "flex_olmo": {**_MOE, "num_experts": 4},
    "granite": {"residual_multiplier": 0.22},
    "minicpm3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "mixtral": {**_MOE, "num_local_experts": 4},
    "qwen3_moe": {**_MOE, "num_experts": 4, "moe_intermediate_size": 64, "mlp_only_layers": [1]},
}
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "glm4",
    "olmo2",
    "olmo3",
    *_MORE,
)
_MODEL_TYPE = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}


def config(family: str, **more: Any) -> Any:
    """Returns the configuration of a tiny model."""
    from transformers import AutoConfig

    settings = {**_COMMON, **_MORE.get(family, {}), **more}
    return AutoConfig.for_model(_MODEL_TYPE.get(family, family), **settings)


def save(
    family: str, folder: pathlib.Path, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> str:
    """Saves a model whose weights, norms and biases are random; returns the folder.

    Collective: rank 0 saves it.
    """
    from transformers import AutoModelForCausalLM

    place = folder / family
    if dist.get_rank() == 0:
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config(family, **more), dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "bias" in name or "sinks" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        model.save_pretrained(place)
    dist.barrier()
    return str(place)


@contextlib.contextmanager
def fusion(**options: Any) -> Iterator[None]:
    """Enables the integration with transformers, and disables it at the end."""
    from allnorm.integrations import transformers as fused

    fused.enable(**options)
    try:
        yield
    finally:
        fused.disable()
        torch._dynamo.reset()


def load(
    place: str,
    family: str,
    ep_size: int = 1,
    *,
    tp_size: int = 0,
    fsdp_size: int = 1,
    auto_class: Any = None,
    **more: Any,
) -> Any:
    """Loads a model, sharded over all ranks; with `tp_size`, over fewer ranks and data-parallel.

    With `ep_size`, each rank holds whole experts.
    """
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from allnorm.integrations import transformers as fused

    plan = fused.GPT_OSS_TP_PLAN if family == "gpt_oss" else "auto"
    sizes = {"tp_size": tp_size or dist.get_world_size(), "ep_size": ep_size}
    if fsdp_size > 1:
        sizes["fsdp_size"] = fsdp_size
    distributed = DistributedConfig(tp_plan=plan, **sizes)
    model = (auto_class or AutoModelForCausalLM).from_pretrained(
        place, dtype="auto", distributed_config=distributed, **more
    )
    return model.eval()
