"""A run of a graph on functional tensors, and the graph that is made of what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_arg

from allnorm.compile.aliasing import Memory, results_of
from allnorm.compile.reductions import Reduction
from allnorm.compile.shapes import same_shape
from allnorm.compile.vocabulary import attribute_at, attribute_of, is_pure, module_of, operation

_library = torch.library.Library("allnorm_compile", "DEF")
_library.define("reduced(Tensor x, int site) -> Tensor")
torch.library.register_fake("allnorm_compile::reduced", lambda x, site: torch.empty_like(x))
REDUCED = torch.ops.allnorm_compile.reduced.default


class NotFunctional(Exception):  # noqa: N818 - a result, with the reason as its text
    """The graph cannot be made functional."""


class Again(Interpreter):
    """Runs a graph on functional tensors, and keeps which node made what."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.makers: dict[Node, Node] = {}  # by node of the record

    def run_node(self, n: Node) -> Any:
        """Runs a node, and remembers it as the maker of what that adds to the record."""
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


class Recorder(Again):
    """Runs the graph that was given, with one operator for every reduction."""

    def __init__(
        self, module: GraphModule, reductions: dict[Node, Reduction], attributes: Sequence[str]
    ) -> None:
        super().__init__(module)
        self._sites = {node: (i, r) for i, (node, r) in enumerate(reductions.items())}
        self._paths = attributes
        self._lifted: dict[int, Any] = {}
        self.results: list[Node] = []
        self.memory: dict[Node, Memory] = {}
        self.inputs: list[Memory | None] = []

    def play(self, *values: Any) -> Any:
        """Runs the graph on its inputs and then its parameters; returns each result once."""
        count = len(values) - len(self._paths)
        for path, value in zip(self._paths, values[count:], strict=True):
            self._lifted[id(attribute_at(self.module, path))] = value
        before = [value.shape if isinstance(value, Tensor) else None for value in values]
        results = self.run(*values[:count])
        for value, shape in zip(values, before, strict=True):
            if shape is not None and not same_shape(value.shape, shape):
                raise NotFunctional("it changes the shape of an input in place")
        self.inputs = [_memory(value) for value in values]
        return results

    def _run(self, n: Node) -> Any:
        index, reduction = self._sites.get(n, (0, None))
        if n.op == "output":
            return self._output(n)
        if n.op == "get_attr":
            return self._lifted[id(attribute_of(n))]
        if n.op == "call_module":
            return self._module(n)
        waited = n.args[0] if operation(n) == "wait" and n.args else None
        if isinstance(waited, Node) and waited in self._sites:
            return self.env[waited]  # as eagerly: the same tensor
        if reduction is None or reduction.x is None:
            return self._handed_on(n, super()._run(n))
        x = self.env[reduction.x]
        value = REDUCED(x, index)
        return x.copy_(value) if reduction.in_place else value

    def _handed_on(self, n: Node, value: Any) -> Any:
        """The input itself where an operator returned it, of which its schema says nothing."""
        if not isinstance(value, Tensor) or not torch._is_functional_tensor(value):
            return value
        for node in n.all_input_nodes:
            given = self.env[node]
            if not isinstance(given, Tensor) or not torch._is_functional_tensor(given):
                continue
            outside, inside = (Memory.of(t).storage for t in (value, given))
            if outside != inside and _inner(value) == _inner(given):
                if not _is_alike(value, given):
                    raise NotFunctional(f"{n} returns a view that its operator does not tell of")
                return given
        return value

    def _module(self, n: Node) -> Any:
        called = module_of(n)
        assert called is not None
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        state = {
            name: self._lifted[id(tensor)]
            for name, tensor in (*called.named_parameters(), *called.named_buffers())
        }
        return functional_call(called, state, args, kwargs)

    def _output(self, n: Node) -> tuple[Any, ...]:
        self.results = results_of(n.graph)
        values = [self.env[node] for node in self.results]
        for node, value in zip(self.results, values, strict=True):
            memory = _memory(value)
            if memory is not None:
                self.memory[node] = memory
            elif isinstance(value, tuple | list | dict):
                raise NotFunctional(f"it returns {node}, which is no tensor")
        return tuple(values)


def _memory(value: Any) -> Memory | None:
    if not isinstance(value, Tensor):
        return None
    return Memory.of(value)


