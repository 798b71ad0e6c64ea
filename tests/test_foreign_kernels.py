"""Kernels of others between two calls, launched as dependents, that never wait for what is before.

CUDA demands of a dependent grid that it waits (`griddepcontrol.wait`). One that does not ends while
our call before it still runs. Our next call must not start on that account: both would read the
same number of an operation.
"""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch
from rank_helpers import Case, assert_ranks_agree, comm, on
from test_cuda_graphs import capture

from allnorm.testing import RankPool

_PTX = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry leaves_at_once() { griddepcontrol.launch_dependents; ret; }
.visible .entry waits() { griddepcontrol.launch_dependents; griddepcontrol.wait; ret; }
"""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an identifier, and a union of 64 bytes aligned to 8."""

    _fields_ = (("id", ctypes.c_int64), ("value", ctypes.c_int32), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION = 6


@functools.cache
def _foreign(name: bytes) -> ctypes.c_void_p:
    driver = ctypes.CDLL("libcuda.so.1")
    torch.zeros(1, device="cuda")  # the context
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuModuleLoadData(ctypes.byref(module), _PTX) == 0
    assert driver.cuModuleGetFunction(ctypes.byref(function), module, name) == 0
    return function


def _launch(name: bytes, blocks: int) -> None:
    attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
    config = _Config(
        grid=(blocks, 1, 1),
        block=(128, 1, 1),
        stream=torch.cuda.current_stream().cuda_stream,
        attributes=ctypes.pointer(attribute),
        num_attributes=1,
    )
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuLaunchKernelEx(ctypes.byref(config), _foreign(name), None, None) == 0


def neighbours(rank: int, world_size: int, name: bytes, graph: bool) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("dependent launch needs compute capability 9.0")
    c = comm()
    cases = [
        Case(shape, algorithm=algorithm, call=call)
        for call in range(6)
        for shape in ((1, 4096), (40, 2880))
        for algorithm in ("one_shot", "two_shot")
    ]
    arguments = [(case.method(c), case.x(rank), case.call_arguments(c)) for case in cases]
    _launch(name, 1)

    def calls() -> list[tuple[torch.Tensor, torch.Tensor]]:
        results = []
        for index, (method, x, given) in enumerate(arguments):
            if (index + rank) % 5 == 0:
                torch.cuda._sleep(400_000)  # this rank is late: its peers' kernels wait for it
            results.append(method(x, **given))
            for _ in range(index % 3):
                _launch(name, 1 + 40 * (index % 2))
        return results

    if graph:
        captured, results = capture(calls)
        for _ in range(3):
            captured.replay()
    else:
        results = calls()
    torch.cuda.synchronize()
    c.check()
    for case, (normed, total) in zip(cases, results, strict=True):
        case.compare(c, normed, total)
        assert_ranks_agree(c, normed, total)


@on(gpu=(2,))
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", [b"leaves_at_once", b"waits"], ids=["leaves_at_once", "waits"])
def test_calls_with_foreign_dependents_between(pool: RankPool, name: bytes, graph: bool) -> None:
    pool.run(neighbours, name, graph)
