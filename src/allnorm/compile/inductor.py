"""The Inductor pass, and the keys that it adds to Inductor's caches."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import pathlib
import sys
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._higher_order_ops.effects import with_effects
from torch.fx import Graph, Node

from allnorm import config
from allnorm._version import __version__
from allnorm.communicator import Communicator
from allnorm.compile import agreement
from allnorm.compile.fusion import check_communicator, fuse
from allnorm.compile.report import FusionReport
from allnorm.core.registry import made_so_far, open_communicators
from allnorm.ops import COLLECTIVES

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass


def inductor_pass(
    communicator: Communicator | None = None,
    *,
    all_reduce_ops: Sequence[Any] = (),
    all_reduce_groups: Collection[str] = (),
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    approximate_quant: bool = False,
    approximate_streams: bool = False,
) -> CustomGraphPass:
    """Returns a pass that applies `fuse` to Inductor's graphs.

    For example:

        fusion = allnorm.compile.inductor_pass(communicator)
        model = torch.compile(model, options={"post_grad_custom_post_pass": fusion})
        model(x)
        print(*fusion.reports)

    Args:
        communicator: as for `fuse`. Pass one to reuse compiled code in later processes. Without it,
            compiled code may name a communicator of this process, so other processes cannot use the
            cached code.
        all_reduce_ops: as for `fuse`.
        all_reduce_groups: as for `fuse`.
        decompositions: as for `fuse`. Inductor caches compiled code only if each function refers to
            nothing but numbers, strings, dtypes, tuples of these, PyTorch and Python modules, and
            functions with the same restriction. Otherwise no cache key can describe the function.
        approximate_quant: as for `fuse`.
        approximate_streams: as for `fuse`.

    Returns:
        A `torch._inductor.custom_graph_pass.CustomGraphPass`. Its `reports` list has one
        `FusionReport` per compiled graph, in order. Code that comes from a cache adds no report.

    Raises:
        TypeError: `communicator` has a wrong type.
        CommunicatorClosedError: `communicator` is closed.

    Not collective. Compiling with the pass is collective if it has to create a communicator.
    """
    check_communicator(communicator)
    options = {
        "all_reduce_ops": tuple(all_reduce_ops),
        "all_reduce_groups": frozenset(all_reduce_groups),
        "decompositions": dict(decompositions or {}),
        "approximate_quant": approximate_quant,
        "approximate_streams": approximate_streams,
    }
    return _pass_class()(communicator, options)


_log = logging.getLogger("allnorm.compile")


@functools.cache
def _pass_class() -> Any:
    """Returns the pass's class, which is defined late because importing Inductor takes seconds."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class FusionPass(CustomGraphPass):
        """Fuses the sites in each graph, and keeps the reports."""

        def __init__(self, communicator: Communicator | None, options: dict[str, Any]):
            self.communicator = communicator
            self.options = options
            self.reports: list[FusionReport] = []

        def __call__(self, graph: Any) -> None:
            _remove_tokens(graph)
            report = fuse(graph.owning_module, None, self.communicator, **self.options)
            self.reports.append(report)
            _log.info("%s", report)

        def __deepcopy__(self, memo: Any) -> Any:
            # torch.compile copies its options; the caller reads the reports of the original pass.
            return self

        def uuid(self) -> Any:
            table = self.options["decompositions"]
            try:
                described = tuple(sorted((str(op), _contents(f)) for op, f in table.items()))
            except _HiddenError:
                return None  # disables Inductor's caches
            from torch._inductor.runtime.cache_dir_utils import cache_dir

            traits = (*fingerprint("allnorm.compile"), _settings(self.communicator))
            mine = ""
            if self.communicator is not None:
                mine = agreement.word(self.communicator, pathlib.Path(cache_dir()), traits)
            return (
                *traits,
                mine,
                tuple(map(str, self.options["all_reduce_ops"])),
                tuple(sorted(self.options["all_reduce_groups"])),
                described,
                self.options["approximate_quant"],
                self.options["approximate_streams"],
            )

    return FusionPass


def _remove_tokens(graph: Graph) -> None:
    """Replaces `with_effects(token, op, *args)` with `op(*args)` for allnorm's operators.

    AOTAutograd wraps operators with effects in this call, which returns the next token and the
    results of `op`. The pass does not match such calls, and Inductor does not need the
    tokens: `allnorm.lowering` keeps the calls and their order.
    """
    for node in graph.find_nodes(op="call_function", target=with_effects):
        if node.args[1] in COLLECTIVES:
            _remove_token(graph, node)


