"""Runs tiny dense models of the real SGLang on CPU ranks, without its GPU dependencies.

Empty fake modules replace the dependencies that these tests do not run (image codecs, GPU
kernels, grammars). SGLang itself, torch and transformers are real.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from limits import HANG_SECONDS

import allnorm
from allnorm.testing import RankPool, rank_input, shared_input

HIDDEN_SIZE = 256
NUM_LAYERS = 3
# Maps a model's module to the prefix of its class names.
FAMILIES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3_causal": "Gemma3",
    "glm4": "Glm4",
    "granite": "Granite",
    "exaone4": "Exaone4",
    "olmo2": "Olmo2",
}
# In 0.5.23, layers of the models in the first tuple reduce all of their own sums. In the second
# tuple's models, the layer boundaries reduce the sums that have a post norm.
REDUCE_THEMSELVES = ("gemma2", "gemma3_causal", "granite", "olmo2")
AT_BOUNDARIES = ("glm4", "exaone4")
_CONFIGS = {"gemma3_causal": "Gemma3TextConfig"}
_MORE: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 64, "hidden_act": "gelu_pytorch_tanh"},
    "gemma3_causal": {"query_pre_attn_scalar": 64},
    "granite": {"residual_multiplier": 0.22},
    "exaone4": {
        "sliding_window": 1024,
        "sliding_window_pattern": "LLLG",
        "layer_types": ["sliding_attention"] * NUM_LAYERS,
    },
}

_STAND_INS = (
    *("gguf", "llguidance", "numba", "outlines", "scipy", "sentencepiece", "sgl_kernel"),
    *("soundfile", "tiktoken", "torchao", "torchvision", "uvloop"),
)


class _Nothing:
    """A fake for any attribute of a module; as a decorator, it returns the decorated object."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], (type, types.FunctionType)):
            return args[0]
        return _Nothing(f"{self.__name__}()")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


class _NothingModule(types.ModuleType):
    __version__ = "99.0"
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(f"{self.__name__}.{name}")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder that imports fake modules for the names in `_STAND_INS`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in _STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _NothingModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@functools.cache
def make_importable() -> str:
    """Makes SGLang's modules importable in this process; returns its version."""
    # These come before the fakes, because torch imports some of the faked modules if they exist.
    importlib.import_module("torch._inductor.config")
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.utils.flop_counter")
    sys.meta_path.append(StandIns())
    return str(importlib.import_module("sglang").__version__)


@functools.cache
def join(**settings: Any) -> None:
    """Initializes SGLang's groups and settings on this rank, after torch.distributed."""
    make_importable()
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.server_args import ServerArgs

    rank, world_size = dist.get_rank(), dist.get_world_size()
    settings = {"device": "cpu", "tp_size": world_size} | settings
    arguments = ServerArgs(model_path="dummy", **settings)
    new = hasattr(runtime_context, "SpawnRanks")
    ranks = {"ranks": runtime_context.SpawnRanks(world_rank=rank)} if new else {}
    runtime_context.publish(arguments, role="scheduler", **ranks)
    parallel_state.init_distributed_environment(
        world_size=world_size, rank=rank, local_rank=rank, backend="gloo"
    )
    sizes = {} if new else {"tensor_model_parallel_size": world_size}
    parallel_state.initialize_model_parallel(backend="gloo", **sizes)
    config = SimpleNamespace(hidden_size=HIDDEN_SIZE, dtype=torch.bfloat16, hf_config=None)
    dp_attention.initialize_dp_attention(arguments, *(() if new else (config,)))


class _Unrotated(torch.nn.Module):
    is_neox_style = True

    def forward(self, positions: Any, q: Any, k: Any, **kwargs: Any) -> Any:
        return q, k


