"""Arms of `all_reduce_hyper_connection`, and what it replaces: an all-reduce, then a mixing kernel.

The residual has `mode.streams` streams in the dtype of the partial sums. With `mode.next_input`,
every arm also makes the next layer's input from its streams: arms of allnorm in one call,
`all_reduce_hyper_connection_input`, all others by `hyper_connection_input`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import allnorm
from allnorm import reference
from allnorm.bench import bounds
from allnorm.bench.arms import Arm, no_outcome
from allnorm.bench.case import Case
from allnorm.bench.modes import INPUT_APART, Mode
from allnorm.testing import copy_all, same_bits
from allnorm.testing.inputs import random_projection

_CHUNK_ELEMS = 1 << 24  # elements of streams per call of the reference of the next input
_CPU_TOKENS = 64  # of a call whose next input is checked on CPU, where the reference is slow


def make_arm(comm: allnorm.Communicator, case: Case, mode: Mode, name: str) -> Arm | str:
    """Returns the arm with a name of `modes.arm_names`, or the reason why it cannot run.

    - "allnorm", "allnorm:one_shot", "allnorm:unfused", ...: as for other modes.
    - "allnorm+mix": allnorm's all-reduce, then a mixing kernel (Triton; on CPU PyTorch).
    - "nccl+mix": NCCL's all-reduce, then that kernel.
    - "allnorm+input": with the next input, which is then a call of its own.
    """
    inputs = [stream_inputs(case, mode, index) for index in range(len(case.batches))]
    if name == "allnorm+mix":

        def reduce_and_mix(index: int) -> Tensor:
            return mix(comm.all_reduce(case.xs[index]), *inputs[index])

        return _arm(case, mode, name, reduce_and_mix)
    if not name.startswith("allnorm"):
        return _after_collective(case, mode, name, inputs)
    algorithm = name.partition(":")[2] or "auto"
    shape, dtype = case.shape, case.dtype
    place = shape.num_tokens, shape.hidden_size, dtype
    try:
        plan = comm.plan(*place, streams=mode.streams, algorithm=algorithm)
    except allnorm.UnsupportedError as error:
        return str(error)
    if algorithm not in ("auto", plan.algorithm):
        return plan.reason

    def call(index: int) -> Tensor:
        return comm.all_reduce_hyper_connection(case.xs[index], *inputs[index], algorithm=algorithm)

    if not mode.next_input or name == INPUT_APART:
        return _arm(case, mode, name, call, exact=True)
    given = [input_arguments(case, mode, index) for index in range(len(case.batches))]

    def call_with_input(index: int) -> NextInput:
        normed, streams, connection = comm.all_reduce_hyper_connection_input(
            case.xs[index], *inputs[index], algorithm=algorithm, **given[index]
        )
        return streams, normed, connection

    return _arm_with_input(case, mode, name, call_with_input, exact=True)


def _after_collective(case: Case, mode: Mode, name: str, inputs: list[Any]) -> Arm:
    copies = [x.clone() for x in case.xs]

    def call(index: int) -> Tensor:
        dist.all_reduce(copies[index])
        return mix(copies[index], *inputs[index])

    return _arm(case, mode, name, call, reset=partial(copy_all, copies, case.xs), inputs=copies)


def stream_inputs(case: Case, mode: Mode, index: int) -> tuple[Tensor, allnorm.HyperConnection]:
    """Returns the residual and the coefficients of a buffer set, the same on every rank."""
    residual, streams = case.batches[index].residual, mode.streams
    rolled = [residual.roll(number, -1) for number in range(streams)]
    generator = torch.Generator().manual_seed(case.seed + index)
    tokens = case.shape.num_tokens
    post = torch.randn(tokens, streams, generator=generator).to(case.device)
    factors = torch.randn(tokens, streams, streams, generator=generator).to(case.device)
    return torch.stack(rolled, 1), allnorm.HyperConnection(post, factors)


def mix(reduced: Tensor, residual: Tensor, connection: allnorm.HyperConnection) -> Tensor:
    """Mixes streams in one kernel: in Triton; on CPUs, in PyTorch.

    Raises:
        ImportError: on a GPU, Triton is not installed.
    """
    if residual.device.type == "cpu":
        mixed = connection.mix @ residual.float()
        mixed += connection.post.unsqueeze(-1) * reduced.float().unsqueeze(1)
        return mixed.to(residual.dtype)
    from allnorm.bench import triton_mix

    return triton_mix.mix(reduced, residual, connection)


def describe_error(case: Case, mode: Mode, got: Tensor, index: int, exact: bool) -> str:
    """Describes a wrong result; "" if there is none.

    Unless `exact`, elements may differ by what the roundings make: of the reduced sum, once per
    rank on both sides; of every product and sum in float32; and of the result.
    """
    xs = case.batches[index].xs
    residual, connection = stream_inputs(case, mode, index)
    wanted = reference.all_reduce_hyper_connection(xs, residual, connection, islands=case.islands)
    if exact:
        return "" if same_bits(got, wanted) else "the streams differ from the reference"
    info, unit = torch.finfo(wanted.dtype), torch.finfo(torch.float32).eps
    summed = torch.stack([x.float().abs() for x in xs]).sum(0).unsqueeze(1)
    from_sum = connection.post.abs().unsqueeze(-1) * summed
    size = from_sum + connection.mix.abs() @ residual.float().abs()
    limit = case.world_size * info.eps * from_sum + 1.1 * info.eps * wanted.float().abs()
    limit += 2 * (mode.streams + 1) * unit * size + info.smallest_normal
    return bounds.compare("streams", got, wanted, limit)


def of_peer(case: Case, mode: Mode, name: str, run: Callable[..., Tensor]) -> Arm:
    """Returns an arm of another library.

    `run` takes the index of a buffer set, the residual, `post`, and `mix` with its last dimensions
    swapped, as SGLang and FlashInfer store it. It returns the new streams.
    """
    inputs = []
    for index in range(len(case.batches)):
        residual, connection = stream_inputs(case, mode, index)
        inputs.append((residual, connection.post, connection.mix.mT.contiguous()))

    def call(index: int) -> Tensor:
        return run(index, *inputs[index])

    return _arm(case, mode, name, call, foreign=True)


def _arm(
    case: Case,
    mode: Mode,
    name: str,
    make: Callable[[int], Tensor],
    *,
    exact: bool = False,
    **more: Any,
) -> Arm:
    """Returns an arm of a call that returns new streams; the mode may add the next input."""
    if not mode.next_input:
        return Arm(
            *(name, make, no_outcome),
            check=lambda result, index: describe_error(case, mode, result, index, exact),
            **more,
        )
    given = [input_arguments(case, mode, index) for index in range(len(case.batches))]

    def call(index: int) -> NextInput:
        streams = make(index)
        return streams, *allnorm.hyper_connection_input(streams, **given[index])

    return _arm_with_input(case, mode, name, call, exact=exact, **more)


def _arm_with_input(
    case: Case,
    mode: Mode,
    name: str,
    call: Callable[[int], NextInput],
    *,
    exact: bool = False,
    **more: Any,
) -> Arm:
    """Returns an arm of a call that returns new streams and the next input."""

    def check(result: NextInput, index: int) -> str:
        error = describe_error(case, mode, result[0], index, exact)
        return error or describe_input_error(case, mode, result, index)

    return Arm(name, call, no_outcome, check=check, **more)


# ---- the next layer's input ----------------------------------------------------------------------


NextInput = tuple[Tensor, Tensor, allnorm.HyperConnection]
"""New streams, and the next layer's normed input and coefficients, made from them."""


