"""The model families whose reductions are fused: the names and rounding modes of their norms."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """The names of a decoder layer's norms; "" for a norm that the layer does not have.

    Attributes:
        attention_post: the norm of the attention's output, before the residual is added.
        attention_norm: the norm after the attention's output is added to the residual.
        mlp_post: the norm of the MLP's output, before the residual is added.
        next_norm: the norm after the MLP's output is added to the residual; in the next layer.
        final: whether the model's final norm directly reads the last layer's sum.
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
# These layers multiply their result by a buffer before the next norm.
_GEMMA4 = replace(SANDWICH, next_norm="", final=False)


@dataclass(frozen=True)
class Family:
    """One of transformers' model architectures.

    Attributes:
        package: its package in transformers.models.
        model: the class that owns `layers` and `norm`.
        numerics: the rounding mode of its norms.
        weight_bias: 1.0 if its norms multiply by 1 + weight.
        layout: the names of its layers' norms.
        is_scaled: whether its layers multiply a sum by a number before they add the residual.
    """

    package: str
    model: str
    numerics: str = "transformers"
    weight_bias: float = 0.0
    layout: Layout = PRE_NORM
    is_scaled: bool = False

    @property
    def post_norm(self) -> bool:
        """Whether the outputs of attention and MLP are normed before the residual is added."""
        return bool(self.layout.mlp_post)


FAMILIES = (
    Family("llama", "LlamaModel"),
    Family("mistral", "MistralModel"),
    Family("qwen2", "Qwen2Model"),
    Family("qwen3", "Qwen3Model"),
    Family("qwen3_moe", "Qwen3MoeModel"),
    Family("mixtral", "MixtralModel"),
    # These models scale the sum before they add it to the residual.
    Family("granite", "GraniteModel", is_scaled=True),
    Family("minicpm3", "MiniCPM3Model", is_scaled=True),
    Family("glm4", "Glm4Model", layout=_GLM4),
    Family("exaone4", "Exaone4Model", layout=POST_NORM),
    # The norms of these models multiply in float32 and round once.
    Family("gpt_oss", "GptOssModel", numerics="rounded"),
    Family("olmo2", "Olmo2Model", numerics="rounded", layout=POST_NORM),
    Family("olmo3", "Olmo3Model", numerics="rounded", layout=POST_NORM),
    Family("flex_olmo", "FlexOlmoModel", numerics="rounded", layout=POST_NORM),
    Family("gemma", "GemmaModel", numerics="rounded", weight_bias=1.0),
    Family("gemma2", "Gemma2Model", numerics="rounded", weight_bias=1.0, layout=SANDWICH),
    Family("gemma3", "Gemma3TextModel", numerics="rounded", weight_bias=1.0, layout=SANDWICH),
    Family("gemma4", "Gemma4TextModel", numerics="rounded", layout=_GEMMA4),
)

# A tensor-parallel plan for GPT-OSS; transformers itself has only an expert-parallel one. This plan
# shards the attention. Every rank keeps all experts unless `ep_size` shards them.
GPT_OSS_TP_PLAN = {
    "model.layers.*.self_attn": "local_params",
    "model.layers.*.self_attn.sinks": "colwise",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}
