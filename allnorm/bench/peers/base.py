"""What a peer is, and what it is told about the benchmark."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from allnorm.cli.bench_modes import Mode
from allnorm.cli.ranks.arms import Arm, Reduction
from allnorm.cli.ranks.case import Case

_MAX_WORDS = 200  # characters of a reason


@dataclass(frozen=True)
class Setting:
    """What a peer needs to know before it sees a shape; the same on every rank but for `rank`.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        device: of the tensors.
        dtype: of the tensors.
        group: all ranks, over gloo, with a time limit.
        max_elems: elements of the largest input.
        max_tokens: rows of the longest one.
        max_hidden_size: columns of the widest one.
    """

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    group: dist.ProcessGroup
    max_elems: int
    max_tokens: int
    max_hidden_size: int

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest input."""
        return self.max_elems * self.dtype.itemsize


class Peer(ABC):
    """One library. Its module is imported everywhere, the library itself in `missing`.

    Attributes:
        name: of its arms.
        device_type: where its kernels run.
        overwrites_inputs: whether its reductions leave something else in their inputs.
    """

    name: ClassVar[str]
    device_type: ClassVar[str] = "cuda"
    overwrites_inputs: ClassVar[bool] = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def missing(self) -> str:
        """Why it cannot be used, "" if it can. Not collective; may compile its kernels."""
        if self.setting.device.type != self.device_type:
            return f"runs on {self.device_type} only"
        if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1":
            return "NVLink multicast is not switched off (TORCH_SYMM_MEM_DISABLE_MULTICAST=1)"
        return self.load()

    @abstractmethod
    def load(self) -> str:
        """Imports the library and compiles its kernels; says what is missing. Not collective."""

    def open(self) -> str | None:
        """Makes what all calls share, or says why that is impossible. Collective."""
        return None

    def supports(self, case: Case, mode: Mode) -> str:
        """Why it cannot run this, "" if it can. Looks only at what all ranks agree on."""
        return ""

    def fused(self, case: Case) -> list[Arm]:
        """Arms that return the normed rows in the dtype of the input."""
        return []

    def fused_quant(self, case: Case, mode: Mode) -> list[Arm]:
        """Arms that quantise as the mode wants within the same kernel."""
        return []

    def reductions(self, case: Case) -> list[Reduction]:
        """All-reduces that a norm must follow."""
        return []

    def close(self) -> None:
        """Releases what `open` made. Collective."""
        return


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_MAX_WORDS].rstrip(": ")
