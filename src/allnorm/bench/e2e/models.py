"""Transformers by name with their published dimensions, names of arms, and jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from allnorm.bench import modes
from allnorm.testing import DTYPES


@dataclass(frozen=True)
class Transformer:
    """The dimensions of a decoder-only transformer."""

    name: str  # name in options and results
    hidden_size: int  # width of the residual stream
    num_layers: int  # number of decoder layers, with two reductions each
    num_heads: int  # number of query heads
    num_kv_heads: int  # number of key and value heads; must be a multiple of the world size
    head_dim: int  # width of a head
    intermediate_size: int  # width of the MLP, or of each of its experts
    vocab_size: int  # size of the vocabulary
    eps: float  # epsilon of the norms
    rope_theta: float = 5e5  # base of the rotary frequencies
    qk_norm: bool = False  # whether each query and key head is normalized
    weight_bias: float = 0.0  # 1.0 if the norms of the residual stream multiply by `1 + weight`
    post_norm: bool = False  # whether results of attention and MLP are normed before the add
    activation: str = "silu"  # activation of the gate: "silu" or "gelu" (tanh approximation)
    num_experts: int = 0  # experts per layer; 0: one dense MLP
    top_k: int = 0  # experts per token

    @property
    def queries_per_kv(self) -> int:
        """The number of query heads per key and value head."""
        return self.num_heads // self.num_kv_heads


def _published(
    name: str,
    sizes: tuple[int, int, int, int, int, int],
    theta: float,
    qk_norm: bool = False,
    **more: Any,
) -> Transformer:
    """Returns a model whose hidden size and norm are in the table `modes.MODELS`."""
    known = modes.find_model(name)
    norm = (known.eps, theta, qk_norm, known.weight_bias)
    return Transformer(name, known.hidden_size, *sizes, *norm, **more)


_SANDWICH: dict[str, Any] = {"post_norm": True, "activation": "gelu"}

# Sizes are from the models' published configurations: layers, query heads, key and value heads,
# head size, MLP width, vocabulary. The MLP of gpt-oss-120b is dense here, as wide as the four
# experts of a token. Omitted are its biases, sinks and windows, and Gemma's windows (with their
# rotary frequencies) and scales of embedding and attention.
TRANSFORMERS = {
    model.name: model
    for model in (
        Transformer("tiny", 256, 3, 16, 8, 16, 512, 1024, 1e-5, 1e4),
        Transformer("tiny-qk-norm", 320, 2, 16, 8, 32, 640, 1024, 1e-6, 1e6, True),
        Transformer("tiny-gemma", 256, 2, 8, 4, 32, 512, 1024, 1e-6, 1e6, True, 1.0, **_SANDWICH),
        Transformer(
            *("tiny-moe", 256, 2, 8, 4, 32, 64, 1024, 1e-6, 1e6, True), num_experts=16, top_k=4
        ),
        _published("llama-3.1-8b", (32, 32, 8, 128, 14336, 128256), 5e5),
        _published("llama-3.1-70b", (80, 64, 8, 128, 28672, 128256), 5e5),
        _published("qwen3-32b", (64, 64, 8, 128, 25600, 151936), 1e6, qk_norm=True),
        _published(
            *("qwen3-30b-a3b", (48, 32, 4, 128, 768, 151936), 1e6, True), num_experts=128, top_k=8
        ),
        _published("gemma-3-27b", (62, 32, 16, 128, 21504, 262208), 1e6, True, **_SANDWICH),
        _published("gpt-oss-120b", (36, 64, 8, 64, 4 * 2880, 201088), 1.5e5),
    )
}


def find(name: str, num_layers: int = 0) -> Transformer:
    """Returns the transformer with that name, with `num_layers` layers unless that is 0.

    Raises:
        ValueError: the name is unknown; the message lists the known names.
    """
    if name.lower() not in TRANSFORMERS:
        raise ValueError(f"unknown model {name!r}: expected one of {', '.join(TRANSFORMERS)}")
    model = TRANSFORMERS[name.lower()]
    return replace(model, num_layers=num_layers) if num_layers else model


def check_world_size(model: Transformer, world_size: int) -> None:
    """Raises if the number of ranks would split a key and value head.

    Raises:
        ValueError: the number of ranks does not divide the number of these heads.
    """
    if model.num_kv_heads % world_size:
        raise ValueError(
            f"{world_size} ranks cannot share the {model.num_kv_heads} key and value heads of "
            f"{model.name} evenly; use a number of ranks that divides them"
        )


def check_dtype(model: Transformer, dtype: str, device: str) -> None:
    """Raises if CUDA graphs cannot capture grouped GEMMs of this dtype.

    Raises:
        ValueError: a mixture of experts on GPUs in a dtype other than bfloat16.
    """
    if model.num_experts and device == "cuda" and dtype != "bfloat16":
        raise ValueError(
            f"{dtype}: on GPUs the experts of {model.name} need PyTorch's grouped GEMMs, which a "
            "CUDA graph can capture in bfloat16 only; use bfloat16 or a different model"
        )


PRODUCTS = ("torch", "triton", "dependent")
"""Implementations of row-parallel linear layers with few tokens, in all arms: PyTorch, a Triton
kernel, or that kernel with its dependent launch triggered early."""


def check_product(model: Transformer, product: str, dtype: str, device: str) -> None:
    """Raises if the GEMM implementation does not support the model, dtype or device.

    Raises:
        ValueError: a Triton GEMM on CPU, in float32, or for a mixture of experts.
    """
    if product == "torch":
        return
    if device != "cuda":
        raise ValueError(f"{product}: Triton GEMMs need a GPU; use torch")
    if dtype == "float32":
        raise ValueError(f"{product}: the Triton GEMM supports 16 bits only; use torch")
    if model.num_experts:
        raise ValueError(f"{product}: the experts of {model.name} use grouped GEMMs; use torch")


REFERENCE = "allnorm:unfused"
"""The arm to which allnorm's other arms must be bit-identical."""
LOCAL = "local"
"""The arm that does not communicate."""

