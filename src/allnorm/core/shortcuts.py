"""torch's fast private functions, for the host path of a call.

In Python, reading shape, strides, dtype and device of three tensors, and allocating two results,
takes longer than the rest of a call before its launch. torch has faster functions for the code that
its compiler generates. They are not a public interface. So each function is tested before it is
used, and the public function is used instead if the test fails.
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

# Missing in builds of torch without CUDA, which do not need them.
current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)

_is_compiling = torch.compiler.is_compiling
_num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def is_traced(x: object) -> bool:
    """Returns whether torch must see the call of `x`, a tensor or ExpertSum, as one operator.

    True under torch.compile, torch.export, make_fx and any other dispatch mode, and for fake
    tensors.
    """
    if _is_compiling() or _num_modes() > 0:
        return True
    kind = x.__class__
    return kind is FakeTensor or (isinstance(x, ExpertSum) and x.rows.__class__ is FakeTensor)


def is_intercepted() -> bool:
    """Returns whether a tracer or transform without a dispatch mode sees this thread's operators.

    True under torch.jit.trace, in transforms of torch.func (including torch.vmap), and under
    make_fx(pre_dispatch=True). The check of `alike` returns False there, so only calls that
    csrc/python does not recognize need to ask.
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
    """Returns a function that checks whether tensors are like these.

    The function returns True only for tensors of the same class, shape, strides, dtype and device.
    It may return False for other reasons too (inference mode, requires_grad, a tensor passed twice,
    a torch version without guards). It does not keep the tensors alive.
    """
    return _guards_of(tensors) if _guards_hold() else lambda *_: False


def fast_empty(device: torch.device) -> New | None:
    """Returns a function that allocates tensors on `device` while that is the current device.

    Returns None if this torch has no such function.
    """
    if device.type == "cpu":
        return _fast_new("cpu")
    with torch.cuda.device(device):  # the test would initialize any other current device
        return _fast_new("cuda")


@functools.cache
def version_counter() -> Callable[[Sequence[torch.Tensor]], None]:
    """Returns a function that bumps tensors' version counters, as operators that write do."""
    try:
        increment: Any = torch._C._increment_version
        probe = torch.empty(1)
        before = probe._version
        increment((probe,))
        if probe._version == before + 1:
            return increment
    except Exception:  # noqa: BLE001 - any error means that the interface is a different one
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
    """Returns whether the guards of this torch version detect every relevant difference."""
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
    except Exception:  # noqa: BLE001 - any error means that the interface is a different one
        return False
    return accepts and refuses


@functools.cache
def _fast_new(device_type: str) -> New | None:
    """Returns the compiler's allocation function; None if it is missing or works differently."""
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
    except Exception:  # noqa: BLE001 - any error means that the interface is a different one
        return None
    return new
