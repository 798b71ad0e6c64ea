"""Counts the reductions of a program that ran fused, by the PyTorch profiler."""

from __future__ import annotations

from allnorm.tracing.report import Entry, TraceReport
from allnorm.tracing.session import trace

__all__ = ["Entry", "TraceReport", "trace"]
