"""Makes graphs with in-place writes functional, using PyTorch's own functionalization.

The graph runs node by node on fake tensors under `torch.func.functionalize`, and `make_fx` records
the run. In-place calls, views of the tensors that they change, and `out=` become pure operators.
Copies at the end store the final contents of the caller's tensors. Every reduction is recorded as
the operator `reduced`. Reductions that are not fused get their original call back.

Graphs that a recording cannot represent are rejected: graphs with calls that have side effects, and
graphs with numbers as inputs, because the recording would turn the numbers into constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call, functionalize
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg

from allnorm.compile import guards
from allnorm.compile.aliasing import keep_aliasing, occurrences
from allnorm.compile.reductions import Reduction, op_name
from allnorm.compile.shapes import Shapes, is_contiguous, same_shape, static_size, storage_of
from allnorm.compile.values import memories
from allnorm.compile.vocabulary import (
    attribute_at,
    attribute_of,
    checks_inputs,
    is_pure,
    is_torch_function,
    module_of,
    operation,
    plain_module,
    qualified_name,
    schema_of,
    state_of,
    written,
)

_library = torch.library.Library("allnorm_compile", "DEF")
_library.define("reduced(Tensor x, int site) -> Tensor")
torch.library.register_fake("allnorm_compile::reduced", lambda x, site: torch.empty_like(x))
REDUCED = torch.ops.allnorm_compile.reduced.default
_FUNCTIONAL = torch.ops._c10d_functional


class NotFunctional(Exception):  # noqa: N818 - a result, with the reason as its text
    """The graph cannot be made functional; the exception's message is the reason."""


def writers(graph: Graph, shapes: Shapes, reductions: dict[Node, Reduction]) -> dict[Node, str]:
    """Returns the nodes that write, keyed by the node whose tensor they write.

    Copies to the graph's inputs are omitted if nothing reads the input afterwards.
    """
    read: set[object] = set()
    found = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            continue
        targets = reductions[node].writes if node in reductions else written(node)
        if targets and not (is_last_copy(node) and shapes.storage(targets[0]) not in read):
            found.update(dict.fromkeys(targets, node))
            targets = []
        sources = [source for source in node.all_input_nodes if source not in targets]
        read.update(memory for source in sources for memory in memories(source, shapes))
    return found


def is_last_copy(node: Node) -> bool:
    """Returns whether a node copies a tensor to a graph input and no node reads the copy."""
    return (
        node.target is torch.ops.aten.copy_.default
        and isinstance(node.args[0], Node)
        and node.args[0].op in ("placeholder", "get_attr")
        and node.args[0] is not node.args[1]
        and all(user.op == "output" for user in node.users)
    )


