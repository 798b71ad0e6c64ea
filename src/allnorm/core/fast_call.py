"""Runs repeated calls without Python: the binding of csrc/python.

Most of a call's host time is spent in Python: looking up the prepared call, allocating results and
reading addresses. For calls that were made twice, C does this through CPython's stable ABI. Other
calls go to dispatch.py, which also works without this library.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from allnorm.core import _native, shortcuts
from allnorm.core.call import PARTS, SLOTS, Call
from allnorm.core.prepared_call import CUDA_ALIGN_BYTES, Memory, PreparedCall
from allnorm.core.slices import slot
from allnorm.core.tensors import row_pitch, span_bytes
from allnorm.quant import Fp8PerGroup, Fp8PerTensor, Fp8PerToken

_pointer, _object = ctypes.c_void_p, ctypes.py_object
_NOTHING, _TENSOR, _INPUT = range(3)  # values of Given in csrc/python/prepared.h
# Types of constants that C may compare: equal values are interchangeable (floats: equal bits).
# Classes are compared too.
_COMPARABLE = frozenset({float, int, bool, str, type(None), type, Fp8PerGroup, Fp8PerToken})
_STATIC_SCALE, _OUT = SLOTS.index("static_scale"), SLOTS.index("out")
# Inputs that results may overwrite, keyed by result.
_OVERWRITTEN = {"residual_out": "residual"} | {
    slot("out", number): slot("x", number) for number in range(_native.MAX_SLICES)
}
# Tensors that need no alignment: their width is not hidden_size, and the kernels read them element
# by element, or not at all.
_NARROW = frozenset(
    {"static_scale", "scale_out", "expert_index", "expert_weights", "post", "mix", "prefetch"}
)


class FastCall(NamedTuple):
    """The functions of csrc/python for one Dispatcher."""

    call: Callable[..., Any]  # takes the fields of a Call by keyword; returns the results
    keep: Callable[[Any], None]  # takes a result of `_prepare`; `call` then repeats that call
    forget: Callable[[], None]  # drops all kept calls
    close: Callable[[], None]  # like `forget`; also cancels other threads' launches
    holder: Callable[[], int]  # returns the id of the thread that is in a launch, or 0


def available() -> bool:
    """Returns whether the library exists and supports this interpreter."""
    return _library() is not None


def new(
    missed: Callable[..., Any],
    failed: Callable[..., Any],
    device: torch.device,
    function: Any,
    handle: int | None = None,
    lock: threading.Lock | None = None,
) -> FastCall:
    """Creates the functions that make repeated calls on a device.

    Args:
        missed: runs calls that are not recognized; takes the fields of a Call by keyword.
        failed: takes a status other than 0, and the fields of the Call by keyword.
        device: device of the tensors.
        function: C function that takes an AllnormCall last; None: no call is recognized.
        handle: first argument of `function`, if it has one.
        lock: held while `function` runs, if given.
    """
    library = _library()
    if function is None or library is None or shortcuts.fast_empty(device) is None:
        return FastCall(missed, lambda prepared: None, lambda: None, lambda: None, lambda: 0)
    of_device: tuple[Any, ...] = (None, None, None)
    if device.type == "cuda":
        of_device = (device.index, shortcuts.current_device, shortcuts.current_raw_stream)
    locking = (None, None) if lock is None else (lock.acquire, lock.release)
    address = ctypes.cast(function, _pointer).value
    return FastCall(
        *library.allnorm_fast_call_new(address, handle, missed, failed, *locking, *of_device)
    )


def keep(fast: FastCall, prepared: PreparedCall, call: Call, memory: Memory) -> None:
    """Makes `fast` repeat calls like this one, if it can. Keeps none of the call's tensors."""
    if isinstance(prepared.repeated, str):
        prepared.repeated = _prepare(prepared, call, memory)
    if prepared.repeated is not None:
        fast.keep(prepared.repeated)


