"""Determines shapes, dtypes, strides and shared memory of a graph's tensors where possible."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    statically_known_true,
)
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._sympy.functions import Mod

from allnorm.compile.reductions import Reduction
from allnorm.compile.vocabulary import argument, is_torch_function

_META_KEYS = ("val", "example_value")


class Freedom(enum.Enum):
    """The sizes that may differ from the real examples' sizes when a graph runs.

    The pass tries the values in this order. The last dimension never differs. Graphs that were
    fused with EQUAL, ROWS or NONE check their inputs.
    """

    DISTINCT = enum.auto()  # every size may differ
    EQUAL = enum.auto()  # every size may differ, but equal sizes stay equal
    ROWS = enum.auto()  # the first dimension may differ, but equal sizes stay equal
    NONE = enum.auto()  # no size may differ


class Shapes:
    """The fake tensors of a graph's nodes, from their metadata or from a run on fake tensors.

    Args:
        module: the graph; it is not changed.
        reductions: its reductions, keyed by node. They are not run; their results are like `x`.
        example_inputs: the graph's arguments, real or fake, or None. Used only for nodes without
            metadata.
        freedom: the sizes that may differ from the real examples' sizes.

    Attributes:
        meta_key: the key in the nodes' metadata that holds the tensors; None without metadata.
        fake_mode: the mode of the graph's fake tensors; None without fake tensors.
        examples: the arguments of the run; None if metadata was used instead.
        assumed: assumptions that the graph must check.
    """

    def __init__(
        self,
        module: GraphModule,
        reductions: dict[Node, Reduction],
        example_inputs: Sequence[Any] | None,
        freedom: Freedom = Freedom.DISTINCT,
    ) -> None:
        self._known: dict[Node, Any] = {}
        self.examples: Sequence[Any] | None = None
        self.assumed = Assumed()
        self.meta_key: str | None = None
        nodes = list(module.graph.nodes)
        for node in nodes:
            key = next((key for key in _META_KEYS if key in node.meta), None)
            if key is not None:
                self._known[node] = node.meta[key]
                self.meta_key = self.meta_key or key
        fakes = [value for value in self._known.values() if isinstance(value, FakeTensor)]
        if len({fake.fake_mode for fake in fakes}) > 1:
            # Fake tensors from different modes do not reveal which tensors share memory.
            inputs = [self._known.get(node) for node in nodes if node.op == "placeholder"]
            example_inputs = example_inputs or _fresh(inputs)
            self._known.clear()
        if example_inputs is not None and any(
            node not in self._known and node.op != "output" for node in nodes
        ):
            if not any(isinstance(value, Tensor) for value in self._known.values()):
                self.examples = example_inputs
            propagate = _Propagate(module, self._known, reductions, self.assumed)
            propagate.start(example_inputs, freedom if self.has_real_examples else None)
        self.fake_mode = fake_mode_of(list(self._known.values()))
        self._storages = {node: storage_of(value) for node, value in self._known.items()}

    def add(self, node: Node, value: Any) -> None:
        """Adds a new node's value, also to its metadata if the other nodes have metadata."""
        self._known[node] = value
        self._storages[node] = storage_of(value)
        if self.meta_key is not None:
            node.meta[self.meta_key] = value

    def describe(self, node: Node) -> None:
        """Runs a new call on fake tensors, and adds the result as its value."""
        if self.fake_mode is None:
            return
        args, kwargs = map_arg((node.args, node.kwargs), self.any_of)
        with self.fake_mode, torch.no_grad():
            if node.op == "call_method":
                result: Any = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                assert callable(node.target)
                result = node.target(*args, **kwargs)
        self.add(node, result)

    @property
    def has_real_examples(self) -> bool:
        """Whether the sizes come from real examples, and may differ when the graph runs."""
        examples = self.examples
        return examples is not None and not any(isinstance(e, FakeTensor) for e in examples)

    @property
    def env(self) -> ShapeEnv | None:
        """The environment of the symbolic sizes; None without real examples."""
        return self.fake_mode.shape_env if self.has_real_examples and self.fake_mode else None

    def in_example(self, size: Any) -> int | None:
        """Returns a size; for a symbolic size, the real examples' size. None if unknown."""
        if static_size(size) is None and self.env is not None:
            return int(size.node.hint)
        return static_size(size)

    def fix(self, size: Any) -> None:
        """Assumes that a size equals the real examples' size; the graph will check it."""
        if static_size(size) is None and self.env is not None:
            self.assumed.sizes = True
            int(size)  # adds a guard

    def any_of(self, node: Node) -> Any:
        """Returns a node's value: a fake tensor, a tuple of them, or a number; None if unknown."""
        return self._known.get(node)

    def of(self, node: Node) -> Tensor | None:
        """Returns the fake tensor of a node; None if it is unknown or not a tensor."""
        value = self._known.get(node)
        return value if isinstance(value, Tensor) else None

    def storage(self, node: Node) -> object:
        """Returns an object that is equal for nodes that share memory; unknown nodes share none."""
        return self._storages.get(node) or node