@dataclass
class Functional:
    """A functional graph.

    Attributes:
        module: the graph; each node has metadata.
        inputs: its inputs, in the original graph's order.
        results: fake tensors of the original graph's results; None for results that are not
            tensors.
        roots: maps each storage to the input or parameter that owns it, with its fake tensor.
        makers: maps each node to the node of the original graph for which it was recorded.
        env: the environment of symbolic sizes that exist only for this graph, or None.
        reductions: the reductions, keyed by node of the original graph.
        constants: the tensors that the original graph creates from constants, keyed by name.
    """

    module: GraphModule
    inputs: list[Node]
    results: list[Tensor | None]
    roots: dict[object, tuple[Node, Tensor]]
    makers: dict[Node, Node]
    env: ShapeEnv | None
    reductions: dict[Node, Reduction] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)

    def finish(self, shapes: Shapes, before: Sequence[Reduction], meta_key: str | None) -> str:
        """Completes the graph after its sites were fused; returns why it cannot, or ""."""
        problem = keep_aliasing(self.module.graph, shapes, self.results, self.roots)
        if not problem:
            self._call_reductions(before)
            traced = meta_key == "val" and TracingContext.try_get() is not None
            if not traced:  # AOTAutograd guards the inputs of its graphs
                self._guard(meta_key)
        return problem

    def install(self, module: GraphModule) -> None:
        """Replaces the nodes of a module's graph with the nodes of this graph."""
        for name, tensor in self.constants.items():
            setattr(module, name, tensor)
        graph = module.graph  # keep the object, because later passes use it
        inputs = graph.find_nodes(op="placeholder")
        meta = graph.output_node().meta
        for node in reversed(graph.nodes):
            if node.op != "placeholder" and not checks_inputs(node):
                graph.erase_node(node)
        same = dict(zip(self.inputs, inputs, strict=True))
        copied: Any = graph.graph_copy(self.module.graph, same, return_output_node=True)
        result, _ = copied
        graph.output(result).meta.update(meta)

    def _call_reductions(self, before: Sequence[Reduction]) -> None:
        """Restores the original calls of reductions that were not fused."""
        graph = self.module.graph
        for node in graph.find_nodes(op="call_function", target=REDUCED):
            with graph.inserting_before(node):
                new = _call(graph, before[node.args[1]], node.args[0])
            new.meta.update(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)

    def _guard(self, meta_key: str | None) -> None:
        """Adds input checks to a graph whose tracer does not guard its inputs."""
        graph = self.module.graph
        # One node per parameter: fused sites may have added more.
        names = {node.target: node for node in graph.find_nodes(op="get_attr")}

        def inputs_of(nodes: Iterable[Node]) -> list[Node]:
            found = (n if n.op == "placeholder" else names.get(n.target) for n in nodes)
            return list(dict.fromkeys(filter(None, found)))

        writes = inputs_of(target for node in graph.nodes for target in written(node))
        roots = inputs_of(node for node, _ in self.roots.values())
        tensors = list(dict.fromkeys([*writes, *roots]))
        given = [node for node in tensors if node.op == "placeholder"]
        rule = "" if meta_key == "example_value" else self._rule(given)
        if writes or rule:
            # The check comes before every node that computes.
            place = next(node for node in graph.nodes if node.op != "placeholder")
            for node in tensors:
                if node.op == "get_attr" and node is not place:
                    place.prepend(node)
            while place.op == "get_attr":
                place = place.next
            with graph.inserting_before(place):
                arguments = (tuple(tensors), len(writes), tuple(given), rule)
                graph.call_function(guards.check_inputs, arguments)

    def _rule(self, tensors: list[Node]) -> str:
        """Returns the conditions on input sizes, written as PyTorch guards."""
        sizes = guards.sizes_of([node.meta["val"] for node in tensors])
        if self.env is not None:
            return guards.rule_of(self.env, sizes, bounds=True)
        traced = guards.rule_of_tracer(sizes)
        parts = [traced] if traced else []
        first: dict[str, str] = {}
        for index, size in enumerate(sizes):
            number, this = static_size(size), f"L['t{index}']"
            known = first.setdefault(str(size), this) if number is None else str(number)
            parts += [f"{this} == {known}"] if known != this else []
        return " and ".join(parts)


def _call(graph: Graph, reduction: Reduction, x: Any) -> Node:
    """Adds a call that reduces `x` as in the original graph; returns the new tensor."""
    node = reduction.node
    name = qualified_name(node.target)
    if name.startswith(("_c10d_functional", "c10d_functional")) or not name:
        functional = _FUNCTIONAL.all_reduce.default
        new = graph.call_function(functional, (x, op_name(reduction), reduction.group))
        return graph.call_function(_FUNCTIONAL.wait_tensor.default, (new,))
    if reduction.in_place:
        x = graph.call_function(torch.ops.aten.clone.default, (x,))
    given = (node.args, node.kwargs)
    args, kwargs = map_arg(given, lambda argument: x if argument is reduction.x else argument)
    result = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    return x if reduction.in_place else result


# ---- recording ----------------------------------------------------------------------------------


