"""The places of a model where a reduction meets a norm: what they call, and what is told of them.

A site belongs to the module whose output is a partial sum. The stock forward of the model goes on
to add the residual and to norm the result: the addition makes the fused call and returns the new
residual; the normed rows wait at the norm, which gives them out when it is asked to norm that very
tensor, and computes anything else itself. A norm of the sum before that, and a factor, become part
of the same call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import allnorm


@dataclass
class Switch:
    """What `enable()` and `disable()` set; read by every call, and guarded by compiled graphs.

    Attributes:
        enabled: whether sites fuse; otherwise models compute as they do without allnorm.
        algorithm: of all calls, as in `Communicator.all_reduce_add_rms_norm`.
    """

    enabled: bool = False
    algorithm: str = "auto"


SWITCH = Switch()


@dataclass(eq=False)
class Norm:
    """An RMSNorm that may find its result made already.

    Attributes:
        module: the norm; its weight is [hidden_size].
        eps: added to the mean square.
        weight_bias: 1.0 for Gemma.
        numerics: the mode with the roundings of its forward.
        residual: what `normed` is the norm of; None while nothing waits.
        normed: the result that waits.
    """

    module: torch.nn.Module
    eps: float
    weight_bias: float
    numerics: str
    residual: torch.Tensor | None = None
    normed: torch.Tensor | None = None

    def fits(self, value: torch.Tensor) -> bool:
        """Whether its result for `value` has that dtype; a wider weight would widen it."""
        return self.weight.dtype == value.dtype

    @property
    def weight(self) -> torch.Tensor:
        """[hidden_size]; the parameter is replaced when weights are loaded."""
        weight = self.module.weight
        assert isinstance(weight, torch.Tensor)
        return weight


@dataclass(eq=False)
class Site:
    """One reduction of a model.

    Attributes:
        name: of the module that reduces, such as "layers.3.self_attn.o_proj".
        norm: what follows the sum with the residual; None if nothing does at once.
        post: the norm of the reduced sum, to whose result the residual is added; None if there is
            none.
        link: the communicator, once the module is part of a tensor-parallel plan.
        reason: why it is not fused; "" if it is.
        linear: the module that reduces, if its bias has to be added to the sum.
        calls: fused calls made in eager mode.
        unfused_calls: sums that something else than this norm wanted, in eager mode.
    """

    name: str
    norm: Norm | None
    post: Norm | None = None
    link: allnorm.Communicator | None = None
    reason: str = "not in the tensor-parallel plan that the model was loaded with"
    linear: torch.nn.Module | None = None
    calls: int = 0
    unfused_calls: int = 0

    def reduce(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, and the bias; collective."""
        self._count("unfused_calls")
        assert self.link is not None
        call = _in_graph_or_break(self.link.all_reduce)
        reduced: torch.Tensor = call(value, algorithm=SWITCH.algorithm)
        bias = self._bias()
        return reduced if bias is None else reduced + bias

    def can_add(
        self, value: torch.Tensor, residual: torch.Tensor, is_normed: bool, scale: float
    ) -> bool:
        """Whether `residual + sum` is what the fused call adds; the same on every rank.

        A bias would have to be added before the sum is changed.
        """
        norms = [norm for norm in (self.post, self.norm) if norm is not None]
        return (
            is_normed == (self.post is not None)
            and residual.shape == value.shape
            and residual.dtype == value.dtype
            and bool(norms)
            and all(norm.fits(value) for norm in norms)
            and (self._bias() is None or not (is_normed or scale != 1.0))
        )

    def add(
        self, value: torch.Tensor, residual: torch.Tensor, is_normed: bool, scale: float
    ) -> torch.Tensor:
        """The fused call: returns the new residual, leaves its norm where it will be asked for.

        The stock model rounds the sum, then sum + bias, then the residual's sum. One call has two
        of these roundings; with a bias a local call makes the third.
        """
        norm, bias = self.norm, self._bias()
        if bias is None or norm is None:
            normed, summed = self._call(value, residual, norm, self.post, scale)
        else:
            _, biased = self._call(value, bias.expand_as(value), norm)
            normed, summed = allnorm.add_rms_norm(
                *(biased, residual, norm.weight, norm.eps),
                weight_bias=norm.weight_bias,
                numerics=norm.numerics,
            )
        if norm is not None:
            norm.normed, norm.residual = normed, summed
        return summed

    def normed(self, value: torch.Tensor) -> torch.Tensor:
        """The fused call for a norm of the sum itself; a bias takes the residual's place."""
        bias = self._bias()
        assert self.post is not None
        residual = None if bias is None else bias.expand_as(value)
        normed, _ = self._call(value, residual, self.post)
        assert normed is not None
        return normed

    def _call(
        self,
        value: torch.Tensor,
        residual: torch.Tensor | None,
        norm: Norm | None,
        post: Norm | None = None,
        scale: float = 1.0,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        self._count("calls")
        assert self.link is not None
        call = _in_graph_or_break(self.link.all_reduce_add_rms_norm)
        more: dict[str, Any] = {} if scale == 1.0 else {"scale": scale}
        if post is not None:
            more["post_norm"] = allnorm.PostNorm(post.weight, post.eps, post.weight_bias)
        weight = None if norm is None else norm.weight
        norm = norm or post
        assert norm is not None
        results: tuple[torch.Tensor | None, torch.Tensor] = call(
            *(value, residual, weight, norm.eps),
            weight_bias=norm.weight_bias,
            numerics=norm.numerics,
            algorithm=SWITCH.algorithm,
            **more,
        )
        return results

    def _bias(self) -> torch.Tensor | None:
        """[hidden_size], as a local tensor; the parameter is replaced when weights are loaded."""
        bias = None if self.linear is None else self.linear._parameters.get("bias")
        return bias.to_local() if isinstance(bias, DTensor) else bias

    def _count(self, what: str) -> None:
        # A compiled graph must not change with the number of its calls.
        if not torch.compiler.is_compiling():
            setattr(self, what, getattr(self, what) + 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        raise TypeError(
            f"{self.name} belongs to a communicator: a model with fused sites cannot be copied. "
            "Load it a second time."
        )


def _in_graph_or_break(call: Callable[..., Any]) -> Callable[..., Any]:
    """The operators have no argument for the algorithm: another than "auto" breaks the graph."""
    if torch.compiler.is_compiling() and SWITCH.algorithm != "auto":
        return torch.compiler.disable(call)
    return call
