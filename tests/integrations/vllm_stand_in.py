"""Fakes of the vLLM modules that the graph pass and the start of vLLM's workers use."""

from __future__ import annotations

import enum
import logging
import pathlib
import sys
import types
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from allnorm.integrations.engines import Announcer
from allnorm.testing import rank_input, shared_input

HIDDEN = 64
_library: list[Any] = []


class Mode(enum.IntEnum):
    NONE = 0
    VLLM_COMPILE = 3


class Pass:
    """A fake base class for vLLM's passes."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @staticmethod
    def time_and_log(function: Any) -> Any:
        return function


class Config(SimpleNamespace):
    def compute_hash(self) -> str:
        return "a hash"


def config(world_size: int, **changes: Any) -> Any:
    """Returns the configuration of an engine that compiles and fuses graphs."""
    passes = SimpleNamespace(fuse_allreduce_rms=True, fi_allreduce_fusion_max_size_mb=None)
    return Config(
        additional_config={"allnorm": {"stock": False}},
        compilation_config=SimpleNamespace(pass_config=passes, mode=Mode.VLLM_COMPILE),
        model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN, dtype=torch.bfloat16),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=world_size, data_parallel_rank=0, use_ubatching=False
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32),
        **changes,
    )


def put_in_place(cache: str) -> None:
    """Installs the fake modules, with a tensor-parallel group of all ranks."""
    group = SimpleNamespace(
        device_group=dist.group.WORLD,
        device=torch.device("cpu"),
        rank_in_group=dist.get_rank(),
        ranks=list(range(dist.get_world_size())),
        unique_name="tp:0",
    )
    platform = SimpleNamespace(is_cuda=lambda: True, device_name="cuda")
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"envs": SimpleNamespace(VLLM_CACHE_ROOT=cache)},
        "vllm.platforms": {"current_platform": platform},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: group},
        "vllm.compilation": {},
        "vllm.compilation.passes": {},
        "vllm.compilation.passes.vllm_inductor_pass": {"VllmInductorPass": Pass},
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
        sys.modules[name] = module
    for name in [name for name in sys.modules if name.endswith("vllm.graph_pass")]:
        del sys.modules[name]
    if not _library:
        library = torch.library.Library("vllm", "FRAGMENT")
        library.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
        library.impl("all_reduce", _all_reduce, "CPU")
        torch.library.register_fake("vllm::all_reduce", lambda x, group_name: torch.empty_like(x))
        library.define(
            "minimax_qk_norm_fusion(Tensor qkv, Tensor q_weight, Tensor k_weight, SymInt q_size, "
            "SymInt kv_size, SymInt tp_rank, SymInt tp_world, float eps, Tensor? workspace) "
            "-> (Tensor, Tensor)"
        )
        library.impl("minimax_qk_norm_fusion", _qk_norm, "CPU")
        torch.library.register_fake("vllm::minimax_qk_norm_fusion", _qk_shapes)
        _library.append(library)


def _all_reduce(x: torch.Tensor, group_name: str) -> torch.Tensor:
    total = x.float()
    dist.all_reduce(total)
    return total.to(x.dtype)


def _qk_norm(
    qkv: torch.Tensor, q_weight: Any, k_weight: Any, q_size: int, kv_size: int, *more: Any
) -> Any:
    """Norms q and k as vLLM does: in float32, with one rounding."""
    _, world_size, eps, _ = more
    results = []
    slices = qkv.split([q_size, kv_size, kv_size], -1)
    for x, weight in zip(slices, (q_weight, k_weight), strict=False):
        mean = x.float().pow(2).mean(-1, keepdim=True)
        dist.all_reduce(mean)
        normed = x.float() * torch.rsqrt(mean / world_size + eps) * weight
        results.append(normed.to(x.dtype))
    return tuple(results)


def _qk_shapes(qkv: torch.Tensor, q_weight: Any, k_weight: Any, *sizes: Any) -> Any:
    return tuple(qkv.new_empty((qkv.shape[0], size)) for size in sizes[:2])


def qk_inputs(rank: int) -> list[torch.Tensor]:
    """Returns q, k and v as one matrix, and the weights of the norms of q and k."""
    return [
        rank_input((5, 2 * HIDDEN), torch.bfloat16, rank),
        rank_input((HIDDEN,), torch.bfloat16, rank + 10),
        rank_input((HIDDEN // 2,), torch.bfloat16, rank + 20),
    ]


def qk_graph(rank: int, world_size: int) -> torch.fx.GraphModule:
    """Returns a graph with the operator by which vLLM norms q and k of MiniMax-M2."""

    def block(qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> Any:
        sizes = (HIDDEN, HIDDEN // 2, rank, world_size)
        q, k = torch.ops.vllm.minimax_qk_norm_fusion(qkv, q_weight, k_weight, *sizes, 1e-6, None)
        return q, k + 1

    return make_fx(block, tracing_mode="fake")(*qk_inputs(rank))


def remove() -> None:
    """Removes the fake modules."""
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


class Said(logging.Handler):
    """Records the plugin's log messages."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        logger = logging.Logger("stand-in", logging.INFO)
        logger.addHandler(self)
        state.announcer = Announcer(logger)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def inputs(rank: int) -> list[torch.Tensor]:
    return [
        rank_input((5, HIDDEN), torch.bfloat16, rank),
        shared_input((5, HIDDEN), torch.bfloat16, "residual"),
        shared_input((HIDDEN,), torch.bfloat16, "weight"),
    ]


def graph(rank: int, norm: bool = True) -> torch.fx.GraphModule:
    """Returns a graph such as the pass receives; without `norm`, it has no reduction to fuse."""

    def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        reduced = torch.ops.vllm.all_reduce(x, "tp:0") if norm else x
        total = reduced + residual
        z = total.float()
        normed = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (normed * weight.float()).to(torch.bfloat16), total

    return make_fx(block, tracing_mode="fake")(*inputs(rank))


def folder(cache: pathlib.Path) -> list[str]:
    """Returns the ids of the generations of compiled code that the cache holds."""
    place = cache / "allnorm"
    return sorted(path.read_text() for path in place.iterdir()) if place.exists() else []
