"""What is known of the tensors of a graph: shapes, dtypes, strides, and who shares memory."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
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
    """The sizes that may differ from real examples when a graph runs, in the order of trying.

    Last dimensions are always as in the examples. A graph that needs more than distinct sizes
    checks its inputs.

    Attributes:
        DISTINCT: every size.
        EQUAL: every size, but equal ones stay equal.
        ROWS: first sizes, but equal ones stay equal.
        NONE: no size.
    """

    DISTINCT = enum.auto()
    EQUAL = enum.auto()
    ROWS = enum.auto()
    NONE = enum.auto()


class Shapes:
    """The tensors of a graph without their data, from its metadata or by running it on fakes.

    Args:
        module: the graph; nothing in it is changed.
        reductions: its reductions, by node: they keep the shape, and need no fake.
        example_inputs: real or fake arguments of the graph, or None. They are only used for nodes
            without metadata.
        freedom: what may be different from real examples later.

    Attributes:
        meta_key: under which the graph's metadata has its tensors; None if it has none.
        fake_mode: of the graph's fake tensors; None if nothing is known.
        examples: the arguments that all of it was found out with; None if metadata told.
        assumed: what was found out of real examples by means that need not hold at other sizes.

    Raises:
        ValueError: fewer example_inputs than the graph has inputs.
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
            for key in _META_KEYS:
                if key in node.meta:
                    self._known[node] = node.meta[key]
                    self.meta_key = self.meta_key or key
                    break
        if len(_modes(self._known.values())) > 1:
            # Each tensor was described on its own: nothing can be said of shared memory.
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
        """Describes a new node, in its metadata too if the others have any."""
        self._known[node] = value
        self._storages[node] = storage_of(value)
        if self.meta_key is not None:
            node.meta[self.meta_key] = value

    def describe(self, node: Node) -> None:
        """Describes a new call by what it returns for fake tensors."""
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
        """Whether all that is known comes from tensors with data, which may be other ones later."""
        examples = self.examples
        return examples is not None and not any(isinstance(e, FakeTensor) for e in examples)

    @property
    def env(self) -> ShapeEnv | None:
        """Environment of the symbolic sizes of real examples; None without real examples."""
        return self.fake_mode.shape_env if self.has_real_examples and self.fake_mode else None

    def in_example(self, size: Any) -> int | None:
        """A size as a number, if it is one, or one of real examples."""
        if static_size(size) is None and self.env is not None:
            return int(size.node.hint)
        return static_size(size)

    def fix(self, size: Any) -> None:
        """Takes a size of real examples as given, which is checked when the graph runs."""
        if static_size(size) is None and self.env is not None:
            self.assumed.sizes = True
            int(size)  # guards

    def any_of(self, node: Node) -> Any:
        """Whatever the node returns, if that is known: a fake tensor, a tuple of them, a number."""
        return self._known.get(node)

    def of(self, node: Node) -> Tensor | None:
        """The fake tensor of a node; None if it is no tensor or nothing is known of it."""
        value = self._known.get(node)
        return value if isinstance(value, Tensor) else None

    def storage(self, node: Node) -> object:
        """Equal for nodes that share memory; a tensor of which nothing is known shares none."""
        return self._storages.get(node) or node


class _Propagate(Interpreter):
    """Runs a graph on fake tensors; what cannot be run stays unknown, and what depends on it."""

    def __init__(
        self,
        module: GraphModule,
        known: dict[Node, Any],
        reductions: dict[Node, Reduction],
        assumed: Assumed,
    ) -> None:
        super().__init__(module, garbage_collect_values=False)  # finding last uses takes long
        self._known = known
        self._reductions = reductions
        self._assumed = assumed
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def start(self, example_inputs: Sequence[Any], freedom: Freedom | None) -> None:
        """Runs the graph.

        Args:
            example_inputs: its arguments.
            freedom: which sizes may be others later, and are symbols; None of what is not real.
        """
        if freedom is not None:
            self._assumed.sizes = freedom is not Freedom.DISTINCT
            # As without symbols, what depends on data stays unknown.
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
                super().run_node(n)  # takes its place in the list of arguments
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
        except Exception:  # noqa: BLE001 - a node that has no fake is unknown, not an error
            return _UNKNOWN
        finally:
            if env is not None:
                self._assumed.note(n, inputs, [guard.expr for guard in env.guards[before:]])
        self._known[n] = result
        return result

    def _run(self, n: Node) -> Any:
        reduction = self._reductions.get(n)
        if reduction is not None and reduction.x is not None:
            x = self.env[reduction.x]
            return x if reduction.in_place else x.clone()
        result = super().run_node(n)
        if n.op == "get_attr" and isinstance(result, Tensor):
            result = self._mode.from_tensor(result, static_shapes=True)
        return result