class Copy:
    """The record as a graph with the names of the one that was recorded."""

    def __init__(
        self,
        module: GraphModule,
        recorder: Recorder,
        traced: GraphModule,
        makers: dict[Node, Node],
    ) -> None:
        self._module, self._recorder = module, recorder
        self._traced, self._makers = traced, makers
        self._graph = Graph()
        self._new: dict[Node, Any] = {}
        self.constants: dict[str, Tensor] = {}
        self.origin: dict[Node, Node] = {}
        self.inputs: dict[object, tuple[Node, Tensor]] = {}
        self.memory: list[Memory | None] = []

    def make(self, inputs: list[Node], attributes: dict[str, Tensor]) -> GraphModule:
        """The graph, with parameters and buffers by the paths that they have in the module."""
        places = self._traced.graph.find_nodes(op="placeholder")
        sources: list[Node | str] = [*inputs, *attributes]
        memories = self._recorder.inputs
        for place, source, memory in zip(places, sources, memories, strict=True):
            if place.users or isinstance(source, Node):
                self._new[place] = node = self._input(place, source)
                if memory is not None:
                    self.inputs[memory.storage] = (node, place.meta["val"])
        for node in self._traced.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self._new[node] = new = self._copied(node)
                maker = self._makers.get(node)
                if maker is not None and isinstance(new, Node) and new not in self.origin:
                    self.origin[new] = maker
                    if "stack_trace" in maker.meta:
                        new.meta["stack_trace"] = maker.meta["stack_trace"]
        self._output()
        for node in reversed(self._graph.nodes):
            if node.op not in ("placeholder", "output") and not node.users and is_pure(node):
                self._graph.erase_node(node)
        paths = {path: attribute_at(self._module, path) for path in attributes}
        return GraphModule({**paths, **self.constants}, self._graph)

    def _input(self, place: Node, source: Node | str) -> Node:
        if isinstance(source, str):
            node = self._graph.create_node("get_attr", source)
        else:
            arguments: Any = (source.args, {}, source.name, source.type)
            node = self._graph.create_node("placeholder", str(source.target), *arguments)
            node.meta.update(source.meta)
        node.meta.update(place.meta)
        return node

    def _copied(self, node: Node) -> Any:
        if node.op == "get_attr":
            return self._constant(node)
        if node.target is torch.ops.aten.copy.default:
            source: Any = node.args[1]
            mine = node.meta["val"]
            theirs = source.meta["val"] if isinstance(source, Node) else None
            # What is read of an input must be read before it is written, at the end.
            if theirs is not None and _is_alike(theirs, mine) and not self._is_input(theirs):
                return self._new[source]
        return self._graph.node_copy(node, self._new.__getitem__)

    def _is_input(self, tensor: Tensor) -> bool:
        inputs = (known for _, known in self.inputs.values())
        mine = tensor.untyped_storage()._cdata
        return any(known.untyped_storage()._cdata == mine for known in inputs)

    def _constant(self, node: Node) -> Node:
        tensor = attribute_at(self._traced, str(node.target))
        if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor):
            raise NotFunctional(f"it makes {node}, a tensor that only tracing knows")
        name = f"_allnorm_constant{len(self.constants)}"
        while hasattr(self._module, name):
            name += "_"
        self.constants[name] = tensor
        new = self._graph.create_node("get_attr", name)
        new.meta.update(node.meta)
        return new

    def _output(self) -> None:
        (values,) = self._traced.graph.output_node().args
        traced = dict(zip(self._recorder.results, values, strict=True))  # type: ignore[arg-type]

        def result(node: Node) -> Any:
            new = self._new.get(traced[node], traced[node])
            if isinstance(new, Node):
                self.memory.append(self._recorder.memory.get(node))
            return new

        output = self._module.graph.output_node()
        self._graph.output(map_arg(output.args[0], result)).meta.update(output.meta)

    def reductions(self, before: dict[Node, Reduction]) -> dict[Node, Reduction]:
        """The reductions of the graph, by the nodes that they had before."""
        marked = {node.args[1]: node for node in self._graph.nodes if node.target is REDUCED}
        found = {}
        for index, (node, reduction) in enumerate(before.items()):
            if reduction.x is None:
                same = (n for n, maker in self.origin.items() if maker is node)
                new = next((n for n in same if n.target == node.target), None)
                changed = replace(reduction, node=new) if new is not None else None
            else:
                new = marked[index]
                x = new.args[0]
                changed = replace(reduction, node=new, x=x, in_place=False, pending=False)
            if changed is None:
                raise NotFunctional(f"{node} is a reduction of several tensors in place")
            found[node] = changed
        return found


def _inner(tensor: Tensor) -> object:
    torch._sync(tensor)  # type: ignore[attr-defined]
    return Memory.of(torch._from_functional_tensor(tensor)).storage


def _is_alike(a: Tensor, b: Tensor) -> bool:
    same = a.dtype == b.dtype and a.device == b.device and same_shape(a.shape, b.shape)
    return same and same_shape(a.stride(), b.stride())
