"""Reads SGLang's groups and settings, and checks whether any of them rule out fused calls.

All values come from SGLang's settings, so all ranks of a tensor-parallel group read the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from allnorm.integrations.sglang.seams import check_fields

_SWITCH = "--enforce-disable-flashinfer-allreduce-fusion"
_DEFAULT_MAX_TOKENS = 8192


@dataclass(frozen=True)
class Engine:
    """One of SGLang's models, and the settings that it runs with.

    `max_tokens` is the largest number of rows in one forward pass. If `multiplexed`, prefill and
    decode run concurrently on two streams.
    """

    model: Any = None
    dtype: torch.dtype = torch.bfloat16
    hidden_size: int = 0
    max_tokens: int = 0
    multiplexed: bool = False


# Fields of SGLang's objects that the plugin reads. It first checks that they exist: otherwise it
# would silently ignore a setting that SGLang has renamed.
_RUNNER = (
    *("device", "model", "dtype", "model_config.hidden_size"),
    *("server_args.chunked_prefill_size", "server_args.enable_pdmux"),
)
_GROUP = ("device_group", "cpu_group", "world_size", "rank_in_group", "ranks", "all_reduce")
_PARALLEL = ("attn_tp_size", "moe_ep_size", "moe_tp_size")
_EXECUTION = (
    "comm.enforce_disable_flashinfer_allreduce_fusion",
    "comm.enable_quant_communications",
    "comm.flashinfer_allreduce_fusion_backend",
    "deterministic.enable_deterministic_inference",
    "overlap.enable_two_batch_overlap",
)


def group_of(runner: Any) -> tuple[Any, dist.ProcessGroup, torch.device]:
    """Returns SGLang's tensor-parallel coordinator, its process group, and this rank's device.

    Raises:
        UnsupportedError: SGLang lacks an expected field. All ranks raise it.
    """
    from sglang.srt.runtime_context import get_parallel

    check_fields("a model runner", runner, ("device",))
    check_fields("parallel groups", get_parallel(), ("tp_group",))
    group = get_parallel().tp_group
    check_fields("a group", group, _GROUP)
    device = torch.device(runner.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return group, group.device_group if device.type == "cuda" else group.cpu_group, device


def engine_of(runner: Any) -> Engine:
    """Reads the model and settings from SGLang's model runner.

    Raises:
        UnsupportedError: SGLang lacks an expected field.
    """
    from sglang.srt.runtime_context import get_exec, get_parallel

    check_fields("a model runner", runner, _RUNNER)
    check_fields("parallel groups", get_parallel(), _PARALLEL)
    check_fields("settings", get_exec(), _EXECUTION)
    rows = runner.server_args.chunked_prefill_size or 0
    return Engine(
        runner.model,
        runner.dtype,
        runner.model_config.hidden_size,
        rows if rows > 0 else _DEFAULT_MAX_TOKENS,
        bool(runner.server_args.enable_pdmux),
    )


def switched_off() -> str:
    """Returns why SGLang's own switch forbids fusion; empty if it allows it.

    Deterministic inference also sets that switch, because FlashInfer's results depend on the batch.
    In that case allnorm ignores the switch, because its own results do not depend on the batch.
    """
    from sglang.srt.runtime_context import get_exec

    comm, deterministic = get_exec().comm, get_exec().deterministic
    off = comm.enforce_disable_flashinfer_allreduce_fusion
    if off and not deterministic.enable_deterministic_inference:
        return f"it is switched off by {_SWITCH}"
    return ""


def obstacle(facts: Engine) -> str:
    """Returns which SGLang setting is incompatible with fused calls; empty if none is."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_exec, get_parallel

    parallel, execution = get_parallel(), get_exec()
    if is_dp_attention_enabled():
        return "data-parallel attention scatters its sums instead of reducing them"
    ranks = list(parallel.tp_group.ranks)
    sizes = {"moe_ep": parallel.moe_ep_size, "moe_tp": parallel.moe_tp_size}
    experts = {name: size for name, size in sizes.items() if size > 1} or {"moe_tp": 1}
    for name, size in {"attn_tp": parallel.attn_tp_size, **experts}.items():
        group = getattr(parallel, f"{name}_group") if size > 1 else None
        if group is None or list(group.ranks) != ranks:
            return f"the group {name} differs from the tensor-parallel group of ranks {ranks}"
    if execution.comm.enable_quant_communications:
        return "--enable-quant-communications makes SGLang quantize its reductions"
    if execution.comm.flashinfer_allreduce_fusion_backend == "cutedsl":
        return "--flashinfer-allreduce-fusion-backend=cutedsl asks for FlashInfer's own fusion"
    if execution.overlap.enable_two_batch_overlap:
        return "two-batch overlap is on: reductions of two batches would share one communicator"
    if facts.multiplexed:
        return "--enable-pdmux runs two batches at once: they would share one communicator"
    return ""


def speculates() -> bool:
    """Returns whether a draft model may read this model's hidden states between two layers."""
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm is not None