class _Propagate(Interpreter):
    """Runs a graph on fake tensors. Nodes that cannot run get no value, nor do their users."""

    def __init__(
        self,
        module: GraphModule,
        known: dict[Node, Any],
        reductions: dict[Node, Reduction],
        assumed: Assumed,
    ) -> None:
        super().__init__(module, garbage_collect_values=False)  # garbage collection would be slow
        self._known = known
        self._reductions = reductions
        self._assumed = assumed
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def start(self, example_inputs: Sequence[Any], freedom: Freedom | None) -> None:
        """Runs the graph. `freedom` selects the sizes that become symbols; None for fake inputs."""
        if freedom is not None:
            self._assumed.sizes = freedom is not Freedom.DISTINCT
            # Values that depend on data get no symbols.
            env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
            self._mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
            fakes = [_free(self._mode, value, i, freedom) for i, value in enumerate(example_inputs)]
        else:
            self._mode = fake_mode_of([*self._known.values(), *example_inputs]) or self._mode
            fakes = [
                self._mode.from_tensor(value)
                if isinstance(value, Tensor) and not isinstance(value, FakeTensor)
                else value
                for value in example_inputs
            ]
        placeholders = sum(node.op == "placeholder" for node in self.graph.nodes)
        if len(fakes) < placeholders:
            raise ValueError(
                f"example_inputs has {len(fakes)} entries: the graph has {placeholders} inputs. "
                "Pass one for each."
            )
        with self._mode, torch.no_grad():
            self.run(*fakes, enable_io_processing=False)

    def run_node(self, n: Node) -> Any:
        if n in self._known:
            if n.op == "placeholder":
                super().run_node(n)  # consumes its argument
            return self._known[n]
        inputs: list[Any] = []
        if n.op != "output":
            map_arg((n.args, n.kwargs), lambda node: inputs.append(self.env.get(node)))
        if n.op == "output" or any(value is _UNKNOWN for value in inputs):
            return _UNKNOWN
        env = self._mode.shape_env
        before = 0 if env is None else len(env.guards)
        try:
            result = self._run(n)
        except Exception:  # noqa: BLE001 - not an error: the node's value stays unknown
            return _UNKNOWN
        finally:
            if env is not None:
                self._assumed.note(n, inputs, [guard.expr for guard in env.guards[before:]])
        self._known[n] = result
        return result

    def _run(self, n: Node) -> Any:
        reduction = self._reductions.get(n)
        if reduction is not None and reduction.x is not None and not reduction.scatters:
            x = self.env[reduction.x]
            return x if reduction.in_place else x.clone()
        result = super().run_node(n)
        if n.op == "get_attr" and isinstance(result, Tensor):
            result = self._mode.from_tensor(result, static_shapes=True)
        return result


_UNKNOWN = object()


@dataclass
class Assumed:
    """Assumptions about symbolic sizes that the graph's operators do not check themselves.

    They do check, for example, that sizes are compatible.

    Attributes:
        sizes: whether the graph must check the guards on sizes.
        ones: whether the graph must check that exactly the same sizes are 1 as in the examples.
    """

    sizes: bool = False
    ones: bool = False

    def note(self, node: Node, inputs: Sequence[Any], guards: Sequence[Any]) -> None:
        """Records the assumptions in the guards that were added when a node ran on `inputs`."""
        name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
        if name in ("squeeze", "squeeze_") and isinstance(inputs[0], Tensor):
            shape, dim = inputs[0].shape, argument(node, 1, "dim")
            sizes = [shape[dim]] if isinstance(dim, int) else shape
            self.ones |= any(static_size(size) is None for size in sizes)
        known = is_torch_function(node) and all(map(_is_checked, guards))
        self.sizes |= bool(guards) and not known