def _prepare(prepared: PreparedCall, call: Call, memory: Memory) -> Any:
    """Returns the argument of `FastCall.keep`; None if the call cannot be repeated."""
    library = _library()
    native = prepared.repeatable(call, memory)
    if library is None or native is None:
        return None
    if not _COMPARABLE.issuperset(map(type, call.constants)):
        return None
    device, given = call.x.device, call.named
    new = shortcuts.fast_empty(device)
    results: list[tuple[int, Any, tuple[Any, ...]]] = []
    for result in prepared.results:
        if result is None:  # rows that the caller does not want; Call.out is then None
            results.append((_OUT, None, ()))
            continue
        place = SLOTS.index(result.field)
        if result.field in given:
            results.append((place, None, ()))
        elif result.scale is not None and result.scale.padded:
            results.append((place, result.scale.empty, (device,)))
        else:
            geometry = tuple(result.like.shape), result.stride, result.like.dtype
            results.append((place, new, geometry))
    if isinstance(call.quant, Fp8PerTensor):
        results[1] = (_STATIC_SCALE, None, ())
    operands = [_operand(given, prepared, name) for name in SLOTS]
    once = [
        given[name] for name, (kind, *_) in zip(SLOTS, operands, strict=True) if kind == _TENSOR
    ]
    # Tensors that require grad are recognized only while gradients are disabled.
    grad_enabled = torch.is_grad_enabled if any(t.requires_grad for t in once) else None
    # Inference tensors have no version; `alike` distinguishes them from other tensors.
    has_version = any(not t.is_inference() for t in call.written)
    overwrite = shortcuts.version_counter() if has_version else None
    return library.allnorm_fast_call_prepare(
        *(ctypes.addressof(native), shortcuts.alike(once), grad_enabled, overwrite),
        *(call.values, tuple(results)),
        (ctypes.c_uint64 * 5 * len(operands))(*operands),  # type: ignore[misc]
    )


def _operand(
    given: dict[str, torch.Tensor], prepared: PreparedCall, name: str
) -> tuple[int, int, int, int, int]:
    """Returns the fields of an Operand in prepared.h, in order."""
    tensor = given.get(name)
    if tensor is None:
        return _NOTHING, 1, 0, 0, 0
    kind = _INPUT if given.get(_OVERWRITTEN.get(name, "")) is tensor else _TENSOR
    align = 1 if name == "prefetch" else tensor.element_size()
    if tensor.device.type == "cuda" and name not in _NARROW:
        align = CUDA_ALIGN_BYTES
    if name == "scale_out" and prepared.scale is not None:
        tensor = prepared.scale.with_padding(tensor)
    # As in core.arguments.check_overlap, rows may alternate only between tensors with the same
    # number of dimensions and element size: here, those of x.
    size, x = tensor.element_size(), given["x"]
    is_like_x = tensor.dim() == x.dim() and size == x.element_size()
    pitch = row_pitch(tensor) if is_like_x else 0
    row = tensor.shape[-1] if pitch else 0
    return kind, align, span_bytes(tensor), row * size, pitch * size


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Makes every call of this process run in Python, where it can be observed."""
    library = _library()
    if library is not None:
        library.allnorm_fast_call_watch(1)
    try:
        yield
    finally:
        if library is not None:
            library.allnorm_fast_call_watch(-1)


def raise_interrupt() -> None:
    """Raises the exception of a signal handler that ran while this thread waited, if any."""
    library = _library()
    if library is not None:
        library.allnorm_fast_call_raise()


def keywords() -> tuple[Any, ...]:
    """Returns the argument of use_keywords() in csrc/python/arguments.h."""
    table = []
    for field in dataclasses.fields(Call):
        default = () if field.default is dataclasses.MISSING else (field.default,)
        name = "x" if field.name == "source" else field.name
        kinds = PARTS.get(field.name, {})
        parts = tuple((kind, tuple(kinds[kind].items())) for kind in kinds)
        table.append((field.name, default, name if name in SLOTS else None, parts))
    return tuple(table)


@functools.cache
def _library() -> ctypes.PyDLL | None:
    """Returns the library; None if it is missing or does not support this interpreter."""
    path = pathlib.Path(__file__).parent.parent / "lib" / "liballnorm_python.so"
    if sys.implementation.name != "cpython" or "t" in sys.abiflags:
        return None
    try:
        library = ctypes.PyDLL(str(path))
        if library.allnorm_fast_call_abi() != _native.ABI_VERSION:
            return None
        use_tensors = library.allnorm_fast_call_use_tensors
        use_keywords = library.allnorm_fast_call_use_keywords
    except (OSError, AttributeError):
        return None
    new, prepare = library.allnorm_fast_call_new, library.allnorm_fast_call_prepare
    new.argtypes, new.restype = (_pointer, _pointer, *[_object] * 7), _object
    prepare.argtypes = (_pointer, *[_object] * 5, _pointer)
    prepare.restype = _object
    watch = library.allnorm_fast_call_watch
    watch.argtypes, watch.restype = (ctypes.c_int32,), None
    use_tensors.argtypes, use_tensors.restype = (_object, _object, _object), None
    use_tensors(vars(forward_ad), torch.Tensor, torch.nn.Parameter)
    use_keywords.argtypes, use_keywords.restype = (_object,), _object
    use_keywords(keywords())
    look, raise_interrupt = library.allnorm_fast_call_look, library.allnorm_fast_call_raise
    look.argtypes, look.restype = (), _pointer
    raise_interrupt.argtypes, raise_interrupt.restype = (), _object
    if "cpu" in _native.available_backends():
        _native.library("cpu").set_interrupt(look())
    return library
