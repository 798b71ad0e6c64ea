"""Starts fused calls for a loaded model: agreement, communicator, wiring, log message.

Collective: every rank of a tensor-parallel group runs this once per loaded model, in the same
order, before graphs are captured. All ranks learn of any failure before one of them continues, and
a failure leaves SGLang unchanged.
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

# Number of forward passes without a fused call before a warning. The first passes may be traced by
# torch.compile, which counts no calls.
_PASSES = 8

_decided: list[bool] = []


@dataclass
class Preparation:
    """Changes of a model: found before the ranks agree, applied afterwards.

    Attributes:
        sites: layers that will leave their sums, with the norms that will complete them.
        norms: every norm and its arithmetic.
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
    """Decides together with the peers whether a model's calls are fused. Never raises.

    The first model of a process decides for all its models: a draft model uses the same
    communicator and is not wired.

    Args:
        runner: SGLang's runner; its model is loaded.
    """
    if _decided:
        return
    _decided.append(True)
    try:
        _start(runner)
    except Exception as error:  # noqa: BLE001 - SGLang lacks a field: equal on all ranks
        announcer.warning(f"SGLang runs without fused reductions: {error}")


def _start(runner: Any) -> None:
    check_fields("a runner of models", runner, ("model_runner",))
    runner = runner.model_runner
    group, process_group, device = engine.group_of(runner)
    if group.world_size == 1:
        announcer.info("SGLang runs without fused reductions: one rank has nothing to reduce")
        return
    preparation, found = Preparation(), Found()
    # From here on the peers wait for this rank, so any error must become its obstacle.
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
        # FlashInfer's fused kernel also triggers dependent launches early, and the kernels after it
        # wait as CUDA requires: docs/sglang.md.
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
    """Facts about SGLang's run.

    Attributes:
        facts: the model and its settings; None until they are read.
        off: whether the user switched the fusion off.
    """

    facts: engine.Engine | None = None
    off: bool = False

    def read(self, runner: Any, group: Any, device: Any, preparation: Preparation) -> str:
        """Reads all facts; returns why nothing can be fused, or ""."""
        reason = engines.disabled_reason()
        if not reason:
            self.facts = engine.engine_of(runner, group, device)
            reason = engine.switched_off()
        self.off = bool(reason)
        return reason or _obstacle(self.facts, preparation)


def _obstacle(facts: engine.Engine | None, preparation: Preparation) -> str:
    """Returns why nothing can be fused, or ""; also finds the changes of the model."""
    assert facts is not None
    reason = engine.obstacle(facts) or seams.obstacle(seams.probe())
    if not reason:
        preparation.find(facts)
    return reason


def _reason(step: Callable[[], str]) -> str:
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - told to all ranks, so that no rank fuses
        return f"SGLang is not as this plugin expects: {type(error).__name__}: {error}"


def _unheard(text: str) -> None:
    """Logs nothing: rank 0 logs the same message."""


def _count_first_pass(model: Any, fusion: Fusion) -> None:
    """Logs how many norms the first forward pass fused, by a wrapper that then removes itself.

    It wraps `model.forward`, because SGLang calls that directly, without the module's hooks.
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
            "compiled graphs: see docs/sglang.md for the models with fused sites"
        )
