"""The timed implementations (arms): allnorm's calls, and collectives followed by separate kernels.

With a sharded residual, the unfused arm is a reduce-scatter, a norm of the rank's rows, and an
all-gather. These collectives need equal shares. If the rows cannot be divided evenly, the partial
sums are padded with zero rows before timing, and each rank owns the rows of its share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import allnorm
from allnorm import reference
from allnorm.bench.case import Case, Outcome
from allnorm.bench.modes import GATHERED, PARTS, RESIDUAL16, Mode
from allnorm.quant import Quant, is_swizzled
from allnorm.testing import copy_all, same_bits

Call = Callable[[int], Any]
"""Runs one call on the inputs of the buffer set with that index."""

Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Takes normed rows [num_tokens, hidden_size]; returns the quantized rows and their scales."""

_NO_QUANTIZER = "there is no separate kernel for this quantization here"

# Renamed in torch 2.13; the package supports torch 2.11 too.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Arm:
    """One implementation of a mode on one case."""

    name: str  # name in JSON rows and tables
    call: Call  # the timed call
    outcome: Callable[[Any], Outcome]  # converts the result of `call`
    exact: bool = False  # must be bit-identical to the reference; else within its error bound
    reset: Callable[[], object] = lambda: None  # restores overwritten inputs; not timed
    # Context in which a CUDA graph must be captured; every rank enters it.
    capturing: Callable[[], AbstractContextManager[Any]] = nullcontext
    foreign: bool = False  # runs another library, whose failure does not end the benchmark
    # Whether ranks wait for each other in the call. If they do, the first rank of a replay waits
    # for the last one, so the shortest of the ranks' times is the time of the calls.
    in_step: bool = True
    # Describes the error in a result, for an arm that does not compute the mode's results.
    check: Callable[[Any, int], str] | None = None
    # The case and mode whose results the arm computes, if they are not those that it was made for.
    of: tuple[Case, Mode] | None = None
    # The tensors that the call reads in place of the case's partial sums, for each buffer set; a
    # GEMM before the call must write them.
    inputs: Sequence[Tensor] | None = None


@dataclass(frozen=True)
class Reduction:
    """A plain all-reduce of this rank's partial sums, to be followed by a norm."""

    name: str  # name of the arm, without the suffix for the norm
    call: Callable[[int], Tensor]  # returns the reduced sum of a buffer set
    # As in Arm.
    reset: Callable[[], object] = lambda: None
    capturing: Callable[[], AbstractContextManager[Any]] = nullcontext
    foreign: bool = True
    inputs: Sequence[Tensor] | None = None

    def then(self, call: Call, name: str = "") -> Arm:
        """Returns an arm for `call`, which runs this reduction and the work that follows it."""
        return Arm(
            *(name or self.name, call, outcome_of),
            reset=self.reset,
            capturing=self.capturing,
            foreign=self.foreign,
            inputs=self.inputs,
        )


def outcome_of(result: Any) -> Outcome:
    """Converts the result of a call: an `allnorm.QuantizedNorm` or (normed, residual)."""
    if isinstance(result, allnorm.QuantizedNorm):
        return Outcome(result.residual, result.normed, result.quantized, result.scale)
    normed, residual = result
    return Outcome(residual, normed)


