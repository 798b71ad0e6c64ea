"""What can be run: transformers by name, with their published dimensions, arms and jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from allnorm.bench import modes
from allnorm.testing import DTYPES


@dataclass(frozen=True)
class Transformer:
    """The dimensions of a decoder-only transformer."""

    name: str  # by which it is known here
    hidden_size: int  # width of the residual stream
    num_layers: int  # decoder layers, of two reduction sites each
    num_heads: int  # query heads
    num_kv_heads: int  # key and value heads; ranks hold whole ones, so their number divides this
    head_dim: int  # width of a head
    intermediate_size: int  # width of the MLP, or of each of its experts
    vocab_size: int  # tokens
    eps: float  # of the norms
    rope_theta: float = 5e5  # base of the rotary frequencies
    qk_norm: bool = False  # whether queries and keys are normalised head by head
    weight_bias: float = 0.0  # 1.0 where the norms of the residual stream multiply by `1 + weight`
    post_norm: bool = False  # whether what attention and MLP return is normed, then added
    activation: str = "silu"  # of the gate: or "gelu", by its tanh
    num_experts: int = 0  # MLPs of a layer; 0: the layer has one, for all tokens
    top_k: int = 0  # of them, how many a token uses

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share a key and value head."""
        return self.num_heads // self.num_kv_heads


def _published(
    name: str,
    sizes: tuple[int, int, int, int, int, int],
    theta: float,
    qk_norm: bool = False,
    **more: Any,
) -> Transformer:
    """A model whose hidden size and norm stand in the table of shapes."""
    known = modes.find_model(name)
    norm = (known.eps, theta, qk_norm, known.weight_bias)
    return Transformer(name, known.hidden_size, *sizes, *norm, **more)


_SANDWICH: dict[str, Any] = {"post_norm": True, "activation": "gelu"}

# Layers, query heads, key and value heads, head size, width of the MLP and vocabulary of the
# models' published configurations. The MLP of gpt-oss-120b is dense and as wide as the four experts
# that a token uses; its biases, sinks and windows are left out. So are Gemma's windows, with their
# own rotary frequencies, and its scales of the embedding and of the attention.
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
    """The transformer of that name, with `num_layers` if they are not 0.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name.lower() not in TRANSFORMERS:
        raise ValueError(f"unknown model {name!r}: known are {', '.join(TRANSFORMERS)}")
    model = TRANSFORMERS[name.lower()]
    return replace(model, num_layers=num_layers) if num_layers else model


def check_world_size(model: Transformer, world_size: int) -> None:
    """Refuses a number of ranks that would split a key and value head.

    Raises:
        ValueError: it does not divide the number of these heads.
    """
    if model.num_kv_heads % world_size:
        raise ValueError(
            f"{world_size} ranks cannot share the {model.num_kv_heads} key and value heads of "
            f"{model.name} evenly; use a number of ranks that divides them"
        )


def check_dtype(model: Transformer, dtype: str, device: str) -> None:
    """Refuses a dtype in which GPUs do not multiply by experts without asking the host.

    Raises:
        ValueError: a GPU, a mixture of experts, and another dtype than bfloat16.
    """
    if model.num_experts and device == "cuda" and dtype != "bfloat16":
        raise ValueError(
            f"{dtype}: on GPUs PyTorch's grouped products, which the experts of {model.name} need, "
            "run in bfloat16 only in a CUDA graph; use that, or another model"
        )


PRODUCTS = ("torch", "triton", "dependent")
"""What computes the row-parallel linears of few tokens, in all arms: PyTorch, a Triton kernel, or
that kernel with dependents let in before it ends."""


def check_product(model: Transformer, product: str, dtype: str, device: str) -> None:
    """Refuses a product that there is none of, there or for these dimensions.

    Raises:
        ValueError: Triton's on a CPU, in float32, or of a mixture of experts.
    """
    if product == "torch":
        return
    if device != "cuda":
        raise ValueError(f"{product}: Triton's products need a GPU; use torch")
    if dtype == "float32":
        raise ValueError(f"{product}: Triton's product here is of 16 bits; use torch")
    if model.num_experts:
        raise ValueError(f"{product}: the experts of {model.name} have grouped products; use torch")


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
    product: str = "torch"  # of PRODUCTS

    @property
    def torch_arm(self) -> str:
        """The unfused arm that runs on PyTorch alone."""
        return "nccl+torch" if self.device == "cuda" else "gloo+torch"

    @property
    def always(self) -> tuple[str, ...]:
        """The arms that the others are compared with; they run even if not asked for."""
        return (REFERENCE, self.torch_arm, LOCAL)


MAX_LOGITS_BYTES = 4 << 30
"""Of logits that a rank keeps for comparisons."""


def memory_bytes(job: Job, world_size: int) -> int:
    """What a rank needs, estimated: its part of the weights, the caches, the logits kept."""
    model, batch = job.model, max(job.batch_sizes)
    element = DTYPES[job.dtype].itemsize
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = model.hidden_size * (heads + model.num_heads * model.head_dim)
    layer += 3 * model.hidden_size * model.intermediate_size * max(1, model.num_experts)
    head = model.vocab_size * model.hidden_size
    weights = (model.num_layers * layer + head) // world_size + head  # the embedding is whole
    steps = job.prompt + job.tokens
    caches = 2 * model.num_layers * model.num_kv_heads * model.head_dim * batch * steps
    logits = min(MAX_LOGITS_BYTES, 4 * 4 * batch * job.tokens * model.vocab_size // world_size)
    # With experts, each of a token's choices has a row of its own.
    choices, rows = (model.top_k, 2 * model.top_k + 4) if model.num_experts else (1, 4)
    widest = 2 * choices * model.intermediate_size // world_size + rows * model.hidden_size
    widest *= batch * job.prompt
    return element * (weights + caches // world_size + widest) + logits
