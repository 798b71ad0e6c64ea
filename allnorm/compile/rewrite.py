"""Puts fused calls into a graph, and takes out what they stand for."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from allnorm.compile import guards
from allnorm.compile.candidate import Match
from allnorm.compile.expressions import Value
from allnorm.compile.safety import answer, is_answered
from allnorm.compile.shapes import FLOATS, has_contiguous_rows, is_contiguous
from allnorm.compile.values import Values
from allnorm.compile.vocabulary import is_pure, operation

# Places in the schemas of the operators that quantise too, from the end: the communicator's name
# and whether the residual is sharded are only there if they reduce.
_RETURN_NORMED = 9
_NORMED = 3


class Rewriter:
    """Applies the matches of one graph.

    Args:
        graph: is changed.
        values: its expressions before any change.
        matches: what will be applied.
    """

    def __init__(self, graph: Graph, values: Values, matches: Sequence[Match]) -> None:
        self._graph = graph
        self._values = values
        self._shapes = values.shapes
        self._order: list[Node | None] = list(values.position)
        self._needed = {node for match in matches for node in match.inputs}
        self._replaced: dict[Node, Node] = {}
        self._gone: set[Node] = set()

    def apply(self, match: Match, comm_name: str) -> None:
        """Replaces one site by a call on the communicator of this name."""
        candidate, quantised = match.candidate, match.candidate.quantised
        if candidate.is_local:
            self._reduce(match, comm_name)
        call = self._call(match, comm_name)
        # The results of the operators, in their order.
        served = [candidate.normed, candidate.summed]
        if quantised is not None:
            served = [quantised.quantized, quantised.scale, candidate.summed, candidate.normed]
        self._answer(match)
        for index, value in enumerate(served):
            if value is None:
                continue
            result = self._add("call_function", operator.getitem, (call, index), behind=match.after)
            new = self._in_shape(match, value, result)
            for node in match.handed_over(self._values, value):
                self._put(new, node)
        superfluous = sorted({*match.members, *match.dead}, key=self._values.position.__getitem__)
        for node in reversed(superfluous):
            needed = node in self._needed and node not in self._replaced
            if node not in self._gone and not node.users and not needed:
                self._remove(node)
        self._move(match)
        if quantised is not None:
            self._drop_normed(call)
        if candidate.reduction.node not in self._gone:
            raise RuntimeError(f"{candidate.reduction.node} is still used after it was fused")

    def finish(self) -> None:
        """Takes out what only calls would have read."""
        for node in reversed(list(self._graph.nodes)):
            if node in self._needed and not node.users and is_pure(node):
                self._graph.erase_node(node)

    def _move(self, match: Match) -> None:
        """Puts what reads results too early behind the call."""
        for node in sorted(match.moved, key=self._values.position.__getitem__):
            self._order[self._values.position[node]] = None
            self._place(match.after).prepend(node)

    def _in_shape(self, match: Match, value: Value, result: Node) -> Node:
        """A result of the call in the shape that the graph has it in."""
        quantised, view, shape = match.candidate.quantised, None, None
        if value is match.candidate.normed:
            view = match.view_normed
        elif quantised is not None and value is quantised.quantized:
            view = match.view_quantized
        elif quantised is not None and value is quantised.scale:
            shape = match.scale_shape
        if view is not None:
            more = view.all_input_nodes[1:]
            behind = max(match.after, self._values.position[view] if more else -1)
            return self._repeat(view, result, behind)
        tensor = self._shapes.of(result)
        if shape is None or (tensor is not None and [*tensor.shape] == shape):
            return result
        reshape = torch.ops.aten.reshape.default
        return self._add("call_function", reshape, (result, shape), behind=match.after)

    def _drop_normed(self, call: Node) -> None:
        """Does not ask for the 16-bit rows if nobody reads them."""
        results = [user for user in call.users if user.args[1] == _NORMED]
        if any(result.users for result in results):
            return
        for result in results:
            self._remove(result)
        call.update_arg(_RETURN_NORMED, False)
        self._describe(call)

    # ---- the call -------------------------------------------------------------------------------

    def _call(self, match: Match, comm_name: str) -> Node:
        behind, candidate = match.after, match.candidate
        x = self._input(match.x, behind, whole=match.view_x is not None)
        if match.view_x is not None:
            x = self._repeat(match.view_x, x, behind)
        x = self._led(x, match.lead_x, behind)
        residual = None if match.residual is None else self._input(match.residual, behind)
        if residual is not None:
            residual = self._led(residual, match.lead_residual, behind)
        tensors = (x, residual, self._weight(match), candidate.norm.eps)
        mode: tuple[Any, ...] = (match.weight_bias, candidate.numerics)
        if not candidate.is_local:
            mode = (*mode, comm_name)
        name = "add_rms_norm" if candidate.is_local else "all_reduce_add_rms_norm"
        args: tuple[Any, ...] = (*tensors, *mode)
        if candidate.quantised is not None:
            static = match.static_scale
            scale = None if static is None else self._current(static)
            kind = (candidate.quantised.kind, candidate.quantised.group_size)
            name += "_quant"
            args = (*tensors, *kind, match.scale_layout, "float32", scale, True, *mode)
        if match.numbers:
            self._check_numbers(match)
        op = getattr(torch.ops.allnorm, name).default
        call = self._add("call_function", op, args, behind=behind)
        last = candidate.normed.definers[0]
        if "stack_trace" in last.meta:
            call.meta["stack_trace"] = last.meta["stack_trace"]
        return call

    def _check_numbers(self, match: Match) -> None:
        """Checks where it runs what the graph computes of sizes, and the call was made with."""
        nodes = tuple(match.numbers)
        behind = max(match.after, *map(self._values.position.__getitem__, nodes))
        args = (nodes, tuple(match.numbers.values()))
        self._add("call_function", guards.check_values, args, behind=behind)

    def _reduce(self, match: Match, comm_name: str) -> None:
        """The reduction alone, by allnorm: the graph adds the bias to it."""
        reduction, values = match.candidate.reduction, self._values
        assert reduction.x is not None
        behind = values.position[reduction.node]
        x = self._input(reduction.x, behind, whole=True)
        op = torch.ops.allnorm.all_reduce.default
        new = self._add("call_function", op, (x, comm_name), behind=behind)
        for node in reversed(values.reduced[reduction.node].definers):
            if node is reduction.node or operation(node) == "wait":
                self._put(new, node)
                self._remove(node)

    def _input(self, node: Node, behind: int, *, whole: bool = False) -> Node:
        """`x` or the residual, copied if its rows are not contiguous, or as a whole."""
        node = self._current(node)
        tensor = self._shapes.of(node)
        assert tensor is not None
        if is_contiguous(tensor) if whole else has_contiguous_rows(tensor):
            return node
        layout = {"memory_format": torch.contiguous_format}
        clone = torch.ops.aten.clone.default
        return self._add("call_function", clone, (node,), layout, behind=behind)

    def _led(self, node: Node, count: int, behind: int) -> Node:
        """With dimensions of size 1 in front."""
        for _ in range(count):
            unsqueeze = torch.ops.aten.unsqueeze.default
            node = self._add("call_function", unsqueeze, (node, 0), behind=behind)
        return node

    def _weight(self, match: Match) -> Node:
        """[hidden_size], of the dtype of `x` or float32."""
        x = self._shapes.of(match.x)
        assert x is not None
        weight, behind = match.weight, match.after
        size = match.candidate.norm.hidden_size
        if weight is None:  # a product with 1.0 is exact
            kwargs = {"dtype": torch.float32, "device": x.device, "pin_memory": False}
            full = torch.ops.aten.full.default
            return self._add("call_function", full, ([size], 1.0), kwargs, behind=behind)
        if isinstance(weight, str):
            node = self._add("get_attr", weight, (), behind=behind)
        else:
            node = self._current(weight)
        tensor = self._shapes.of(node)
        assert tensor is not None
        if tensor.dim() != 1:
            view = torch.ops.aten.view.default
            node = self._add("call_function", view, (node, [size]), behind=behind)
        if tensor.dtype not in (x.dtype, torch.float32):
            assert tensor.dtype in FLOATS
            cast = torch.ops.prims.convert_element_type.default
            node = self._add("call_function", cast, (node, torch.float32), behind=behind)
        return node

    def _repeat(self, view: Node, source: Node, behind: int) -> Node:
        """A view of the graph, of another tensor."""
        first = view.all_input_nodes[0]

        def replacement(node: Node) -> Node:
            return source if node is first else self._current(node)

        args, kwargs = map_arg((view.args, view.kwargs), replacement)
        return self._add(view.op, view.target, args, kwargs, behind=behind)

    def _add(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        behind: int,
    ) -> Node:
        """A new node behind a position, and behind what was put there before."""
        with self._graph.inserting_before(self._place(behind)):
            node = self._graph.create_node(op, target, args, kwargs or {})
        self._describe(node)
        return node

    def _place(self, behind: int) -> Node:
        """The node in front of which new ones stand behind a position."""
        for index in range(behind + 1, len(self._order)):
            node = self._order[index]
            if node is not None and node not in self._gone:
                return node
        raise AssertionError("a graph ends with its output")

    def _describe(self, node: Node) -> None:
        """Gives a new node the metadata that the others have."""
        mode = self._shapes.fake_mode
        if mode is None:
            return
        args, kwargs = map_arg((node.args, node.kwargs), self._shapes.any_of)
        with mode, torch.no_grad():
            if node.op == "get_attr":
                parameter = self._values.parameters[str(node.target)]
                fake = isinstance(parameter, FakeTensor)
                result: Any = parameter if fake else mode.from_tensor(parameter)
            elif node.op == "call_method":
                result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                assert callable(node.target)
                result = node.target(*args, **kwargs)
        self._shapes.add(node, result)

    # ---- readers --------------------------------------------------------------------------------

    def _current(self, node: Node) -> Node:
        """What stands now for a node of the graph as it was."""
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def _put(self, new: Node, node: Node) -> None:
        """Makes everybody who reads a node read the new one."""
        for user in list(node.users):
            if user is not new:
                user.replace_input_with(node, new)
        self._replaced[node] = new

    def _answer(self, match: Match) -> None:
        """Asks others for shapes and dtypes of tensors that will not be there, or not so early."""
        values, members = self._values, {*match.members, *match.dead}
        served = {n for value in match.candidate.served for n in match.handed_over(values, value)}
        for value in match.candidate.values:
            for question, source in value.questions:
                early = values.position[question] <= match.after
                if question in self._gone or (source in served and not early):
                    continue
                if source not in members and source not in served:
                    continue
                other = answer(values, match, question, source)
                if is_answered(values, question):
                    self._graph.erase_node(question)
                    self._gone.add(question)
                elif other is not None:
                    question.replace_input_with(source, self._current(other))

    # ---- removal --------------------------------------------------------------------------------

    def _remove(self, node: Node) -> None:
        """Erases a node, and what is then left without a use."""
        inputs = node.all_input_nodes
        self._gone.add(node)
        self._graph.erase_node(node)
        for source in inputs:
            unused = source not in self._gone and not source.users and source.op != "placeholder"
            needed = source in self._needed and source not in self._replaced
            if unused and not needed and is_pure(source):
                self._remove(source)
