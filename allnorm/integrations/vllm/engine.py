"""What a worker process knows: its communicator, or why it has none; what was fused.

Every rank of a tensor-parallel group decides alike, since it decides by the engine's configuration,
which is the same in all workers, and by what `engine_communicator` agreed on.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import pathlib
from dataclasses import dataclass, field
from typing import Any

import torch

import allnorm
import allnorm.compile
from allnorm.compile import FusionReport
from allnorm.integrations.engines import Announcer, Outcome, engine_communicator
from allnorm.integrations.vllm import LOGGER, switch


@dataclass
class State:
    """Of this process.

    Attributes:
        vllm_config: of the engine that it works for; None outside of workers.
        outcome: what the ranks agreed on; None until they were asked.
        reports: of the graphs that were compiled.
        announcer: speaks for the group, in one of its processes.
    """

    vllm_config: Any = None
    outcome: Outcome | None = None
    reports: list[FusionReport] = field(default_factory=list)
    announcer: Announcer = field(default_factory=lambda: Announcer(logging.getLogger(LOGGER)))


STATE = State()


def start(vllm_config: Any) -> None:
    """Takes note of the engine; makes its communicator if compiled graphs will use it. Collective.

    Called by every worker once the groups exist: before the model is loaded, compiled or captured,
    and whether or not its code comes from a cache.
    """
    STATE.vllm_config = vllm_config
    STATE.outcome = None
    STATE.reports = []
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return
    if switch.is_on(vllm_config) and compiles(vllm_config):
        agree()


def compiles(vllm_config: Any) -> bool:
    """Whether vLLM runs its passes for this engine."""
    mode = getattr(vllm_config.compilation_config, "mode", None)
    return getattr(mode, "name", "") == "VLLM_COMPILE"


def communicator_for_eager() -> allnorm.Communicator | None:
    """For the helpers of eager models. Collective at its first call."""
    if STATE.outcome is None:
        config = STATE.vllm_config
        if config is None or not switch.is_on_for_eager(config):
            return None
        agree()
    return communicator()


def communicator() -> allnorm.Communicator | None:
    """That of this engine; None before the ranks agreed, or if they agreed not to fuse."""
    return None if STATE.outcome is None else STATE.outcome.communicator


def agree() -> None:
    """Asks all ranks of the tensor-parallel group whether to fuse; makes the communicator."""
    from vllm.distributed.parallel_state import get_tp_group

    config, group = STATE.vllm_config, get_tp_group()
    STATE.outcome = engine_communicator(
        group.device_group,
        torch.device(group.device),
        hidden_size=config.model_config.get_hidden_size(),
        max_tokens=config.scheduler_config.max_num_batched_tokens,
        dtype=config.model_config.dtype,
        obstacle=switch.obstacle(config),
    )
    if STATE.outcome.communicator is not None:
        atexit.register(_stop)  # while the modules that closing needs exist
    else:
        warn(f"nothing is fused: {STATE.outcome.reason}")


def _stop() -> None:
    ending, STATE.outcome = communicator(), None
    if ending is not None:
        ending.close()


def is_spokesman() -> bool:
    """Whether this rank speaks for its tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group) == 0


def warn(text: str) -> None:
    """One warning for each group."""
    if is_spokesman():
        STATE.announcer.warning(text)


def summarise() -> None:
    """One line about the engine, once it is ready."""
    mine = communicator()
    if mine is None or not is_spokesman():
        return
    world = mine.world_size
    if not compiles(STATE.vllm_config):
        STATE.announcer.info(f"norms of an eager model are fused over {world} ranks")
        return
    sites = [site for report in STATE.reports for site in report.sites]
    fused = [site for site in sites if site.fused]
    if not sites:
        STATE.announcer.info(
            f"fuses over {world} ranks; the compiled code came from vLLM's cache, which knows "
            "allnorm's version and settings"
        )
        return
    kinds = sorted({", ".join(filter(None, (site.numerics, site.quant))) for site in fused})
    missed = sorted({str(site.reason) for site in sites if not site.fused})
    text = (
        f"{len(fused)} of {len(sites)} reductions fused over {world} ranks, counted in the "
        f"{len(STATE.reports)} graphs that were compiled ({'; '.join(kinds) or 'none'})"
    )
    if missed:
        text += f"; missed: {'; '.join(missed)}"
    if fused:
        STATE.announcer.info(text)
    else:
        STATE.announcer.warning(text)


# ---- caches --------------------------------------------------------------------------------------


def key() -> str:
    """Everything that compiled code depends on: sources, version, communicator, or their lack."""
    mine = communicator()
    if mine is None:
        return f"allnorm {allnorm.__version__} off"
    traits = (mine.name, mine.world_size, mine.device.type)
    return f"allnorm {allnorm.__version__} {_sources()} {traits}"


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for module in (allnorm.compile, allnorm.integrations.vllm):
        for path in sorted(pathlib.Path(str(module.__file__)).parent.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
