"""The models whose reductions are fused: where their norms are, and how these round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    Attributes:
        package: under transformers.models.
        model: the class that owns `layers` and `norm`.
        numerics: rounding mode of its norms.
        weight_bias: 1.0 where a norm multiplies by 1 + weight.
        post_norm: whether the output of attention and MLP is normed before the residual is added.
    """

    package: str
    model: str
    numerics: str = "transformers"
    weight_bias: float = 0.0
    post_norm: bool = False


FAMILIES = (
    Family("llama", "LlamaModel"),
    Family("mistral", "MistralModel"),
    Family("qwen2", "Qwen2Model"),
    Family("qwen3", "Qwen3Model"),
    Family("qwen3_moe", "Qwen3MoeModel"),
    Family("mixtral", "MixtralModel"),
    # Multiplies in float32 and rounds once.
    Family("gpt_oss", "GptOssModel", numerics="rounded"),
    Family("gemma", "GemmaModel", numerics="rounded", weight_bias=1.0),
    Family("gemma2", "Gemma2Model", numerics="rounded", weight_bias=1.0, post_norm=True),
    Family("gemma3", "Gemma3TextModel", numerics="rounded", weight_bias=1.0, post_norm=True),
)
