"""Faster ways around torch's public functions, for the host path of a call.

Reading shape, strides, dtype and device of three tensors from Python, and making two results,
take longer than all else that a call does before its launch. The code that torch's own compiler
generates has the same trouble, and functions for it. They are no public interface: each is tried
out before it is relied on, and the public way is taken if it does not do as expected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from allnorm.expert_sum import ExpertSum

Check = Callable[..., bool]
New = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]

# Not in builds of torch without CUDA, where nobody asks.
current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)

_is_compiling = torch.compiler.is_compiling
_num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def is_traced(x: object) -> bool:
    """Returns whether torch must see the call of `x` as one operator; `x` may be an ExpertSum.

    So under torch.compile, torch.export and make_fx, under any other dispatch mode, and for fake
    tensors.
    """
    if _is_compiling() or _num_modes() > 0:
        return True
    kind = x.__class__
    return kind is FakeTensor or (isinstance(x, ExpertSum) and x.rows.__class__ is FakeTensor)


def is_intercepted() -> bool:
    """Returns whether a tracer or transform that is no dispatch mode sees this thread's operators.

    So under torch.jit.trace, in the transforms of torch.func, torch.vmap among them, and under
    make_fx(pre_dispatch=True). A function that `alike` returns answers False there: only calls that
    csrc/python does not recognize need ask.
    """
    return (
        torch._C._is_tracing()
        or is_transforming()
        or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
    )


def is_transforming() -> bool:
    """Returns whether this thread is in a transform of torch.func or in torch.vmap."""
    return _transform() is not None


def alike(tensors: Sequence[torch.Tensor]) -> Check:
    """A function that tells whether as many tensors are like these.

    It answers True only for tensors of the same class, shape, strides, dtype and device, and may
    answer False for other reasons too (inference mode, requires_grad, one tensor passed twice, a
    torch without such a function). It keeps none of `tensors`.
    """
    return _guards_of(tensors) if _guards_hold() else lambda *_: False


def fast_empty(device: torch.device) -> New | None:
    """A function that makes tensors on `device`, with no values, while that is the current one.

    None if this torch has none.
    """
    if device.type == "cpu":
        return _fast_new("cpu")
    with torch.cuda.device(device):  # another device would be initialized by trying it out there
        return _fast_new("cuda")


@functools.cache
def version_counter() -> Callable[[Sequence[torch.Tensor]], None]:
    """Returns a function that raises the versions of tensors, as writing operators do."""
    try:
        increment: Any = torch._C._increment_version
        probe = torch.empty(1)
        before = probe._version
        increment((probe,))
        if probe._version == before + 1:
            return increment
    except Exception:  # noqa: BLE001 - any surprise means that it is another interface
        pass
    return _increment_versions


def _increment_versions(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _guards_of(tensors: Sequence[torch.Tensor]) -> Check:
    from torch._C._dynamo import guards

    make: Any = guards.TensorGuards
    check: Check = make(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check
    return check


@functools.cache
def _guards_hold() -> bool:
    """Whether the guards of this torch see every difference that matters here."""
    make = functools.partial(torch.empty_strided, dtype=torch.bfloat16, device="cpu")
    shape, stride = (3, 4), (6, 1)
    others = (
        make((2, 4), stride),
        make((3, 5), stride),
        make(shape, (4, 1)),
        make(shape, (6, 2)),
        make((1, *shape), (18, *stride)),
        make((0, 4), stride),
        make(shape, stride, dtype=torch.float16),
        make(shape, stride, device="meta"),
        None,
    )
    first, second = make(shape, stride), make(shape, stride)
    try:
        check = _guards_of([first, second])
        accepts = check(make(shape, stride), make(shape, stride)) is True
        refuses = all(
            check(other, second) is False and check(first, other) is False for other in others
        )
    except Exception:  # noqa: BLE001 - any surprise means that it is another interface
        return False
    return accepts and refuses


@functools.cache
def _fast_new(device_type: str) -> New | None:
    """The compiler's function for it; None if it is not there or makes something else."""
    try:
        from torch._C._dynamo import guards

        new: New = getattr(guards, f"_empty_strided_{device_type}")
        for shape, stride, dtype in (
            ((2, 3), (3, 1), torch.bfloat16),
            ((3, 2), (1, 4), torch.float8_e4m3fn),
            ((0, 3), (3, 1), torch.float32),
        ):
            made = new(shape, stride, dtype)
            if (made.shape, made.stride(), made.dtype) != (torch.Size(shape), stride, dtype):
                return None
            if type(made) is not torch.Tensor or made.device.type != device_type:
                return None
    except Exception:  # noqa: BLE001 - any surprise means that it is another interface
        return None
    return new
