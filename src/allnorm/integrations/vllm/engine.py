"""The plugin's state in a worker process: the communicator, or why it is missing, and the reports.

All ranks of a tensor-parallel group decide alike. The engine's configuration is equal in all
workers, `engine_communicator` compares the ranks' obstacles, and the ranks that compile a graph
reach a common verdict on it. No exception reaches the engine.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import pathlib
from dataclasses import dataclass, field
from typing import Any

import torch

import allnorm
import allnorm.compile
from allnorm.compile import FusionReport
from allnorm.compile.inductor import fingerprint
from allnorm.core.verdicts import Verdicts
from allnorm.integrations.engines import (
    Announcer,
    Outcome,
    attempt,
    engine_communicator,
    in_words,
    open_verdicts,
)
from allnorm.integrations.vllm import LOGGER, generation, switch


@dataclass
class State:
    """The plugin's state in this process.

    Attributes:
        vllm_config: the engine's configuration; None outside workers.
        outcome: the ranks' decision; None until they have decided.
        verdicts: the ranks' verdicts on each graph; None without a communicator.
        word: a random part of the cache keys, equal on all ranks: see `generation`.
        place: the file that stores the word; None on ranks that do not store it.
        graphs: number of graphs that the pass received.
        reports: the reports on all graphs except graphs that a verdict left unfused.
        unfused: reasons why graphs run unfused on all ranks.
        broken: which patch failed, if this rank therefore must not fuse; otherwise empty.
    """

    vllm_config: Any = None
    outcome: Outcome | None = None
    verdicts: Verdicts | None = None
    word: str = ""
    place: pathlib.Path | None = None
    graphs: int = 0
    reports: list[FusionReport] = field(default_factory=list)
    unfused: list[str] = field(default_factory=list)
    broken: str = ""
    announcer: Announcer = field(default_factory=lambda: Announcer(logging.getLogger(LOGGER)))


STATE = State()


def start(vllm_config: Any) -> None:
    """Stores the configuration; creates the communicator if compiled graphs use it. Collective.

    Every worker calls this function after the groups exist and before the model is loaded, even if
    its compiled code comes from a cache. Never raises.
    """
    STATE.vllm_config = vllm_config
    STATE.outcome = STATE.verdicts = STATE.place = None
    STATE.word, STATE.graphs, STATE.reports, STATE.unfused = "", 0, [], []
    try:
        # The configuration is equal on all ranks: if reading it fails, it fails on all of them.
        if vllm_config.parallel_config.tensor_parallel_size == 1:
            return
        asked = switch.is_on(vllm_config) and compiles(vllm_config)
        if STATE.broken:
            stock = switch.stock_default(vllm_config)
            vllm_config.compilation_config.pass_config.fuse_allreduce_rms = stock
        if asked:
            _agree()
    except Exception as error:  # noqa: BLE001 - the engine continues without fused calls
        _give_up(error)


def compiles(vllm_config: Any) -> bool:
    """Returns whether vLLM runs its passes for this engine."""
    return getattr(vllm_config.compilation_config.mode, "name", "") == "VLLM_COMPILE"


def communicator_for_eager() -> allnorm.Communicator | None:
    """Returns the communicator for eager models. The first call is collective. Never raises."""
    if STATE.outcome is None:
        config = STATE.vllm_config
        try:
            if config is None or not switch.is_on_for_eager(config):
                return None
            _agree()
        except Exception as error:  # noqa: BLE001 - the engine continues without fused calls
            _give_up(error)
    return communicator()


def communicator() -> allnorm.Communicator | None:
    """Returns the engine's communicator; None before the ranks agree, or if nothing is fused."""
    return None if STATE.outcome is None else STATE.outcome.communicator


def _give_up(error: Exception) -> None:
    """Closes the communicator after an unexpected error; the engine continues without it."""
    ending = communicator()
    STATE.outcome = Outcome(None, in_words(error))
    if ending is not None:
        ending.close()
    STATE.announcer.warning(f"nothing is fused, vLLM runs without allnorm: {STATE.outcome.reason}")


