"""Calls like earlier ones, made without Python: the binding of csrc/python.

What a call costs the host is Python's for the most part: finding what is prepared for it, making
results, reading addresses. Where the same call is made again, C does that, by CPython's stable ABI.
Whatever it does not recognise is left to calls.py and local.py, which alone check, and do all of it
without this library too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pathlib
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from allnorm import _native, shortcuts
from allnorm.arguments import span_bytes
from allnorm.keys import geometry_of
from allnorm.launch import Launch
from allnorm.quant import Fp8PerGroup, Fp8PerToken

_pointer, _object = ctypes.c_void_p, ctypes.py_object
_OUT, _RESIDUAL_OUT, _QUANTIZED, _SCALE = range(4)  # Slot of prepared.h
_NOTHING, _TENSOR, _INPUT = range(3)  # Given of prepared.h
# Kinds of memory for results that are kept for calls of one geometry.
_MAX_VARIANTS = 8
# Constants of a norm that C may compare: equal ones of these, with the same sign if they are
# floats, are the same call.
_COMPARABLE = frozenset({float, int, bool, str, Fp8PerGroup, Fp8PerToken})


class FastCall(NamedTuple):
    """What repeated calls are made with.

    Attributes:
        make: (x, residual, weight, norm, algorithm, out, residual_out) -> the results in a tuple;
            or the status of a launch that failed, an int; or None if it has done nothing.
        keep: recognises what `_prepare` has returned from now on.
        forget: recognises nothing that was kept until now.
        close: the same, and a call that another thread is about to launch does nothing.
        holder: the thread that has a launch under way, as `threading.get_ident` names it, or 0.
    """

    make: Callable[..., Any]
    keep: Callable[[Any], None]
    forget: Callable[[], None]
    close: Callable[[], None]
    holder: Callable[[], int]


# Recognises nothing.
_NONE = FastCall(lambda *args: None, lambda prepared: None, lambda: None, lambda: None, lambda: 0)


def available() -> bool:
    """Whether the library is there and fits this interpreter."""
    return _library() is not None


def of_communicator(
    library: _native.Library,
    handle: int,
    world_size: int,
    device: torch.device,
    lock: threading.Lock,
) -> FastCall:
    """For the calls of a communicator on `device`, which `library` makes with `handle`."""
    if handle:
        return _new(library.run, handle, device, (lock.acquire, lock.release))
    # Ranks that cannot exchange go through the process group; one alone needs none.
    return of_thread(library, device) if world_size == 1 else _NONE


def of_thread(library: _native.Library, device: torch.device) -> FastCall:
    """For a thread's calls of `library` on `device` that involve no other rank."""
    return _new(library.local, None, device, (None, None))


def _new(
    function: Any, handle: int | None, device: torch.device, lock: tuple[Any, Any]
) -> FastCall:
    functions, empty = _library(), shortcuts.fast_empty(device)
    if functions is None or empty is None:
        return _NONE
    of_device: tuple[Any, ...] = (None, None, None)
    if device.type == "cuda":
        of_device = (device.index, shortcuts.current_device, shortcuts.current_raw_stream)
    address = ctypes.cast(function, _pointer).value
    return FastCall(*functions.new(address, handle, empty, *lock, *of_device))


Tensors = tuple[
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
]
"""x, residual, weight, and memory for out and residual_out."""


def keep(
    fast: FastCall,
    launch: Launch,
    tensors: Tensors,
    norm: tuple[Any, ...] | None,
    algorithm: str,
    alone: bool = False,
) -> None:
    """Lets `fast` make calls like this one from now on, if it can.

    Args:
        fast: of the communicator or thread that makes them.
        launch: what is prepared for them.
        tensors: of this call; none is kept. Results must be what the kernels can write to.
        norm: what the norm needs beside tensors.
        algorithm: what was asked for.
        alone: whether there is no other rank.
    """
    key = _into(tensors)
    if key not in launch.fast:
        if len(launch.fast) >= _MAX_VARIANTS:
            launch.fast.clear()
        launch.fast[key] = _prepare(launch, tensors, norm, algorithm, alone)
    prepared = launch.fast[key]
    if prepared is not None:
        fast.keep(prepared)


