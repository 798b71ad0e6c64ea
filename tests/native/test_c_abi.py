"""Tests that both libraries accept or refuse the same random C structs, with messages."""

from __future__ import annotations

import ctypes

import pytest
import torch

from allnorm.core import _native

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

FIELDS = dict(_native.Call._fields_)
INTEGERS = (0, 1, -1, 2, 3, 4, 16, 64, 128, 4096, 2**31 - 1, -(2**31), 2**40, 2**63 - 1, -(2**63))
# Invalid addresses: a call that passes the checks must not run.
ADDRESSES = (0, 0, 1 << 20, (1 << 20) + 1, 1 << 21, 1 << 22, 1 << 23, 2**64 - 64)


def values(kind: type) -> st.SearchStrategy[object]:
    if kind is ctypes.c_float:
        return st.floats(width=32)
    if kind is ctypes.c_void_p:
        return st.sampled_from(ADDRESSES)
    bits = 8 * ctypes.sizeof(kind)
    return st.sampled_from(INTEGERS).map(lambda value: value % 2**bits)


def base() -> _native.Call:
    """Returns a call that both libraries would accept if its addresses were valid."""
    call = _native.Call()
    call.struct_bytes = ctypes.sizeof(call)
    call.op, call.dtype, call.weight_dtype, call.eps = 1, 2, 2, 1e-6
    call.num_tokens, call.hidden_size, call.num_sources = 2, 128, 1
    call.x, call.weight, call.out, call.residual_out = 1 << 20, 1 << 21, 1 << 22, 1 << 23
    call.x_stride = call.out_stride = call.residual_out_stride = call.quantized_stride = 128
    return call


changed_fields = st.fixed_dictionaries(
    {}, optional={name: values(kind) for name, kind in FIELDS.items() if name != "stream"}
)


@pytest.fixture(scope="module")
def cuda() -> _native.Library:
    if "cuda" not in _native.available_backends():
        pytest.skip("this installation was built without nvcc")
    if torch.cuda.is_available():
        pytest.skip("with a GPU a call that passes the checks would be run")
    return _native.library("cuda")


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(changes=changed_fields)
def test_both_libraries_refuse_the_same_calls(
    cuda: _native.Library, changes: dict[str, object]
) -> None:
    call = base()
    for name, value in changes.items():
        setattr(call, name, value)
    address = ctypes.addressof(call)
    status, message = cuda.local(address), cuda.last_error()
    rows = [_native.library(name).rows_per_chunk(2, 1 << 20, address) for name in ("cpu", "cuda")]
    assert min(rows) >= 0
    if status == _native.INVALID_ARGUMENT:
        cpu = _native.library("cpu")
        assert (cpu.local(address), cpu.last_error()) == (status, message)
        assert len(message) > 10
    elif call.num_tokens != 0:
        # The call passed the checks, and failed because there is no GPU.
        assert status in (_native.SYSTEM, _native.UNSUPPORTED), (status, message)
        assert message