def make_functional(
    module: GraphModule,
    shapes: Shapes,
    reductions: dict[Node, Reduction],
    differentiated: frozenset[Node],
) -> Functional:
    """Returns a functional version of the graph; raises NotFunctional if that is impossible.

    Does not change the module.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    _check(module, shapes, reductions)
    if any(node.op != "placeholder" for node in differentiated):
        raise NotFunctional(
            "its results need a gradient: run under torch.no_grad(), or fuse after autograd"
        )
    mode, attributes = shapes.fake_mode, _attributes(module)
    if mode is None:
        raise NotFunctional("the shapes and dtypes of its tensors are unknown")
    fixed = [mode.from_tensor(t.detach(), static_shapes=True) for t in attributes.values()]
    values = [*map(shapes.any_of, inputs), *fixed]
    recorder = _Recorder(module, reductions, list(attributes))
    try:
        with mode, torch.no_grad(), enable_python_dispatcher():
            traced, makers = make_fx(functionalize(recorder.play))(*values), recorder.makers
            if any(written(node) and not is_last_copy(node) for node in traced.graph.nodes):
                again = _Runner(traced)  # an operator's decomposition may write in place
                traced = make_fx(functionalize(again.run))(*values)
                makers = {new: makers[n] for new, n in again.makers.items() if n in makers}
    except NotFunctional:
        raise
    except Exception as error:  # noqa: BLE001 - operators may raise anything for fake tensors
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise NotFunctional(f"PyTorch cannot make it functional: {text[0]}") from None
    _check_strides(shapes, recorder)
    _check_sharing(traced, values, [*(node.name for node in inputs), *attributes])
    places = _with_parameters(traced.graph, len(inputs), list(attributes))
    memory = [storage_of(value) for value in recorder.inputs]
    roots = {
        storage: (place, place.meta["val"])
        for place, storage in zip(places, memory, strict=True)
        if storage is not None and place.graph is not None
    }
    made = Functional(
        traced,
        places[: len(inputs)],
        _with_results(traced.graph, module.graph, recorder, makers),
        roots,
        {**makers, **dict(zip(places, inputs, strict=False))},
        shapes.env,
    )
    _without_copies(made)
    _with_constants(made, module)
    for node in reversed(traced.graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and is_pure(node):
            traced.graph.erase_node(node)
    made.reductions = _reductions(traced.graph, reductions, made.makers)
    _rename(traced.graph, made.makers)
    return made


def _rename(graph: Graph, makers: dict[Node, Node]) -> None:
    """Names each node after the original graph's node for which it was recorded."""
    names = graph._graph_namespace = torch.fx.graph._Namespace()
    last = {makers[node]: node for node in graph.nodes if node in makers}
    for maker, node in last.items():
        node.name = names.create_name(maker.name, None)
    for node in graph.nodes:
        maker = makers.get(node, node)
        if last.get(maker) is not node:
            node.name = names.create_name(maker.name, None)


def _check(module: GraphModule, shapes: Shapes, reductions: dict[Node, Reduction]) -> None:
    """Raises unless a run on fake tensors records everything that the graph does."""
    for node in module.graph.nodes:
        value, reduction = shapes.any_of(node), reductions.get(node)
        _check_plain(node, value)
        if node.op == "placeholder":
            if node.users and (value is None or isinstance(value, int | float | str | list)):
                raise NotFunctional(
                    f"its input {node} is {value!r}, not a tensor, and may differ in later calls"
                )
        elif node.op == "get_attr":
            if not isinstance(attribute_of(node), Tensor):
                raise NotFunctional(f"{node} is not a tensor")
        elif checks_inputs(node):
            continue  # this node stays in the graph
        elif node.op == "call_module":
            called = module_of(node)
            problem = plain_module(called)
            if problem or not type(called).__module__.startswith("torch.nn.modules."):
                effects = "may have side effects: it is not of PyTorch"
                raise NotFunctional(f"{node} calls a module that {problem or effects}")
        elif reduction is not None:
            _check_reduction(reduction)
        elif isinstance(node.target, HigherOrderOperator):
            raise NotFunctional(f"{node} calls {node.target.name()}, a higher-order operator")
        elif node.op == "call_function" and not is_torch_function(node):
            raise NotFunctional(
                f"{node} calls a function that may have side effects: it is not of PyTorch"
            )
        elif (
            node.op != "output" and value is None and not (schema_of(node.target) or written(node))
        ):
            raise NotFunctional(f"{node} does not compute a tensor, so it may have side effects")


def _check_plain(node: Node, value: Any) -> None:
    """Raises if a node involves a DTensor, which cannot be recorded."""
    tensors = {node.name: attribute_of(node) if node.op == "get_attr" else value}
    for name, tensor in (state_of(node) | tensors).items():
        if isinstance(tensor, DTensor):
            raise NotFunctional(
                f"{name} is a DTensor: pass its whole local tensor to the graph instead"
            )


def _check_reduction(reduction: Reduction) -> None:
    node = reduction.node
    if reduction.x is None:
        return
    if reduction.result is not None or node.all_input_nodes != [reduction.x]:
        raise NotFunctional(f"the reduction {node} is not an operator with one tensor argument")
    if reduction.problem.startswith(("it is asynchronous", "it is a Python function")):
        raise NotFunctional(f"{node} is a reduction, but {reduction.problem}")
    of_torch = not qualified_name(node.target) or "c10d_functional" in qualified_name(node.target)
    if of_torch and (reduction.group is None or not op_name(reduction)):
        raise NotFunctional(f"it does not name the reduce op or the process group of {node}")


