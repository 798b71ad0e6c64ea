"""Lists the places in vLLM that the plugin relies on, and checks that the installed vLLM has them.

They are looked up in vLLM's source files. Importing the modules would take seconds in processes
that never need them, and would initialize vLLM's platform too early.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Seam:
    """A name in one of vLLM's modules.

    Attributes:
        module: the dotted name of the module.
        name: a function, a class, a method ("Class.method"), a field ("Class.field", declared in
            the class or assigned to `self` in its constructor), or any name that is assigned or
            imported at the module's top level.
        parameters: a function's first parameters, without `self`; all later parameters must have
            defaults.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        inside = f"({', '.join(self.parameters)}, ...)" if self.parameters else ""
        return f"{self.module}.{self.name}{inside}"


@dataclass(frozen=True)
class Option:
    """Alternative seams. vLLM must have at least one of them for some kind of norm to be fused.

    Attributes:
        unfused: a log message that names what is not fused without them.
        alternatives: one seam per vLLM version that differs here.
        needs: further seams that are needed with any of the alternatives.
        weight_bias: for eager models' helpers, the number that the norm adds to the weight.
    """

    unfused: str
    alternatives: tuple[Seam, ...]
    needs: tuple[Seam, ...] = ()
    weight_bias: float = 0.0

    def present(self) -> list[Seam]:
        """Returns the alternatives that the installed vLLM has; empty if it lacks `needs`."""
        if missing(self.needs):
            return []
        return [seam for seam in self.alternatives if _exists(seam)]

    def __str__(self) -> str:
        gone = missing(self.needs)
        return ", ".join(gone) or " or ".join(map(str, self.alternatives))


def _fields(module: str, owner: str, *names: str) -> tuple[Seam, ...]:
    return tuple(Seam(module, f"{owner}.{name}") for name in names)


CONFIG = "vllm.config.vllm"
PASS_CONFIG = "vllm.config.compilation"
PASS_MANAGER = "vllm.compilation.passes.pass_manager"
WORKER = "vllm.v1.worker.gpu_worker"
GEMMA_HELPER = "vllm.model_executor.layers.fused_allreduce_gemma_rms_norm"
_PARALLEL_STATE = "vllm.distributed.parallel_state"
_LAYERNORM = "vllm.model_executor.layers.layernorm"
# The modules that define the helper for plain norms, in vLLM 0.33 and in 0.26.
PLAIN_HELPERS = (
    "vllm.models.common.ops.fused_allreduce_rms_norm",
    "vllm.models.deepseek_v32.nvidia.fused_ops",
)
_HELPED = ("hidden_states", "residual", "norm")

# If one of these is missing, nothing is fused.
REQUIRED = (
    # Names that the plugin replaces or extends.
    Seam(CONFIG, "OPTIMIZATION_LEVEL_TO_CONFIG"),
    Seam(PASS_CONFIG, "PassConfig.compute_hash"),
    Seam(PASS_MANAGER, "AllReduceFusionPass"),
    Seam(WORKER, "init_worker_distributed_environment", ("vllm_config", "rank")),
    Seam(WORKER, "Worker.compile_or_warm_up_model"),
    # Names that it calls or reads.
    Seam("vllm.compilation.passes.vllm_inductor_pass", "VllmInductorPass"),
    Seam(_PARALLEL_STATE, "get_tp_group"),
    Seam(_PARALLEL_STATE, "all_reduce", ("tensor", "group_name")),
    *_fields(
        *(CONFIG, "VllmConfig", "additional_config", "compilation_config", "model_config"),
        *("parallel_config", "scheduler_config", "compute_hash"),
    ),
    *_fields(PASS_CONFIG, "CompilationConfig", "pass_config", "mode"),
    *_fields(PASS_CONFIG, "PassConfig", "fuse_allreduce_rms", "fi_allreduce_fusion_max_size_mb"),
    Seam(PASS_CONFIG, "CompilationMode.VLLM_COMPILE"),
    *_fields(
        *("vllm.config.parallel", "ParallelConfig"),
        *("tensor_parallel_size", "data_parallel_rank", "use_ubatching"),
    ),
    *_fields("vllm.config.scheduler", "SchedulerConfig", "max_num_batched_tokens"),
    *_fields("vllm.config.model", "ModelConfig", "get_hidden_size", "dtype"),
    *_fields(
        *(_PARALLEL_STATE, "GroupCoordinator"),
        *("device_group", "device", "rank_in_group", "ranks", "unique_name"),
    ),
    *_fields("vllm.platforms.interface", "Platform", "is_cuda", "device_name"),
)
_DISPATCH = _fields("vllm.ir.op", "IrOp", "registry", "dispatch")
# Helpers that eager models call.
HELPERS = (
    Option(
        "Gemma norms of eager models are not fused",
        (Seam(GEMMA_HELPER, "fused_allreduce_gemma_rms_norm", _HELPED),),
        (*_DISPATCH, *_fields(_LAYERNORM, "GemmaRMSNorm", "weight", "variance_epsilon")),
        weight_bias=1.0,
    ),
    Option(
        "norms of eager models are not fused",
        tuple(Seam(module, "fused_allreduce_rms_norm", _HELPED) for module in PLAIN_HELPERS),
        (
            *_DISPATCH,
            *_fields(
                *(_LAYERNORM, "RMSNorm"),
                *("weight", "variance_epsilon", "variance_size_override", "has_weight"),
            ),
        ),
    ),
)
# If one of these is missing, only the norms that depend on it are not fused.
OPTIONAL = (
    Option(
        "norms that are operators of vLLM's intermediate representation are not fused",
        _DISPATCH[1:],
        (_DISPATCH[0], *_fields("vllm.ir.op", "IrOpImpl", "provider", "impl_fn")),
    ),
    *HELPERS,
)


def missing(seams: tuple[Seam, ...] = REQUIRED) -> list[str]:
    """Returns the names of the seams that the installed vLLM lacks."""
    return [str(seam) for seam in seams if not _exists(seam)]


def _exists(seam: Seam) -> bool:
    tree = _parsed(seam.module)
    if tree is None:
        return False
    found: list[ast.AST] = [tree]
    for part in seam.name.split("."):
        found = [node for scope in found for node in _named(scope, part)]
    if not seam.parameters:
        return bool(found)
    return any(_takes(node, seam.parameters) for node in found)


@functools.cache
def _parsed(module: str) -> ast.Module | None:
    """Returns a module's syntax tree; imports only its outermost package."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        base = pathlib.Path(place).joinpath(*inner)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return ast.parse(path.read_text(encoding="utf-8"))
    return None


def _named(scope: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yields definitions of `name` in a module or class, including inside `if`, `try` or `with`."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if node.name == name:
                yield node
            elif node.name == "__init__":
                yield from (each for each in ast.walk(node) if _is_set_on_self(each, name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if any((alias.asname or alias.name) == name for alias in node.names):
                yield node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield node
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _named(node, name)


def _is_set_on_self(node: ast.AST, name: str) -> bool:
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_set and ast.unparse(node) == f"self.{name}"


def _takes(node: ast.AST, parameters: tuple[str, ...]) -> bool:
    """Returns whether a function can be called with exactly these parameters."""
    if not isinstance(node, ast.FunctionDef):
        return False
    positional = node.args.posonlyargs + node.args.args
    names = [argument.arg for argument in positional]
    required = len(names) - len(node.args.defaults)
    if names[:1] == ["self"]:
        names, required = names[1:], required - 1
    has_more = required > len(parameters) or None in node.args.kw_defaults
    return tuple(names[: len(parameters)]) == parameters and not has_more
