"""The fused calls that replace SGLang's all-reduce and norm once all ranks have agreed to fuse.

Every hook checks `current()`. If it is None, SGLang runs as if the plugin were not installed. Only
the hook that runs before graph capture changes it, in the same way on all ranks.

If a fused call is impossible, this module itself runs SGLang's all-reduce and norm, because SGLang
0.5.17 would run the norm without any all-reduce.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import allnorm
from allnorm import policy
from allnorm.integrations.sglang.norms import (
    ATTRIBUTE,
    NormArithmetic,
    arithmetic,
    eps_of,
    next_weight,
    post_norm,
    tensor_obstacle,
)

_Pair = tuple[Any, torch.Tensor]


@dataclass(frozen=True)
class Before:
    """Steps between the reduction and the residual add of a wired norm.

    `norm` is SGLang's norm that is applied to the sum, or None. `scale` is the factor that the
    result is multiplied by.
    """

    norm: Any = None
    scale: float = 1.0


_NOTHING = Before()


@dataclass
class Fusion:
    """Makes fused calls on a communicator.

    Attributes:
        all_reduce: SGLang's own all-reduce over the communicator's group.
        say: is called with the reason when a reduction cannot be fused.
        sites: ids of the norms whose calls were fused outside compiled graphs.
    """

    communicator: allnorm.Communicator
    all_reduce: Callable[[torch.Tensor], torch.Tensor]
    say: Callable[[str], None]
    sites: set[int] = field(default_factory=set)

    def norm(
        self, module: Any, x: torch.Tensor, residual: torch.Tensor | None, before: Before = _NOTHING
    ) -> _Pair:
        """Runs all-reduce, residual add and the norm of `module`, fused if possible.

        Args:
            module: one of SGLang's norms.
            x: `[num_tokens, hidden_size]`, this rank's partial sum.
            residual: a tensor like `x`, equal on every rank, or None.
            before: the steps between the reduction and the residual add.

        Returns:
            The input for the layer after the norm (a tensor or `(fp8, scale)`), and a new residual.
        """
        how, residual, obstacle = _arithmetic(module, x, residual)
        post = None
        if before.norm is not None and not obstacle:
            post, obstacle = post_norm(before.norm, how.numerics, x.dtype)
        if obstacle:
            return self._unfused(module, x, residual, obstacle, before)
        quant = how.quant if before is _NOTHING and x.dtype == torch.bfloat16 else None
        if quant is not None and residual is not None:
            return self._quantized(module, x, residual, how, quant, keep_bf16=False)
        self.count(module)
        return self.communicator.all_reduce_add_rms_norm(
            *(x, residual, module.weight, eps_of(module)),
            weight_bias=how.weight_bias,
            numerics=how.numerics,
            post_norm=post,
            scale=before.scale,
            prefetch=self._next_weight(how),
        )

    def quantized_norm(
        self,
        module: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        quant: allnorm.Fp8PerGroup,
        keep_bf16: bool,
    ) -> _Pair | None:
        """Runs all-reduce, residual add, norm and quantization, for a layer that reads FP8.

        If `keep_bf16`, a layer also reads the normed tensor in 16 bits.

        Returns:
            `((fp8, scale), residual)`, or `((normed, fp8, scale), residual)` with `keep_bf16`;
            None if this norm cannot be fused; in that case nothing was communicated.
        """
        how, _, obstacle = _arithmetic(module, x, residual)
        obstacle = obstacle or ("a float32 residual" if how.float32_residual else "")
        return None if obstacle else self._quantized(module, x, residual, how, quant, keep_bf16)

    def _quantized(
        self,
        module: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        how: NormArithmetic,
        quant: allnorm.Fp8PerGroup,
        keep_bf16: bool,
    ) -> _Pair:
        self.count(module)
        fp8, scale, residual_out, normed = self.communicator.all_reduce_add_rms_norm_quant(
            *(x, residual, module.weight, eps_of(module), quant, keep_bf16),
            weight_bias=how.weight_bias,
            numerics=how.numerics,
            prefetch=self._next_weight(how),
        )
        return ((normed, fp8, scale) if keep_bf16 else (fp8, scale)), residual_out

    def _next_weight(self, how: NormArithmetic) -> torch.Tensor | None:
        wanted = policy.prefetch_tokens(self.communicator.traits)
        return next_weight(how, self.communicator.device) if wanted else None

    def count(self, module: Any) -> None:
        """Counts a site, unless a compiler traces its call."""
        if not torch.compiler.is_compiling():
            self.sites.add(id(module))

    def _unfused(
        self,
        module: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        reason: str,
        before: Before,
    ) -> _Pair:
        if not torch.compiler.is_compiling():
            self.say(f"a reduction of SGLang is not fused: {reason}")
        reduced = self.all_reduce(x)
        if before.norm is not None:
            reduced = type(before.norm).forward(before.norm, reduced)
        if before.scale != 1.0:
            reduced = reduced * before.scale
        # Call the class's forward, because the instance's own forward may be one that completes
        # sums.
        if residual is None:
            return type(module).forward(module, reduced), reduced
        result: _Pair = type(module).forward(module, reduced, residual.clone())
        return result


def _arithmetic(
    module: Any, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[NormArithmetic, torch.Tensor | None, str]:
    """Returns a norm's arithmetic, the residual in the dtype that it keeps, and any obstacle.

    The obstacle says why a call with these tensors cannot be fused.
    """
    how: NormArithmetic = getattr(module, ATTRIBUTE, None) or arithmetic(module)
    if how.float32_residual and residual is not None:
        residual = residual.float()
    like = x if residual is None else residual
    problem = tensor_obstacle(module.weight, x, like, float32_residual=how.float32_residual)
    return how, residual, how.obstacle or problem


_current: list[Fusion | None] = [None]


def current() -> Fusion | None:
    """Returns the process's `Fusion`; None if SGLang runs without fused calls."""
    return _current[0]


