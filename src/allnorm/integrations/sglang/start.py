"""Starts fusing a loaded model's calls: agreement, communicator, wiring, log message.

Collective: every rank of a tensor-parallel group runs `start` before graphs are captured. If one
rank fails, no rank changes anything in SGLang.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from allnorm.integrations import engines
from allnorm.integrations.sglang import announcer, dense, engine, qk_norm, seams
from allnorm.integrations.sglang.fusion import Fusion, activate, current
from allnorm.integrations.sglang.handoff import quant_of
from allnorm.integrations.sglang.norms import ATTRIBUTE, NormArithmetic, arithmetic, classes
from allnorm.integrations.sglang.seams import check_fields

# A warning is logged after this many forward passes without a fused call. torch.compile may trace
# the first passes, and calls are not counted while it traces.
_PASSES = 8

_decided: list[bool] = []


def start(runner: Any) -> None:
    """Decides together with the peers whether a model's calls are fused. Never raises.

    `runner` is SGLang's runner for the loaded model. The first model in a process decides for all
    of the process's models: a draft model uses the same communicator and is not wired.
    """
    if _decided:
        return
    _decided.append(True)
    try:
        _start(runner)
    except Exception as error:  # noqa: BLE001 - SGLang lacks a field, on all ranks
        announcer.warning(f"SGLang runs without fused reductions: {error}")


def _start(runner: Any) -> None:
    check_fields("a runner of models", runner, ("model_runner",))
    runner = runner.model_runner
    group, process_group, device = engine.group_of(runner)
    if group.world_size == 1:
        announcer.info("SGLang runs without fused reductions: one rank has nothing to reduce")
        return
    found = Found()
    try:
        reason = found.read(runner, group.world_size)
    except Exception as error:  # noqa: BLE001 - the peers wait for this rank's reason
        reason = f"SGLang is not as this plugin expects: {engines.in_words(error)}"
    outcome = engines.engine_communicator(
        process_group,
        device,
        hidden_size=found.facts.hidden_size,
        max_tokens=found.facts.max_tokens,
        dtype=found.facts.dtype,
        numerics="unrounded",
        obstacle=reason,
        # FlashInfer's fused kernel also triggers dependent launches early, and the kernels after it
        # wait as CUDA requires (see docs/sglang.md).
        early_trigger=True,
    )
    if outcome.communicator is None:
        if group.rank_in_group == 0:
            text = f"SGLang runs without fused reductions: {outcome.reason}"
            (announcer.info if found.off else announcer.warning)(text)
        return
    # Only rank 0 logs messages, on behalf of all ranks.
    say = announcer.warning if group.rank_in_group == 0 else lambda text: None
    fusion = Fusion(outcome.communicator, group.all_reduce, say)
    found.apply()
    activate(fusion)
    if group.rank_in_group == 0:
        _count_first_pass(found.facts.model, fusion)


@dataclass
class Found:
    """Facts about SGLang's run, and changes to its model that are applied once the ranks agree.

    Attributes:
        facts: the model and its settings.
        off: whether the user switched the fusion off.
        sites: the layers that will return partial sums, with the norms that will complete them.
        norms: every norm and its arithmetic.
        qk_norms: the objects that norm q and k over the ranks.
    """

    facts: engine.Engine = field(default_factory=engine.Engine)
    off: bool = False
    sites: list[dense.Site] = field(default_factory=list)
    norms: list[tuple[torch.nn.Module, NormArithmetic]] = field(default_factory=list)
    qk_norms: list[Any] = field(default_factory=list)

    def read(self, runner: Any, world_size: int) -> str:
        """Reads everything and changes nothing. Returns why nothing can be fused, or ""."""
        reason = engines.disabled_reason()
        if not reason:
            self.facts = engine.engine_of(runner)
            reason = engine.switched_off()
        self.off = bool(reason)
        reason = reason or engine.obstacle(self.facts) or seams.obstacle(seams.probe())
        if not reason:
            self._read_model(self.facts.model, world_size)
        return reason

    def _read_model(self, model: torch.nn.Module, world_size: int) -> None:
        self.sites += dense.sites(model, world_size, hidden_states_leave=engine.speculates())
        self.qk_norms += qk_norm.sites(model, world_size)
        readers = {id(norm): linear for norm, linear in dense.consumers(model)}
        gemms = {id(norm): linear for norm, linear in dense.next_gemms(model)}
        rounded = set(map(id, dense.rounded_norms(model)))
        for module in model.modules():
            if isinstance(module, classes()):
                how = arithmetic(module, is_rounded=id(module) in rounded)
                # The readers of a float32 result take a tensor, which they round.
                quant = None if how.float32_residual else quant_of(readers.get(id(module)))
                how = replace(how, quant=quant, next_gemm=gemms.get(id(module)))
                self.norms.append((module, how))

    def apply(self) -> None:
        """Changes the model. Only sets attributes, which cannot fail on one rank alone."""
        for module, how in self.norms:
            setattr(module, ATTRIBUTE, how)
        dense.wire(self.sites)
        qk_norm.wire(self.qk_norms)


def _count_first_pass(model: Any, fusion: Fusion) -> None:
    """Makes the model log how many norms were fused, after its first fused pass.

    The wrapper replaces `model.forward`, because SGLang calls it directly, which bypasses module
    hooks. The wrapper removes itself after logging.
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
