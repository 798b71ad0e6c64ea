"""A graph that writes in place as one that does not, by PyTorch's own functionalisation.

The graph is run node by node on fake tensors under `torch.func.functionalize`, and recorded by
`make_fx`: calls in place, views of what they change and `out=` become pure operators, and what the
caller's tensors hold in the end is copied into them there. Reductions are recorded as one operator
of this module, whatever they were called; those that are not fused get their own call back.

What a recording would lose is refused: calls that do more than compute, numbers of one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.node import map_arg

from allnorm.compile import guards
from allnorm.compile.aliasing import Memory, keep_aliasing
from allnorm.compile.record import REDUCED, Again, Copy, NotFunctional, Recorder
from allnorm.compile.reductions import Reduction, op_name
from allnorm.compile.shapes import Shapes
from allnorm.compile.vocabulary import (
    attribute_of,
    is_torch_function,
    module_of,
    plain_module,
    qualified_name,
    schema_of,
    written,
)

_FUNCTIONAL = torch.ops._c10d_functional


def writers(graph: Graph, reductions: dict[Node, Reduction]) -> Iterator[Node]:
    """Nodes that write, but for copies to the graph's inputs behind everything that reads them."""
    read: set[Node] = set()
    for node in reversed(graph.nodes):
        targets = reductions[node].writes if node in reductions else written(node)
        if node.op == "output" or not targets:
            read.update(node.all_input_nodes if node.op != "output" else ())
        elif _is_last_copy(node, targets) and targets[0] not in read:
            read.update(node.all_input_nodes[1:])
        else:
            yield node


def _is_last_copy(node: Node, targets: list[Node]) -> bool:
    return (
        node.target is torch.ops.aten.copy_.default
        and targets[0].op in ("placeholder", "get_attr")
        and targets[0] is not node.args[1]
        and all(user.op == "output" for user in node.users)
    )


@dataclass
class Functional:
    """A functional graph.

    Attributes:
        module: the graph; each node has metadata.
        reductions: by the node of the graph that it was made of.
        origin: the node of that graph that each node was made by.
    """

    module: GraphModule
    reductions: dict[Node, Reduction]
    origin: dict[Node, Node]
    _memory: list[Memory | None]
    _inputs: dict[object, tuple[Node, Tensor]]
    _constants: dict[str, Tensor]
    _meta_key: str | None
    _env: ShapeEnv | None

    def finish(self, shapes: Shapes, before: Sequence[Reduction]) -> str:
        """What the graph needs besides its sites, to stand in the place of that one.

        Returns:
            Why it cannot; empty if it can.
        """
        problem = keep_aliasing(self.module.graph, shapes, self._memory, self._inputs)
        if not problem:
            self._call_reductions(before)
            self._guard(shapes)
        return problem

    def install(self, module: GraphModule) -> None:
        """Makes it the graph of a module."""
        for name, tensor in self._constants.items():
            setattr(module, name, tensor)
        graph = module.graph  # stays the same object: passes hand it on
        for node in reversed(list(graph.nodes)):
            graph.erase_node(node)
        copied: Any = graph.graph_copy(self.module.graph, {}, return_output_node=True)
        result, output = copied
        graph.output(result).meta.update(output.meta)

    def _call_reductions(self, before: Sequence[Reduction]) -> None:
        """Gives the reductions that were not fused their calls back."""
        graph = self.module.graph
        for node in graph.find_nodes(op="call_function", target=REDUCED):
            with graph.inserting_before(node):
                new = _call(graph, before[node.args[1]], node.args[0])
            new.meta.update(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)

    def _guard(self, shapes: Shapes) -> None:
        graph = self.module.graph
        targets = [written(node)[0] for node in graph.nodes if written(node)]
        first = list(dict.fromkeys(t for t in targets if t.op in ("placeholder", "get_attr")))
        inputs = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
        tensors = [node for node in inputs if shapes.of(node) is not None]
        tensors = first + [node for node in tensors if node not in first]
        sizes: list[tuple[int | str, ...] | None] = []
        symbols: dict[str, Any] = {}
        for node in tensors:
            given = node.op == "placeholder" and self._meta_key != "example_value"
            sizes.append(_named(shapes.of(node), symbols) if given else None)
        rule = ""
        if self._env is not None and symbols:
            rule = self._env.produce_guards_expression(list(symbols.values())) or ""
        traced = self._meta_key == "val" and TracingContext.try_get() is not None
        if traced or (not first and not any(sizes)):
            return  # AOTAutograd guards its inputs
        last = inputs[-1]
        with graph.inserting_after(last):
            graph.call_function(
                guards.check_inputs,
                (tuple(tensors), tuple(sizes), rule, tuple(symbols), len(first)),
            )