def _attributes(module: GraphModule) -> dict[str, Tensor]:
    """Returns each parameter and buffer that the graph uses once, keyed by its first path."""
    found: dict[int, tuple[str, Tensor]] = {}
    for node in module.graph.nodes:
        read = {str(node.target): attribute_of(node)} if node.op == "get_attr" else state_of(node)
        for path, tensor in read.items():
            found.setdefault(id(tensor), (path, tensor))
    return dict(found.values())


def _check_strides(shapes: Shapes, recorder: _Recorder) -> None:
    """Raises if functionalization loses a result's strides, which happens with `out=`."""
    for node, result in recorder.results.items():
        given = shapes.of(node)
        if given is None or not isinstance(result, Tensor):
            continue
        if is_contiguous(given) != is_contiguous(result):
            strides = tuple(given.stride())
            raise NotFunctional(
                f"{node} has strides {strides}, which PyTorch's functionalization loses"
            )


def _check_sharing(traced: GraphModule, values: list[Any], names: list[str]) -> None:
    """Raises if the graph writes to an input that shares memory with another input."""
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
                    f"it writes to its input {names[places.index(target)]}, which shares memory "
                    "with another input"
                )


class _Runner(Interpreter):
    """Runs a graph on functional tensors.

    Attributes:
        makers: maps each recorded node to the graph's node for which it was recorded.
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.makers: dict[Node, Node] = {}

    def run_node(self, n: Node) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        last = mode.tracer.graph._root._prev
        value = self._run(n)
        new = mode.tracer.graph._root._prev
        while new is not last and new.op != "root":
            self.makers[new] = n
            new = new._prev
        return value

    def _run(self, n: Node) -> Any:
        return super().run_node(n)


class _Recorder(_Runner):
    """Runs the original graph on functional tensors, with one common operator for all reductions.

    Attributes:
        results: the graph's results, keyed by node.
        inputs: the inputs, followed by the parameters, as they are after the run.
    """

    def __init__(
        self, module: GraphModule, reductions: dict[Node, Reduction], attributes: Sequence[str]
    ) -> None:
        super().__init__(module)
        self._sites = {node: (i, r) for i, (node, r) in enumerate(reductions.items())}
        self._paths = attributes
        self._lifted: dict[int, Any] = {}
        self.results: dict[Node, Any] = {}
        self.inputs: list[Any] = []

    def play(self, *values: Any) -> Any:
        """Runs the graph on its inputs and parameters, and returns each result once."""
        count = len(values) - len(self._paths)
        for path, value in zip(self._paths, values[count:], strict=True):
            self._lifted[id(attribute_at(self.module, path))] = value
        before = [value.shape if isinstance(value, Tensor) else None for value in values]
        # IO processing would flatten an exported graph's inputs and restructure its results.
        results = self.run(*values[:count], enable_io_processing=False)
        for value, shape in zip(values, before, strict=True):
            if shape is not None and not same_shape(value.shape, shape):
                raise NotFunctional("it changes an input's shape in place")
        self.inputs = list(values)
        return results

    def _run(self, n: Node) -> Any:
        index, reduction = self._sites.get(n, (0, None))
        if n.op == "output":
            return self._output(n)
        if n.op == "get_attr":
            return self._lifted[id(attribute_of(n))]
        if checks_inputs(n):
            return None
        if n.op == "call_module":
            return self._module(n)
        waited = n.args[0] if operation(n) == "wait" and n.args else None
        if isinstance(waited, Node) and waited in self._sites:
            return self.env[waited]  # the same tensor, as in eager mode
        if reduction is None or reduction.x is None:
            return self._without_hidden_alias(n, super()._run(n))
        x = self.env[reduction.x]
        value = REDUCED(x, index)
        return x.copy_(value) if reduction.in_place else value

    def _without_hidden_alias(self, n: Node, value: Any) -> Any:
        """Returns the operator's result, or the argument that the operator returned undeclared."""
        if not isinstance(value, Tensor) or not torch._is_functional_tensor(value):
            return value
        for node in n.all_input_nodes:
            given = self.env[node]
            if not isinstance(given, Tensor) or not torch._is_functional_tensor(given):
                continue
            if storage_of(value) != storage_of(given) and _inner(value) == _inner(given):
                if not _is_alike(value, given):
                    raise NotFunctional(
                        f"{n} returns a view of its argument that the operator does not declare"
                    )
                return given
        return value

    def _module(self, n: Node) -> Any:
        called = module_of(n)
        assert called is not None
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        prefix = f"{n.target}."
        state = {path.removeprefix(prefix): t for path, t in state_of(n).items()}
        lifted = {name: self._lifted[id(tensor)] for name, tensor in state.items()}
        return functional_call(called, lifted, args, kwargs)

    def _output(self, n: Node) -> tuple[Any, ...]:
        self.results = {node: self.env[node] for node in occurrences(n.graph)}
        for node, value in self.results.items():
            if isinstance(value, tuple | list | dict):
                raise NotFunctional(f"it returns {node}, which is not a tensor")
        return tuple(self.results.values())


