"""Kills ranks at random moments, as a program of its own: `python kill_rig.py ROUNDS SEED`.

Ranks are forked from this process, which has imported torch and started no thread. Each round they
form a group and call in a loop until one is killed; what the survivors see is a line of JSON.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

import allnorm

# Far beyond what a round may take: no deadline may be what ends a wait.
TIMEOUT_SECONDS = 600.0
ROUND_SECONDS = 30
SHARED_MEMORY = pathlib.Path("/dev/shm")


def calls(comm: allnorm.Communicator, shuffled: random.Random) -> None:
    """Calls in an order that is the same on every rank, until one raises."""
    torch.manual_seed(0)
    x, weight = torch.randn(6, 256), torch.ones(256)
    lo, hi = comm.row_shard(6)
    while True:
        kind = shuffled.choice(("one_shot", "two_shot", "sharded", "gather", "quant", "unfused"))
        for _ in range(4):  # from the third time on without Python
            if kind == "sharded":
                comm.all_reduce_add_rms_norm(x, x[lo:hi], weight, 1e-6, residual_sharded=True)
            elif kind == "gather":
                comm.all_gather_rows(x[lo:hi], 6)
            elif kind == "quant":
                comm.all_reduce_add_rms_norm_quant(x, x, weight, 1e-6)
            else:
                comm.all_reduce_add_rms_norm(x, x, weight, 1e-6, algorithm=kind)


def rank_main(
    rank: int, world_size: int, store: str, seed: int, ready: int, answer: int, done: int
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    comm = allnorm.Communicator(device="cpu", timeout=TIMEOUT_SECONDS)
    comm.all_reduce(torch.ones(2, 64))
    os.write(ready, b"x")
    error: Exception | None = None
    try:
        calls(comm, random.Random(seed))
    except Exception as caught:  # noqa: BLE001 - reported
        error = caught
    told = time.monotonic()
    again = ""
    try:
        comm.all_reduce(torch.ones(2, 64))
        again = "nothing"
    except allnorm.PeerTimeoutError as caught:
        again = type(caught).__name__
    seen = {
        "rank": rank,
        "error": type(error).__name__,
        "peer": getattr(error, "peer", None),
        "message": str(error),
        "told": told,
        "again": again,
        "again_seconds": time.monotonic() - told,
    }
    os.write(answer, json.dumps(seen).encode() + b"\n")
    os.close(answer)
    os.read(done, 1)  # a survivor that ends now might be the one that others see


def kill_one(seed: int, folder: str) -> dict[str, Any]:
    """A round: two to four ranks, one of them killed."""
    chosen = random.Random(seed)
    world_size = chosen.choice((2, 2, 3, 4))
    victim = chosen.randrange(world_size)
    (ready_out, ready), (answer_out, answer), (done_out, done) = (os.pipe() for _ in range(3))
    store = f"{folder}/{seed}"
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            signal.alarm(ROUND_SECONDS)
            try:
                os.close(done)
                rank_main(rank, world_size, store, seed, ready, answer, done_out)
            finally:
                os._exit(0)
        pids.append(pid)
    os.close(ready)
    os.close(answer)
    count = 0
    while count < world_size and (data := os.read(ready_out, 64)):
        count += len(data)
    time.sleep(chosen.uniform(0.0, 0.03))
    killed = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    answers = b""
    while data := os.read(answer_out, 1 << 16):
        answers += data
    os.close(done)
    os.close(done_out)
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(ready_out)
    os.close(answer_out)
    survivors = [json.loads(line) for line in answers.splitlines()]
    for survivor in survivors:
        survivor["seconds"] = survivor.pop("told") - killed
    return {
        "seed": seed,
        "world_size": world_size,
        "victim": victim,
        "victim_pid": pids[victim],
        "survivors": survivors,
        # Of these ranks alone: other tests make communicators at the same time.
        "left": [p.name for pid in pids for p in SHARED_MEMORY.glob(f"allnorm-{pid}-*")],
    }


def main(rounds: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            print(json.dumps(kill_one(seed + number, folder)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
