"""Finds the fused call that can replace a reduction, or the reason why no call can."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch.fx import Node

from allnorm.compile.candidate import Candidate, Fused, Match, Missed, mode_of
from allnorm.compile.decompose import UNTRACED
from allnorm.compile.experts import place_experts
from allnorm.compile.expressions import Value, bare
from allnorm.compile.fit import fit
from allnorm.compile.norms import (
    Branch,
    find_branches,
    find_norms,
    outputs_of,
    rounded,
    stored32,
)
from allnorm.compile.quantize import find_quantizations, is_quantized_otherwise
from allnorm.compile.reductions import Reduction
from allnorm.compile.shapes import FLOATS, static_size
from allnorm.compile.sharded import ShardedMatch, match_sharded, reduces_squares
from allnorm.compile.stream_inputs import place_input
from allnorm.compile.streams import find_streams
from allnorm.compile.values import Values
from allnorm.compile.vocabulary import not_plain, written

_MAX_HIDDEN_SIZE = (1 << 20) - 1


class Matcher:
    """Finds fused calls for the reductions in a graph, given the graph's expressions."""

    def __init__(
        self,
        values: Values,
        *,
        approximate_quant: bool = False,
        approximate_streams: bool = False,
    ) -> None:
        self._values = values
        self._approximate = approximate_quant
        self._approximate_streams = approximate_streams
        self._norms = find_norms(values.algebra)
        self._accepted: list[Fused] = []
        self._claimed: dict[Value, Node] = {}

    def match(self, reduction: Reduction, why: str = "") -> Match | ShardedMatch:
        """Returns the fused call for a reduction. Raises Missed, with the reason, if it has none.

        `why` is the reason why this graph's in-place reductions cannot be fused.
        """
        if reduces_squares(self._values, reduction):
            return match_sharded(self._values, reduction, self._accepted, why)
        dtype = self._check(reduction)
        if reduction.in_place:
            raise Missed(f"it works in place, {why}")
        reduced = self._values.reduced[reduction.node]
        first: Missed | None = None
        more = ""
        for candidate in self._candidates(reduction, reduced, dtype):
            try:
                self._check_claims(candidate)
                self._check_use(candidate)
                if not candidate.numerics:
                    raise Missed(
                        "one of its norms rounds before the weight, the other after it: no "
                        "numerics mode does both"
                    )
                match = self._fit(candidate)
            except Missed as missed:
                first = first or missed
                if candidate.residual is not None and candidate.boundary:
                    more = more or f"not everything after it is fused: {missed}"
                continue
            match.note = match.note or more
            if not reduction.scatters:
                match.note = match.note or place_experts(self._values, match)
            return match
        if not reduction.scatters:
            found = find_streams(
                *(self._values, reduction, reduced, dtype, self._accepted),
                approximate=self._approximate_streams,
            )
            if found is not None:
                place_input(
                    *(self._values, self._norms, found), approximate=self._approximate_streams
                )
                return found
        if reduction.scatters and first is None:
            raise Missed("no residual add with an RMSNorm of its rows follows the reduce-scatter")
        raise first or Missed(self._explain(reduced))

    def accept(self, match: Match | ShardedMatch) -> None:
        """Records a match, so that no later match computes the same results again."""
        self._accepted.append(match)
        self._claimed.update(dict.fromkeys(match.served, match.reduction.node))

    def _fit(self, candidate: Candidate) -> Match:
        """Returns the match, including the quantization after the norm if possible."""
        algebra, normed = self._values.algebra, candidate.normed
        if candidate.norm is None or normed is None:
            return fit(self._values, candidate, self._accepted)
        size, note = candidate.norm.hidden_size, ""
        for quantization in find_quantizations(
            algebra, normed, size, approximate=self._approximate
        ):
            try:
                with_it = dataclasses.replace(candidate, quantization=quantization)
                return fit(self._values, with_it, self._accepted)
            except Missed as missed:
                note = note or f"its quantization is not fused: {missed}"
        match = fit(self._values, candidate, self._accepted)
        if not note and is_quantized_otherwise(algebra, normed):
            nearly = any(find_quantizations(algebra, normed, size, approximate=True))
            note = "its quantization to FP8 is not fused: " + (
                "it multiplies by the reciprocal of the scale, or has a different smallest scale. "
                "Pass approximate_quant=True to fuse it"
                if nearly and not self._approximate
                else "it is not computed as allnorm computes it"
            )
        untraced = (u.note for u in normed.users if u.op == "opaque" and UNTRACED in u.note)
        match.note = note or next(untraced, "")
        return match

    def _check(self, reduction: Reduction) -> torch.dtype:
        if reduction.problem:
            raise Missed(reduction.problem)
        if reduction.x is None:
            raise Missed("it does not reduce a tensor")
        x = self._values.shapes.of(reduction.x)
        if x is None:
            raise Missed(
                "its shape and dtype are unknown: pass example_inputs, or a graph with metadata"
            )
        problem = not_plain(str(reduction.x), x)
        if problem:
            raise Missed(f"it reduces {problem}")
        if x.dtype not in FLOATS:
            raise Missed(f"it reduces {x.dtype}: expected float32, float16 or bfloat16")
        held = self._values.held[reduction.x]
        if held.op == "up":
            raise Missed(
                f"it reduces a {held.args[0].dtype} tensor in float32 and does not round the sum "
                f"to {held.args[0].dtype}: no numerics mode does that"
            )
        hidden_size = static_size(x.shape[-1]) if x.dim() else None
        if hidden_size is None:
            raise Missed(
                f"its tensor has shape {tuple(x.shape)}: expected a last dimension of constant size"
            )
        if reduction.scatters and x.dim() != 2:
            raise Missed(
                f"it reduce-scatters a tensor of {x.dim()} dimensions: expected rows [num_tokens, "
                "hidden_size]"
            )
        if not 1 <= hidden_size <= _MAX_HIDDEN_SIZE:
            raise Missed(f"its last dimension is {hidden_size}: expected 1 to {_MAX_HIDDEN_SIZE}")
        return x.dtype

    def _check_claims(self, candidate: Candidate) -> None:
        for node in [self._claimed[value] for value in candidate.served if value in self._claimed]:
            if candidate.is_local:
                raise Missed(f"its sum with {node} is fused there")
            raise Missed(f"it is the residual of {node}: their sum is fused there")

    def _check_use(self, candidate: Candidate) -> None:
        """Raises unless the graph uses the normed tensor or, without a second norm, the sum."""
        wanted = candidate.summed if candidate.normed is None else candidate.normed
        if wanted is not None and not self._values.is_used(wanted):
            raise Missed(f"the result of {wanted.definers[0]} is not used")

    def _candidates(
        self, reduction: Reduction, reduced: Value, dtype: torch.dtype
    ) -> Iterator[Candidate]:
        """Yields candidates with a residual, then without, then with a tensor added before it."""
        algebra = self._values.algebra
        reduced32 = stored32(reduced, algebra, dtype)
        if reduced32 is None:
            return
        branches = list(find_branches(reduced, self._norms, algebra, dtype))
        start = Candidate(reduction, reduced, branches[0], None, reduced32, None, None, None, "")
        for branch in branches:
            yield from self._with_residuals(start, branch, dtype)
        if reduction.scatters:
            return  # a call that returns this rank's rows has a residual with these rows
        for branch in reversed(branches):
            z = stored32(branch.value, algebra, dtype)
            summed = branch.value if branch.value.holders else None
            if z is not None:
                alone = dataclasses.replace(start, branch=branch, sum32=z, summed=summed)
                yield from self._with_norms(alone, z, dtype)
        for biased32 in [user for user in reduced32.users if user.op == "add"]:
            biased = rounded(biased32, algebra, dtype)
            added = biased32.other(reduced32)
            if biased is not None and biased.holders and added.op != "const":
                local = dataclasses.replace(start, reduced=biased, is_local=True)
                yield from self._with_residuals(local, Branch(biased), dtype)

    def _with_residuals(
        self, start: Candidate, branch: Branch, dtype: torch.dtype
    ) -> Iterator[Candidate]:
        """Yields one candidate per residual and norm, then one without a second norm."""
        algebra = self._values.algebra
        branch32 = stored32(branch.value, algebra, dtype)
        if branch32 is None:
            return
        for sum32 in [user for user in branch32.users if user.op == "add"]:
            for residual in self._residuals(sum32, branch32, dtype):
                if start.is_local and residual.op == "reduced":
                    continue  # the other reduction fuses both into one call
                # The sum with a float32 residual is not rounded.
                summed = rounded(sum32, algebra, residual.dtype or dtype)
                rounded32 = (
                    None if summed is None else stored32(summed, algebra, residual.dtype or dtype)
                )
                stored = summed if summed is not None and summed.holders else None
                common = dataclasses.replace(
                    start, branch=branch, residual=residual, sum32=sum32, summed=stored
                )
                for z in dict.fromkeys((rounded32, sum32)):
                    if z is not None:
                        yield from self._with_norms(common, z, dtype)
                if branch.norm is not None and stored is not None:
                    yield dataclasses.replace(common, numerics=mode_of(True, branch.output))

    def _residuals(self, sum32: Value, reduced32: Value, dtype: torch.dtype) -> Iterator[Value]:
        """Yields what may be the residual: of the reduction's dtype first, then float32."""
        other = sum32.other(reduced32)
        if other.op == "const":
            sum32.note = sum32.note or "a number is added to the reduced tensor"
            return
        residual = other.args[0] if other.op == "up" else other
        if residual.dtype == dtype:
            yield residual
        if other.dtype == torch.float32 != dtype and other.holders:
            yield other
        elif residual.dtype != dtype:
            expected = f"{dtype}, the dtype of the reduced tensor, or torch.float32"
            sum32.note = sum32.note or (
                f"the tensor added to the reduced tensor is {residual.dtype}: expected {expected}"
            )

    def _with_norms(self, common: Candidate, z: Value, dtype: torch.dtype) -> Iterator[Candidate]:
        """Yields `common` with each norm of the rounded or unrounded sum `z`."""
        is_rounded = z is not common.sum32 or common.residual is None or dtype == torch.float32
        for norm in self._norms.get(z, []):
            for output in outputs_of(norm, self._values.algebra, dtype):
                if output.normed.holders:  # otherwise it exists only inside an operator
                    numerics = mode_of(is_rounded, common.branch.output, output)
                    yield dataclasses.replace(common, norm=norm, output=output, numerics=numerics)

    def _explain(self, reduced: Value) -> str:
        """Returns why no candidate exists, preferably a note on an expression after the sum."""
        readers = [node for node, _ in reduced.readers if node not in reduced.definers]
        if not readers:
            return "its result is not used"
        queue, seen = [reduced], {reduced}
        ends: list[str] = []
        for value in queue:
            if value.note:
                return value.note
            for user in value.users:
                if _adds_next_reduction(user, reduced):
                    continue
                if user.op in ("opaque", "reduced") and not user.note:
                    ends += [node.name for node in user.definers]
                elif user not in seen:
                    seen.add(user)
                    queue.append(user)
        first = [user for value in queue[:2] for user in value.users if user.op in ("mul", "div")]
        nodes = [node for v in first for user in (v, *v.users) for node in user.definers]
        if nodes and any(value.op == "rsqrt" for value in queue):
            name = self._values.name_of(nodes[0])
            return f"neither a residual add nor an RMSNorm follows it: {name} comes first"
        if any(value.op == "rsqrt" for value in queue):
            return "the norm after it is not an RMSNorm that allnorm computes"
        for node in (*readers, *(node for value in queue for node, _ in value.readers)):
            overwritten = self._values.written_by(node) if written(node) else ""
            if overwritten:
                return overwritten
        ends = list(dict.fromkeys(ends or map(str, readers)))
        names = ", ".join(ends[:3]) + (", ..." if len(ends) > 3 else "")
        return f"no RMSNorm follows it: its result is used by {names}"


def _adds_next_reduction(value: Value, reduced: Value) -> bool:
    """Returns whether `value` adds the result of another reduction, which is a separate site."""
    operands = [bare(operand) for operand in value.args] if value.op == "add" else []
    return any(operand.op == "reduced" and operand is not reduced for operand in operands)
