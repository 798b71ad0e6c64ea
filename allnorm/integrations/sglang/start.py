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
from allnorm.integrations.sglang import announcer, dense, engine, seams
from allnorm.integrations.sglang.fusion import Fusion, activate, current
from allnorm.integrations.sglang.handoff import quant_of
from allnorm.integrations.sglang.norms import ATTRIBUTE, NormArithmetic, arithmetic, classes

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
        runner: SGLang's model runner, its model loaded.
    """
    if _decided:
        return
    _decided.append(True)
    try:
        facts = engine.engine_of(runner)
    except Exception as error:  # noqa: BLE001 - the same on all ranks: it is SGLang's structure
        announcer.warning(f"SGLang runs without fused reductions: {error}")
        return
    if facts.group.world_size == 1:
        announcer.info("nothing changes in SGLang: tensor parallelism of 1 has no reductions")
        return
    off = engines.disabled_reason() or _reason(engine.switched_off)
    preparation = Preparation()
    reason = off or _reason(lambda: _obstacle(facts, preparation))
    outcome = engines.engine_communicator(
        facts.process_group,
        facts.device,
        hidden_size=facts.hidden_size,
        max_tokens=facts.max_tokens,
        dtype=facts.dtype,
        numerics="unrounded",
        obstacle=reason,
        # FlashInfer's fused kernel triggers early here too, and what follows it waits, as CUDA
        # demands: docs/sglang.md.
        early_trigger=True,
    )
    if outcome.communicator is None:
        if facts.group.rank_in_group == 0:
            text = f"SGLang runs without fused reductions: {outcome.reason}"
            (announcer.info if off else announcer.warning)(text)
        return
    say = announcer.warning if facts.group.rank_in_group == 0 else _unheard
    fusion = Fusion(outcome.communicator, facts.group.all_reduce, say)
    preparation.apply()
    activate(fusion)
    if facts.group.rank_in_group == 0:
        _count_first_pass(facts.model, fusion)


def _obstacle(facts: engine.Engine, preparation: Preparation) -> str:
    """Why SGLang's run cannot be fused; also finds what is to be changed in the model."""
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
