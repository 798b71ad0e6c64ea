"""Counts a program's reductions, and how many ran fused, using the PyTorch profiler."""

from __future__ import annotations

from allnorm.tracing.report import Entry, TraceReport
from allnorm.tracing.session import trace

__all__ = ["Entry", "TraceReport", "trace"]
