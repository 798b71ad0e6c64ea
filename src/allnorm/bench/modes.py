"""What can be timed: shapes, of models too, kinds of results, and the arms of each by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import allnorm
from allnorm.names import ALGORITHMS, BETWEEN_ISLANDS, SCALE_FORMATS, SCALE_LAYOUTS
from allnorm.quant import Quant

PEERS = ("flashinfer", "sglang", "vllm", "symm_mem")
RESIDUALS = ("replicated", "sharded")

YARDSTICKS = ("empty", "local")
"""What runs beside the arms behind a product: a kernel that does nothing, and the norm alone."""

# Rows of a norm with weights around 1 stay below 7 = 448 / 64 but for one element in 1e11.
_STATIC_SCALE = 1 / 64
_GLOBAL_SCALE = 500.0  # of NVFP4: 448 * 6 / the greatest of a few thousand normed elements
_MXFP8, _NVFP4 = "mxfp8", "nvfp4"


@dataclass(frozen=True)
class Mode:
    """What a call returns, and where the residual is."""

    quant: str = ""  # the spec as `quant_name` writes it, "" for results in the dtype of the input
    residual_sharded: bool = False  # each rank holds its own rows of the residual only
    return_normed: bool = False  # a quantised call returns the normed rows too
    post_norm: bool = False  # the reduced sum is normed before the residual is added, too
    experts: int = 0  # x is the sum of so many rows of experts, and of a shared one's; 0: it is not

    @property
    def is_plain(self) -> bool:
        """Whether nothing comes before the residual but the reduction."""
        return not self.post_norm and not self.experts

    def __str__(self) -> str:
        parts = [self.quant] if self.quant else []
        parts += ["with normed"] if self.quant and self.return_normed else []
        parts += ["sharded residual"] if self.residual_sharded else []
        parts += ["post norm"] if self.post_norm else []
        parts += [f"{self.experts} experts"] if self.experts else []
        return ", ".join(parts)


def modes(
    quants: Iterable[str],
    residuals: Iterable[str],
    return_normed: bool = False,
    post_norm: bool = False,
    experts: int = 0,
) -> list[Mode]:
    """Each kind of result with each kind of residual; "none" stands for no quantisation.

    With `post_norm` each of them with that norm too, and with `experts` also with so many.

    Raises:
        ValueError: a word is no spec, or one that allnorm refuses.
    """
    specs = list(dict.fromkeys(map(quant_name, quants))) or [""]
    before = [
        (False, 0),
        *([(True, 0)] if post_norm else []),
        *([(False, experts)] if experts else []),
    ]
    return [
        Mode(spec, residual == "sharded", bool(spec) and return_normed, *change)
        for residual in residuals
        for spec in specs
        for change in before
    ]


def quant_name(text: str) -> str:
    """A spec as rows and tables name it, defaults left out; "" for "none".

    Raises:
        ValueError: `text` is no spec.
    """
    spec = quant_of(text)
    if spec == allnorm.MxFp8():
        return _MXFP8
    if not isinstance(spec, allnorm.Fp8PerGroup):
        return "" if spec is None else text
    layout, scale_format = spec.scale_layout, spec.scale_format
    name = f"per_group:{spec.group_size}"
    name += f":{layout}" if layout != SCALE_LAYOUTS[0] else ""
    return name + (f":{scale_format}" if scale_format != SCALE_FORMATS[0] else "")


def quant_of(text: str, device: torch.device | str = "cpu") -> Quant | None:
    """The spec that a word stands for; None for no quantisation, "" or "none".

    The words are "per_token"; "per_tensor" and "nvfp4", whose given scale lies on `device`;
    "nvfp4:row_major", with scales in rows; "mxfp8"; and "per_group" with a group size, a layout and
    a format of the scales behind it, as many as are wanted, in any order, separated by colons.

    Raises:
        ValueError: it is something else.
    """
    if text in ("", "none"):
        return None
    if text == "per_token":
        return allnorm.Fp8PerToken()
    if text == "per_tensor":
        return allnorm.Fp8PerTensor(torch.tensor([_STATIC_SCALE], device=device))
    if text == _MXFP8:
        return allnorm.MxFp8()
    if text in (_NVFP4, f"{_NVFP4}:row_major"):
        given = torch.tensor([_GLOBAL_SCALE], device=device)
        return allnorm.NvFp4(given, *text.split(":")[1:])
    kind, *words = text.split(":")
    found: dict[str, Any] = {}
    for word in words:
        if word.isdecimal():
            found["group_size"] = int(word)
        elif word in SCALE_LAYOUTS:
            found["scale_layout"] = word
        elif word in SCALE_FORMATS:
            found["scale_format"] = word
    if kind != "per_group" or len(found) < len(words):
        raise ValueError(
            f"{text!r}: expected per_group:128, per_group:GROUP_SIZE:LAYOUT:FORMAT, per_token, "
            f"per_tensor, mxfp8, nvfp4 or none, where a layout is one of "
            f"{', '.join(SCALE_LAYOUTS)} and a format one of {', '.join(SCALE_FORMATS)}"
        )
    return allnorm.Fp8PerGroup(**found)


# Of a hierarchical call, each by itself: launch A, the exchange between islands, launch B.
PARTS = ("islands:sums", "islands:exchange", "islands:rest")


def arm_names(device: str, mode: Mode, island_size: int = 0) -> list[str]:
    """The arms that do not depend on what is installed, in the order of the table.

    What is called "nccl" on GPUs is "gloo" on "cpu". Ranks in islands of a size have other
    algorithms, and the parts of "hierarchical" beside them.
    """
    library = "nccl" if device == "cuda" else "gloo"
    fused = ["allnorm", *(f"allnorm:{algorithm}" for algorithm in ALGORITHMS)]
    if island_size:
        fused = ["allnorm", *(f"allnorm:{algorithm}" for algorithm in BETWEEN_ISLANDS)]
        fused += PARTS if mode.is_plain and not mode.residual_sharded and island_size > 1 else ()
    if not mode.is_plain:
        if mode.residual_sharded:
            return fused
        separate = ["sum+allnorm"] if mode.experts else ["allnorm+norm"]
        return [*fused, *separate, f"{library}+local"]
    if not mode.quant:
        return [*fused, f"{library}+torch", f"{library}+local"]
    unfused = [f"{library}+torch+quant", f"{library}+local+quant"]
    return [*fused, "allnorm16", "allnorm16+quant", *unfused]


def peer_names(device: str, mode: Mode) -> list[str]:
    """The peers that take part in a mode.

    They run on GPUs, and know no sharded residual and nothing that comes before the residual.
    """
    return list(PEERS) if device == "cuda" and mode.is_plain and not mode.residual_sharded else []


def known_arms(device: str, wanted: Sequence[Mode], island_size: int = 0) -> tuple[str, ...]:
    """The arms and peers of all these modes."""
    names = [name for mode in wanted for name in arm_names(device, mode, island_size)]
    return tuple(dict.fromkeys([*names, *(PEERS if device == "cuda" else ())]))


def with_compared(arms: Sequence[str], wanted: Sequence[Mode]) -> tuple[str, ...]:
    """The arms, and the 16-bit call where a quantised one is to be compared with it."""
    quantised = any(mode.quant for mode in wanted) and "allnorm" in arms
    return tuple(dict.fromkeys([*arms, *(["allnorm16"] if quantised else [])]))


def is_other(arm: str) -> bool:
    """Whether an arm is another way to do the work: neither this library's call nor a yardstick."""
    return not arm.startswith("allnorm") and arm not in (*YARDSTICKS, *PARTS)


