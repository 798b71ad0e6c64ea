"""Shared parts of the plugins for serving engines: the switch, the communicator, log messages.

All ranks of a tensor-parallel group must decide alike. Otherwise the engine hangs: one rank waits
in a fused call for peers that make an unfused one. Therefore the ranks gather their reasons not to
fuse. If any rank has a reason, no rank fuses, and the first reason is reported. No exception
reaches the engine.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import allnorm
from allnorm import config
from allnorm.core import hip
from allnorm.core.verdicts import PATIENCE_S, Verdicts, first_reason

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_WORKSPACE_BYTES = 256 << 20
_MIN_WORKSPACE_BYTES = 8 << 20


@dataclass(frozen=True)
class Outcome:
    """The common decision of a group's ranks.

    Attributes:
        communicator: the communicator for the fused calls; None if nothing is fused.
        reason: why nothing is fused; empty if `communicator` is not None.
    """

    communicator: allnorm.Communicator | None
    reason: str = ""


def disabled_reason() -> str:
    """Returns why this process's environment forbids fusing; empty if it allows it.

    Not collective: pass the reason as `obstacle` to `engine_communicator`.
    """
    try:
        settings = config.read_settings()
    except allnorm.ConfigurationError as error:
        return str(error)
    if hip.is_used():
        return "AMD GPUs are a preview, in which the plugins stay off: docs/amd.md"
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
    """Creates the communicator for an engine's tensor-parallel group, or returns why it cannot.

    Collective: every rank of the group calls it before any CUDA graph is captured, including ranks
    that have an obstacle. Never raises as long as the group itself works.

    Args:
        group: the tensor-parallel group.
        device: the device that holds this rank's tensors.
        hidden_size: the model's hidden size.
        max_tokens: the largest number of rows that the engine reduces at once, which determines the
            size of the workspace. Calls with more rows run in chunks.
        dtype: the model's dtype.
        numerics: the default rounding mode of the communicator.
        obstacle: why this rank cannot fuse; empty if it can.
        early_trigger: as for `Communicator`. False by default, because not all engine kernels with
            programmatic dependent launch wait for the preceding grid.

    Returns:
        The decision, equal on every rank.
    """
    if not obstacle and dtype not in _DTYPES:
        obstacle = f"the model computes in {dtype}: expected bfloat16, float16 or float32"
    reason = _first_reason(group, obstacle or disabled_reason())
    if reason:
        return Outcome(None, reason)
    try:
        workspace_bytes = _workspace_bytes(hidden_size, max_tokens, dtype)
        communicator = allnorm.Communicator(
            group, device, workspace_bytes, numerics, early_trigger=early_trigger
        )
    except Exception as error:  # noqa: BLE001 - either every rank raises or none does
        return Outcome(None, _first_reason(group, in_words(error)))

    def step() -> str:
        plan = communicator.plan(1, hidden_size, dtype)
        if plan.algorithm == "unfused":
            return plan.reason
        _try_kernels(device, dtype)
        return ""

    reason = _first_reason(group, attempt(step))
    if reason:
        communicator.close()
        return Outcome(None, reason)
    return Outcome(communicator)


def _first_reason(group: dist.ProcessGroup, own: str) -> str:
    """Returns the reason of the lowest rank that has one, on every rank. Collective."""
    return first_reason(_gathered(group, own))


def _gathered(group: dist.ProcessGroup, own: str) -> list[str]:
    """Returns every rank's text, in rank order. Collective."""
    texts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(texts, own, group=group)
    return texts


def _workspace_bytes(hidden_size: int, max_tokens: int, dtype: torch.dtype) -> int | None:
    """Returns a size that fits `max_tokens` rows into one launch; None if the user set a size."""
    if config.read_settings().workspace_bytes is not None:
        return None
    # A phase is 4/9 of the workspace and holds three copies of the rows (partial sums and sums).
    rows = 7 * max_tokens * hidden_size * dtype.itemsize
    return max(_MIN_WORKSPACE_BYTES, min(_MAX_WORKSPACE_BYTES, rows))


def _try_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Makes a call without peers. Raises if the library has no kernels for this GPU."""
    x = torch.ones((1, 64), dtype=dtype, device=device)
    normed, _ = allnorm.add_rms_norm(x, None, torch.ones(64, dtype=dtype, device=device), 0.0)
    if not bool((normed == 1).all()):
        raise allnorm.AllnormError(f"the kernels compute wrong values on {device}")


def open_verdicts(group: dist.ProcessGroup, word: str) -> tuple[Verdicts | None, str, str]:
    """Opens the `Verdicts` with which a group's ranks will decide on each graph. Collective.

    Args:
        group: the tensor-parallel group.
        word: a string that rank 0 sends to all ranks; ignored on other ranks.

    Returns:
        The verdicts, or None if they cannot be opened; the reason for that; and rank 0's word.
    """
    mine: Any = None

    def step() -> str:
        nonlocal mine
        mine = distributed_c10d._get_default_store()
        return ""

    # The keys must differ from the keys of other groups and of earlier verdicts.
    (first, said), *_ = map(json.loads, _gathered(group, json.dumps([uuid.uuid4().hex, word])))
    reason = _first_reason(group, attempt(step))
    if reason or mine is None:
        return None, reason, said
    store = distributed_c10d.PrefixStore(f"allnorm/{first}", mine)
    timeout = config.read_settings().timeout or config.DEFAULT_TIMEOUT
    verdicts = Verdicts(
        store,
        dist.get_rank(group),
        dist.get_world_size(group),
        # A rank that does not reply may be waiting in a call: give up before that wait times out.
        patience_s=min(PATIENCE_S, timeout.total_seconds() / 4),
    )
    return verdicts, "", said


def wants_gradient(*tensors: torch.Tensor) -> bool:
    """Returns whether autograd would record a call with these tensors; a fused call would raise."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def attempt(step: Callable[[], str]) -> str:
    """Returns the reason that a step returns, or describes the exception that it raises."""
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - the engine continues without fused calls
        return in_words(error)


def in_words(error: Exception) -> str:
    """Returns the class and message of an error."""
    return f"{type(error).__name__}: {error}"


class Announcer:
    """Logs each message once per process, to a logger whose output the engine's users see."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said: set[str] = set()

    def info(self, text: str) -> None:
        """Logs a message at INFO, unless it was logged before."""
        self._say(logging.INFO, text)

    def warning(self, text: str) -> None:
        """Logs a warning, unless it was logged before."""
        self._say(logging.WARNING, text)

    def _say(self, level: int, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._logger.log(level, "allnorm: %s", text)
