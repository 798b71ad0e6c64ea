"""Puts fused calls into a graph, and takes out what they stand for."""

from __future__ import annotations

import bisect
import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from allnorm.compile.candidate import Match
from allnorm.compile.expressions import Value
from allnorm.compile.shapes import (
    FLOATS,
    has_contiguous_rows,
    is_contiguous,
    same_shape,
)
from allnorm.compile.values import Values
from allnorm.compile.vocabulary import operation, written

# Places in the schema of all_reduce_add_rms_norm_quant.
_RETURN_NORMED = 9
_NORMED = 3


class Rewriter:
    """Applies the matches of one graph.

    Args:
        graph: is changed.
        values: its expressions before any change.
    """

    def __init__(self, graph: Graph, values: Values) -> None:
        self._graph = graph
        self._values = values
        self._shapes = values.shapes
        # Where every node is, or was: new ones stand between whole numbers.
        self._position: dict[Node, float] = {**values.position}
        self._order = [(float(position), node) for node, position in values.position.items()]
        # What stands for the tensor of a node, and behind which position.
        self._replaced: dict[Node, list[tuple[int, Node]]] = {}
        self._gone: set[Node] = set()

    def apply(self, match: Match, comm_name: str) -> None:
        """Replaces one site by a call on the communicator of this name."""
        candidate, quantised = match.candidate, match.candidate.quantised
        call = self._call(match, comm_name)
        # The results of the operators, in their order.
        served = [candidate.normed, candidate.summed]
        if quantised is not None:
            served = [quantised.quantized, quantised.scale, candidate.summed, candidate.normed]
        for index, value in enumerate(served):
            if value is None:
                continue
            result = self._add("call_function", operator.getitem, (call, index), behind=match.after)
            new = self._in_shape(match, value, result)
            self._hand_over(value, new)
        self._take_out(match)
        if quantised is not None:
            self._drop_normed(call)
        if candidate.reduction.node not in self._gone:
            raise RuntimeError(f"{candidate.reduction.node} is still used after it was fused")

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
            return self._repeat(view, result, max(match.after, self._values.position[view]))
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
        residual = None if match.residual is None else self._input(match.residual, behind)
        tensors = (x, residual, self._weight(match), candidate.norm.eps)
        mode = (match.weight_bias, candidate.numerics, comm_name)
        op = torch.ops.allnorm.all_reduce_add_rms_norm.default
        args: tuple[Any, ...] = (*tensors, *mode)
        if candidate.quantised is not None:
            static = match.static_scale
            scale = None if static is None else self._current(static, behind)
            kind = (candidate.quantised.kind, candidate.quantised.group_size)
            op = torch.ops.allnorm.all_reduce_add_rms_norm_quant.default
            layout = match.scale_layout
            args = (*tensors, *kind, layout, "float32", scale, True, False, *mode)
        call = self._add("call_function", op, args, behind=behind)
        last = candidate.normed.definers[0]
        if "stack_trace" in last.meta:
            call.meta["stack_trace"] = last.meta["stack_trace"]
        return call

    def _input(self, node: Node, behind: int, *, whole: bool = False) -> Node:
        """`x` or the residual, copied if its rows are not contiguous, or as a whole."""
        node = self._current(node, behind)
        tensor = self._shapes.of(node)
        assert tensor is not None
        if is_contiguous(tensor) if whole else has_contiguous_rows(tensor):
            return node
        layout = {"memory_format": torch.contiguous_format}
        clone = torch.ops.aten.clone.default
        return self._add("call_function", clone, (node,), layout, behind=behind)

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
            node = self._current(weight, behind)
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
            return source if node is first else self._current(node, behind)

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
        index = bisect.bisect_left(self._order, float(behind + 1), key=lambda entry: entry[0])
        with self._graph.inserting_before(self._order[index][1]):
            node = self._graph.create_node(op, target, args, kwargs or {})
        before = self._order[index - 1][0] if index else -1.0
        position = (max(before, float(behind)) + behind + 1) / 2
        self._position[node] = position
        self._order.insert(index, (position, node))
        self._describe(node)
        return node

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

    def _current(self, node: Node, behind: float) -> Node:
        """What stands now, behind a position, for a tensor of the graph as it was."""
        for since, new in reversed(self._replaced.get(node, [])):
            if since <= behind:
                return new
        return node

    def _hand_over(self, value: Value, new: Node) -> None:
        """Makes everybody who reads `value` where it was computed read the new node."""
        tensor, values = self._shapes.of(new), self._values
        shape = () if tensor is None else tensor.shape
        owners = values.owners(value)
        for writer in filter(values.writes_outside, list(value.definers)):
            if not values.is_kept(writer, shape):
                self._write_outside(writer, value, new)
        for holder in dict.fromkeys(value.holders):
            since, mine = values.held_since(holder, value), self._shapes.of(holder)
            storage = self._shapes.storage(holder)
            # Memory that is seen outside gets the value itself; views stay views, of the new node.
            if since is None or storage not in owners or values.is_external(storage):
                continue
            if mine is not None and not same_shape(mine.shape, shape):
                continue
            stand_ins = [holder, *(node for _, node in self._replaced.get(holder, []))]
            for stand_in in stand_ins:
                for user in list(stand_in.users):
                    if self._position[user] > since and user is not new:
                        user.replace_input_with(stand_in, new)
            self._replaced.setdefault(holder, []).append((since, new))

    def _write_outside(self, writer: Node, value: Value, new: Node) -> None:
        """Copies a result to where a call in place stored it for somebody outside the graph."""
        (target,) = {write.target for write in self._values.writes_of(writer)}
        behind = self._values.position[writer] - 1
        args = (self._current(target, behind), new)
        copy = self._add("call_function", torch.ops.aten.copy_.default, args, behind=behind)
        writer.replace_all_uses_with(copy)
        self._replaced.setdefault(writer, []).append((self._values.position[writer], copy))
        self._remove(writer)

    # ---- removal --------------------------------------------------------------------------------

    def _take_out(self, match: Match) -> None:
        superfluous = sorted({*match.members, *match.dead}, key=self._values.position.__getitem__)
        for node in reversed(superfluous):
            if node not in self._gone and not node.users and self._is_idle(node):
                self._remove(node)

    def _is_idle(self, node: Node) -> bool:
        """Whether nobody sees what an unused node writes."""
        if self._values.writes_outside(node):
            return False
        memory = {write.storage for write in self._values.writes_of(node)}
        since = self._position[node]
        return not any(
            reader not in self._gone and source in reader.all_input_nodes
            for value in self._values.defines.get(node, [])
            for reader, source in value.readers
            if self._shapes.storage(source) in memory
            # Later views of that memory have read one of the tensors that were there.
            and self._position[source] <= since < self._position[reader]
        )

    def _remove(self, node: Node) -> None:
        """Erases a node, and what is then left without a use."""
        inputs = node.all_input_nodes
        self._gone.add(node)
        position = self._position[node]
        index = bisect.bisect_left(self._order, position, key=lambda entry: entry[0])
        del self._order[index]
        self._graph.erase_node(node)
        for source in inputs:
            only_computes = bool(operation(source)) or source.op == "get_attr"
            unused = source not in self._gone and not source.users
            if unused and only_computes and not written(source):
                self._remove(source)
