"""The shapes to time (also those of models), the modes, and the names of each mode's arms."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import allnorm
from allnorm.names import ALGORITHMS, BETWEEN_ISLANDS, SCALE_FORMATS, SCALE_LAYOUTS
from allnorm.quant import Quant

PEERS = ("flashinfer", "sglang", "vllm", "symm_mem")
_STREAM_PEERS = ("flashinfer", "sglang")
RESIDUALS = ("replicated", "sharded")

YARDSTICKS = ("empty", "local")
"""Additional arms after a GEMM: a kernel that does nothing, and the norm alone."""

# Normed rows with weights around 1 stay below 7 = 448 / 64; only one element in 1e11 does not.
_STATIC_SCALE = 1 / 64
_GLOBAL_SCALE = 500.0  # for NVFP4: 448 * 6 / the maximum of a few thousand normed elements
_MXFP8, _NVFP4 = "mxfp8", "nvfp4"


@dataclass(frozen=True)
class Mode:
    """The kind of a call: its results, the residual, and what precedes the residual add."""

    quant: str = ""  # name of the spec, from `quant_name`; "" for unquantized results
    residual_sharded: bool = False  # each rank holds only its own rows of the residual
    return_normed: bool = False  # a quantized call returns the normed rows too
    post_norm: bool = False  # the reduced sum is also normed before the residual add
    experts: int = 0  # experts per token whose rows x sums, besides a shared one; 0: plain x
    float32_residual: bool = False  # the residual is float32, x is not
    own_rows: bool = False  # gather=False: every result has only this rank's rows
    # Tensors [num_tokens, hidden_size] per rank of a call of `rms_norm_sharded`, which takes the
    # place of the call; 0: none.
    slices: int = 0
    # Residual streams of a call of `all_reduce_hyper_connection`, which takes the place of the
    # call; 0: none.
    streams: int = 0
    # After a call of streams, `hyper_connection_input` makes the next layer's input of them.
    next_input: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the residual is added directly to the reduced sum of plain inputs."""
        return not (self.post_norm or self.experts or self.slices or self.streams)

    def __str__(self) -> str:
        parts = [self.quant] if self.quant else []
        parts += ["with normed"] if self.quant and self.return_normed else []
        parts += ["sharded residual"] if self.residual_sharded else []
        parts += ["own rows"] if self.own_rows else []
        parts += ["float32 residual"] if self.float32_residual else []
        parts += ["post norm"] if self.post_norm else []
        parts += [f"{self.experts} experts"] if self.experts else []
        parts += [f"sharded norm of {self.slices}"] if self.slices else []
        parts += [f"{self.streams} streams"] if self.streams else []
        parts += ["next input"] if self.next_input else []
        return ", ".join(parts)


def modes(
    quants: Iterable[str],
    residuals: Iterable[str],
    return_normed: bool = False,
    post_norm: bool = False,
    experts: int = 0,
    float32_residual: bool = False,
    own_rows: bool = False,
    slices: int = 0,
    streams: int = 0,
    next_input: bool = False,
) -> list[Mode]:
    """Returns all combinations of results and residuals; "none" means no quantization.

    `post_norm` adds a variant of each mode with a post norm, `experts` one with that many experts,
    `float32_residual` one with such a residual. `own_rows` adds one of each kind of results, with a
    sharded residual. `slices` adds a mode in which `rms_norm_sharded` norms that many tensors,
    and `streams` one of `all_reduce_hyper_connection` with that many streams. `next_input` adds a
    second mode of streams, in which the next layer's input follows.

    Raises:
        ValueError: a word is not a quantization spec, or allnorm rejects it.
    """
    specs = list(dict.fromkeys(map(quant_name, quants))) or [""]
    changes: list[dict[str, Any]] = [
        {},
        *([{"post_norm": True}] if post_norm else []),
        *([{"experts": experts}] if experts else []),
        *([{"float32_residual": True}] if float32_residual else []),
    ]
    found = [
        Mode(spec, residual == "sharded", bool(spec) and return_normed, **change)
        for residual in residuals
        for spec in specs
        for change in changes
    ]
    if own_rows:
        found += [Mode(spec, True, bool(spec) and return_normed, own_rows=True) for spec in specs]
    found += [Mode(slices=slices)] if slices else []
    found += [Mode(streams=streams)] if streams else []
    return [*found, *([Mode(streams=streams, next_input=True)] if streams and next_input else [])]


def quant_name(text: str) -> str:
    """Returns the name of a spec in JSON rows and tables, without defaults; "" for "none".

    Raises:
        ValueError: `text` is not a quantization spec.
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
    """Parses a quantization spec; returns None for "" and "none".

    Specs are "per_token"; "per_tensor" and "nvfp4", whose caller-given scale is put on `device`;
    "nvfp4:row_major", with scales in row order; "mxfp8"; and "per_group", optionally followed by a
    group size, a scale layout and a scale format, in any order, separated by colons.

    Raises:
        ValueError: `text` is not a quantization spec.
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


# The steps of a hierarchical call: launch A, the exchange between islands, launch B.
INPUT_APART = "allnorm+input"
PARTS = ("islands:sums", "islands:exchange", "islands:rest")

RESIDUAL16 = "allnorm-residual16"
"""The call with a residual in the dtype of x, in place of a float32 one."""

