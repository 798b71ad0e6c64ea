"""Tests the Python host code for CUDA without a GPU: failed communicators, streams, graphs."""

from __future__ import annotations

import ctypes
import datetime
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from allnorm.core import _native, faults
from allnorm.core.endpoint import Endpoint
from allnorm.core.opened import Opened
from allnorm.core.workspace import Workspace
from allnorm.errors import AllnormError, PeerDivergedError


class Library:
    """A replacement of the native library."""

    def __init__(self, status: int = _native.OK) -> None:
        self.status = status
        self.lasting: list[int] = []

    def comm_close(self, handle: int) -> int:
        return self.status

    def comm_check(self, handle: int, fault: int) -> int:
        return self.status

    def run(self, handle: int, call: int) -> int:
        return self.status

    def last_error(self) -> str:
        return "rank 1 could not make a call: launching the kernel failed"

    def stream_lasts(self, stream: int) -> None:
        self.lasting.append(stream)


def endpoint(library: Library, workspace: Any = None) -> Endpoint:
    """Returns an endpoint without a working dispatcher."""
    opened = Opened(
        *("0", 1, "0/0", lambda: None, 0, 2),
        *(torch.device("cuda", 0), datetime.timedelta(seconds=1)),
        *(library, workspace, 1),
    )
    with mock.patch("allnorm.core.endpoint.Dispatcher"):
        return Endpoint(opened, mock.Mock())


def test_check_reports_a_failed_launch() -> None:
    with pytest.raises(AllnormError, match="could not make a call: launching"):
        endpoint(Library(_native.SYSTEM)).check()
    endpoint(Library()).check()


def test_peers_name_the_rank_that_could_not_launch() -> None:
    fault = _native.Fault(
        status=_native.DIVERGED,
        rank=0,
        peer=1,
        expected_op=7,
        seen_op=7,
        expected_shape=2 << 28,
        seen_shape=_native.MISSING_CALL,
        expected_tokens=4,
    )
    error = faults.fault_error(fault, datetime.timedelta(seconds=1), {}, {})
    assert isinstance(error, PeerDivergedError)
    assert "Seen from rank 1: operation 7: a call that it could not launch" in str(error)


@pytest.mark.parametrize(
    ("stream_id", "lasts"), [(35, True), (0x7F00, False)], ids=["torch's", "external"]
)
def test_streams_of_torch_last(
    monkeypatch: pytest.MonkeyPatch, stream_id: int, lasts: bool
) -> None:
    """An external stream's ID is its handle, and its creator may destroy the stream."""
    current = SimpleNamespace(cuda_stream=0x7F00, stream_id=stream_id)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    library = Library()
    made = endpoint(library)
    made._note_stream(0x7F00)
    assert library.lasting == ([0x7F00] if lasts else [])
    assert made._streams == {None, 0x7F00}
    # 0x9900 is not the current stream, so nothing is known about its lifetime.
    made._note_stream(0x9900)
    assert library.lasting == ([0x7F00] if lasts else [])


def test_mirror_of_device_code() -> None:
    assert ctypes.sizeof(_native.DeviceCode) == 16


@pytest.mark.parametrize("captured", [False, True])
def test_a_workspace_in_a_graph_stays(captured: bool) -> None:
    released: list[str] = []
    library = Library(_native.BUSY if captured else _native.OK)
    made = endpoint(library, Workspace([1], 1, _release=lambda: released.append("workspace")))
    for _ in range(2):
        made.close()
    assert released == ([] if captured else ["workspace"])
