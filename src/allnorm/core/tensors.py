"""The memory of tensors: which tensors a call reads in place, copies, or refuses.

The kernels see addresses, so the values of a tensor must be the numbers in its memory. Tensors that
compute their values, or keep them elsewhere, are refused by type, which is equal on all ranks. Two
kinds of plain tensors are copied instead: negated views, and zero tensors without memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_is_transformed: Any = torch._C._functorch.is_functorch_wrapped_tensor
_is_functional: Any = torch._is_functional_tensor
_is_compiling = torch.compiler.is_compiling  # Dynamo supports only plain tensors
_strided = torch.strided
# A lower address may be an offset into memory that was freed; see has_memory().
LOW_ADDRESS = 1 << 32


def check_kind(name: str, tensor: object) -> None:
    """Raises TypeError or ValueError unless `tensor` is a plain tensor without a gradient.

    It checks only properties that are equal on all ranks: the type, the layout, and whether a
    gradient is needed.
    """
    kind = type(tensor)
    if kind not in _TYPES:
        _refuse_type(name, tensor)
    assert isinstance(tensor, torch.Tensor)
    check_layout(name, tensor)
    if wants_gradient(tensor):
        raise ValueError(
            f"{name} with requires_grad=True: expected none while gradients are enabled, because "
            "results carry no gradient. Call it under torch.no_grad() or torch.inference_mode(), "
            f"or pass {name}.detach()."
        )
    if _is_compiling():
        return
    if has_tangent(tensor):
        raise ValueError(
            f"{name} has a tangent of forward-mode differentiation: expected none, because results "
            f"carry no gradient. Call it under torch.inference_mode(), or pass {name}.detach()."
        )
    if _is_transformed(tensor) or _is_functional(tensor):
        raise TypeError(
            f"{name} is the tensor of a transform (torch.func, torch.vmap or functionalisation) "
            "that is not active here: expected one with memory of its own. Make the call within "
            "the transform, or pass a plain tensor."
        )


def check_layout(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError if `tensor` is sparse or nested."""
    if tensor.layout is not _strided or tensor.is_nested:
        what = "nested" if tensor.is_nested else str(tensor.layout)
        raise TypeError(
            f"{name} is a tensor with layout {what}: expected a dense one. Pass "
            f"{name}.to_dense(), or what it consists of."
        )


def wants_gradient(tensor: torch.Tensor) -> bool:
    """Returns whether autograd would record a call of `tensor`."""
    return tensor.requires_grad and torch.is_grad_enabled()


def has_tangent(tensor: torch.Tensor) -> bool:
    """Returns whether `tensor` has a tangent in active forward-mode differentiation."""
    level = forward_ad._current_level
    if level < 0 or not torch._C._is_fwd_grad_enabled():
        return False
    return torch._VF._unpack_dual(tensor, level=level)[1] is not None


def _refuse_type(name: str, tensor: object) -> None:
    kind = type(tensor).__name__
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {kind}: expected a torch.Tensor.")
    for method in ("to_local", "wait", "get_data", "unwrap"):  # the first one that exists
        if hasattr(type(tensor), method):
            remedy = f"{name}.{method}()"
            break
    else:
        remedy = f"the plain tensor inside it, or {name}.as_subclass(torch.Tensor)"
    raise TypeError(f"{name} is a {kind}: expected a plain torch.Tensor. Pass {remedy}.")


def is_batched(tensor: torch.Tensor) -> bool:
    """Returns whether torch.vmap maps over `tensor`."""
    return not _is_compiling() and bool(torch._C._functorch.is_batchedtensor(tensor))


def check_all_fake(**given: Any) -> None:
    """Raises TypeError if only some of a call's tensors are fake."""
    if _is_compiling():
        return
    modes = [t.fake_mode for t in given.values() if type(t) is FakeTensor]
    if not modes or modes[0].allow_non_fake_inputs:
        return
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor) and type(tensor) is not FakeTensor:
            raise TypeError(
                f"{name} is a {type(tensor).__name__} in a call of fake tensors: expected a "
                f"FakeTensor too. Pass fake_mode.from_tensor({name})."
            )


def is_virtual(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's values differ from its memory: negated views, zero tensors."""
    return bool(tensor.is_neg() or tensor._is_zerotensor())


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether the kernels can read a tensor in place, provided that it has memory."""
    try:
        check_kind("", tensor)
    except (TypeError, ValueError):
        return False
    return not is_virtual(tensor)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose memory holds the same values; a copy only where needed."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_neg()


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a plain tensor has memory for its elements, or no elements.

    Zero tensors without storage count as having memory. After `untyped_storage().resize_(0)` the
    address of a view is its offset.
    """
    address = tensor.data_ptr()
    if address >= LOW_ADDRESS or tensor.numel() == 0 or tensor._is_zerotensor():
        return True
    return address != 0 and tensor.untyped_storage().data_ptr() != 0


def check_memory(**tensors: torch.Tensor | None) -> None:
    """Raises ValueError unless all `tensors` have memory; may raise on this rank only."""
    for name, tensor in tensors.items():
        if tensor is not None and not has_memory(tensor):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and no memory: expected memory with its "
                "elements. Its storage was freed; allocate it again before the call."
            )


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` as [num_tokens, hidden_size]; a view wherever one exists."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def has_even_rows(x: torch.Tensor) -> bool:
    """Returns whether the distance from each row to the next is the same."""
    shape, stride = x.shape[:-1], x.stride()[:-1]
    return all(stride[i] == stride[i + 1] * shape[i + 1] for i in range(len(shape) - 1))


def row_pitch(tensor: torch.Tensor) -> int:
    """Returns the elements from each row to the next; 0 unless rows are dense and evenly spaced."""
    if tensor.dim() < 2 or tensor.stride(-1) != 1 or not has_even_rows(tensor):
        return 0
    return max(0, tensor.stride(-2))


def span_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes from the start of a tensor's first element to the end of its last."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in dims) + 1) * tensor.element_size()