GATHERED = "allnorm-gathered"
"""The call that returns all rows, in place of this rank's."""


def arm_names(device: str, mode: Mode, island_size: int = 0) -> list[str]:
    """Returns the arms that need no other library, in table order.

    Arms of "nccl" on GPUs are arms of "gloo" on "cpu". Ranks in islands have different algorithms,
    and additional arms for the steps of "hierarchical".
    """
    library = "nccl" if device == "cuda" else "gloo"
    if mode.slices:
        fused = ["allnorm", "allnorm:one_shot", "allnorm:unfused"]
        compiled = [f"{library}+inductor"] if device == "cuda" else []  # slow to compile on CPU
        return [*(fused if not island_size else fused[:1]), f"{library}+torch", *compiled]
    fused = ["allnorm", *(f"allnorm:{algorithm}" for algorithm in ALGORITHMS)]
    if island_size:
        fused = ["allnorm", *(f"allnorm:{algorithm}" for algorithm in BETWEEN_ISLANDS)]
        fused += PARTS if mode.is_plain and not mode.residual_sharded and island_size > 1 else ()
    fused += [RESIDUAL16] if mode.float32_residual else []
    fused += [GATHERED] if mode.own_rows else []
    if mode.streams:
        fused += [INPUT_APART] if mode.next_input else []
        return [*(name for name in fused if name not in PARTS), "allnorm+mix", f"{library}+mix"]
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
    """Returns the names of the peer libraries that support a mode.

    Peers run only on GPUs, and support neither sharded nor float32 residuals, post norms, experts
    nor sharded norms. Two of them support four streams.
    """
    if mode.streams:
        return list(_STREAM_PEERS) if device == "cuda" and mode.streams == 4 else []
    supported = mode.is_plain and not mode.residual_sharded and not mode.float32_residual
    return list(PEERS) if device == "cuda" and supported else []


def yardstick_names(mode: Mode) -> tuple[str, ...]:
    """Returns the additional arms after a GEMM; sharded norms and streams have no local one."""
    return YARDSTICKS[:1] if mode.slices or mode.streams else YARDSTICKS


def known_arms(device: str, wanted: Sequence[Mode], island_size: int = 0) -> tuple[str, ...]:
    """Returns the arms and peers of all these modes."""
    names = [name for mode in wanted for name in arm_names(device, mode, island_size)]
    return tuple(dict.fromkeys([*names, *(PEERS if device == "cuda" else ())]))


def with_compared(arms: Sequence[str], wanted: Sequence[Mode]) -> tuple[str, ...]:
    """Returns the arms, plus the calls that a mode's call is compared with.

    A quantized call is compared with the 16-bit call, one with a float32 residual with a 16-bit
    one, and one that returns this rank's rows with the call that returns all of them.
    """
    compared = {
        "allnorm16": any(mode.quant for mode in wanted),
        RESIDUAL16: any(mode.float32_residual for mode in wanted),
        GATHERED: any(mode.own_rows for mode in wanted),
    }
    more = [name for name, needed in compared.items() if needed and "allnorm" in arms]
    return tuple(dict.fromkeys([*arms, *more]))


def is_other(arm: str) -> bool:
    """Returns whether an arm is an alternative: neither an allnorm call nor a yardstick."""
    return not arm.startswith("allnorm") and arm not in (*YARDSTICKS, *PARTS)


def family(arm: str) -> str:
    """Returns the table column for an arm: a peer's algorithms share one, allnorm's do not."""
    return arm if arm.startswith("allnorm") or arm in PARTS else re.sub(r":\w+", "", arm)


@dataclass(frozen=True)
class Shape:
    """The shape of a call and the constants of its norm."""

    num_tokens: int  # rows
    hidden_size: int  # columns
    eps: float = 1e-6  # epsilon of the norm
    weight_bias: float = 0.0  # 1.0 for a Gemma-style weight
    model: str = ""  # the model with this shape, or ""

    def __str__(self) -> str:
        return f"{self.num_tokens}x{self.hidden_size}"


# hidden_size and rms_norm_eps from the models' published configurations. Gemma and Qwen3.5 store
# zero-centered norm weights: serving engines run them with GemmaRMSNorm, which multiplies by
# 1 + weight.
MODELS = {
    shape.model: shape
    for shape in (
        Shape(0, 4096, 1e-5, model="llama-3.1-8b"),
        Shape(0, 8192, 1e-5, model="llama-3.1-70b"),
        Shape(0, 5120, 1e-6, model="qwen3-32b"),
        Shape(0, 2048, 1e-6, model="qwen3-30b-a3b"),
        Shape(0, 2880, 1e-5, model="gpt-oss-120b"),
        Shape(0, 7168, 1e-6, model="deepseek-v3"),
        Shape(0, 4096, 1e-6, 1.0, "qwen3.5-397b"),
        Shape(0, 5376, 1e-6, 1.0, "gemma-3-27b"),
    )
}


def find_model(name: str, num_tokens: int = 0) -> Shape:
    """Returns the shape of the named model's calls.

    Raises:
        ValueError: the name is unknown; the message lists the known names.
    """
    if name.lower() not in MODELS:
        raise ValueError(f"unknown model {name!r}: expected one of {', '.join(MODELS)}")
    return replace(MODELS[name.lower()], num_tokens=num_tokens)
