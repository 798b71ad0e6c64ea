"""Tests calls with kernels from other libraries between them.

Some are dependent launches that never wait for their predecessors (`griddepcontrol.wait`), although
CUDA requires it. Such a kernel can end while our previous call is still running. Our next call must
not start before that call ends, because both would read the same operation number.

Others write a call's input long after the call has begun, so the call must wait until they
end. They read the input first, which leaves its old values in the SM's L1 cache.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import pytest
import torch
from rank_helpers import Case, assert_ranks_agree, comm, on

import allnorm
from allnorm import reference
from allnorm.testing import assert_same_bits

from .test_cuda_graphs import capture, kernel_nodes

_PTX = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry leaves_at_once() { griddepcontrol.launch_dependents; ret; }
.visible .entry waits() { griddepcontrol.launch_dependents; griddepcontrol.wait; ret; }
.visible .entry copies_late(.param .u64 to, .param .u64 from, .param .u64 bytes)
{
  .reg .b64 %time, %end, %offset, %step, %bytes, %to, %from, %address;
  .reg .b32 %thread, %block, %threads, %blocks, %read, %word;
  .reg .b16 %element;
  .reg .pred %p;
  ld.param.u64 %to, [to];
  ld.param.u64 %bytes, [bytes];
  min.u64 %end, %bytes, 65536;
  mov.u32 %thread, %tid.x;
  mul.wide.u32 %offset, %thread, 4;
  mov.u32 %read, 0;
  // The 128 threads of every block read the old values, 4 bytes each; their OR is never 1.
READ:
  setp.ge.u64 %p, %offset, %end;
  @%p bra HAVE_READ;
  add.u64 %address, %to, %offset;
  ld.global.ca.u32 %word, [%address];
  or.b32 %read, %read, %word;
  add.u64 %offset, %offset, 512;
  bra READ;
HAVE_READ:
  setp.eq.u32 %p, %read, 1;
  @%p ret;
  mov.u64 %end, %globaltimer;
  add.u64 %end, %end, 30000;
WAIT:
  mov.u64 %time, %globaltimer;
  setp.lt.u64 %p, %time, %end;
  @%p bra WAIT;
  ld.param.u64 %from, [from];
  mov.u32 %threads, %ntid.x;
  mov.u32 %block, %ctaid.x;
  mov.u32 %blocks, %nctaid.x;
  mad.lo.u32 %thread, %block, %threads, %thread;
  mul.wide.u32 %offset, %thread, 2;
  mul.lo.u32 %threads, %threads, %blocks;
  mul.wide.u32 %step, %threads, 2;
NEXT:
  setp.ge.u64 %p, %offset, %bytes;
  @%p ret;
  add.u64 %address, %from, %offset;
  ld.global.b16 %element, [%address];
  add.u64 %address, %to, %offset;
  st.global.b16 [%address], %element;
  add.u64 %offset, %offset, %step;
  bra NEXT;
}
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
    torch.zeros(1, device="cuda")  # creates the context
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuModuleLoadData(ctypes.byref(module), _PTX) == 0
    assert driver.cuModuleGetFunction(ctypes.byref(function), module, name) == 0
    return function


def _launch(name: bytes, blocks: int, *arguments: int, dependent: bool = True) -> None:
    attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
    config = _Config(
        grid=(blocks, 1, 1),
        block=(128, 1, 1),
        stream=torch.cuda.current_stream().cuda_stream,
        attributes=ctypes.pointer(attribute),
        num_attributes=int(dependent),
    )
    values = [ctypes.c_uint64(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    driver = ctypes.CDLL("libcuda.so.1")
    error = driver.cuLaunchKernelEx(ctypes.byref(config), _foreign(name), pointers, None)
    assert error == 0, f"cuLaunchKernelEx: {error}"


@on(gpu=(2,))
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", [b"leaves_at_once", b"waits"], ids=["leaves_at_once", "waits"])
def test_calls_with_foreign_dependents_between(
    rank: int, world_size: int, name: bytes, graph: bool
) -> None:
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
                torch.cuda._sleep(400_000)  # makes the peers' kernels wait for this rank
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


@on(gpu=(1, 2))
@pytest.mark.parametrize("blocks", [1, 132, 1056], ids=lambda blocks: f"{blocks} blocks")
def test_calls_that_begin_before_their_input_is_written(
    rank: int, world_size: int, blocks: int
) -> None:
    for shape in ((1, 4096), (40, 2880), (128, 4096), (300, 4096)):
        late_writer(comm(), shape, blocks)


def late_writer(c: allnorm.Communicator, shape: tuple[int, int], blocks: int) -> None:
    """The preceding kernel writes a call's input long after the call has begun."""
    cases = [Case(shape, algorithm=algorithm) for algorithm in ("one_shot", "two_shot")]
    sources = [case.x(c.rank) for case in cases]
    xs = [torch.empty_like(source) for source in sources]
    arguments = [case.call_arguments(c) for case in cases]

    def calls() -> list[Any]:
        results = []
        for case, source, x, given in zip(cases, sources, xs, arguments, strict=True):
            for call in (case.method(c), _norm_alone):
                x.fill_(float("nan"))
                copied = x.data_ptr(), source.data_ptr(), x.numel() * x.element_size()
                _launch(b"copies_late", blocks, *copied, dependent=False)
                results.append(call(x, **given))
        return results

    calls()  # loads the kernels
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        results = calls()
    nodes = kernel_nodes(graph).values()
    begun = [node.begins for node in nodes if "allnorm" in node.name]
    assert begun == 4 * ["begun"], begun
    for call in range(6):
        drawn = [case.but(call=call) for case in cases]
        for case, source, given in zip(drawn, sources, arguments, strict=True):
            source.copy_(case.x(c.rank))
            given["residual"].copy_(case.call_arguments(c)["residual"])
        for tensor in (tensor for result in results for tensor in result):
            tensor.fill_(float("nan"))
        if (call + c.rank) % 3 == 0:
            torch.cuda._sleep(400_000)  # makes the peers' kernels wait for this rank
        graph.replay()
        torch.cuda.synchronize()
        c.check()
        for index, (case, given) in enumerate(zip(drawn, arguments, strict=True)):
            fused, alone = results[2 * index : 2 * index + 2]
            case.compare(c, *fused)
            assert_ranks_agree(c, *fused)
            wanted = reference.all_reduce_add_rms_norm([case.x(c.rank)], **given)
            for part, expected in zip(alone, wanted, strict=True):
                assert_same_bits(part, expected)
    del graph


def _norm_alone(x: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given.pop("algorithm", None)
    return allnorm.add_rms_norm(x, **given)