PEER_ARMS = ("flashinfer", "sglang", "sglang+local", "vllm+local")
"""Arms of other libraries: fused kernels; "+local": all-reduce and `allnorm.add_rms_norm`."""


def arm_names(device: str) -> tuple[str, ...]:
    """Returns the names of all arms for "cuda" or "cpu"."""
    library, peers = ("nccl", PEER_ARMS) if device == "cuda" else ("gloo", ())
    return ("allnorm", REFERENCE, f"{library}+torch", f"{library}+local", *peers)


@dataclass(frozen=True)
class Job:
    """A description of what to run, equal on every rank."""

    model: Transformer  # dimensions of the model
    batch_sizes: tuple[int, ...]  # numbers of prompts
    prompt: int  # tokens per prompt
    tokens: int  # tokens to generate, at least 2
    arms: tuple[str, ...]  # arms to time and compare, of `arm_names`
    dtype: str  # name of the dtype of weights and activations
    device: str  # "cuda" or "cpu"
    rounds: int  # timed generations per arm
    product: str = "torch"  # GEMM before reductions, of PRODUCTS

    @property
    def torch_arm(self) -> str:
        """The name of the unfused arm that uses only PyTorch."""
        return "nccl+torch" if self.device == "cuda" else "gloo+torch"

    @property
    def always(self) -> tuple[str, ...]:
        """The arms that others are compared with; they always run."""
        return (REFERENCE, self.torch_arm, LOCAL)


MAX_LOGITS_BYTES = 4 << 30
"""Maximum bytes of logits that a rank keeps for comparisons."""


def memory_bytes(job: Job, world_size: int) -> int:
    """Estimates the memory of a rank: its part of the weights, the caches, the kept logits."""
    model, batch = job.model, max(job.batch_sizes)
    element = DTYPES[job.dtype].itemsize
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = model.hidden_size * (heads + model.num_heads * model.head_dim)
    layer += 3 * model.hidden_size * model.intermediate_size * max(1, model.num_experts)
    head = model.vocab_size * model.hidden_size
    weights = (model.num_layers * layer + head) // world_size + head  # the embedding is replicated
    steps = job.prompt + job.tokens
    caches = 2 * model.num_layers * model.num_kv_heads * model.head_dim * batch * steps
    logits = min(MAX_LOGITS_BYTES, 4 * 4 * batch * job.tokens * model.vocab_size // world_size)
    # With experts, a token has one row per chosen expert.
    choices, rows = (model.top_k, 2 * model.top_k + 4) if model.num_experts else (1, 4)
    widest = 2 * choices * model.intermediate_size // world_size + rows * model.hidden_size
    widest *= batch * job.prompt
    return element * (weights + caches // world_size + widest) + logits
