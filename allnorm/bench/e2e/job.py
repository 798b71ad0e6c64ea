"""What ranks are asked to run, and what there is to ask for."""

from __future__ import annotations

from dataclasses import dataclass

from allnorm.bench.e2e.models import Transformer

REFERENCE = "allnorm:unfused"
"""The arm whose bits allnorm's others must have."""
LOCAL = "local"
"""The arm that does not communicate."""

PEER_ARMS = ("flashinfer", "sglang", "sglang+local", "vllm+local")
"""Other libraries: a fused kernel, or "+local": its all-reduce and `allnorm.add_rms_norm`."""


def arm_names(device: str) -> tuple[str, ...]:
    """What can run on "cuda" or "cpu"."""
    library, peers = ("nccl", PEER_ARMS) if device == "cuda" else ("gloo", ())
    return ("allnorm", REFERENCE, f"{library}+torch", f"{library}+local", *peers)


@dataclass(frozen=True)
class Job:
    """What to run; the same on every rank."""

    model: Transformer  # its dimensions
    batch_sizes: tuple[int, ...]  # numbers of prompts
    prompt: int  # tokens of a prompt
    tokens: int  # to generate, at least 2
    arms: tuple[str, ...]  # what to time and compare, of `arm_names`
    dtype: str  # name of the dtype of weights and activations
    device: str  # "cuda" or "cpu"
    rounds: int  # how often each arm generates everything

    @property
    def torch_arm(self) -> str:
        """The arm that stands for what others compute."""
        return "nccl+torch" if self.device == "cuda" else "gloo+torch"

    @property
    def always(self) -> tuple[str, ...]:
        """The arms that the others are compared with, timed whether asked for or not."""
        return (REFERENCE, self.torch_arm, LOCAL)
