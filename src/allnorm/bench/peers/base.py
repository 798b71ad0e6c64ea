"""The base class of peer libraries, and the parameters of the benchmark that they receive."""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from allnorm.bench.arms import Arm, Call, Reduction, outcome_of
from allnorm.bench.case import Case
from allnorm.bench.modes import Mode, Shape
from allnorm.testing import DTYPES


def optional_module(name: str) -> Any:
    """Imports a module that some versions of a library do not have; returns None without it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@dataclass(frozen=True)
class Setting:
    """The parameters that a peer is opened with; equal on every rank, except `rank`."""

    rank: int  # this rank
    world_size: int  # number of ranks
    device: torch.device  # device of the tensors
    dtype: torch.dtype  # dtype of the tensors
    group: dist.ProcessGroup  # gloo group of all ranks, with a time limit
    shapes: tuple[Shape, ...]  # shapes of all inputs

    @property
    def max_elems(self) -> int:
        """The number of elements of the largest input."""
        return max(shape.num_tokens * shape.hidden_size for shape in self.shapes)

    @property
    def max_bytes(self) -> int:
        """The size of the largest input in bytes."""
        return self.max_elems * self.dtype.itemsize

    @property
    def max_tokens(self) -> int:
        """The largest number of rows of an input."""
        return max(shape.num_tokens for shape in self.shapes)

    @property
    def max_hidden_size(self) -> int:
        """The largest number of columns of an input."""
        return max(shape.hidden_size for shape in self.shapes)


class Peer(ABC):
    """Base class of peer libraries. The library itself is only imported in `missing`."""

    name: ClassVar[str]  # name of its arms
    device_type: ClassVar[str] = "cuda"  # device type of its kernels
    dtypes: ClassVar[tuple[torch.dtype, ...]] = tuple(DTYPES.values())  # supported dtypes
    overwrites_inputs: ClassVar[bool] = False  # whether its reductions overwrite their inputs
    granule_bytes: ClassVar[int] = 1  # the size of inputs must be a multiple of this

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def missing(self) -> str:
        """Returns why the peer cannot be used, or "". Not collective; may compile its kernels."""
        if self.setting.device.type != self.device_type:
            return f"runs on {self.device_type} only"
        if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1":
            return "NVLink multicast is not switched off (TORCH_SYMM_MEM_DISABLE_MULTICAST=1)"
        return self.load()

    @abstractmethod
    def load(self) -> str:
        """Imports the library and compiles its kernels; returns an error or "". Not collective."""

    def open(self) -> str | None:
        """Creates the objects that calls share; returns why that failed, or None. Collective."""
        return None

    def supports(self, case: Case, mode: Mode) -> str:
        """Returns why the peer cannot run this case, or ""; depends on no rank's own state."""
        if case.dtype not in self.dtypes:
            return f"no kernel for {case.dtype}"
        num_bytes = case.xs[0].numel() * case.dtype.itemsize
        whole = case.shape.num_tokens and not num_bytes % self.granule_bytes
        return "" if whole else f"no kernel for {case.shape}"

    def variants(self, call: Callable[[Any], Call], choices: Mapping[str, Any]) -> list[Arm]:
        """Returns an arm per choice of a parameter; `choices` maps suffixes of names to values."""
        return [
            Arm(f"{self.name}{suffix}", call(choice), outcome_of, foreign=True)
            for suffix, choice in choices.items()
        ]

    def fused(self, case: Case) -> list[Arm]:
        """Returns arms whose results are normed rows in the dtype of the input."""
        return []

    def fused_quant(self, case: Case, mode: Mode) -> list[Arm]:
        """Returns arms that also quantize as the mode wants, in the same kernel."""
        return []

    def streams(self, case: Case, mode: Mode) -> list[Arm]:
        """Returns arms that reduce the partial sums and mix them with the mode's streams."""
        return []

    def reductions(self, case: Case) -> list[Reduction]:
        """Returns all-reduces, which a norm must follow."""
        return []

    def close(self) -> None:
        """Releases the objects that `open` created. Collective."""
        return