def _into(tensors: Tensors) -> tuple[Any, ...]:
    """What a call like another one has in common with it, where results are given."""
    x, residual, _, out, residual_out = tensors
    return (
        None if out is None else (out is x, geometry_of(out)),
        None if residual_out is None else (residual_out is residual, geometry_of(residual_out)),
    )


def _prepare(
    launch: Launch,
    tensors: Tensors,
    norm: tuple[Any, ...] | None,
    algorithm: str,
    alone: bool,
) -> Any:
    """What `FastCall.keep` takes; None if nothing can."""
    functions = _library()
    x, residual, _, out, residual_out = tensors
    call = None
    if alone or not launch.is_unfused:
        call = launch.repeatable(out, residual_out)
    if functions is None or call is None:
        return None
    if norm is not None and not _COMPARABLE.issuperset(map(type, norm)):
        return None
    results: list[tuple[int, Any]] = [(_OUT, launch.out if out is None else None)]
    if launch.call.quant:
        scale = launch.scale
        if scale is None or scale.padded:  # given by the caller, or with memory of its own around
            return None
        wants_normed = norm is not None and norm[-1]
        results = [
            (_QUANTIZED, launch.quantized),
            (_SCALE, (scale.shape, scale.stride, scale.dtype)),
            (_RESIDUAL_OUT, launch.residual_out),
            (_OUT, launch.out if wants_normed else None),
        ]
    elif launch.is_norm:
        results.append((_RESIDUAL_OUT, launch.residual_out if residual_out is None else None))
    given = [_NOTHING if tensor is None else _TENSOR for tensor in tensors]
    given[3] = _INPUT if out is x else given[3]
    given[4] = _INPUT if residual_out is not None and residual_out is residual else given[4]
    once = [t for t, kind in zip(tensors, given, strict=True) if kind == _TENSOR and t is not None]
    check = shortcuts.alike(once)
    # What requires grad is taken only while gradients are disabled.
    grad_enabled = torch.is_grad_enabled if any(t.requires_grad for t in once) else None
    spans = (0 if tensor is None else span_bytes(tensor) for tensor in tensors)
    return functions.prepare(
        *(ctypes.addressof(call), check, grad_enabled, norm, algorithm, tuple(results)),
        *((ctypes.c_uint8 * len(tensors))(*given), (ctypes.c_uint64 * len(tensors))(*spans)),
    )


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Lets Python make every call of this process, to be seen there."""
    functions = _library()
    if functions is not None:
        functions.watch(1)
    try:
        yield
    finally:
        if functions is not None:
            functions.watch(-1)


def raise_interrupt() -> None:
    """Raises what a signal handler raised while this thread waited in the library; else nothing."""
    functions = _library()
    if functions is not None:
        functions.raise_interrupt()


class _Functions(NamedTuple):
    new: Callable[..., Any]
    prepare: Callable[..., Any]
    watch: Callable[[int], None]
    raise_interrupt: Callable[[], None]


@functools.cache
def _library() -> _Functions | None:
    """The functions of the library; None where it was not built, or is for other interpreters."""
    path = pathlib.Path(__file__).parent / "lib" / "liballnorm_python.so"
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    try:
        library = ctypes.PyDLL(str(path))
        if library.allnorm_fast_call_abi() != _native.ABI_VERSION:
            return None
    except (OSError, AttributeError):
        return None
    new, prepare = library.allnorm_fast_call_new, library.allnorm_fast_call_prepare
    new.argtypes, new.restype = (_pointer, _pointer, *[_object] * 6), _object
    prepare.argtypes = (_pointer, *[_object] * 5, _pointer, _pointer)
    prepare.restype = _object
    watch = library.allnorm_fast_call_watch
    watch.argtypes, watch.restype = (ctypes.c_int32,), None
    look, raise_interrupt = library.allnorm_fast_call_look, library.allnorm_fast_call_raise
    look.argtypes, look.restype = (), _pointer
    raise_interrupt.argtypes, raise_interrupt.restype = (), _object
    if "cpu" in _native.available_backends():
        _native.library("cpu").set_interrupt(look())
    return _Functions(new, prepare, watch, raise_interrupt)
