"""Models that the commands know by name: what their norms after a reduction look like."""

from __future__ import annotations

from dataclasses import dataclass

import typer


@dataclass(frozen=True)
class Model:
    """The reduction sites of one model.

    Attributes:
        name: what `--model` takes.
        hidden_size: width of the residual stream.
        eps: of its RMSNorms.
        weight_bias: 1.0 where the norm multiplies by `1 + weight`.
    """

    name: str
    hidden_size: int
    eps: float
    weight_bias: float = 0.0


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
        typer.BadParameter: there is none; the message lists those there are.
    """
    try:
        return MODELS[name.lower()]
    except KeyError:
        known = ", ".join(MODELS)
        raise typer.BadParameter(f"unknown model {name!r}: known are {known}") from None
