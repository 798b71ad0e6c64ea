"""What a peer is, and what it is told about the benchmark."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from allnorm.bench.arms import Arm, Call, Reduction, outcome_of
from allnorm.bench.case import Case, Outcome
from allnorm.bench.modes import Mode, Shape
from allnorm.testing import DTYPES


@dataclass(frozen=True)
class Setting:
    """What a peer needs to know before it sees a shape; the same on every rank but for `rank`."""

    rank: int  # this rank
    world_size: int  # number of ranks
    device: torch.device  # of the tensors
    dtype: torch.dtype  # of the tensors
    group: dist.ProcessGroup  # all ranks, over gloo, with a time limit
    shapes: tuple[Shape, ...]  # of all inputs

    @property
    def max_elems(self) -> int:
        """Elements of the largest input."""
        return max(shape.num_tokens * shape.hidden_size for shape in self.shapes)

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest input."""
        return self.max_elems * self.dtype.itemsize

    @property
    def max_tokens(self) -> int:
        """Rows of the longest input."""
        return max(shape.num_tokens for shape in self.shapes)

    @property
    def max_hidden_size(self) -> int:
        """Columns of the widest input."""
        return max(shape.hidden_size for shape in self.shapes)


class Peer(ABC):
    """One library. Its module is imported everywhere, the library itself in `missing`."""

    name: ClassVar[str]  # of its arms
    device_type: ClassVar[str] = "cuda"  # where its kernels run
    dtypes: ClassVar[tuple[torch.dtype, ...]] = tuple(DTYPES.values())  # that it has kernels for
    overwrites_inputs: ClassVar[bool] = False  # by its reductions
    granule_bytes: ClassVar[int] = 1  # inputs must consist of whole ones

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
        if case.dtype not in self.dtypes:
            return f"no kernel for {case.dtype}"
        num_bytes = case.xs[0].numel() * case.dtype.itemsize
        whole = case.num_rows and not num_bytes % self.granule_bytes
        return "" if whole else f"no kernel for {case.shape}"

    def variants(
        self,
        call: Callable[[Any], Call],
        choices: Mapping[str, Any],
        outcome: Callable[[Any], Outcome] = outcome_of,
    ) -> list[Arm]:
        """An arm for each choice that the library can be given, by the suffix of its name."""
        return [
            Arm(f"{self.name}{suffix}", call(choice), outcome, foreign=True)
            for suffix, choice in choices.items()
        ]

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
