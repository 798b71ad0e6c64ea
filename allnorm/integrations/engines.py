"""What the plugins for serving engines share: the switch, the communicator, what is said.

A plugin decides as all ranks of its tensor-parallel group do, or the engine hangs: one rank would
wait in a fused call for ranks that make an unfused one. So the reasons not to fuse are gathered
from every rank, and the first one counts for all. Nothing here raises into an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import allnorm
from allnorm import config

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_WORKSPACE_BYTES = 256 << 20
_MIN_WORKSPACE_BYTES = 8 << 20


@dataclass(frozen=True)
class Outcome:
    """What all ranks of a group agreed on.

    Attributes:
        communicator: runs the fused calls; None: nothing is fused.
        reason: why nothing is fused, in one sentence; empty if there is a communicator.
    """

    communicator: allnorm.Communicator | None
    reason: str = ""


def disabled_reason() -> str:
    """Why this process must not fuse, as far as its environment says; empty if it may.

    Not collective: pass it on as the `obstacle` of `engine_communicator`.
    """
    try:
        settings = config.read_settings()
    except allnorm.ConfigurationError as error:
        return str(error)
    return "it is switched off by ALLNORM_DISABLE=1" if settings.disabled else ""


def engine_communicator(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    hidden_size: int,
    max_tokens: int,
    dtype: torch.dtype,
    numerics: str = "rounded",
    obstacle: str = "",
    early_trigger: bool = False,
) -> Outcome:
    """The communicator of an engine's tensor-parallel group, or why no rank gets one.

    Collective: every rank of the group calls it, before any CUDA graph is captured, also one that
    has an obstacle. Never raises, if the group itself works.

    Args:
        group: the tensor-parallel group.
        device: of this rank's tensors; its index need not be the rank.
        hidden_size: of the model.
        max_tokens: the most rows that the engine reduces at once; decides the workspace. More rows
            are cut into chunks.
        dtype: of the model.
        numerics: rounding mode of calls that name none.
        obstacle: why this rank cannot fuse; empty if it can.
        early_trigger: as for `Communicator`. False by default: kernels of an engine that are
            launched with programmatic dependent launch are not ours to trust.

    Returns:
        The same on every rank.
    """
    if not obstacle and dtype not in _DTYPES:
        obstacle = f"the model computes in {dtype}: expected bfloat16, float16 or float32"
    reason = _first_reason(group, obstacle or disabled_reason())
    if reason:
        return Outcome(None, reason)
    try:
        communicator = allnorm.Communicator(
            group,
            device,
            _workspace_bytes(hidden_size, max_tokens, dtype),
            numerics,
            early_trigger=early_trigger,
        )
    except Exception as error:  # noqa: BLE001 - raised on every rank if on one
        return Outcome(None, _first_reason(group, _in_words(error)))
    plan = communicator.plan(1, hidden_size, dtype)
    reason = plan.reason if plan.algorithm == "unfused" else ""
    reason = _first_reason(group, reason or _attempt(lambda: _try_kernels(device, dtype)))
    if reason:
        communicator.close()
        return Outcome(None, reason)
    return Outcome(communicator)


def _first_reason(group: dist.ProcessGroup, own: str) -> str:
    """The first rank's reason, on every rank. Collective."""
    reasons: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(reasons, own, group=group)
    for rank, reason in enumerate(reasons):
        if reason:
            everywhere = all(other == reason for other in reasons)
            return reason if everywhere else f"{reason} (rank {rank} of the group)"
    return ""


def _workspace_bytes(hidden_size: int, max_tokens: int, dtype: torch.dtype) -> int | None:
    """For the most rows in one launch, within bounds; None if the user says how much."""
    if config.read_settings().workspace_bytes is not None:
        return None
    # Three phases, each with a row's partial sums and its sum; and a little more for control.
    rows = 7 * max_tokens * hidden_size * dtype.itemsize
    return max(_MIN_WORKSPACE_BYTES, min(_MAX_WORKSPACE_BYTES, rows))


def _try_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Launches a kernel that waits for nobody: one that is not built for this GPU fails here."""
    x = torch.ones((1, 64), dtype=dtype, device=device)
    normed, _ = allnorm.add_rms_norm(x, None, torch.ones(64, dtype=dtype, device=device), 0.0)
    if not bool((normed == 1).all()):
        raise allnorm.AllnormError(f"the kernels compute wrong values on {device}")


def _attempt(step: Callable[[], None]) -> str:
    try:
        step()
    except Exception as error:  # noqa: BLE001 - an engine goes on without the fusion
        return _in_words(error)
    return ""


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Announcer:
    """Says each thing once in a process: what was fused as INFO, why nothing is as a warning.

    Args:
        logger: the engine's, so that its users see the line.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said: set[str] = set()

    def info(self, text: str) -> None:
        """Logs at INFO, unless it was said before."""
        self._say(logging.INFO, text)

    def warning(self, text: str) -> None:
        """Logs a warning, unless it was said before."""
        self._say(logging.WARNING, text)

    def _say(self, level: int, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._logger.log(level, "allnorm: %s", text)