def input_arguments(case: Case, mode: Mode, index: int) -> dict[str, Any]:
    """Returns the arguments of `hyper_connection_input` but the streams, the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed + index)
    size = mode.streams, case.shape.hidden_size
    return {
        "projection": random_projection(generator, *size, case.device),
        "weight": case.batches[index].weight,
        "eps": case.shape.eps,
        "weight_bias": case.shape.weight_bias,
        "numerics": case.numerics,
    }


def describe_input_error(case: Case, mode: Mode, got: NextInput, index: int) -> str:
    """Describes a next input that is not the reference's of the same streams; "" if it is.

    Checks every token on GPUs; on CPU at most `_CPU_TOKENS`, which include the first one.
    """
    streams, normed, connection = got
    given = input_arguments(case, mode, index)
    step = 1 if streams.is_cuda else -(-len(streams) // _CPU_TOKENS)
    tokens = torch.arange(0, len(streams), step, device=streams.device)
    for rows in tokens.split(max(1, _CHUNK_ELEMS // streams[0].numel())):
        wanted, others = reference.hyper_connection_input(streams[rows], **given)
        for name, whole, right in zip(
            ("normed", "post", "mix"), (normed, *connection), (wanted, *others), strict=True
        ):
            if not same_bits(whole[rows], right):
                return f"{name} of the next input differs from the reference"
    return ""
