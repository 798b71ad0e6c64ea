"""The models whose reductions are fused: where their norms are, and how these round."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """Where a decoder layer has its norms: names of its modules, "" for none.

    Attributes:
        attention_post: of the attention's output, before the residual is added.
        attention_norm: of the sum with the residual.
        mlp_post: of the MLP's output, before the residual is added.
        next_norm: of the sum with the residual, in the next layer.
        final: whether the model's norm reads the sum of the last layer.
    """

    attention_post: str = ""
    attention_norm: str = ""
    mlp_post: str = ""
    next_norm: str = ""
    final: bool = True


PRE_NORM = Layout(attention_norm="post_attention_layernorm", next_norm="input_layernorm")
POST_NORM = Layout(attention_post="post_attention_layernorm", mlp_post="post_feedforward_layernorm")
SANDWICH = replace(
    POST_NORM, attention_norm="pre_feedforward_layernorm", next_norm="input_layernorm"
)
_GLM4 = replace(PRE_NORM, attention_post="post_self_attn_layernorm", mlp_post="post_mlp_layernorm")
# The sum of a layer is multiplied by a buffer before the next norm.
_GEMMA4 = replace(SANDWICH, next_norm="", final=False)


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    Attributes:
        package: under transformers.models.
        model: the class that owns `layers` and `norm`.
        numerics: rounding mode of its norms.
        weight_bias: 1.0 where a norm multiplies by 1 + weight.
        layout: where its layers have norms.
        is_scaled: whether its layers multiply a sum by a number before adding it.
    """

    package: str
    model: str
    numerics: str = "transformers"
    weight_bias: float = 0.0
    layout: Layout = PRE_NORM
    is_scaled: bool = False

    @property
    def post_norm(self) -> bool:
        """Returns whether the output of attention and MLP is normed before the residual is added."""
        return bool(self.layout.mlp_post)


FAMILIES = (
    Family("llama", "LlamaModel"),
    Family("mistral", "MistralModel"),
    Family("qwen2", "Qwen2Model"),
    Family("qwen3", "Qwen3Model"),
    Family("qwen3_moe", "Qwen3MoeModel"),
    Family("mixtral", "MixtralModel"),
    # Scale what is added to the residual.
    Family("granite", "GraniteModel", is_scaled=True),
    Family("minicpm3", "MiniCPM3Model", is_scaled=True),
    Family("glm4", "Glm4Model", layout=_GLM4),
    Family("exaone4", "Exaone4Model", layout=POST_NORM),
    # Multiply in float32 and round once.
    Family("gpt_oss", "GptOssModel", numerics="rounded"),
    Family("olmo2", "Olmo2Model", numerics="rounded", layout=POST_NORM),
    Family("olmo3", "Olmo3Model", numerics="rounded", layout=POST_NORM),
    Family("flex_olmo", "FlexOlmoModel", numerics="rounded", layout=POST_NORM),
    Family("gemma", "GemmaModel", numerics="rounded", weight_bias=1.0),
    Family("gemma2", "Gemma2Model", numerics="rounded", weight_bias=1.0, layout=SANDWICH),
    Family("gemma3", "Gemma3TextModel", numerics="rounded", weight_bias=1.0, layout=SANDWICH),
    Family("gemma4", "Gemma4TextModel", numerics="rounded", layout=_GEMMA4),
)
