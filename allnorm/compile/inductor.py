"""The pass for Inductor, and what Inductor's caches must know of it."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import pathlib
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from allnorm import config
from allnorm._version import __version__
from allnorm.communicator import Communicator, open_communicators
from allnorm.compile import tokens
from allnorm.compile.fusion import check_communicator, fuse
from allnorm.compile.groups import made_so_far
from allnorm.compile.report import FusionReport

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass


def inductor_pass(
    communicator: Communicator | None = None,
    *,
    all_reduce_ops: Sequence[Any] = (),
    all_reduce_groups: Collection[str] = (),
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    approximate_quant: bool = False,
) -> CustomGraphPass:
    """`fuse` as a pass over Inductor's graphs.

    Example::

        fusion = allnorm.compile.inductor_pass(communicator)
        model = torch.compile(model, options={"post_grad_custom_post_pass": fusion})
        model(x)
        print(*fusion.reports)

    Args:
        communicator: as for `fuse`. Pass it to keep compiled code across processes: without it the
            code may name a communicator that only this process makes, so that Inductor's caches
            are not used by any other.
        all_reduce_ops: as for `fuse`.
        all_reduce_groups: as for `fuse`.
        decompositions: as for `fuse`. Compiled code is kept across processes only with functions
            of which the source is at hand, and which depend on nothing else that changes.
        approximate_quant: as for `fuse`.

    Returns:
        A `torch._inductor.custom_graph_pass.CustomGraphPass`. Its `reports` has a `FusionReport`
        for each graph that was compiled with it, in order; code from a cache adds none.

    Raises:
        TypeError: `communicator` is of a wrong type.
        CommunicatorClosedError: `communicator` is closed.

    Not collective; compiling with it is, if it has to make a communicator.
    """
    check_communicator(communicator)
    options = {
        "all_reduce_ops": tuple(all_reduce_ops),
        "all_reduce_groups": frozenset(all_reduce_groups),
        "decompositions": dict(decompositions or {}),
        "approximate_quant": approximate_quant,
    }
    return _pass_class()(communicator, options)


_log = logging.getLogger("allnorm.compile")


@functools.cache
def _pass_class() -> Any:
    """The class; made late, because importing Inductor takes seconds."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class FusionPass(CustomGraphPass):
        """Fuses the sites of each graph, and remembers what became of them."""

        def __init__(self, communicator: Communicator | None, options: dict[str, Any]):
            self.communicator = communicator
            self.options = options
            self.reports: list[FusionReport] = []

        def __call__(self, graph: Any) -> None:
            tokens.take_away(graph)
            report = fuse(graph.owning_module, None, self.communicator, **self.options)
            self.reports.append(report)
            _log.info("%s", report)

        def __deepcopy__(self, memo: Any) -> Any:
            # torch.compile copies its options; the reports belong to the pass that the caller has.
            return self

        def uuid(self) -> Any:
            return (
                *_fingerprint(),
                _settings(self.communicator),
                tuple(map(str, self.options["all_reduce_ops"])),
                tuple(sorted(self.options["all_reduce_groups"])),
                tuple(sorted(map(_described, self.options["decompositions"].items()))),
                self.options["approximate_quant"],
            )

    return FusionPass


@functools.cache
def _fingerprint() -> tuple[str, str]:
    """Version and sources: other sources fuse other graphs."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return __version__, digest.hexdigest()


def _described(entry: tuple[Any, Callable[..., Any]]) -> tuple[str, str]:
    """An operator, and the source of what it stands for; without one, this process's own."""
    op, function = entry
    try:
        return str(op), inspect.getsource(function)
    except (OSError, TypeError):
        return str(op), f"{_PROCESS} {function!r}"


# Differs in every process.
_PROCESS = uuid.uuid4().hex


def _settings(communicator: Communicator | None) -> tuple[str, ...]:
    """What else the compiled code depends on: the name of the communicator stands in it."""
    switches = str(config.read_settings())
    if communicator is not None:
        traits = (communicator.name, communicator.world_size, communicator.device.type)
        return (switches, *map(str, traits))
    known = [open_.name for open_ in open_communicators()]
    return (switches, _PROCESS, str(known), str(made_so_far()))
