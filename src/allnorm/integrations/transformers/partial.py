"""A partial sum that a row-parallel module returns instead of a reduced tensor.

Norming or scaling it is deferred. Adding it to the residual makes the fused call. Any other use
reduces it first, so no code can read a partial sum by mistake.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from allnorm.integrations.transformers.sites import Norm, Site

# Factors are rounded to float32, so larger factors would overflow.
_MAX_SCALE = torch.finfo(torch.float32).max
_ADD = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, operator.add)


class PartialSum:
    """This rank's partial of a sum over ranks, and the site that reduces it.

    It is not a tensor. Torch functions call its `__torch_function__`; other code calls its
    operators and attributes. All of these reduce it, with the following exceptions:

    - `residual + partial` makes its site's fused call.
    - Multiplication by a number, and its site's post norm, return a PartialSum.
    - `reshape`, `view`, and `to` its own dtype return a PartialSum.
    - Its shape, dtype and device are the reduced tensor's.

    Args:
        value: [..., hidden_size], this rank's partial.
        site: the site that the partial comes from.
        is_normed: whether the site's post norm will be applied to the sum.
        scale: the factor by which the result will then be multiplied.
    """

    def __init__(
        self, value: torch.Tensor, site: Site, is_normed: bool = False, scale: float = 1.0
    ) -> None:
        self.value = value
        self.site = site
        self.is_normed = is_normed
        self.scale = scale
        self._reduced: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the reduced tensor."""
        return self.value.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the reduced tensor."""
        return self.value.dtype

    @property
    def device(self) -> torch.device:
        """The device of the reduced tensor."""
        return self.value.device

    def reduced(self) -> torch.Tensor:
        """Returns the sum over all ranks, normed and scaled if that was deferred.

        The first call is collective; later calls return the same tensor.
        """
        if self._reduced is None:
            make = self.site.normed if self.is_normed else self.site.reduce
            if torch.is_grad_enabled():  # the reducing module ran without gradients
                with torch.no_grad():
                    made = make(self.value)
            else:
                made = make(self.value)
            self._reduced = made if self.scale == 1.0 else made * self.scale
        return self._reduced

    def can_norm(self, norm: Norm) -> bool:
        """Returns whether `norm` is the site's post norm and can be deferred."""
        if torch.is_grad_enabled() or self._reduced is not None:
            return False
        is_changed = self.is_normed or self.scale != 1.0
        return not is_changed and self.site.post is norm and not norm.obstacle(self.value)

    def normed(self) -> PartialSum:
        """Returns the sum with its post norm; both are deferred."""
        return PartialSum(self.value, self.site, is_normed=True)

    def add_to(self, residual: torch.Tensor) -> torch.Tensor:
        """Returns `residual` plus the sum over all ranks, fused if possible. Collective.

        The fused call also saves the normed rows on the norm module.
        """
        change = (self.is_normed, self.scale)
        may_fuse = self._reduced is None and not torch.is_grad_enabled()
        if may_fuse and self.site.can_add(self.value, residual, *change):
            return self.site.add(self.value, residual, *change)
        return residual + self.reduced()

    def scaled(self, factor: Any) -> Any:
        """Returns the sum times `factor`; deferred if that is a number and the site can scale."""
        is_number = isinstance(factor, int | float) and abs(factor) <= _MAX_SCALE
        can_wait = self.site.is_scaled or self.is_normed
        if self._reduced is None and self.scale == 1.0 and is_number and can_wait:
            return PartialSum(self.value, self.site, self.is_normed, float(factor))
        return self.reduced() * _reduced(factor)

    def reshape(self, *shape: Any) -> Any:
        """Returns the sum in a different shape; reduces it if the last dimension changes."""
        if self._reduced is None:
            value = self.value.reshape(*shape)
            if value.shape[-1:] == self.value.shape[-1:]:
                return PartialSum(value, self.site, self.is_normed, self.scale)
        return self.reduced().reshape(*shape)

    def view(self, *shape: Any) -> Any:
        """Returns the sum in a different shape, or a view of the reduced tensor as a dtype."""
        if isinstance(shape[0], torch.dtype):
            return self.reduced().view(*shape)
        return self.reshape(*shape)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Returns itself for its own dtype; otherwise converts the reduced tensor."""
        if args == (self.dtype,) and not kwargs and self._reduced is None:
            return self
        return self.reduced().to(*args, **kwargs)

    def __add__(self, other: Any) -> Any:
        return self.add_to(other) if isinstance(other, torch.Tensor) else self.reduced() + other

    def __radd__(self, other: Any) -> Any:
        return self.add_to(other) if isinstance(other, torch.Tensor) else other + self.reduced()

    __mul__ = __rmul__ = scaled

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("value", "site", "is_normed", "scale", "_reduced"):
            raise AttributeError(name)  # attributes do not exist yet during unpickling or copying
        return getattr(self.reduced(), name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls a torch function with partial sums reduced; an addition makes the fused call."""
        if function in _ADD and len(args) == 2 and not kwargs:
            left, right = args
            if isinstance(right, PartialSum) and type(left) is not PartialSum:
                return right.__radd__(left)
            if isinstance(left, PartialSum) and type(right) is not PartialSum:
                return left.__add__(right)
        return function(*_reduced(args), **_reduced(kwargs or {}))


def _reduced(value: Any) -> Any:
    if isinstance(value, PartialSum):
        return value.reduced()
    if isinstance(value, (list, tuple)):
        return type(value)([_reduced(item) for item in value])
    if isinstance(value, dict):
        return {key: _reduced(item) for key, item in value.items()}
    return value


def _forward(name: str) -> Callable[..., Any]:
    def method(self: PartialSum, *args: Any) -> Any:
        return getattr(self.reduced(), name)(*_reduced(args))

    return method


# Python looks up these methods on the class, without calling __getattr__.
for _name in (
    *("__getitem__", "__setitem__", "__len__", "__iter__", "__bool__", "__float__", "__int__"),
    *("__sub__", "__rsub__", "__truediv__", "__rtruediv__", "__pow__"),
    *("__matmul__", "__rmatmul__", "__neg__", "__abs__", "__iadd__", "__imul__", "__isub__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__array__"),
):
    setattr(PartialSum, _name, _forward(_name))