def make_arm(comm: allnorm.Communicator, case: Case, mode: Mode, name: str) -> Arm | str:
    """Returns the arm with a name of `modes.arm_names`, or the reason why it cannot run.

    - "allnorm": the call with its own choice of algorithm; "allnorm:two_shot": with that algorithm;
      "allnorm16": without quantization.
    - "allnorm+norm": a call that only reduces and applies the post norm, then the local add + norm
      kernel.
    - "sum+allnorm": a kernel that sums the rows of experts, then the call.
    - "nccl+torch": all-reduce, PyTorch's add and RMSNorm.
    - "nccl+local": all-reduce, allnorm's local add + norm kernel.
    - suffix "+quant": then a quantization kernel; with "+local" the local kernel quantizes.
    - "allnorm-residual16": with a residual in the dtype of x in place of a float32 one.
    - "allnorm-gathered": with all rows in place of this rank's.
    """
    if name.startswith("allnorm16"):
        plain = replace(mode, quant="", return_normed=False)
        arm = allnorm_arm(comm, case, plain, name, "auto")
        if isinstance(arm, str) or name == "allnorm16":
            return arm if isinstance(arm, str) else replace(arm, of=(case, plain))
        return then_quantize(arm, case, mode)
    if name in (RESIDUAL16, GATHERED):
        return _compared(comm, case, mode, name)
    if name in PARTS:
        return _part(comm, case, name)
    if name == "allnorm+norm":
        return _norm_twice(comm, case, mode, name)
    if name == "sum+allnorm":
        return _sum_first(comm, case, mode, name)
    if name.startswith("allnorm"):
        return allnorm_arm(comm, case, mode, name, name.partition(":")[2] or "auto")
    local = "+local" in name
    if mode.residual_sharded:
        return _sharded(case, mode, name, local)
    copies = [] if mode.experts else [x.clone() for x in case.xs]

    def all_reduce(index: int) -> Tensor:
        x = sum_experts(case.xs[index]) if mode.experts else copies[index]
        dist.all_reduce(x)
        return x

    reset = partial(copy_all, copies, case.xs[: len(copies)])
    reduction = Reduction(name, all_reduce, reset, foreign=False, inputs=copies or None)
    if local:
        return then_local_norm(reduction, case, mode, name)
    residuals = [batch.residual for batch in case.batches]
    rms_norm = _torch_rms_norm(case)

    def call(index: int) -> Any:
        summed = residuals[index] + all_reduce(index)
        return rms_norm(index, summed), summed

    arm = reduction.then(call)
    return then_quantize(arm, case, mode) if mode.quant else arm


def _compared(comm: allnorm.Communicator, case: Case, mode: Mode, name: str) -> Arm | str:
    """Returns the arm of the call that the mode's call is compared with."""
    if name == GATHERED:
        other = replace(mode, own_rows=False)
    else:
        assert case.original is not None
        case, other = case.original, replace(mode, float32_residual=False)
    arm = allnorm_arm(comm, case, other, name, "auto")
    return arm if isinstance(arm, str) else replace(arm, of=(case, other))


def _torch_rms_norm(case: Case) -> Callable[[int, Tensor], Tensor]:
    """Returns PyTorch's RMSNorm of a new residual, with the weight of a buffer set."""
    weights, size, eps = case.unbiased_weights(), (case.shape.hidden_size,), case.shape.eps
    weights = [w.to(b.residual.dtype) for w, b in zip(weights, case.batches, strict=True)]

    def rms_norm(index: int, summed: Tensor) -> Tensor:
        return F.rms_norm(summed, size, weights[index], eps).to(case.dtype)

    return rms_norm


def yardstick(name: str, case: Case, mode: Mode) -> Arm:
    """Returns an arm that gives a lower bound for the times after a GEMM.

    "empty" is a kernel that does nothing (on CPU: no call). "local" is allnorm's add + norm
    (+ quantization) of this rank's partial sums, without communication.
    """
    if name == "empty":
        launch = torch.cuda._sleep if case.device.type == "cuda" else (lambda cycles: None)
        return Arm(name, lambda index: launch(0), no_outcome, in_step=False, check=_not_checked)
    options, rest, function = case.options(mode), case.rest(), _local(mode)
    spec = case.spec(mode.quant)
    plain = case.options(replace(mode, quant=""))

    def call(index: int) -> Any:
        return function(case.xs[index], *rest[index], **options)

    def check(result: Any, index: int) -> str:
        x = case.xs[index]
        normed, residual = reference.all_reduce_add_rms_norm([x], *rest[index], **plain)
        wanted, got = {"residual": residual, "normed": normed}, outcome_of(result)
        if spec is not None:
            wanted["quantized"], wanted["scale"] = reference.quantize(normed, spec)
        parts = {part: getattr(got, part) for part in wanted}
        wrong = [k for k, v in parts.items() if v is not None and not same_bits(v, wanted[k])]
        return f"{wrong[0]} differs from the reference" if wrong else ""

    return Arm(name, call, outcome_of, in_step=False, check=check)


