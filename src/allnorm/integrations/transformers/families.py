"""The model families whose reductions are fused: the names and rounding modes of their norms."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """The names of the norms of a decoder layer, "" for absent ones.

    Attributes:
        attention_post: the norm of the attention's output, before the residual is added.
        attention_norm: the norm of the sum of the attention's output and the residual.
        mlp_post: the norm of the MLP's output, before the residual is added.
        next_norm: the norm of the sum of the MLP's output and the residual, in the next layer.
        final: whether the model's final norm directly reads the sum of the last layer.
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
    """One architecture of transformers.

    Attributes:
        package: its package in transformers.models.
        model: the class that owns `layers` and `norm`.
        numerics: the rounding mode of its norms.
        weight_bias: 1.0 if its norms multiply by 1 + weight.
        is_scaled: whether its layers multiply a sum by a number before they add it.
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
    # These scale the sum that is added to the residual.
    Family("granite", "GraniteModel", is_scaled=True),
    Family("minicpm3", "MiniCPM3Model", is_scaled=True),
    Family("glm4", "Glm4Model", layout=_GLM4),
    Family("exaone4", "Exaone4Model", layout=POST_NORM),
    # The norms of these multiply in float32 and round once.
    Family("gpt_oss", "GptOssModel", numerics="rounded"),
    Family("olmo2", "Olmo2Model", numerics="rounded", layout=POST_NORM),
    Family("olmo3", "Olmo3Model", numerics="rounded", layout=POST_NORM),
    Family("flex_olmo", "FlexOlmoModel", numerics="rounded", layout=POST_NORM),
    Family("gemma", "GemmaModel", numerics="rounded", weight_bias=1.0),
    Family("gemma2", "Gemma2Model", numerics="rounded", weight_bias=1.0, layout=SANDWICH),
    Family("gemma3", "Gemma3TextModel", numerics="rounded", weight_bias=1.0, layout=SANDWICH),
    Family("gemma4", "Gemma4TextModel", numerics="rounded", layout=_GEMMA4),
)

# A tensor-parallel plan for GPT-OSS, for which transformers has only expert parallelism. It shards
# the attention. The experts stay whole on every rank unless `ep_size` shards them.
GPT_OSS_TP_PLAN = {
    "model.layers.*.self_attn": "local_params",
    "model.layers.*.self_attn.sinks": "colwise",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}
