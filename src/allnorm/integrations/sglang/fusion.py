"""The fused calls that stand in for SGLang's all-reduce and norm, once all ranks agreed on them.

`current()` is the switch that every hook looks at: None, and SGLang runs as if there were no
plugin. It changes only in the hook that runs before graphs are captured, on all ranks alike.

A call that the fused path cannot take is completed here with SGLang's own all-reduce and norm:
version 0.5.17 would go on to the norm without any all-reduce.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import allnorm
from allnorm.integrations.sglang.norms import (
    ATTRIBUTE,
    NormArithmetic,
    arithmetic,
    eps_of,
    post_norm,
    tensor_obstacle,
)

_Pair = tuple[Any, torch.Tensor]


@dataclass(frozen=True)
class Before:
    """What a model does to a sum before a wired norm adds it to the residual.

    Attributes:
        norm: a norm of SGLang, of the sum; None if there is none.
        scale: what the sum, or its norm, is multiplied by.
    """

    norm: Any = None
    scale: float = 1.0


_NOTHING = Before()


@dataclass
class Fusion:
    """A communicator and what was fused on it.

    Attributes:
        communicator: of SGLang's tensor-parallel group.
        all_reduce: SGLang's own all-reduce over that group.
        say: is told of each kind of reduction that could not be fused.
        sites: the norms whose calls were fused, by identity, seen outside compiled graphs.
    """

    communicator: allnorm.Communicator
    all_reduce: Callable[[torch.Tensor], torch.Tensor]
    say: Callable[[str], None]
    sites: set[int] = field(default_factory=set)

    def norm(
        self, module: Any, x: torch.Tensor, residual: torch.Tensor, before: Before = _NOTHING
    ) -> _Pair:
        """All-reduce, residual add and norm, as `module` computes it.

        Args:
            module: a norm of SGLang.
            x: `[num_tokens, hidden_size]`, this rank's partial sum.
            residual: of the same shape and dtype, the same on every rank.
            before: what comes between the reduction and the residual.

        Returns:
            What the layer after the norm reads, a tensor or `(fp8, scale)`, and a new residual.
        """
        how: NormArithmetic = getattr(module, ATTRIBUTE, None) or arithmetic(module)
        obstacle = how.obstacle or tensor_obstacle(module.weight, x, residual)
        post = None
        if before.norm is not None and not obstacle:
            post, obstacle = post_norm(before.norm, how.numerics, x.dtype)
        if obstacle:
            return self._unfused(module, x, residual, obstacle, before)
        if before is not _NOTHING:
            self._count(module)
            # Under a tracer the method is an operator too.
            return self.communicator.all_reduce_add_rms_norm(
                *(x, residual, module.weight, eps_of(module)),
                weight_bias=how.weight_bias,
                numerics=how.numerics,
                post_norm=post,
                scale=before.scale,
            )
        if how.quant is not None and x.dtype == torch.bfloat16:
            return self._quantized(module, x, residual, how, how.quant, keep_bf16=False)
        if torch.compiler.is_compiling():
            normed, residual_out = torch.ops.allnorm.all_reduce_add_rms_norm(
                *(x, residual, module.weight, eps_of(module)),
                *(how.weight_bias, how.numerics, self.communicator.name),
            )
            return normed, residual_out
        self.sites.add(id(module))
        return self.communicator.all_reduce_add_rms_norm(
            *(x, residual, module.weight, eps_of(module)),
            weight_bias=how.weight_bias,
            numerics=how.numerics,
        )

    def quantized_norm(
        self,
        module: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        quant: allnorm.Fp8PerGroup,
        keep_bf16: bool,
    ) -> _Pair | None:
        """As `norm`, for a layer that reads FP8.

        Args:
            module: as of `norm`.
            x: as of `norm`.
            residual: as of `norm`.
            quant: what the layer reads.
            keep_bf16: whether some layer also reads the norm in 16 bits.

        Returns:
            `((fp8, scale), residual)`, or `((normed, fp8, scale), residual)` with `keep_bf16`;
            None, before anything was communicated, if this norm cannot be fused.
        """
        how: NormArithmetic = getattr(module, ATTRIBUTE, None) or arithmetic(module)
        if how.obstacle or tensor_obstacle(module.weight, x, residual):
            return None
        return self._quantized(module, x, residual, how, quant, keep_bf16)

    def _quantized(
        self,
        module: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        how: NormArithmetic,
        quant: allnorm.Fp8PerGroup,
        keep_bf16: bool,
    ) -> _Pair:
        arguments = (x, residual, module.weight, eps_of(module))
        if torch.compiler.is_compiling():
            fp8, scale, residual_out, normed = torch.ops.allnorm.all_reduce_add_rms_norm_quant(
                *arguments,
                *(quant.kind, quant.group_size, quant.scale_layout, quant.scale_format, None),
                *(keep_bf16, how.weight_bias, how.numerics, self.communicator.name),
            )
        else:
            self.sites.add(id(module))
            fp8, scale, residual_out, normed = self.communicator.all_reduce_add_rms_norm_quant(
                *(*arguments, quant, keep_bf16),
                weight_bias=how.weight_bias,
                numerics=how.numerics,
            )
        return ((normed, fp8, scale) if keep_bf16 else (fp8, scale)), residual_out

    def norm_alone(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """All-reduce and norm; whoever called the norm adds the residual.

        Args:
            module: as of `norm`.
            x: as of `norm`.
        """
        how: NormArithmetic = getattr(module, ATTRIBUTE, None) or arithmetic(module)
        obstacle = how.obstacle or tensor_obstacle(module.weight, x, x)
        if obstacle:
            self._say_unfused(obstacle)
            normed: torch.Tensor = type(module).forward(module, self.all_reduce(x))
            return normed
        self._count(module)
        normed, _ = self.communicator.all_reduce_add_rms_norm(
            *(x, None, module.weight, eps_of(module)),
            weight_bias=how.weight_bias,
            numerics=how.numerics,
        )
        return normed

    def _count(self, module: Any) -> None:
        if not torch.compiler.is_compiling():
            self.sites.add(id(module))

    def _say_unfused(self, reason: str) -> None:
        if not torch.compiler.is_compiling():
            self.say(f"a reduction of SGLang is not fused: {reason}")

    def _unfused(
        self, module: Any, x: torch.Tensor, residual: torch.Tensor, reason: str, before: Before
    ) -> _Pair:
        self._say_unfused(reason)
        reduced = self.all_reduce(x)
        if before.norm is not None:
            reduced = type(before.norm).forward(before.norm, reduced)
        if before.scale != 1.0:
            reduced = reduced * before.scale
        # The forward of the class: this instance's may be the one that completes sums.
        result: _Pair = type(module).forward(module, reduced, residual.clone())
        return result


_current: list[Fusion | None] = [None]


def current() -> Fusion | None:
    """What runs the fused calls in this process; None: SGLang runs on its own."""
    return _current[0]


def activate(fusion: Fusion | None) -> None:
    """Makes hooked functions of SGLang fuse, or lets them run on their own."""
    _current[0] = fusion


def completing_forward(
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
) -> Any:
    """Returns the forward of a norm whose input is a partial sum; bound to it by `complete_sums_in`."""
    fusion = _fusion()
    if residual is None:
        raise _broken()
    if post_residual_addition is not None:
        residual = residual + post_residual_addition
    return fusion.norm(self, x, residual, getattr(self, _BEFORE, _NOTHING))


def completing_alone(self: Any, x: torch.Tensor, residual: None = None) -> Any:
    """Returns the forward of a post norm that completes a sum; somebody else adds the residual."""
    if residual is not None:
        raise _broken()
    return _fusion().norm_alone(self, x)


def passing_on(self: Any, x: torch.Tensor, residual: None = None) -> Any:
    """Returns the forward of a post norm that the norm behind it computes, once the sum is complete."""
    _fusion()
    if residual is not None:
        raise _broken()
    return x


# Where a wired norm keeps what comes before its residual.
_BEFORE = "_allnorm_before"


def complete_sums_in(module: Any, before: Before = _NOTHING) -> None:
    """Lets a norm of SGLang reduce its input over the ranks before it adds and norms it.

    Args:
        module: the norm.
        before: what the model does to the sum first. Its norm then hands on what it is given.
    """
    module.forward = types.MethodType(completing_forward, module)
    if before is not _NOTHING:
        setattr(module, _BEFORE, before)
    if before.norm is not None:
        before.norm.forward = types.MethodType(passing_on, before.norm)


def complete_alone_in(module: Any) -> None:
    """Lets a norm of SGLang reduce its input over the ranks; it adds nothing."""
    module.forward = types.MethodType(completing_alone, module)


def _fusion() -> Fusion:
    fusion = current()
    if fusion is None:
        raise _broken()
    return fusion


def _broken() -> RuntimeError:
    return RuntimeError(
        "this norm expects the partial sum of the layer before it, and a residual where it had "
        "one: the plugin of allnorm was switched off, or the model changed, after they were wired "
        "together."
    )
