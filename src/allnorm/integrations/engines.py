"""What the plugins for serving engines share: the switch, the communicator, what is said.

A plugin decides as all ranks of its tensor-parallel group do, or the engine hangs: one rank would
wait in a fused call for ranks that make an unfused one. So the reasons not to fuse are gathered
from every rank, and the first one counts for all. Nothing here raises into an engine.
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
from allnorm.core.verdicts import PATIENCE_S, Verdicts, first_reason

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
    """Returns why this process must not fuse, as far as its environment says; empty if it may.

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
    """Returns the communicator of an engine's tensor-parallel group, or why no rank gets one.

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
    """Returns the first rank's reason, on every rank. Collective."""
    return first_reason(_gathered(group, own))


def _gathered(group: dist.ProcessGroup, own: str) -> list[str]:
    """Returns every rank's text, in the order of ranks. Collective."""
    texts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(texts, own, group=group)
    return texts


def _workspace_bytes(hidden_size: int, max_tokens: int, dtype: torch.dtype) -> int | None:
    """For the most rows in one launch, within bounds; None if the user says how much."""
    if config.read_settings().workspace_bytes is not None:
        return None
    # A large phase, four ninths, holds the partial sums of all rows and their sums, and more.
    rows = 7 * max_tokens * hidden_size * dtype.itemsize
    return max(_MIN_WORKSPACE_BYTES, min(_MAX_WORKSPACE_BYTES, rows))


def _try_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Launches a kernel that waits for nobody: one that is not built for this GPU fails here."""
    x = torch.ones((1, 64), dtype=dtype, device=device)
    normed, _ = allnorm.add_rms_norm(x, None, torch.ones(64, dtype=dtype, device=device), 0.0)
    if not bool((normed == 1).all()):
        raise allnorm.AllnormError(f"the kernels compute wrong values on {device}")


def open_verdicts(group: dist.ProcessGroup, word: str) -> tuple[Verdicts | None, str, str]:
    """Where ranks of a group decide later on what all of them do.

    Collective, after the ranks agreed that they fuse.

    Args:
        group: the tensor-parallel group.
        word: of rank 0, for all ranks.

    Returns:
        The verdicts, or None and the reason why there can be none; then rank 0's word.
    """
    mine: Any = None

    def step() -> str:
        nonlocal mine
        mine = distributed_c10d._get_default_store()
        return ""

    # What was asked in another group, or before, is another question.
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
        # Who does not come may be waiting in a call meanwhile.
        patience_s=min(PATIENCE_S, timeout.total_seconds() / 4),
    )
    return verdicts, "", said


def wants_gradient(*tensors: torch.Tensor) -> bool:
    """Returns whether autograd would record a call with them, which a fused call refuses."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def attempt(step: Callable[[], str]) -> str:
    """What the step returns, a reason or nothing; what it raises, in words, is a reason too."""
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - an engine goes on without the fusion
        return in_words(error)


def in_words(error: Exception) -> str:
    """What went wrong, in one sentence."""
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
