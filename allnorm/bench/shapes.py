"""What one call works on, and the models that shapes are taken from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What one call works on."""

    num_tokens: int  # rows
    hidden_size: int  # columns
    eps: float = 1e-6  # of the norm
    weight_bias: float = 0.0  # 1.0 for a Gemma-style weight
    model: str = ""  # the model it was taken from, or ""

    def __str__(self) -> str:
        return f"{self.num_tokens}x{self.hidden_size}"


@dataclass(frozen=True)
class Model:
    """The norms after the reductions of one model."""

    name: str  # by which it is known here
    hidden_size: int  # width of the residual stream
    eps: float  # of its RMSNorms
    weight_bias: float = 0.0  # 1.0 where the norm multiplies by `1 + weight`

    def shape(self, num_tokens: int) -> Shape:
        """That of a call on so many tokens."""
        return Shape(num_tokens, self.hidden_size, self.eps, self.weight_bias, self.name)


# hidden_size and rms_norm_eps of the models' published configurations. Qwen3.5 stores its norm
# weights zero-centred: serving engines run it with GemmaRMSNorm, which multiplies by 1 + weight.
MODELS = {
    model.name: model
    for model in (
        Model("llama-3.1-8b", 4096, 1e-5),
        Model("llama-3.1-70b", 8192, 1e-5),
        Model("qwen3-32b", 5120, 1e-6),
        Model("gpt-oss-120b", 2880, 1e-5),
        Model("deepseek-v3", 7168, 1e-6),
        Model("qwen3.5-397b", 4096, 1e-6, weight_bias=1.0),
    )
}


def find(name: str) -> Model:
    """The model of that name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name.lower() not in MODELS:
        raise ValueError(f"unknown model {name!r}: known are {', '.join(MODELS)}")
    return MODELS[name.lower()]
