"""Fakes of bench's peer libraries, which compute correct results with gloo's collectives.

They accept the arguments that the adapters pass, by keyword or position, and record the calls.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from allnorm import Fp8PerGroup, Fp8PerTensor, Fp8PerToken, reference

calls: list[tuple[str, dict[str, Any]]] = []


def _reduce(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def _module(name: str, **attributes: Any) -> types.ModuleType:
    """Registers a fake module and its parent packages."""
    parent, _, leaf = name.rpartition(".")
    module = sys.modules.setdefault(name, types.ModuleType(name))
    module.__path__ = []
    vars(module).update(attributes)
    if parent:
        setattr(_module(parent), leaf, module)
    return module


def install(*names: str, **sglang: Any) -> None:
    """Installs the fakes of the named libraries; `sglang` holds options of SGLang's fake."""
    for name in names:
        globals()[f"install_{name}"](**(sglang if name == "sglang" else {}))


class Communicator:
    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        calls.append(("close", {}))


# ---- FlashInfer --------------------------------------------------------------------------------


class Patterns:
    kAllReduce = 0  # noqa: N815
    kARResidualRMSNorm = 1  # noqa: N815
    kARResidualRMSNormFP8Quant = 2  # noqa: N815
    kARResidualRMSNormOutFP8Quant = 4  # noqa: N815
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8  # noqa: N815
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9  # noqa: N815
    kARResidualRMSNormDynamicFP8Quant = 10  # noqa: N815
    kARResidualRMSNormOutDynamicFP8Quant = 11  # noqa: N815