def _named(tensor: Tensor | None, symbols: dict[str, Any]) -> tuple[int | str, ...]:
    named: list[int | str] = []
    assert tensor is not None
    for size in tensor.shape:
        if isinstance(size, int):
            named.append(size)
        elif size.node.expr.is_number:
            named.append(int(size.node.expr))
        else:
            symbols.setdefault(str(size.node.expr), size)
            named.append(str(size.node.expr))
    return tuple(named)


def _call(graph: Graph, reduction: Reduction, x: Any) -> Node:
    """The call of a reduction, of another tensor, that returns a new one."""
    node, given = reduction.node, reduction.x

    def other(argument: Node) -> Any:
        return x if argument is given else argument

    functional = _FUNCTIONAL.all_reduce.default
    name = qualified_name(node.target)
    if name.startswith(("_c10d_functional", "c10d_functional")) or not name:
        new = graph.call_function(functional, (x, op_name(reduction), reduction.group))
        return graph.call_function(_FUNCTIONAL.wait_tensor.default, (new,))
    if reduction.in_place:
        copy = graph.call_function(torch.ops.aten.clone.default, (x,))
        args, kwargs = map_arg((node.args, node.kwargs), lambda a: copy if a is given else a)
        graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        return copy
    args, kwargs = map_arg((node.args, node.kwargs), other)
    return graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]


# ---- making it ----------------------------------------------------------------------------------


def functionalise(
    module: GraphModule,
    shapes: Shapes,
    reductions: dict[Node, Reduction],
    differentiated: set[Node],
) -> Functional:
    """The graph, functional. The module is not changed.

    Raises:
        NotFunctional: with the reason.
    """
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    _check(module, shapes, reductions)
    if any(node.op != "placeholder" for node in differentiated):
        raise NotFunctional("results of it need a gradient")
    attributes = _attributes(module)
    mode, values = _arguments(shapes, inputs, list(attributes.values()))
    recorder = Recorder(module, reductions, list(attributes))
    try:
        with mode, torch.no_grad(), enable_python_dispatcher():
            traced = make_fx(functionalize(recorder.play))(*values)
            makers = recorder.makers
            if any(writers(traced.graph, {})):  # inside of what an operator is made of
                again = Again(traced)
                traced = make_fx(functionalize(again.run))(*values)
                makers = {new: makers[n] for new, n in again.makers.items() if n in makers}
    except NotFunctional:
        raise
    except Exception as error:  # noqa: BLE001 - whatever an operator says to fake tensors
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise NotFunctional(f"PyTorch cannot make it functional: {text[0]}") from None
    _check_sharing(traced, values)
    copy = Copy(module, recorder, traced, makers)
    made = copy.make(inputs, attributes)
    return Functional(
        made,
        copy.reductions(reductions),
        copy.origin,
        copy.memory,
        copy.inputs,
        copy.constants,
        shapes.meta_key,
        mode.shape_env if shapes.has_real_examples else None,
    )