def _fused(comm: allnorm.Communicator, mode: Mode) -> Callable[..., Any]:
    """Returns the communicator's method that computes the mode's results."""
    return comm.all_reduce_add_rms_norm_quant if mode.quant else comm.all_reduce_add_rms_norm


def _local(mode: Mode) -> Callable[..., Any]:
    """Returns allnorm's local function that computes the mode's results."""
    return allnorm.add_rms_norm_quant if mode.quant else allnorm.add_rms_norm


def no_outcome(result: Any) -> Outcome:
    """Rejects a result that the arm's own check must judge."""
    raise AssertionError("an arm without a result must not be compared")


def _not_checked(result: Any, index: int) -> str:
    return ""


def allnorm_arm(
    comm: allnorm.Communicator, case: Case, mode: Mode, name: str, algorithm: str
) -> Arm | str:
    """Returns the arm of an allnorm algorithm or "auto", or the reason why it cannot run."""
    sharded = mode.residual_sharded
    try:
        plan = comm.plan(
            case.shape.num_tokens,
            case.shape.hidden_size,
            case.dtype,
            case.spec(mode.quant),
            sharded,
            return_normed=mode.return_normed,
            algorithm=algorithm,
            residual_dtype=case.batches[0].residual.dtype,
            gather=not mode.own_rows,
        )
    except allnorm.UnsupportedError as error:
        return str(error)
    if algorithm not in ("auto", plan.algorithm):
        return plan.reason
    rows = comm.row_shard(case.shape.num_tokens) if sharded else None
    rest, method = case.rest(slice(*rows) if rows else slice(None)), _fused(comm, mode)
    arguments = [(x, *others) for x, others in zip(case.xs, rest, strict=True)]
    options = case.options(mode) | {"algorithm": algorithm, "residual_sharded": sharded}
    gather = not mode.own_rows
    options |= {} if gather else {"gather": False}

    def call(index: int) -> Any:
        return method(*arguments[index], **options)

    def outcome(result: Any) -> Outcome:
        return replace(outcome_of(result), rows=rows, gathered=gather)

    return Arm(name, call, outcome, exact=True)


def _part(comm: allnorm.Communicator, case: Case, name: str) -> Arm | str:
    """Returns the arm for one step of a hierarchical call; only the whole call is checked."""
    whole = allnorm_arm(comm, case, Mode(), name, "hierarchical")
    if isinstance(whole, str):
        return whole
    part, options = name.partition(":")[2], case.options(Mode())
    calls = [
        comm._endpoint.parts(x, *rest, **options)[part]
        for x, rest in zip(case.xs, case.rest(), strict=True)
    ]
    return Arm(name, lambda index: calls[index](), no_outcome, check=_not_checked)


def _norm_twice(comm: allnorm.Communicator, case: Case, mode: Mode, name: str) -> Arm:
    """Returns an arm of two launches: all-reduce and post norm, then residual add and norm."""
    norm = case.post_norm
    assert norm is not None
    options: dict[str, Any] = {"weight_bias": norm.weight_bias, "numerics": case.numerics}

    def reduce(index: int) -> Tensor:
        x = case.xs[index]
        normed, _ = comm.all_reduce_add_rms_norm(x, None, norm.weight, norm.eps, **options)
        return normed

    reduction = Reduction(name, reduce, foreign=False)
    arm = then_local_norm(reduction, replace(case, post_norm=None), mode, name)
    return replace(arm, exact=True)


def _sum_first(comm: allnorm.Communicator, case: Case, mode: Mode, name: str) -> Arm:
    """Returns an arm of two launches: the sum over experts, then the call."""
    rest, options, method = case.rest(), case.options(mode), _fused(comm, mode)

    def call(index: int) -> Any:
        return method(sum_experts(case.xs[index]), *rest[index], **options)

    return Arm(name, call, outcome_of)