def _remove_token(graph: Graph, node: Node) -> None:
    given: tuple[Any, ...] = node.args
    token, target, *arguments = given
    with graph.inserting_before(node):
        call = graph.call_function(target, tuple(arguments), node.kwargs)
    is_tuple = len(target._schema.returns) > 1
    call.meta = dict(node.meta)
    if "val" in node.meta:
        _, *results = node.meta["val"]
        call.meta["val"] = tuple(results) if is_tuple else results[0]
    for item in list(node.users):
        index: Any = item.args[1]
        if index and is_tuple:
            item.args = (call, index - 1)
        else:
            item.replace_all_uses_with(call if index else token)
            graph.erase_node(item)
    graph.erase_node(node)


@functools.cache
def fingerprint(*packages: str) -> tuple[str, str]:
    """Returns allnorm's version, and a hash of the sources of these packages."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(pathlib.Path(str(sys.modules[package].__file__)).parent.glob("*.py")):
            digest.update(path.read_bytes())
    return __version__, digest.hexdigest()


class _HiddenError(Exception):
    """A function refers to an object that can change or whose contents are hidden."""


_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype)
_FIXED = {"torch", "math", "operator", "functools", "itertools", "builtins"}


def _contents(value: Any, seen: tuple[Any, ...] = ()) -> str:
    """Returns a string that differs between values if a function may compute differently with them.

    Raises _HiddenError if the value can change later or its contents are hidden.
    """
    if type(value) in _PLAIN:
        return f"{type(value).__name__} {value!r}"
    if any(value is one for one in seen):
        return f"again {[value is one for one in seen].index(True)}"
    seen = (*seen, value)
    if type(value) in (tuple, frozenset):
        inside = [_contents(item, seen) for item in value]
        return f"{type(value).__name__} {sorted(inside) if type(value) is frozenset else inside}"
    if inspect.isfunction(value):
        return _contents_of_function(value, seen)
    if inspect.iscode(value):
        inside = [_contents(constant, seen) for constant in value.co_consts]
        return f"code {value.co_code.hex()} {value.co_names} {value.co_flags} {inside}"
    if isinstance(value, functools.partial) and not vars(value):
        parts = (value.func, value.args, tuple(sorted(value.keywords.items())))
        return f"partial {_contents(parts, seen)}"
    home = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
    if isinstance(home, str) and home.partition(".")[0] in _FIXED:
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        is_named = inspect.ismodule(value) or inspect.isbuiltin(value) or inspect.isclass(value)
        if is_named or isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return f"{home}.{name} {value}" if not is_named else f"{home}.{name}"
    raise _HiddenError


def _contents_of_function(function: Any, seen: tuple[Any, ...]) -> str:
    home = function.__module__ or ""
    if home.partition(".")[0] in _FIXED:
        return f"{home}.{function.__qualname__}"
    try:
        variables = inspect.getclosurevars(function)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except (ValueError, TypeError):  # a cell that is still empty, or a C wrapper
        raise _HiddenError from None
    names = {**variables.globals, **{name: name for name in variables.unbound}}
    names.update(_globals_inside(function.__code__, function.__globals__))
    parts = (
        function.__code__,
        function.__defaults__,
        tuple(sorted((function.__kwdefaults__ or {}).items())),
        tuple(cells),
        tuple(sorted(names.items(), key=lambda item: item[0])),
    )
    return f"function {_contents(parts, seen)}"


def _globals_inside(code: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the globals that nested functions refer to by name."""
    found = {name: known[name] for name in code.co_names if name in known}
    for constant in code.co_consts:
        if inspect.iscode(constant):
            found.update(_globals_inside(constant, known))
    return found


_PROCESS = uuid.uuid4().hex


def _settings(communicator: Communicator | None) -> tuple[str, ...]:
    """Returns the settings and the communicators that compiled code depends on."""
    switches = str(config.read_settings())
    if communicator is not None:
        traits = (communicator.name, communicator.world_size, communicator.device.type)
        return (switches, *map(str, traits))
    known = [open_.name for open_ in open_communicators()]
    return (switches, _PROCESS, str(known), str(made_so_far()))