def create_workspace(
    tp_rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    use_fp32_lamport: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[list[list[int]], Tensor]:
    print("noise of old versions")
    assert (tp_rank, tp_size) == (dist.get_rank(group), dist.get_world_size(group))
    dist.barrier(group)
    calls.append(("create", {"capacity": max_token_num * hidden_dim, "fp32": use_fp32_lamport}))
    return [[0]], torch.zeros(3 * tp_size + 1, dtype=torch.int64)


def allreduce_fusion(
    allreduce_in: Tensor,
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: Tensor,
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    fp32_acc: bool,
    pattern_code: int,
    use_oneshot: bool | None,
    allreduce_out: Tensor | None,
    residual_in: Tensor | None,
    residual_out: Tensor | None,
    norm_out: Tensor | None,
    quant_out: Tensor | None,
    scale_out: Tensor | None,
    rms_gamma: Tensor | None,
    rms_eps: float,
    scale_factor: Tensor | None,
    layout_code: int | None,
    block_quant_group_size: int | None = None,
    weight_bias: float | None = None,
) -> None:
    calls.append(("fusion", {"pattern": pattern_code, "one_shot": use_oneshot}))
    assert allreduce_in.shape == (token_num, hidden_dim)
    if pattern_code == 0:
        assert residual_in is residual_out is norm_out is rms_gamma is None
        assert allreduce_out is not None
        allreduce_out.copy_(_reduce(allreduce_in))
        return
    assert residual_in is not None
    assert residual_out is not None
    assert rms_gamma is not None
    residual_out.copy_(_reduce(allreduce_in) + residual_in)
    gain = rms_gamma + (weight_bias or 0.0)
    normed = F.rms_norm(residual_out, (hidden_dim,), gain, rms_eps)
    if norm_out is not None:
        norm_out.copy_(normed)
    if quant_out is None:
        assert pattern_code == 1
        return
    spec: Any = Fp8PerToken()
    if pattern_code in (2, 4):
        assert scale_factor is not None
        spec = Fp8PerTensor(scale_factor)
    elif pattern_code in (8, 9):
        assert block_quant_group_size is not None
        spec = Fp8PerGroup(block_quant_group_size, "column_major_tma", "ue8m0_packed")
    quantized, scale = reference.quantize(normed, spec)
    quant_out.copy_(quantized)
    if scale_out is not None:
        assert scale_out.shape == scale.shape
        scale_out.copy_(scale)


def mhc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Mixes streams; `comb` is [num_tokens, old stream, new stream]."""
    calls.append(("mhc_post", {}))
    mixed = comb.mT @ residual.float() + post.unsqueeze(-1) * x.float().unsqueeze(1)
    return mixed.to(residual.dtype)


def install_flashinfer() -> None:
    parts = {
        "AllReduceFusionPattern": Patterns,
        "trtllm_create_ipc_workspace_for_all_reduce_fusion": create_workspace,
        "trtllm_allreduce_fusion": allreduce_fusion,
        "get_trtllm_comm_module": lambda: calls.append(("compile", {})),
    }
    _module("flashinfer.comm", **parts)
    _module("flashinfer.comm.trtllm_ar", **parts)
    _module("flashinfer.mhc", mhc_post=mhc_post)


# ---- vLLM --------------------------------------------------------------------------------------


class CustomAllreduce(Communicator):
    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, max_size: int = 8192 * 1024
    ) -> None:
        dist.barrier(group)
        self.max_size = max_size
        self.disabled = True

    def finalize_p2p(self) -> None:
        self.disabled = False

    def custom_all_reduce(self, x: Tensor) -> Tensor | None:
        return _reduce(x) if x.numel() * x.element_size() < self.max_size else None


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    residual.add_(x)
    x.copy_(F.rms_norm(residual, (x.shape[-1],), weight, epsilon))


def install_vllm() -> None:
    _module("vllm._custom_ops", fused_add_rms_norm=fused_add_rms_norm)
    _module(
        "vllm.distributed.device_communicators.custom_all_reduce",
        custom_ar=True,
        CustomAllreduce=CustomAllreduce,
    )


# ---- SGLang ------------------------------------------------------------------------------------


class CustomAllReduceV2(Communicator):
    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        max_pull_size: int | None = None,
        max_push_size: int | None = None,
        max_pull_blocks: int | None = None,
        max_push_blocks: int | None = None,
    ) -> None:
        dist.barrier(group)
        self.disabled, self.obj = False, object()
        self.push = (max_push_size, max_push_blocks, max_pull_size, max_pull_blocks)

    def should_custom_ar(self, x: Tensor) -> bool:
        return x.numel() * x.element_size() % 16 == 0

    def custom_all_reduce(self, x: Tensor) -> Tensor:
        x.copy_(_reduce(x))  # as SGLang does in CUDA graphs
        return x.clone()


def all_reduce_residual_norm(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    *,
    world_size: int,
    gemma: bool = False,
    residual_out: Tensor | None = None,
    two_shot: bool | None = None,
) -> tuple[Tensor, Tensor]:
    calls.append(("sglang", {"two_shot": two_shot}))
    assert residual_out is not None
    residual_out.copy_(_reduce(x) + residual)
    gain = norm_weight + 1.0 if gemma else norm_weight
    return F.rms_norm(residual_out, (x.shape[-1],), gain, norm_eps), residual_out


def overwriting_norm(x: Tensor, *args: Any, **options: Any) -> Any:
    """Returns correct results for three arms on two buffer sets, then overwrites its input."""
    found = all_reduce_residual_norm(x, *args, **options)
    if sum(name == "sglang" for name, _ in calls) > 6:
        x.zero_()
    return found


def moe_finalize_all_reduce_mhc_post(
    rows: Tensor,
    index: Tensor,
    weights: Tensor,
    top_k: int,
    shared: Tensor | None,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    *,
    world_size: int,
) -> tuple[Tensor, Tensor]:
    assert (top_k, shared, world_size) == (1, None, dist.get_world_size())
    assert index.dtype == torch.int32
    assert weights.shape == (rows.shape[0], 1)
    calls.append(("mhc", {}))
    reduced = _reduce(rows[index] * weights.to(rows.dtype))
    return reduced, mhc_post(reduced, residual, post, comb)


def install_sglang(*, fused: bool = True, norm: Any = all_reduce_residual_norm) -> None:
    _module(
        "sglang.srt.distributed.device_communicators.custom_all_reduce_v2",
        CustomAllReduceV2=CustomAllReduceV2,
    )
    if fused:
        _module(
            "sglang.kernels.ops.communication.all_reduce_fusion",
            register_comm=lambda comm: calls.append(("register", {})),
            valid_cluster_sizes=lambda hidden: [1] if hidden % 256 == 0 else [],
            all_reduce_residual_norm=norm,
        )
        _module(
            "sglang.kernels.ops.communication.all_reduce_mhc",
            _MHC_HIDDEN_DIM=256,
            moe_finalize_all_reduce_mhc_post=moe_finalize_all_reduce_mhc_post,
        )


# ---- PyTorch's symmetric memory ------------------------------------------------------------------

libraries: list[torch.library.Library] = []


class Handle:
    multicast_ptr = 0


def install_symm_mem() -> None:
    import torch.distributed._symmetric_memory as memory

    def rendezvous(buffer: Tensor, group: str) -> Handle:
        calls.append(("rendezvous", {"elems": buffer.numel(), "group": group}))
        dist.barrier()
        return Handle()

    def one_shot(x: Tensor, op: str, group: str) -> Tensor:
        assert op == "sum"
        return _reduce(x)

    def two_shot(x: Tensor, op: str, group: str) -> Tensor:
        assert op == "sum"
        return x.copy_(_reduce(x))

    memory.empty = torch.empty
    memory.rendezvous = rendezvous
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    library.impl("one_shot_all_reduce", one_shot)
    library.impl("two_shot_all_reduce_", two_shot)
    libraries.append(library)