class _HiddenStates(torch.nn.Module):
    """A fake logits processor that returns the hidden states."""

    def forward(self, input_ids: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


def tiny_model(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Returns this rank's shard of an SGLang model with random weights; its attention is a tanh."""
    import transformers

    config = getattr(transformers, _CONFIGS.get(family, f"{FAMILIES[family]}Config"))(
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        vocab_size=128,
        pad_token_id=0,
        **_MORE.get(family, {}),
    )
    module = importlib.import_module(f"sglang.srt.models.{family}")
    for name in {"llama", "qwen2", "qwen3", family}:
        importlib.import_module(f"sglang.srt.models.{name}").get_rope = lambda *a, **k: _Unrotated()
    torch.set_default_dtype(dtype)
    try:
        model = getattr(module, f"{FAMILIES[family]}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.logits_processor = _HiddenStates()
    rank = dist.get_rank()
    for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
        shape = tuple(parameter.shape)
        if "norm" in name:
            values = 1 + 0.25 * shared_input(shape, torch.float32, name)
        else:
            values = 0.05 * rank_input(shape, torch.float32, rank, call=index)
        parameter.data.copy_(values)
    for layer in model.model.layers:
        layer.self_attn.attn.forward = lambda q, k, v, *a, **kw: torch.tanh(q)
    return model


def batch_of(num_tokens: int) -> Any:
    """Returns a decode batch of SGLang with one sequence per token."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    zeros = torch.zeros(num_tokens, dtype=torch.int64)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=num_tokens,
        input_ids=zeros,
        req_pool_indices=zeros,
        seq_lens=zeros + 1,
        out_cache_loc=zeros,
        seq_lens_sum=num_tokens,
    )


def run(model: Any, num_tokens: int = 5) -> torch.Tensor:
    """Runs a decode batch; its random embeddings are equal on every rank."""
    dtype = model.model.norm.weight.dtype
    embeds = shared_input((num_tokens, HIDDEN_SIZE), dtype, "embeddings")
    with torch.inference_mode():
        return model.forward(
            torch.zeros(num_tokens, dtype=torch.int64),
            torch.arange(num_tokens),
            batch_of(num_tokens),
            input_embeds=embeds,
        )


def warm_up(model: Any, settings: Mapping[str, Any] | None = None) -> None:
    """Calls the method that SGLang calls before graph capture, which starts the plugin."""
    from sglang.srt.model_executor.runner.base_runner import BaseRunner

    arguments = {
        "chunked_prefill_size": 64,
        "enable_pdmux": False,
        "flashinfer_allreduce_fusion_backend": None,
    }
    runner = SimpleNamespace(
        model=model,
        device="cpu",
        dtype=torch.bfloat16,
        model_config=SimpleNamespace(hidden_size=HIDDEN_SIZE),
        server_args=SimpleNamespace(**(arguments | dict(settings or {}))),
    )
    worker = SimpleNamespace(model_runner=runner)
    BaseRunner._pre_initialize_flashinfer_allreduce_workspace(worker)


def by_definition(model: Any) -> None:
    """Makes a model compute its norms with `allnorm.add_rms_norm`.

    SGLang's CPU norm adds squares in a different order. With the same norm, a fused and an unfused
    run differ only if the reductions or the steps between reductions and norms differ.
    """
    from allnorm.integrations.sglang import norms

    def norm(module: Any, x: Any, residual: Any = None, post: Any = None) -> Any:
        assert post is None
        if residual is not None and module.fp32_residual:
            residual = residual.float()
        normed, total = allnorm.add_rms_norm(
            *(x.contiguous(), residual, module.weight, norms.eps_of(module)),
            weight_bias=norms.arithmetic(module).weight_bias,
            numerics="unrounded",
        )
        return normed if residual is None else (normed, total)

    for module in model.modules():
        if isinstance(module, norms.classes()):
            module._forward_method = functools.partial(norm, module)


@contextlib.contextmanager
def counted_all_reduces() -> Iterator[list[tuple[int, ...]]]:
    """Records the shapes of SGLang's own all-reduces over the tensor-parallel group."""
    from sglang.srt.runtime_context import get_parallel

    shapes: list[tuple[int, ...]] = []
    group = get_parallel().tp_group
    kind = type(group)
    original = kind.all_reduce

    def counting(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return original(self, x, *args, **kwargs)

    kind.all_reduce = counting
    try:
        yield shapes
    finally:
        kind.all_reduce = original


def fresh_plugin() -> Any:
    """Returns the plugin after SGLang has applied its hooks, before the ranks decide on fusion."""
    join()
    from sglang.srt.plugins.hook_registry import HookRegistry

    from allnorm.integrations import sglang as plugin
    from allnorm.integrations.sglang import fusion, start

    assert plugin.install()
    HookRegistry.apply_hooks()
    fusion.activate(None)
    start._decided.clear()
    plugin.announcer._said.clear()
    return fusion


def with_plugin(function: Callable[..., Any]) -> Callable[..., Any]:
    """Passes a fresh plugin to a function as its first argument; closes its communicator later."""

    @functools.wraps(function)
    def run(rank: int, world_size: int, *args: Any) -> Any:
        plugin = fresh_plugin()
        try:
            return function(plugin, rank, world_size, *args)
        finally:
            if plugin.current() is not None:
                plugin.current().communicator.close()
                plugin.activate(None)

    return run


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(2, "cpu", timeout=HANG_SECONDS)
    yield pool
    pool.close()


def is_old() -> bool:
    """Returns whether SGLang is 0.5.17, whose row-parallel layers reduce their own sums."""
    return importlib.metadata.version("sglang") == "0.5.17"


class Log(logging.Handler):
    """Records the plugin's log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        logger = logging.getLogger("allnorm.integrations.sglang")
        logger.setLevel(logging.INFO)
        logger.handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))