def _agree() -> None:
    """Agrees with the tensor-parallel group's ranks whether to fuse; creates the communicator."""
    from vllm.distributed.parallel_state import get_tp_group

    group, sizes = get_tp_group(), _Sizes()
    # An error on this rank alone must become an obstacle, because its peers wait for its reply.
    obstacle = STATE.broken or attempt(lambda: sizes.read(STATE.vllm_config, group))
    STATE.outcome = engine_communicator(
        group.device_group,
        torch.device(group.device),
        hidden_size=sizes.hidden_size,
        max_tokens=sizes.max_tokens,
        dtype=sizes.dtype,
        obstacle=obstacle,
    )
    if STATE.outcome.communicator is not None:
        atexit.register(_stop)  # runs before Python unloads the modules that closing needs
        mine = "" if sizes.place is None else generation.take(sizes.place)
        STATE.verdicts, reason, STATE.word = open_verdicts(group.device_group, mine)
        STATE.place = sizes.place
        if STATE.verdicts is None:
            STATE.outcome.communicator.close()
            STATE.outcome = Outcome(None, reason)
    if STATE.outcome.communicator is None:
        warn(f"nothing is fused: {STATE.outcome.reason}")


@dataclass
class _Sizes:
    """The communicator's arguments and, on rank 0, the file that stores the word."""

    hidden_size: int = 0
    max_tokens: int = 0
    dtype: torch.dtype = torch.bfloat16
    place: pathlib.Path | None = None

    def read(self, config: Any, group: Any) -> str:
        """Reads all fields; returns why this engine has nothing to fuse, or ""."""
        self.hidden_size = config.model_config.get_hidden_size()
        self.max_tokens = config.scheduler_config.max_num_batched_tokens
        self.dtype = config.model_config.dtype
        if int(group.rank_in_group) == 0:
            self.place = generation.place_of(config, group)
        if compiles(config):
            importlib.import_module("allnorm.integrations.vllm.graph_pass")
            fingerprint(*_PACKAGES)  # early: when vLLM reads the cache key, an error would be fatal
        return switch.obstacle(config)


def _stop() -> None:
    ending, STATE.outcome = communicator(), None
    if ending is not None:
        ending.close()


def logs_for_group() -> bool:
    """Returns whether this rank logs the messages for its tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group) == 0


def warn(text: str) -> None:
    """Logs a warning on one rank of the group."""
    if logs_for_group():
        STATE.announcer.warning(text)


def runs_unfused(reason: str) -> None:
    """Records a graph that runs unfused on all ranks, and logs the reason once."""
    STATE.unfused.append(reason)
    warn(f"a graph runs unfused on all ranks: {reason}")


def ready() -> None:
    """Logs one line about the fused sites when the engine is ready. Never raises."""
    try:
        mine = communicator()
        if mine is None or not logs_for_group():
            return
        if not STATE.unfused and STATE.place is not None:
            try:
                generation.put_back(STATE.place, STATE.word)
            except OSError as error:
                STATE.announcer.info(
                    "the next start of this engine compiles everything again: " + in_words(error)
                )
        fused, text = summary(mine.world_size)
        (STATE.announcer.info if fused else STATE.announcer.warning)(text)
    except Exception as error:  # noqa: BLE001 - only the log message is missing
        STATE.announcer.warning(f"cannot list the fused sites: {in_words(error)}")


def summary(world: int) -> tuple[bool, str]:
    """Returns (False if no site in the compiled graphs is fused, the line to log)."""
    if not compiles(STATE.vllm_config):
        return True, f"norms of an eager model are fused over {world} ranks"
    if STATE.graphs == 0:
        return True, (
            f"fused over {world} ranks; the compiled code came from vLLM's cache, whose keys "
            "include allnorm's version and settings"
        )
    sites = [site for report in STATE.reports for site in report.sites]
    fused = [site for site in sites if site.fused]
    missed = sorted({str(site.reason) for site in sites if not site.fused})
    missed += [f"a graph: {reason}" for reason in sorted(set(STATE.unfused))]
    kinds = sorted({", ".join(filter(None, (site.numerics, site.quant))) for site in fused})
    if not sites and not missed:
        return False, (
            f"0 reductions found in the {STATE.graphs} graphs that vLLM compiled: nothing in them "
            "is fused"
        )
    text = (
        f"{len(fused)} of {len(sites)} reductions fused over {world} ranks, counted in the "
        f"{STATE.graphs} graphs that vLLM compiled ({'; '.join(kinds) or 'none'})"
    )
    if missed:
        text += f"; missed: {'; '.join(missed)}"
    return bool(fused), text


_PACKAGES = ("allnorm.compile", "allnorm.integrations.vllm")


def key() -> str:
    """Returns a cache key that covers the sources, the version and the communicator."""
    mine = communicator()
    if mine is None:
        return f"allnorm {allnorm.__version__} off"
    traits = (mine.name, mine.world_size, mine.device.type, STATE.word)
    return f"allnorm {' '.join(fingerprint(*_PACKAGES))} {traits}"
