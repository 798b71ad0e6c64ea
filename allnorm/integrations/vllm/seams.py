"""The places in vLLM that the plugin relies on, and whether the installed one has them.

They are looked up in its sources: to import them would take seconds in processes that never need
them, and set up its platform too early.
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
    """A name in a module of vLLM.

    Attributes:
        module: dotted name.
        name: of a function, a class, a method ("Class.method") or anything that is assigned or
            imported at the module's top level.
        parameters: what a function takes, the first of all its parameters, without `self`.
        use: what the plugin does there.
    """

    module: str
    name: str
    use: str
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        inside = f"({', '.join(self.parameters)}, ...)" if self.parameters else ""
        return f"{self.module}.{self.name}{inside}"


CONFIG = "vllm.config.vllm"
PASS_CONFIG = "vllm.config.compilation"
PASS_MANAGER = "vllm.compilation.passes.pass_manager"
WORKER = "vllm.v1.worker.gpu_worker"
GEMMA_HELPER = "vllm.model_executor.layers.fused_allreduce_gemma_rms_norm"
# Where the helper for plain norms is: in 0.33, and in 0.26.
HELPERS = (
    "vllm.models.common.ops.fused_allreduce_rms_norm",
    "vllm.models.deepseek_v32.nvidia.fused_ops",
)
_HELPED = ("hidden_states", "residual", "norm")

# Without one of these nothing is done.
REQUIRED = (
    Seam(CONFIG, "OPTIMIZATION_LEVEL_TO_CONFIG", "sets the default of fuse_allreduce_rms"),
    Seam(PASS_CONFIG, "PassConfig.compute_hash", "tells compile caches of allnorm"),
    Seam(PASS_MANAGER, "AllReduceFusionPass", "is replaced by allnorm's pass"),
    Seam("vllm.compilation.passes.vllm_inductor_pass", "VllmInductorPass", "its base class"),
    Seam("vllm.distributed.parallel_state", "get_tp_group", "the group that is fused"),
    Seam("vllm.distributed.parallel_state", "all_reduce", "the operator", ("tensor", "group_name")),
    Seam(
        WORKER,
        "init_worker_distributed_environment",
        "after it the communicator is made",
        ("vllm_config", "rank"),
    ),
    Seam(WORKER, "Worker.compile_or_warm_up_model", "after it the sites are logged"),
)
# Without these the norms that they stand for are not fused.
OPTIONAL = (
    Seam("vllm.ir.op", "IrOp.dispatch", "says which kernel computes a norm"),
    Seam(GEMMA_HELPER, "fused_allreduce_gemma_rms_norm", "eager Gemma norms", _HELPED),
    *(Seam(module, "fused_allreduce_rms_norm", "eager norms", _HELPED) for module in HELPERS),
)


def missing(seams: tuple[Seam, ...] = REQUIRED) -> list[str]:
    """Those that the installed vLLM does not have, in words."""
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
    """The source of a module; of its packages, only the outermost is imported."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        base = pathlib.Path(place).joinpath(*inner)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return ast.parse(path.read_text(encoding="utf-8"))
    return None


def _named(scope: ast.AST, name: str) -> Iterator[ast.AST]:
    """What is called `name` in a module or class, also below an `if`, `try` or `with`."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if node.name == name:
                yield node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if any((alias.asname or alias.name) == name for alias in node.names):
                yield node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield node
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _named(node, name)


def _takes(node: ast.AST, parameters: tuple[str, ...]) -> bool:
    if not isinstance(node, ast.FunctionDef):
        return False
    names = [argument.arg for argument in node.args.posonlyargs + node.args.args]
    names = names[1:] if names[:1] == ["self"] else names
    return tuple(names[: len(parameters)]) == parameters