def activate(fusion: Fusion | None) -> None:
    """Sets the process's `Fusion`; None switches the plugin off."""
    _current[0] = fusion


def completing_forward(
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
) -> Any:
    """The forward of a norm whose input is a partial sum; installed by `complete_sums_in`."""
    fusion = _fusion(is_expected=residual is not None)
    if post_residual_addition is not None and residual is not None:
        residual = residual + post_residual_addition
    return fusion.norm(self, x, residual, getattr(self, _BEFORE, _NOTHING))


def completing_alone(self: Any, x: torch.Tensor, residual: None = None) -> Any:
    """The forward of a post norm that completes a sum; the layer itself adds the residual."""
    normed, _ = _fusion(is_expected=residual is None).norm(self, x, None)
    return normed


def passing_on(self: Any, x: torch.Tensor, residual: None = None) -> Any:
    """Returns `x` unchanged: the next norm's fused call includes this post norm."""
    _fusion(is_expected=residual is None)
    return x


# The attribute in which a wired norm keeps the steps before its residual add.
_BEFORE = "_allnorm_before"


def complete_sums_in(module: Any, before: Before = _NOTHING) -> None:
    """Makes one of SGLang's norms reduce its input over the ranks before it adds and norms it.

    `before` has the steps before the residual add. If they include a norm, its forward is replaced
    with one that returns the input unchanged.
    """
    module.forward = types.MethodType(completing_forward, module)
    if before is not _NOTHING:
        setattr(module, _BEFORE, before)
    if before.norm is not None:
        before.norm.forward = types.MethodType(passing_on, before.norm)


def complete_alone_in(module: Any) -> None:
    """Makes one of SGLang's norms reduce its input over the ranks; it does not add a residual."""
    module.forward = types.MethodType(completing_alone, module)


def _fusion(*, is_expected: bool) -> Fusion:
    """Returns the process's `Fusion`. Raises if it is None or the caller's arguments are wrong."""
    fusion = current()
    if fusion is None or not is_expected:
        raise RuntimeError(
            "this norm expects the partial sum of the layer before it, and a residual if it had "
            "one. The allnorm plugin was switched off, or the model changed, after the layer and "
            "the norm were wired together: load the model again."
        )
    return fusion