def sum_experts(experts: allnorm.ExpertSum) -> Tensor:
    """Sums the experts' rows, selected by an index, with weights: in Triton; on CPUs, in PyTorch.

    A CUDA graph can capture it for any number of tokens for which it has already been called.

    Raises:
        ImportError: on a GPU, Triton is not installed.
    """
    rows, weights, shared = experts.rows, experts.weights, experts.shared
    assert experts.index is not None
    assert weights is not None
    if rows.device.type == "cpu":
        total = (rows[experts.index] * weights.unsqueeze(-1)).sum(1)
        return (total if shared is None else total + shared).to(rows.dtype)
    from allnorm.bench import triton_expert_sum

    if shared is None:
        shared = _zeros((experts.index.shape[0], rows.shape[-1]), rows.dtype, rows.device)
    sums = torch.empty_like(shared)
    triton_expert_sum.expert_sum(replace(experts, shared=shared), sums)
    return sums


@cache
def _zeros(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros in place of a shared expert's rows, which the Triton kernel requires."""
    return torch.zeros(shape, dtype=dtype, device=device)


def then_local_norm(reduction: Reduction, case: Case, mode: Mode, name: str) -> Arm:
    """Returns an arm: the reduction, then allnorm's local add + norm (+ quantization) kernel."""
    options, rest = case.options(mode), case.rest()
    function, reduce = _local(mode), reduction.call

    def call(index: int) -> Any:
        return function(reduce(index), *rest[index], **options)

    return reduction.then(call, name)


def then_quantize(arm: Arm, case: Case, mode: Mode, name: str = "") -> Arm | str:
    """Returns an arm that runs `arm`, then quantizes its 16-bit results in a separate kernel."""
    spec = case.spec(mode.quant)
    assert spec is not None
    if not has_quantizer(spec, case.device):
        return _NO_QUANTIZER
    quantize = quantizer(spec, case.shape.hidden_size, case.device)

    def call(index: int) -> Any:
        result = arm.call(index)
        return result, quantize(result[0])

    def outcome(result: Any) -> Outcome:
        before, (quantized, scale) = result
        return replace(arm.outcome(before), quantized=quantized, scale=scale)

    return replace(arm, name=name or arm.name, call=call, outcome=outcome, exact=False)


def has_quantizer(spec: Quant, device: torch.device) -> bool:
    """Returns whether `quantizer` supports the spec; on GPUs, not tiled scales or NVFP4."""
    tiles = is_swizzled(spec)
    return device.type != "cuda" or not (tiles or isinstance(spec, allnorm.NvFp4))


def quantizer(spec: Quant, hidden_size: int, device: torch.device) -> Quantizer:
    """Returns a function that only quantizes: in Triton; on CPUs, in PyTorch.

    Raises:
        ImportError: on a GPU, Triton is not installed.
    """
    if device.type != "cuda":
        return partial(reference.quantize, quant=spec)
    from allnorm.bench import triton_quantizer

    launch = triton_quantizer.plan(spec, hidden_size)

    def quantize(normed: Tensor) -> tuple[Tensor, Tensor]:
        quantized = torch.empty_like(normed, dtype=torch.float8_e4m3fn)
        if isinstance(spec, allnorm.Fp8PerTensor):
            scale = spec.scale
        else:
            rows, columns = normed.shape
            scale = allnorm.quant.empty_scale(spec, rows, columns, normed.device)
        launch(normed, quantized, scale)
        return quantized, scale

    return quantize


# ---- unfused arms with a sharded residual --------------------------------------------------------


def _sharded(case: Case, mode: Mode, name: str, local: bool) -> Arm | str:
    spec = case.spec(mode.quant)
    static = isinstance(spec, allnorm.Fp8PerTensor)  # the scale need not be gathered
    if is_swizzled(spec):
        return "tiled scales would need a new layout after the all-gather"
    if spec is not None and not local and not has_quantizer(spec, case.device):
        return _NO_QUANTIZER
    if isinstance(spec, allnorm.Fp8PerGroup):
        if spec.scale_format == "ue8m0_packed":
            return "packed scales would need a new layout after the all-gather"
        # Scales are gathered in row order. A column-major consumer would have to transpose them.
        spec = allnorm.Fp8PerGroup(spec.group_size, "row_major", spec.scale_format)
    share = -(-case.shape.num_tokens // case.world_size)
    lo = min(case.shape.num_tokens, case.rank * share)
    hi = min(case.shape.num_tokens, lo + share)
    padded = [_padded(x, share * case.world_size) for x in case.xs]
    residuals = [_padded(batch.residual[lo:hi], share) for batch in case.batches]
    norm = (_local_norm if local else _torch_norm)(case, residuals, spec, mode)

    def call(index: int) -> Any:
        summed = padded[index].new_empty(share, padded[index].shape[1])
        reduce_scatter_into(summed, padded[index])
        residual, normed, *quantized = norm(index, summed)
        parts = [*quantized[: 1 if static else 2], *([] if normed is None else [normed])]
        return residual, parts if mode.own_rows else _gather(parts)

    def outcome(result: Any) -> Outcome:
        count = hi - lo if mode.own_rows else case.shape.num_tokens
        residual, parts = result[0][: hi - lo], [part[:count] for part in result[1]]
        place: dict[str, Any] = {"rows": (lo, hi), "gathered": not mode.own_rows}
        if spec is None:
            return Outcome(residual, parts[0], **place)
        quantized, *rest = parts
        scale = spec.scale if isinstance(spec, allnorm.Fp8PerTensor) else rest.pop(0)
        return Outcome(residual, rest[0] if rest else None, quantized, scale, **place)

    return Arm(name, call, outcome, inputs=[x[: case.shape.num_tokens] for x in padded])


def _local_norm(
    case: Case, residuals: list[Tensor], spec: Quant | None, mode: Mode
) -> Callable[..., Any]:
    rest = [(batch.weight, case.shape.eps) for batch in case.batches]
    options = case.options(mode) | ({"quant": spec} if spec else {})

    def norm(index: int, x: Tensor) -> Any:
        result = _local(mode)(x, residuals[index], *rest[index], **options)
        if spec is None:
            return result[1], result[0]
        return result.residual, result.normed, result.quantized, result.scale

    return norm


def _torch_norm(
    case: Case, residuals: list[Tensor], spec: Quant | None, mode: Mode
) -> Callable[..., Any]:
    rms_norm = _torch_rms_norm(case)
    quantize = quantizer(spec, case.shape.hidden_size, case.device) if spec else None

    def norm(index: int, x: Tensor) -> Any:
        residual = residuals[index] + x
        normed = rms_norm(index, residual)
        if quantize is None:
            return residual, normed
        return residual, normed if mode.return_normed else None, *quantize(normed)

    return norm


def _padded(rows: Tensor, height: int) -> Tensor:
    """Returns a contiguous copy, padded with rows of zeros to `height` rows."""
    return F.pad(rows, (0, 0, 0, height - rows.shape[0])).contiguous()


def _gather(parts: list[Tensor]) -> list[Tensor]:
    """Gathers all ranks' rows of each part; in one launch on GPUs."""
    ranks = dist.get_world_size()
    wholes = [part.new_empty(part.shape[0] * ranks, *part.shape[1:]) for part in parts]
    together = len(parts) > 1 and parts[0].is_cuda
    # This function is private, but the only way to gather multiple tensors in one launch.
    grouped = dist._coalescing_manager(device=parts[0].device) if together else nullcontext()  # type: ignore[attr-defined]
    with grouped:
        for whole, part in zip(wholes, parts, strict=True):
            # Gathers bytes, because NCCL does not support FP8.
            gather_into(whole.view(torch.uint8), part.view(torch.uint8))
    return wholes