def _inner(tensor: Tensor) -> object:
    """Returns the memory of the tensor that a functional tensor wraps."""
    torch._sync(tensor)  # type: ignore[attr-defined]
    return storage_of(torch._from_functional_tensor(tensor))


def _is_alike(a: Tensor, b: Tensor) -> bool:
    same = a.dtype == b.dtype and a.device == b.device and same_shape(a.shape, b.shape)
    return same and same_shape(a.stride(), b.stride())


# ---- converting the recorded graph to a graph of the module --------------------------------------


def _with_parameters(graph: Graph, count: int, paths: list[str]) -> list[Node]:
    """Replaces all placeholders but the first `count` with the module's parameters and buffers.

    Returns:
        The nodes of all inputs, parameters and buffers.
    """
    places = graph.find_nodes(op="placeholder")
    for index, path in enumerate(paths, count):
        place = places[index]
        with graph.inserting_before(place):
            places[index] = node = graph.create_node("get_attr", path)
        node.meta.update(place.meta)
        place.replace_all_uses_with(node)
        graph.erase_node(place)
    return places


def _with_results(
    graph: Graph, given: Graph, recorder: _Recorder, makers: dict[Node, Node]
) -> list[Tensor | None]:
    """Makes the graph return its results in the original graph's structure.

    Returns:
        Fake tensors of the original graph's results; None for results that are not tensors.
    """
    output, results = graph.output_node(), []
    recorded: Any = output.args[0]
    traced = dict(zip(recorder.results, recorded, strict=True))

    def result(node: Node) -> Any:
        if isinstance(traced[node], Node):
            results.append(recorder.results[node])
            makers.setdefault(traced[node], node)
        return traced[node]

    output.args = (map_arg(given.output_node().args[0], result),)
    return results


def _without_copies(made: Functional) -> None:
    """Removes `copy` nodes whose source has the same layout as their target."""
    inputs = [storage_of(place.meta["val"]) for place, _ in made.roots.values()]
    for node in made.module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.copy.default
    ):
        source = node.args[1]
        tensor = source.meta["val"] if isinstance(source, Node) else None
        # Copies of inputs stay: the graph writes its inputs at the end, after all reads.
        alike = isinstance(tensor, Tensor) and _is_alike(tensor, node.meta["val"])
        if alike and storage_of(tensor) not in inputs:
            node.replace_all_uses_with(source)


def _with_constants(made: Functional, module: GraphModule) -> None:
    """Names the tensors that the graph creates from constants, as attributes of the module."""
    paths = [place.target for place, _ in made.roots.values()]
    for node in made.module.graph.find_nodes(op="get_attr"):
        if node.target in paths:
            continue
        tensor = attribute_at(made.module, str(node.target))
        if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor):
            raise NotFunctional(f"it creates {node}, a tensor that exists only while it is traced")
        name = f"_allnorm_constant{len(made.constants)}"
        while hasattr(module, name):
            name += "_"
        made.constants[name] = tensor
        node.target = name


def _reductions(
    graph: Graph, before: dict[Node, Reduction], makers: dict[Node, Node]
) -> dict[Node, Reduction]:
    """Returns the graph's reductions, keyed by their nodes in the original graph."""
    marked = {node.args[1]: node for node in graph.nodes if node.target is REDUCED}
    found = {}
    for index, (node, reduction) in enumerate(before.items()):
        if reduction.x is None:
            same = (n for n, maker in makers.items() if maker is node)
            new = next((n for n in same if n.target == node.target), None)
            if new is None:
                raise NotFunctional(f"{node} reduces several tensors in place")
            found[node] = replace(reduction, node=new)
        else:
            new = marked[index]
            x: Any = new.args[0]
            found[node] = replace(reduction, node=new, x=x, in_place=False, pending=False)
    return found
