"""From a loaded model to fused calls: agree, make the communicator, wire, say so.

Collective: every rank of a tensor-parallel group comes here once for each model it loads, before
graphs are captured, in the same order. Whatever fails is told to all ranks before any of them goes
on, and leaves SGLang as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from allnorm.integrations import engines
from allnorm.integrations.sglang import dense, engine, seams
from allnorm.integrations.sglang.fusion import Fusion, activate, current
from allnorm.integrations.sglang.handoff import quant_of
from allnorm.integrations.sglang.log import announcer
from allnorm.integrations.sglang.norms import ATTRIBUTE, NormArithmetic, arithmetic, classes
from allnorm.integrations.sglang.seams import check_fields

# Forward passes that may go by without a fused call before that is worth a warning: the first ones
# may be traced by torch.compile, where calls are not counted.
_PASSES = 8

_decided: list[bool] = []


@dataclass
class Preparation:
    """What is found in a model before the ranks agree, and put into it afterwards.

    Attributes:
        sites: layers that are to leave their sums, and the norms that are to complete them.
        norms: every norm, and how it computes.
    """

    sites: list[dense.Site] = field(default_factory=list)
    norms: list[tuple[torch.nn.Module, NormArithmetic]] = field(default_factory=list)

    def find(self, facts: engine.Engine) -> None:
        """Reads the model; changes nothing."""
        self.sites += dense.sites(
            facts.model, facts.group.world_size, hidden_states_leave=engine.speculates()
        )
        readers = {id(norm): linear for norm, linear in dense.consumers(facts.model)}
        for module in facts.model.modules():
            if isinstance(module, classes()):
                quant = quant_of(readers.get(id(module)))
                self.norms.append((module, arithmetic(module).reading(quant)))

    def apply(self) -> None:
        """Changes the model. Sets attributes only, so that no rank fails alone."""
        for module, how in self.norms:
            setattr(module, ATTRIBUTE, how)
        dense.wire(self.sites)


def start(runner: Any) -> None:
    """Decides, with the other ranks, whether the calls of a model are fused. Never raises.

    The first model of a process decides for all of them: a draft model beside it uses the same
    communicator, and is not wired.

    Args:
        runner: what SGLang runs models with; its model is loaded.
    """
    if _decided:
        return
    _decided.append(True)
    try:
        _start(runner)
    except Exception as error:  # noqa: BLE001 - the same on all ranks: it is SGLang's structure
        announcer.warning(f"SGLang runs without fused reductions: {error}")


def _start(runner: Any) -> None:
    check_fields("a runner of models", runner, ("model_runner",))
    runner = runner.model_runner
    group, process_group, device = engine.group_of(runner)
    if group.world_size == 1:
        announcer.info("nothing changes in SGLang: tensor parallelism of 1 has no reductions")
        return
    preparation, found = Preparation(), Found()
    # From here on the others wait for this rank: whatever fails on it is told to them.
    reason = _reason(lambda: found.read(runner, group, device, preparation))
    facts = found.facts
    outcome = engines.engine_communicator(
        process_group,
        device,
        hidden_size=0 if facts is None else facts.hidden_size,
        max_tokens=0 if facts is None else facts.max_tokens,
        dtype=torch.bfloat16 if facts is None else facts.dtype,
        numerics="unrounded",
        obstacle=reason,
        # FlashInfer's fused kernel triggers early here too, and what follows it waits, as CUDA
        # demands: docs/sglang.md.
        early_trigger=True,
    )
    if outcome.communicator is None or facts is None:
        if group.rank_in_group == 0:
            text = f"SGLang runs without fused reductions: {outcome.reason}"
            (announcer.info if found.off else announcer.warning)(text)
        return
    say = announcer.warning if group.rank_in_group == 0 else _unheard
    fusion = Fusion(outcome.communicator, group.all_reduce, say)
    preparation.apply()
    activate(fusion)
    if group.rank_in_group == 0:
        _count_first_pass(facts.model, fusion)


@dataclass
class Found:
    """What is read of SGLang's run.

    Attributes:
        facts: None until they are read.
        off: the user switched the fusion off.
    """

    facts: engine.Engine | None = None
    off: bool = False

    def read(self, runner: Any, group: Any, device: Any, preparation: Preparation) -> str:
        """Reads all of it; returns why nothing can be fused, if so."""
        reason = engines.disabled_reason()
        if not reason:
            self.facts = engine.engine_of(runner, group, device)
            reason = engine.switched_off()
        self.off = bool(reason)
        return reason or _obstacle(self.facts, preparation)


def _obstacle(facts: engine.Engine | None, preparation: Preparation) -> str:
    """Returns why SGLang's run cannot be fused; also finds what is to be changed in the model."""
    assert facts is not None
    reason = engine.obstacle(facts) or seams.obstacle(seams.probe())
    if not reason:
        preparation.find(facts)
    return reason


def _reason(step: Callable[[], str]) -> str:
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - told to all ranks, which then go on without
        return f"SGLang is not as this plugin knows it: {type(error).__name__}: {error}"


def _unheard(text: str) -> None:
    """Rank 0 says the same."""


def _count_first_pass(model: Any, fusion: Fusion) -> None:
    """Says how many norms took part in the first forward pass, then takes itself away.

    SGLang calls `model.forward`, past the hooks of torch modules.
    """
    forward = model.forward
    passes = 0

    @functools.wraps(forward)
    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        result = forward(*args, **kwargs)
        passes += 1
        if (fusion.sites or passes == _PASSES) and model.__dict__.get("forward") is counting:
            del model.__dict__["forward"]
            _announce(fusion)
        return result

    model.forward = counting


def _announce(fusion: Fusion) -> None:
    comm = fusion.communicator
    if fusion.sites and current() is fusion:
        announcer.info(
            f"SGLang's reductions are fused at {len(fusion.sites)} sites of the model, over "
            f"{comm.world_size} ranks on {comm.device.type.upper()}"
        )
    else:
        announcer.warning(
            f"no reduction of this model was fused in its first {_PASSES} forward passes outside "
            "compiled graphs: docs/sglang.md lists the models that have sites"
        )