_UNKNOWN = object()


@dataclass
class Assumed:
    """What the symbolic sizes of a graph rest upon, beyond what its operators check themselves.

    Sizes that must fit need no check: where they do not, the operator raises, or a fused call does.

    Attributes:
        sizes: whether shapes may be others where a guard does not hold.
        ones: whether shapes may be others where a size is 1, or no longer is.
    """

    sizes: bool = False
    ones: bool = False

    def note(self, node: Node, inputs: Sequence[Any], guards: Sequence[Any]) -> None:
        """Takes in the guards that running a node on `inputs` has added."""
        name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
        if name in ("squeeze", "squeeze_") and isinstance(inputs[0], Tensor):
            shape, dim = inputs[0].shape, argument(node, 1, "dim")
            sizes = [shape[dim]] if isinstance(dim, int) else shape
            self.ones |= any(static_size(size) is None for size in sizes)
        known = is_torch_function(node) and all(map(_is_checked, guards))
        self.sizes |= bool(guards) and not known


def _is_checked(guard: Any) -> bool:
    """Whether a guard of an operator only says that sizes fit, or that one is not a special one."""
    relation = getattr(guard, "rel_op", "")
    if relation == "==":
        divides = isinstance(guard.lhs, Mod) and guard.rhs == 0
        return divides or not (guard.lhs.is_number or guard.rhs.is_number)
    if relation in (">", ">="):  # as a comparison of strides: that a size is not 1
        return bool(not guard.lhs.is_Add and guard.rhs <= 2 * guard.lhs.as_coeff_Mul()[0])
    return bool(relation == "!=")


def _free(mode: FakeTensorMode, value: Any, index: int, freedom: Freedom) -> Any:
    """A fake tensor for a real one, of any size but in its last dimension."""
    if not isinstance(value, Tensor):
        return value
    if is_traceable_wrapper_subclass(value):  # a DTensor, with which no site is fused
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
    """Equal for tensors that share memory; None for what is none, or has none."""
    if not isinstance(value, Tensor):
        return None
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _modes(values: Iterable[Any]) -> set[FakeTensorMode]:
    return {value.fake_mode for value in values if isinstance(value, FakeTensor)}


def _fresh(values: Sequence[Any]) -> list[Any]:
    """Fake tensors of one mode for those of several."""
    with FakeTensorMode():
        return [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            if isinstance(t, Tensor)
            else t
            for t in values
        ]


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode | None:
    """The mode that the first fake tensor was made in. The tracer's current one may be another."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
        if isinstance(value, list | tuple) and fake_mode_of(value) is not None:
            return fake_mode_of(value)
    return None


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are equal for certain; adds no guard."""
    return len(a) == len(b) and all(
        statically_known_true(i == j) for i, j in zip(a, b, strict=True)
    )


def is_row(shape: Sequence[Any]) -> bool:
    """Whether all dimensions but the last are 1."""
    return len(shape) > 0 and all(static_size(size) == 1 for size in shape[:-1])


def leads_to(shape: Sequence[Any], longer: Sequence[Any]) -> bool:
    """Whether one shape is another without some dimensions of size 1 in front."""
    more = len(longer) - len(shape)
    ones = more > 0 and all(static_size(size) == 1 for size in longer[:more])
    return bool(shape) and ones and same_shape(shape, longer[more:])


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and strides for certain, where strides matter."""
    sizes = zip(a.shape, a.stride(), b.stride(), strict=False)
    return same_shape(a.shape, b.shape) and all(
        static_size(size) == 1 or statically_known_true(i == j) for size, i, j in sizes
    )


def is_contiguous(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous for certain; adds no guard."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not statically_known_true(size == 1) and not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def has_contiguous_rows(tensor: Tensor) -> bool:
    """Whether the last dimension of a tensor is contiguous for certain."""
    return tensor.dim() > 0 and (
        statically_known_true(tensor.stride(-1) == 1)
        or statically_known_true(tensor.shape[-1] == 1)
    )


def static_size(size: Any) -> int | None:
    """A dimension as a number, if it is one."""
    if isinstance(size, int):
        return size
    expression = getattr(getattr(size, "node", None), "expr", None)
    return int(expression) if expression is not None and expression.is_number else None


def printable(shape: Sequence[Any], *, hints: bool = False) -> tuple[int | str, ...]:
    """A shape without symbols of the tracer: they are named, or with `hints` as in the example."""
    sizes = [static_size(size) for size in shape]
    return tuple(
        (symbolic.node.hint if hints else str(symbolic)) if size is None else size
        for size, symbolic in zip(sizes, shape, strict=True)
    )


def elems(shape: Sequence[Any]) -> Any:
    """The number of elements of a shape."""
    return math.prod(shape)


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HALF = (torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
