"""Capture of CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


@contextlib.contextmanager
def capture(
    inside: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - it holds nothing
) -> Iterator[torch.cuda.CUDAGraph]:
    """Captures what the block runs as a graph, which is yielded.

    What is captured has run before: kernels are loaded at their first launch, which no capture
    allows.

    Args:
        inside: a context that the capture must happen in, entered before it begins.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog thread queries events, which must not end the capture.
    with inside, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        yield graph