def _is_checked(guard: Any) -> bool:
    """Returns whether an operator's guard only requires sizes to be compatible or not special."""
    relation = getattr(guard, "rel_op", "")
    if relation == "==":
        divides = isinstance(guard.lhs, Mod) and guard.rhs == 0
        return divides or not (guard.lhs.is_number or guard.rhs.is_number)
    if relation in (">", ">="):  # a comparison of strides: a size is not 1
        return bool(not guard.lhs.is_Add and guard.rhs <= 2 * guard.lhs.as_coeff_Mul()[0])
    return bool(relation == "!=")


def _free(mode: FakeTensorMode, value: Any, index: int, freedom: Freedom) -> Any:
    """Returns a fake version of a tensor, with symbols for the sizes that `freedom` allows."""
    if not isinstance(value, Tensor):
        return value
    if is_traceable_wrapper_subclass(value):  # a DTensor, which no fused site uses
        return mode.from_tensor(value.detach(), static_shapes=True)
    kind = DimDynamic.DYNAMIC if freedom is Freedom.DISTINCT else DimDynamic.DUCK
    free = {Freedom.ROWS: 1, Freedom.NONE: 0}.get(freedom, value.dim() - 1)
    dims = [
        kind if place < min(free, value.dim() - 1) else DimDynamic.STATIC
        for place in range(value.dim())
    ]
    context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
    source = ConstantSource(f"input{index}")
    return mode.from_tensor(value.detach(), symbolic_context=context, source=source)


def storage_of(value: Any) -> object:
    """Returns an object that is equal for tensors that share memory; None without memory."""
    if not isinstance(value, Tensor):
        return None
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _fresh(values: Sequence[Any]) -> list[Any]:
    """Returns fake tensors like the given tensors, all with the same new mode."""
    with FakeTensorMode():
        return [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            if isinstance(t, Tensor)
            else t
            for t in values
        ]


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode | None:
    """Returns the mode of the first fake tensor, or None."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
        if isinstance(value, list | tuple) and fake_mode_of(value) is not None:
            return fake_mode_of(value)
    return None


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Returns whether two shapes are known to be equal; adds no guard."""
    return len(a) == len(b) and all(
        statically_known_true(i == j) for i, j in zip(a, b, strict=True)
    )


def is_row(shape: Sequence[Any]) -> bool:
    """Returns whether all dimensions but the last have size 1."""
    return len(shape) > 0 and all(static_size(size) == 1 for size in shape[:-1])


def leads_to(shape: Sequence[Any], longer: Sequence[Any]) -> bool:
    """Returns whether `longer` is `shape` with one or more leading dimensions of size 1."""
    more = len(longer) - len(shape)
    ones = more > 0 and all(static_size(size) == 1 for size in longer[:more])
    return bool(shape) and ones and same_shape(shape, longer[more:])


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors are known to have the same shape and the same strides.

    Strides of dimensions of size 1 may differ.
    """
    sizes = zip(a.shape, a.stride(), b.stride(), strict=False)
    return same_shape(a.shape, b.shape) and all(
        static_size(size) == 1 or statically_known_true(i == j) for size, i, j in sizes
    )


def is_contiguous(tensor: Tensor) -> bool:
    """Returns whether a tensor is known to be contiguous; adds no guard."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not statically_known_true(size == 1) and not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def has_contiguous_rows(tensor: Tensor) -> bool:
    """Returns whether a tensor's last dimension is known to be contiguous."""
    return tensor.dim() > 0 and (
        statically_known_true(tensor.stride(-1) == 1)
        or statically_known_true(tensor.shape[-1] == 1)
    )


def static_size(size: Any) -> int | None:
    """Returns a size as a number; None if it is symbolic."""
    if isinstance(size, int):
        return size
    expression = getattr(getattr(size, "node", None), "expr", None)
    return int(expression) if expression is not None and expression.is_number else None


def printable(shape: Sequence[Any], *, hints: bool = False) -> tuple[int | str, ...]:
    """Returns a shape with symbolic sizes as strings or, if `hints`, as their example values."""
    sizes = [static_size(size) for size in shape]
    return tuple(
        (symbolic.node.hint if hints else str(symbolic)) if size is None else size
        for size, symbolic in zip(sizes, shape, strict=True)
    )


def elems(shape: Sequence[Any]) -> Any:
    """Returns the number of elements of a shape."""
    return math.prod(shape)


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HALF = (torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