def family(arm: str) -> str:
    """The column of an arm: a peer's algorithms share one, allnorm's have one each."""
    return arm if arm.startswith("allnorm") or arm in PARTS else re.sub(r":\w+", "", arm)


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
        """The shape of a call on so many tokens."""
        return Shape(num_tokens, self.hidden_size, self.eps, self.weight_bias, self.name)


# hidden_size and rms_norm_eps of the models' published configurations. Gemma and Qwen3.5 store
# their norm weights zero-centred: serving engines run them with GemmaRMSNorm, which multiplies by
# 1 + weight.
MODELS = {
    model.name: model
    for model in (
        Model("llama-3.1-8b", 4096, 1e-5),
        Model("llama-3.1-70b", 8192, 1e-5),
        Model("qwen3-32b", 5120, 1e-6),
        Model("qwen3-30b-a3b", 2048, 1e-6),
        Model("gpt-oss-120b", 2880, 1e-5),
        Model("deepseek-v3", 7168, 1e-6),
        Model("qwen3.5-397b", 4096, 1e-6, weight_bias=1.0),
        Model("gemma-3-27b", 5376, 1e-6, weight_bias=1.0),
    )
}


def find_model(name: str) -> Model:
    """The model of that name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name.lower() not in MODELS:
        raise ValueError(f"unknown model {name!r}: known are {', '.join(MODELS)}")
    return MODELS[name.lower()]