def _check(module: GraphModule, shapes: Shapes, reductions: dict[Node, Reduction]) -> None:
    """Raises unless running the graph on fake tensors shows everything that it does."""
    for node in module.graph.nodes:
        value, reduction = shapes.any_of(node), reductions.get(node)
        if node.op == "placeholder":
            if node.users and (value is None or isinstance(value, int | float | str | list)):
                raise NotFunctional(f"{node} is {value!r} in it, which may be another one later")
        elif node.op == "get_attr":
            if not isinstance(attribute_of(node), Tensor):
                raise NotFunctional(f"{node} is no tensor")
        elif node.op == "call_module":
            called = module_of(node)
            problem = plain_module(called)
            if problem or not type(called).__module__.startswith("torch.nn.modules."):
                raise NotFunctional(f"{node} calls a module that {problem or 'may do anything'}")
        elif reduction is not None:
            _check_reduction(reduction)
        elif isinstance(node.target, HigherOrderOperator):
            raise NotFunctional(f"{node} calls {node.target.name()}, a higher-order operator")
        elif node.op == "call_function" and not is_torch_function(node):
            raise NotFunctional(f"{node} calls a function that may do anything")
        elif node.op in ("call_function", "call_method") and not _computes(node, value):
            raise NotFunctional(f"{node} does something else than to compute a tensor")


def _computes(node: Node, value: Any) -> bool:
    if schema_of(node.target) is not None or written(node):
        return True
    return value is not None


def _check_reduction(reduction: Reduction) -> None:
    node = reduction.node
    if reduction.x is None:
        return
    if reduction.result is not None or node.all_input_nodes != [reduction.x]:
        raise NotFunctional(f"{node} is a reduction of another form than an operator of one tensor")
    if reduction.problem.startswith(("it is asynchronous", "it is a Python function")):
        raise NotFunctional(f"{node} is a reduction of which {reduction.problem}")
    of_torch = not qualified_name(node.target) or "c10d_functional" in qualified_name(node.target)
    if of_torch and (reduction.group is None or not op_name(reduction)):
        raise NotFunctional(f"the process group of {node} is not a constant of the graph")


def _attributes(module: GraphModule) -> dict[str, Tensor]:
    """Every parameter and buffer that the graph uses, once, by its first path."""
    found: dict[str, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            found[str(node.target)] = attribute_of(node)
        elif node.op == "call_module":
            called = module_of(node)
            assert called is not None
            for name, tensor in (*called.named_parameters(), *called.named_buffers()):
                found[f"{node.target}.{name}"] = tensor
    seen: set[int] = set()
    unique = {path: t for path, t in found.items() if not (id(t) in seen or seen.add(id(t)))}  # type: ignore[func-returns-value]
    return unique


def _arguments(
    shapes: Shapes, inputs: list[Node], attributes: list[Tensor]
) -> tuple[FakeTensorMode, list[Any]]:
    """Fake tensors for the inputs and then the attributes, of sizes as free as they can be."""
    if not shapes.has_real_examples:
        mode = shapes.fake_mode
        if mode is None:
            raise NotFunctional("the shapes and dtypes of its tensors are not known")
        values = [shapes.any_of(node) for node in inputs]
    else:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        assert shapes.examples is not None
        values = [_free(mode, value, index) for index, value in enumerate(shapes.examples)]
        values = values[: len(inputs)]
    fixed = [mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in attributes]
    return mode, [*values, *fixed]


def _free(mode: FakeTensorMode, value: Any, index: int) -> Any:
    """Of any size but in its last dimension."""
    if not isinstance(value, Tensor) or not value.dim():
        return mode.from_tensor(value.detach()) if isinstance(value, Tensor) else value
    dims = [DimDynamic.DUCK] * (value.dim() - 1) + [DimDynamic.STATIC]
    context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
    source = ConstantSource(f"input{index}")
    return mode.from_tensor(value.detach(), symbolic_context=context, source=source)


def _check_sharing(traced: GraphModule, values: list[Any]) -> None:
    """Raises if the graph writes to an input whose memory is another one's too."""
    places = traced.graph.find_nodes(op="placeholder")
    storages = {
        place: value.untyped_storage()._cdata
        for place, value in zip(places, values, strict=True)
        if isinstance(value, Tensor)
    }
    for node in traced.graph.nodes:
        for target in written(node):
            if list(storages.values()).count(storages.get(target)) > 1:
                raise NotFunctional(
                    f"it writes to an input, {target}, that shares memory with another"
                )
