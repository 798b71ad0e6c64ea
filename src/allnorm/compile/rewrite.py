"""Adds fused calls to a graph, and removes the nodes that they replace."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from allnorm import policy
from allnorm.compile import guards, prefetch
from allnorm.compile.candidate import Coefficients, Match, PlainInput, Weight
from allnorm.compile.expressions import Value
from allnorm.compile.functional import is_last_copy
from allnorm.compile.safety import answer, is_answered
from allnorm.compile.shapes import FLOATS, has_contiguous_rows, is_contiguous, static_size
from allnorm.compile.sharded import ShardedMatch
from allnorm.compile.values import Values
from allnorm.compile.vocabulary import is_pure, operation
from allnorm.core import registry

# For the operators that quantize: the indices of the argument return_normed and of the result
# normed.
_RETURN_NORMED = 9
_NORMED = 3


class Rewriter:
    """Applies a graph's matches; `values` has the graph's expressions before any change.

    Attributes:
        streams: maps each call that makes new residual streams to its match.
    """

    def __init__(self, graph: Graph, values: Values) -> None:
        self.streams: dict[Node, Match] = {}
        self._graph = graph
        self._values = values
        self._shapes = values.shapes
        self._used = [node for node in graph.nodes if node.users]
        self._place = graph.output_node()
        self._in_order = True
        self._replaced: dict[Node, Node] = {}
        self._transposed: dict[Node, Node] = {}  # matrices of which other nodes are the transpose
        self._superfluous: set[Node] = set()
        self._answered: set[Node] = set()
        self._quantizing: list[Node] = []
        self._prefetching: list[Node] = []

    def apply(self, match: Match | ShardedMatch, comm_name: str) -> None:
        """Replaces one site with a call on the named communicator."""
        if isinstance(match, ShardedMatch):
            self._norm_slices(match, comm_name)
            return
        candidate, quantization = match.candidate, match.candidate.quantization
        if candidate.is_local:
            self._reduce(match, comm_name)
        self._place = self._place_of_call(match)
        call = self._call(match, comm_name)
        comm = registry.find(comm_name, None)
        norms = not candidate.is_local and candidate.streams is None
        if norms and comm is not None and policy.prefetch_tokens(comm.traits):
            self._prefetching.append(call)
        # The call's results, in order.
        served: list[Value | None] = [candidate.normed, candidate.summed]
        if candidate.streams is not None:
            served = [candidate.summed]
            self.streams[call] = match
        if quantization is not None:
            served = [quantization.quantized, quantization.scale, *reversed(served)]
            self._quantizing.append(call)
        self._answer(match)
        for index, value in enumerate(served):
            if value is None:
                continue
            if candidate.streams is not None:
                result = call
            else:
                result = self._add(operator.getitem, (call, index))
            if quantization is not None and value is quantization.scale:
                result = self._scale_in_shape(match, value, result)
            viewed: dict[Node, Node] = {}
            for node in match.handed_over(self._values, value):
                view = match.views.get(node)
                if view is not None and view not in viewed:
                    viewed[view] = self._repeat(view, result)
                self._put(result if view is None else viewed[view], node)
        self._superfluous.update(match.members, match.dead, match.inputs)
        if match.plain_input is not None:
            self._make_input(match, match.plain_input)

    def _make_input(self, match: Match, plain: PlainInput) -> None:
        """Replaces the next layer's input, which the graph makes from a match's streams."""
        assert match.candidate.summed is not None
        source, position = match.candidate.summed.definers[0], self._values.position
        begin = position[match.reduction.node]
        late = [n for n in plain.arguments if isinstance(n, Node) and position[n] > begin]
        for node in late:
            if node.op == "get_attr":
                self._move_up(node)
        self._in_order = self._in_order and all(node.op == "get_attr" for node in late)
        given = [self._current(one) if isinstance(one, Node) else one for one in plain.arguments]
        target = torch.ops.allnorm.hyper_connection_input.default
        made = self._add(target, (self._current(source), *given))
        normed, post, mix = (self._add(operator.getitem, (made, index)) for index in range(3))
        tensor = self._shapes.of(plain.comb)
        assert tensor is not None
        order = [*range(tensor.dim() - 2), tensor.dim() - 1, tensor.dim() - 2]
        comb = self._input(self._add(torch.ops.aten.permute.default, (mix, order)), whole=True)
        self._transposed[comb] = mix
        for node in plain.normed:
            self._put(normed, node)
        self._put(post, plain.post)
        self._put(comb, plain.comb)

    def _norm_slices(self, match: ShardedMatch, comm_name: str) -> None:
        """Replaces one site with a call of `rms_norm_sharded`."""
        self._place = self._place_of_call(match)
        tensors, weights = [], []
        for one in match.slices:
            tensors.append(self._input(one.x))
            weights.append(self._weight(one.weight, one.x, one.norm.hidden_size)[0])
        self._check_numbers(match)
        args = (tensors, weights, match.eps, match.weight_bias, match.numerics, comm_name)
        call = self._add(torch.ops.allnorm.rms_norm_sharded.default, args)
        for index, one in enumerate(match.slices):
            result = self._add(operator.getitem, (call, index))
            for node in one.nodes:
                self._put(result, node)
        self._superfluous.update(match.members, match.inputs)

    def _check_numbers(self, match: Match | ShardedMatch) -> None:
        """Adds a check of the numbers that the call takes as constants."""
        if match.numbers:
            numbers = (tuple(match.numbers), tuple(match.numbers.values()))
            self._add(guards.check_values, numbers)

    def _place_of_call(self, match: Match | ShardedMatch) -> Node:
        """Returns the node before which a call is inserted: after all of its inputs."""
        node, position = match.reduction.node, self._values.position
        views = match.views.values() if isinstance(match, Match) else ()
        sizes = (n for view in views for n in view.all_input_nodes[1:])
        late = [*match.numbers, *sizes]
        for source in match.inputs:
            if position[source] <= position[node]:
                continue
            if source.op == "get_attr":
                self._move_up(source)
            else:
                late.append(source)
        self._in_order = self._in_order and not late
        return max([node, *match.inputs], key=position.__getitem__).next if late else node.next

    def _move_up(self, attribute: Node) -> None:
        """Moves a get_attr node before all calls."""
        next(node for node in self._graph.nodes if node.op != "placeholder").prepend(attribute)

    def finish(self) -> None:
        """Removes unused nodes, and sorts the graph if necessary."""
        used = {*self._used, *self._replaced}
        for node in reversed(self._graph.nodes):
            known = node in self._values.position
            if node.op in ("placeholder", "output") or node.users:
                continue
            if (node in self._superfluous or node in used or not known) and (
                is_pure(node) or node in self._values.reduced or node in self._superfluous
            ):
                self._graph.erase_node(node)
        for call in self._quantizing:
            # If no node reads the 16-bit rows, the call need not return them.
            if all(user.args[1] != _NORMED for user in call.users):
                call.update_arg(_RETURN_NORMED, False)
                self._describe(call)
        for call in self._prefetching:
            weight = prefetch.next_weight(call, self._shapes)
            if weight is not None:
                call.update_kwarg("prefetch", weight)
                if weight.op == "get_attr":
                    self._move_up(weight)
        if not self._in_order:
            self._sort()

    def _sort(self) -> None:
        """Moves nodes after the nodes that they read; otherwise keeps their order."""
        output, nodes = self._graph.output_node(), list(self._graph.nodes)
        order = [node for node in nodes if node in self._values.ordered]
        before = dict(zip(order[1:], order, strict=False))
        done: set[Node] = set()
        waiting: set[Node] = set()
        # Copies to inputs come last, after every node that reads the input.
        for root in sorted(nodes[:-1], key=is_last_copy):
            pending = [root]
            while pending:
                node = pending[-1]
                needed = [*node.all_input_nodes, *([before[node]] if node in before else [])]
                missing = [] if node in done else [n for n in needed if n not in done]
                if not waiting.isdisjoint(missing):
                    raise RuntimeError(f"{node} depends on itself through {missing}")
                if missing:
                    waiting.add(node)
                    pending += missing
                    continue
                waiting.discard(pending.pop())
                if node not in done:
                    done.add(node)
                    output.prepend(node)

    def _scale_in_shape(self, match: Match, value: Value, result: Node) -> Node:
        """Returns the computed scales in the shape and dtype that the graph expects."""
        shape, tensor = match.scale_shape, self._shapes.of(result)
        if shape is not None and tensor is not None and tensor.dtype != value.dtype:
            result = self._add(torch.ops.aten.view.dtype, (result, value.dtype))
            tensor = self._shapes.of(result)
        if shape is None or (tensor is not None and [*tensor.shape] == shape):
            return result
        return self._add(torch.ops.aten.reshape.default, (result, shape))

    def _call(self, match: Match, comm_name: str) -> Node:
        candidate = match.candidate
        experts = match.experts
        rows = match.x if experts is None else experts.rows
        x = self._input(rows, whole=match.view_x is not None or experts is not None)
        if match.view_x is not None:
            x = self._repeat(match.view_x, x)
        x = self._with_leading_ones(x, match.lead_x)
        if candidate.streams is not None:
            return self._hyper_connection(match, x, comm_name)
        residual = None if match.residual is None else self._input(match.residual)
        if residual is not None:
            residual = self._with_leading_ones(residual, match.lead_residual)
        weight, bias = self._given_weight(match, match.weight)
        eps = 0.0 if candidate.norm is None else candidate.norm.eps
        args: list[Any] = [x, residual, weight, eps]
        name = "add_rms_norm" if candidate.is_local else "all_reduce_add_rms_norm"
        if candidate.quantization is not None:
            static = match.static_scale
            name += "_quant"
            args += [candidate.quantization.kind, candidate.quantization.group_size]
            args += [match.scale_layout, candidate.quantization.scale_format]
            args += [None if static is None else self._current(static), True]
        args += [bias, candidate.numerics, *([] if candidate.is_local else [comm_name])]
        self._check_numbers(match)
        op = getattr(torch.ops.allnorm, name).default
        kwargs = self._before_residual(match) | self._experts(match)
        if candidate.reduction.scatters:
            kwargs |= {"residual_sharded": True, "gather": False}
        call = self._add(op, tuple(args), kwargs)
        last = candidate.served[-1].definers[0]
        if "stack_trace" in last.meta:
            call.meta["stack_trace"] = last.meta["stack_trace"]
        return call

    def _hyper_connection(self, match: Match, x: Node, comm_name: str) -> Node:
        streams, leading = match.candidate.streams, len(match.shape) - 2
        assert streams is not None
        residual = self._without_ones(streams.residual, leading)
        post, mix = (self._factors(given, leading) for given in (streams.post, streams.mix))
        args = (x, self._input(residual), post, mix, comm_name)
        return self._add(torch.ops.allnorm.all_reduce_hyper_connection.default, args)

    def _factors(self, given: Coefficients, leading: int) -> Node:
        """Returns a hyper-connection's factors in float32, contiguous, in the call's layout."""
        node = self._without_ones(given.node, leading)
        if given.transposed and node in self._transposed:
            node = self._transposed[node]
        elif given.transposed:
            order = [*range(leading), leading + 1, leading]
            node = self._add(torch.ops.aten.permute.default, (node, order))
        tensor = self._shapes.of(node)
        assert tensor is not None
        if tensor.dtype != torch.float32:  # exact
            node = self._add(torch.ops.prims.convert_element_type.default, (node, torch.float32))
        return self._input(node, whole=True)

    def _without_ones(self, node: Node, leading: int) -> Node:
        """Returns a tensor without the sizes of 1 after its leading dimensions."""
        node = self._current(node)
        tensor = self._shapes.of(node)
        assert tensor is not None
        ones = [d for d in range(leading, tensor.dim()) if static_size(tensor.shape[d]) == 1]
        return self._add(torch.ops.aten.squeeze.dims, (node, ones)) if ones else node

    def _reduce(self, match: Match, comm_name: str) -> None:
        """Replaces a local match's reduction with allnorm's own."""
        reduction, values = match.candidate.reduction, self._values
        assert reduction.x is not None
        self._place = reduction.node.next
        x = self._input(reduction.x, whole=True)
        new = self._add(torch.ops.allnorm.all_reduce.default, (x, comm_name))
        for node in values.reduced[reduction.node].definers:
            if node is reduction.node or operation(node) == "wait":
                self._put(new, node)
                self._superfluous.add(node)

    def _input(self, node: Node, *, whole: bool = False) -> Node:
        """Returns an input, copied if its rows (`whole`: the entire tensor) are not contiguous."""
        node = self._current(node)
        tensor = self._shapes.of(node)
        assert tensor is not None
        if is_contiguous(tensor) if whole else has_contiguous_rows(tensor):
            return node
        layout = {"memory_format": torch.contiguous_format}
        return self._add(torch.ops.aten.clone.default, (node,), layout)

    def _with_leading_ones(self, node: Node, count: int) -> Node:
        """Returns a node's tensor with `count` more leading dimensions of size 1."""
        for _ in range(count):
            node = self._add(torch.ops.aten.unsqueeze.default, (node, 0))
        return node

    def _before_residual(self, match: Match) -> dict[str, Any]:
        """Returns the arguments for the post norm and the scale."""
        branch, found = match.candidate.branch, {}
        if branch.norm is not None:
            weight, bias = self._given_weight(match, match.post_weight)
            found = {"post_weight": weight, "post_eps": branch.norm.eps, "post_weight_bias": bias}
        return found if branch.scale == 1.0 else {**found, "scale": branch.scale}

    def _experts(self, match: Match) -> dict[str, Any]:
        """Returns the arguments for the sum over experts."""
        experts = match.experts
        if experts is None:
            return {}
        self._superfluous.add(match.x)
        given = {"expert_weights": experts.weights, "shared": experts.shared}
        tensors = {name: self._input(node, whole=True) for name, node in given.items() if node}
        weights = None if experts.weights is None else self._shapes.of(experts.weights)
        if weights is not None and weights.dim() > 2:
            squeeze = torch.ops.aten.squeeze.dim
            tensors["expert_weights"] = self._add(squeeze, (tensors["expert_weights"], -1))
        return {"experts": True, **tensors}

    def _given_weight(self, match: Match, given: Weight | None) -> tuple[Node | None, float]:
        """Returns (weight, bias), as `_weight` does; (None, 0.0) without a norm."""
        if given is None:
            return None, 0.0
        return self._weight(given, match.x, match.candidate.norms[0].hidden_size)

    def _weight(self, given: Weight, source: Node, size: int) -> tuple[Node, float]:
        """Returns (weight, bias); the weight is [size], in float32 or the dtype of `source`."""
        x, weight = self._shapes.of(source), given.source
        assert x is not None
        if weight is None:  # multiplying by 1.0 is exact
            kwargs = {"dtype": torch.float32, "device": x.device, "pin_memory": False}
            return self._add(torch.ops.aten.full.default, ([size], 1.0), kwargs), given.bias
        if isinstance(weight, str):
            node = self._add(weight, (), op="get_attr")
        else:
            node = self._current(weight)
        tensor = self._shapes.of(node)
        assert tensor is not None
        if tensor.dim() != 1:
            node = self._add(torch.ops.aten.view.default, (node, [size]))
        if tensor.dtype not in (x.dtype, torch.float32):
            assert tensor.dtype in FLOATS
            node = self._add(torch.ops.prims.convert_element_type.default, (node, torch.float32))
        return node, given.bias

    def _repeat(self, view: Node, source: Node) -> Node:
        """Applies one of the graph's views to a different tensor."""
        first = view.all_input_nodes[0]

        def replacement(node: Node) -> Node:
            return source if node is first else self._current(node)

        args, kwargs = map_arg((view.args, view.kwargs), replacement)
        return self._add(view.target, args, kwargs, op=view.op)

    def _add(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        op: str = "call_function",
    ) -> Node:
        """Adds a node at the current match's place in the graph; `_sort` moves it if necessary."""
        with self._graph.inserting_before(self._place):
            node = self._graph.create_node(op, target, args, kwargs or {})
        self._describe(node)
        return node

    def _describe(self, node: Node) -> None:
        """Adds metadata to a new node if the other nodes have metadata."""
        mode = self._shapes.fake_mode
        if node.op != "get_attr":
            self._shapes.describe(node)
        elif mode is not None:
            parameter = self._values.parameters[str(node.target)]
            fake = isinstance(parameter, FakeTensor)
            with mode, torch.no_grad():
                self._shapes.add(node, parameter if fake else mode.from_tensor(parameter))

    def _current(self, node: Node) -> Node:
        """Returns the node that replaces an original node, or the node itself if none does."""
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def _put(self, new: Node, node: Node) -> None:
        """Makes all readers of a node read `new` instead."""
        for user in list(node.users):
            if user is not new:
                user.replace_input_with(node, new)
        self._replaced[node] = new

    def _answer(self, match: Match) -> None:
        """Redirects shape and dtype queries of tensors that will be removed to an input."""
        members = {*match.members, *match.dead, *match.served_nodes(self._values)}
        for value in match.candidate.values:
            for question, source in value.questions:
                if source not in members or question in self._answered:
                    continue
                other = answer(self._values, match, question, source)
                if is_answered(self._values, question):
                    self._answered.add(question)
                    if question is self._place:
                        self._place = question.next
                    self._graph.erase_node(question)
                elif other is not None:
                    question.replace_input_with(source, self._current(other))
