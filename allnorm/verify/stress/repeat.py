"""Given shapes, many times each: no two calls of a shape have the same payload."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from allnorm.names import FUSED
from allnorm.testing import report
from allnorm.verify.record import Recorder
from allnorm.verify.run import Context
from allnorm.verify.stress.calls import call, record
from allnorm.verify.stress.delays import Delays
from allnorm.verify.stress.graphs import Graph
from allnorm.verify.stress.kinds import Kind, algorithms
from allnorm.verify.stress.tape import Tape, make_tape

_BURST = 64  # calls without host synchronisation
_GRAPH_MAX_ELEMS = 1 << 20  # of a call: up to there every other burst is the replay of one graph


def repeat_shapes(context: Context, recorder: Recorder) -> None:
    """Runs `job.repeat` calls of each of `job.shapes` by one_shot, and as many by two_shot."""
    comm, job = context.comm, context.job
    delays = Delays(job.seed, comm.rank, comm.device)
    kinds = []
    for num_tokens, hidden_size in job.shapes:
        for algorithm in FUSED:
            kind = Kind("norm", num_tokens, hidden_size, torch.bfloat16, algorithm=algorithm)
            # What cannot be exchanged is tested all the same, the one way that it can run.
            if algorithms(kind, [comm]) != {algorithm}:
                kind = replace(kind, algorithm="unfused")
            kinds.append(kind)
    kinds = list(dict.fromkeys(kinds))
    for index, kind in enumerate(kinds):
        seed = job.seed * 1009 + index
        num_rows, width = kind.num_tokens + job.repeat, kind.hidden_size
        tape = make_tape(num_rows, width, kind.dtype, comm.device, comm.rank, comm.world_size, seed)
        rows = list(range(job.repeat))
        random.Random(seed).shuffle(rows)
        report({"text": f"{recorder.name}: {kind}", "done": index, "total": len(kinds)})
        for begin in range(0, job.repeat, _BURST):
            _burst(context, recorder, delays, kind, tape, rows[begin : begin + _BURST], begin)
    recorder.note = f"{job.repeat:,} each of " + ", ".join(f"{t}x{h}" for t, h in job.shapes)


def _burst(
    context: Context,
    recorder: Recorder,
    delays: Delays,
    kind: Kind,
    tape: Tape,
    rows: list[int],
    number: int,
) -> None:
    comm = context.comm
    small = kind.num_tokens * kind.hidden_size <= _GRAPH_MAX_ELEMS and kind.algorithm != "unfused"
    if small and comm.device.type == "cuda" and number // _BURST % 2:
        graph = Graph([(comm, kind, tape, index % 2 == 1) for index in range(len(rows))])
        called = graph.replay(number, rows, "replay")
    else:
        called = []
        for index, row in enumerate(rows):
            delays.before_call()
            called.append(call(comm, kind, tape, row, number + index, "eager"))
    record(called, recorder)
    comm.check()
