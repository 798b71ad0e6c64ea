"""The places of a model where a reduction meets a norm: what they call, and what is told of them.

A site belongs to the module whose output is a partial sum. The stock forward of the model goes on
to add the residual and to norm the result: the addition makes the fused call and returns the new
residual; the normed rows wait at the norm, which gives them out when it is asked to norm that very
tensor, and computes anything else itself.
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
        norm: what follows it.
        direct: whether the norm reads the reduced sum, and the residual is added to its result.
        link: the communicator, once the module is part of a tensor-parallel plan.
        reason: why it is not fused; "" if it is.
        linear: the module that reduces, if its bias has to be added to the sum.
        calls: fused calls made in eager mode.
        unfused_calls: sums that something else than this norm wanted, in eager mode.
    """

    name: str
    norm: Norm
    direct: bool = False
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

    def can_add(self, value: torch.Tensor, residual: torch.Tensor) -> bool:
        """Whether `residual + sum` is what the fused call adds; the same on every rank."""
        return (
            not self.direct
            and residual.shape == value.shape
            and residual.dtype == value.dtype
            and self.can_norm(value)
        )

    def can_norm(self, value: torch.Tensor) -> bool:
        """Whether the norm of `value` has its dtype; a wider weight would widen the result."""
        return self.norm.weight.dtype == value.dtype

    def add(self, value: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The fused call: returns the new residual, leaves its norm where it will be asked for.

        The stock model rounds the sum, then sum + bias, then the residual's sum. One call has two
        of these roundings; with a bias a local call makes the third.
        """
        norm, bias = self.norm, self._bias()
        if bias is None:
            norm.normed, norm.residual = self._call(value, residual)
        else:
            _, biased = self._call(value, bias.expand_as(value))
            norm.normed, norm.residual = allnorm.add_rms_norm(
                *(biased, residual, norm.weight, norm.eps),
                weight_bias=norm.weight_bias,
                numerics=norm.numerics,
            )
        return norm.residual

    def normed(self, value: torch.Tensor) -> torch.Tensor:
        """The fused call for a norm of the sum itself; a bias takes the residual's place."""
        bias = self._bias()
        return self._call(value, None if bias is None else bias.expand_as(value))[0]

    def _call(
        self, value: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._count("calls")
        norm = self.norm
        assert self.link is not None
        call = _in_graph_or_break(self.link.all_reduce_add_rms_norm)
        results: tuple[torch.Tensor, torch.Tensor] = call(
            *(value, residual, norm.weight, norm.eps),
            weight_bias=norm.weight_bias,
            numerics=norm.numerics,
            algorithm=SWITCH.algorithm,
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
