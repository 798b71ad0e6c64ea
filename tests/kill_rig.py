"""Hurts ranks at random moments, as a program of its own.

    python kill_rig.py --seconds 1800 --seed 1     # for so long
    python kill_rig.py --rounds 100 --kinds flat --hurts kill

Ranks are forked from this process, which has imported torch and started no thread. Each round they
form a group and call in a loop until one is hurt: killed, stopped (SIGSTOP), interrupted by a
signal handler that raises, or closed by one. In some rounds ranks fork children meanwhile. What the
ranks saw, and what should not have been, is a line of JSON for each round. The exit status is 1 if
a round had problems: a survivor raised too late or nothing, named a healthy rank, had a wrong
result before, could call afterwards, disagreed with check() or stats(), left a process, or shared
memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

import allnorm
from allnorm import reference

# Far beyond what a round may take: no deadline may be what ends a wait for one that is gone.
TIMEOUT_SECONDS = 600.0
# For ranks that are stopped, where the deadline ends it.
STOPPED_SECONDS = 3.0
# On a busy machine; on an idle one it is a tenth of a second.
LATE_SECONDS = 20.0
ROUND_SECONDS = 120
SHARED_MEMORY = pathlib.Path("/dev/shm")
KINDS: dict[str, tuple[tuple[tuple[int, ...], ...] | None, ...]] = {
    "flat": (None,),
    "islands": (((0, 1), (2, 3)), ((0, 1), (2, 3), (4, 5)), ((0,), (1,), (2,))),
    "unfused": (None, ((0, 1), (2, 3))),
}
HURTS = ("kill", "stop", "interrupt", "close")
_NAMES = {
    "kill": ("PeerDiedError",),
    "stop": ("PeerTimeoutError",),
    # The latter before anything was exchanged: the rank has refused the call, and all are in step.
    "interrupt": ("PeerLeftError", "PeerDivergedError"),
    "close": ("PeerLeftError",),
}


class InterruptError(Exception):
    """What the handler of a rank that is interrupted raises."""


def inputs(number: int, world_size: int) -> list[torch.Tensor]:
    """The partial sums of all ranks in call `number`, whole numbers."""
    rows = torch.arange(7 * 256, dtype=torch.float32).view(7, 256)
    return [(rows + 3 * number) % 13 * (rank + 1) - rank for rank in range(world_size)]


def calls(comm: allnorm.Communicator, shuffled: random.Random, kind: str, where: list[str]) -> None:
    """Makes calls in an order that is the same on every rank, and checks them, until one raises."""
    weight = torch.ones(256)
    world_size, rank = comm.world_size, comm.rank
    lo, hi = comm.row_shard(7)
    number = 0
    while True:
        name = shuffled.choice(("auto", "unfused", "sharded", "gather", "quant"))
        if kind == "flat":
            name = shuffled.choice(("one_shot", "two_shot", "sharded", "gather", "quant"))
        elif kind == "unfused":
            name = "unfused"
        for _ in range(4):  # from the third time on without Python
            number += 1
            where[0] = f"{name}, call {number}"
            xs = inputs(number, world_size)
            x, total = xs[rank], sum(xs[1:], xs[0])
            if name == "sharded":
                out = comm.all_reduce_add_rms_norm(x, x[lo:hi], weight, 1e-6, residual_sharded=True)
                got, expected = out[0].shape, x.shape
            elif name == "gather":
                got, expected = comm.all_gather_rows(xs[0][lo:hi], 7), xs[0]
            elif name == "quant":
                comm.all_reduce_add_rms_norm_quant(x, xs[0], weight, 1e-6)
                continue
            else:
                normed, got = comm.all_reduce_add_rms_norm(
                    x, xs[0], weight, 1e-6, algorithm=name if name != "auto" else "auto"
                )
                expected = total + xs[0]
                right = reference.add_rms_norm(total, xs[0], weight, 1e-6)[0]
                if not torch.equal(normed, right):
                    raise AssertionError(f"{where[0]}: wrong normed rows")
            same = got == expected if isinstance(got, torch.Size) else torch.equal(got, expected)
            if not same:
                raise AssertionError(f"{where[0]}: wrong rows")


def fork_children(chosen: random.Random) -> list[int]:
    """Starts a child that ends at once by sys.exit(), as a program would."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(ROUND_SECONDS)
        ctypes.pythonapi.Py_Exit(0)  # as sys.exit(), but for the frames of the rank
    return [pid]


def rank_main(rank: int, config: dict[str, Any], ready: int, answer: int, done: int) -> None:
    torch.set_num_threads(1)
    world_size = config["world_size"]
    victim = rank == config["victim"]
    dist.init_process_group(
        "gloo", store=dist.FileStore(config["store"], world_size), rank=rank, world_size=world_size
    )
    comm = allnorm.Communicator(
        device="cpu", timeout=config["timeout"], islands=config["islands"] or "auto"
    )
    comm.all_reduce(torch.ones(2, 64))
    comm.all_reduce(torch.ones(2, 64), algorithm="unfused")
    problems: list[str] = []

    def interrupts(*_: Any) -> None:
        raise InterruptError

    def closes(*_: Any) -> None:
        try:
            comm.close()
        except allnorm.AllnormError:  # within a call: once more, a little later
            signal.setitimer(signal.ITIMER_REAL, 0.0003)

    if victim and config["hurt"] in ("interrupt", "close"):
        handler = interrupts if config["hurt"] == "interrupt" else closes
        signal.signal(signal.SIGUSR1, handler)
        signal.signal(signal.SIGALRM, handler)
    children = fork_children(random.Random(rank)) if config["forks"] else []
    error: BaseException | None = None
    where = [""]
    try:
        os.write(ready, b"x")
        calls(comm, random.Random(config["seed"]), config["kind"], where)
    except BaseException as caught:  # noqa: BLE001 - reported
        error = caught
    if config["hurt"] == "interrupt":
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    told = time.monotonic()
    if not isinstance(error, allnorm.AllnormError | InterruptError):
        problems.append(f"raised {type(error).__name__}: {error}")
    again = ""
    if not comm.is_closed:
        with contextlib.suppress(InterruptError):
            problems += aftermath(comm, error, victim)
        again = "checked"
    for pid in children:
        if not ends(pid):
            problems.append(f"a child of fork() hangs as it ends: {pid}")
    seconds = time.monotonic() - told
    if seconds > LATE_SECONDS:
        problems.append(f"check(), stats() and the next call took {seconds:.1f} s")
    seen = {
        "rank": rank,
        "error": type(error).__name__,
        "peer": getattr(error, "peer", None),
        "message": str(error),
        "where": where[0],
        "told": told,
        "again": again,
        "problems": problems,
    }
    os.write(answer, json.dumps(seen).encode() + b"\n")
    os.close(answer)
    os.read(done, 1)  # a survivor that ends now might be the one that others see
    start = time.monotonic()
    comm.close()
    if time.monotonic() - start > LATE_SECONDS:
        os.write(2, f"rank {rank}: close() took {time.monotonic() - start:.1f} s\n".encode())


def aftermath(comm: allnorm.Communicator, error: BaseException | None, victim: bool) -> list[str]:
    """What check(), stats() and the next call do otherwise than the call that failed."""
    if isinstance(error, allnorm.PeerDivergedError):
        return []
    problems = []
    said: list[BaseException | None] = []
    for attempt in (comm.check, lambda: comm.all_reduce(torch.ones(2, 64))):
        try:
            attempt()
            said.append(None)
        except allnorm.AllnormError as caught:
            said.append(caught)
        if victim and said == [None]:
            # Interrupted before a call had begun. Its peers wait for it, or it refused that call.
            # Then they make no other one: a call of this rank would wait for them.
            comm.close()
            return []
    if victim:  # one that was interrupted between calls is fine, but for its peers
        return []
    if any(type(one) is not type(error) for one in said):
        problems.append(f"check() and the next call raised {said}, the call {error!r}")
    elif str(said[0]) != str(error):
        problems.append(f"check() says {said[0]}, the call {error}")
    fault = comm.stats().fault
    if fault != f"{type(error).__name__}: {error}":
        problems.append(f"stats().fault is {fault}, the call's error {error!r}")
    if comm.is_closed:
        problems.append("is_closed, but was not closed")
    return problems


def ends(pid: int) -> bool:
    """Whether a child ends; if not, it is killed."""
    deadline = time.monotonic() + LATE_SECONDS
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def hurt_one(seed: int, folder: str, kinds: list[str], hurts: list[str]) -> dict[str, Any]:
    """A round: ranks of which one is hurt."""
    chosen = random.Random(seed)
    kind, hurt = chosen.choice(kinds), chosen.choice(hurts)
    islands = chosen.choice(KINDS[kind])
    world_size = sum(map(len, islands)) if islands else chosen.choice((2, 2, 3, 4))
    victim = chosen.randrange(world_size)
    config = {
        "seed": seed,
        "kind": kind,
        "hurt": hurt,
        "islands": islands,
        "world_size": world_size,
        "victim": victim,
        "forks": chosen.random() < 0.3,
        "timeout": STOPPED_SECONDS if hurt == "stop" else TIMEOUT_SECONDS,
    }
    (ready_out, ready), (answer_out, answer), (done_out, done) = (os.pipe() for _ in range(3))
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            signal.alarm(ROUND_SECONDS)
            try:
                os.close(done)
                rank_main(rank, {**config, "store": f"{folder}/{seed}"}, ready, answer, done_out)
            except BaseException as error:  # noqa: BLE001 - shown
                os.write(2, f"rank {rank} of seed {seed}: {error!r}\n".encode())
            os._exit(0)
        pids.append(pid)
    os.close(ready)
    os.close(answer)
    count = 0
    while count < world_size and (data := os.read(ready_out, 64)):
        count += len(data)
    time.sleep(chosen.uniform(0.0, 0.03))
    numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    hurt_at = time.monotonic()
    os.kill(pids[victim], numbers.get(hurt, signal.SIGUSR1))
    answers = b""
    expected = world_size - (hurt in numbers)
    deadline = hurt_at + ROUND_SECONDS
    while answers.count(b"\n") < expected and time.monotonic() < deadline:
        if not select.select([answer_out], [], [], 1.0)[0]:
            continue
        data = os.read(answer_out, 1 << 16)
        if not data:
            break
        answers += data
    if hurt == "stop":
        os.kill(pids[victim], signal.SIGKILL)
    os.close(done)
    os.close(done_out)
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(ready_out)
    os.close(answer_out)
    ranks = [json.loads(line) for line in answers.splitlines()]
    for one in ranks:
        one["seconds"] = one.pop("told") - hurt_at
    survivors = [one for one in ranks if one["rank"] != victim]
    # Of these ranks alone: other tests make communicators at the same time.
    left = [p.name for pid in pids for p in SHARED_MEMORY.glob(f"allnorm-{pid}-*")]
    return {
        **config,
        "victim_pid": pids[victim],
        "survivors": survivors,
        "left": left,
        "problems": find_problems(config, ranks, left),
    }


def find_problems(
    config: dict[str, Any], ranks: list[dict[str, Any]], left: list[str]
) -> list[str]:
    """What did not hold in a round."""
    hurt, victim = config["hurt"], config["victim"]
    problems = [f"left in shared memory: {name}" for name in left]
    silent = set(range(config["world_size"])) - {one["rank"] for one in ranks}
    if hurt in ("kill", "stop"):
        silent.discard(victim)
    problems += [f"rank {rank} said nothing" for rank in sorted(silent)]
    limit = LATE_SECONDS + (STOPPED_SECONDS if hurt == "stop" else 0.0)
    for one in ranks:
        rank = f"rank {one['rank']}"
        problems += [f"{rank}: {text}" for text in one["problems"]]
        if one["rank"] == victim:
            continue
        if one["error"] not in _NAMES[hurt]:
            problems.append(f"{rank} raised {one['error']}: {one['message']}")
        elif one["peer"] != victim:
            problems.append(f"{rank} names rank {one['peer']}: {one['message']}")
        if one["seconds"] > limit:
            problems.append(f"{rank} raised after {one['seconds']:.1f} s")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.0, help="0: one pass of --rounds")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--hurts", default=",".join(HURTS))
    parser.add_argument("--quiet", action="store_true", help="only rounds with problems")
    options = parser.parse_args()
    end, number, bad = time.monotonic() + options.seconds, 0, 0
    folder = tempfile.mkdtemp()  # not TemporaryDirectory, which children would remove
    while number < options.rounds or time.monotonic() < end:
        seed = options.seed + number
        row = hurt_one(seed, folder, options.kinds.split(","), options.hurts.split(","))
        number, bad = number + 1, bad + bool(row["problems"])
        if row["problems"] or not options.quiet:
            print(json.dumps(row), flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{number} rounds, {bad} with problems", file=sys.stderr, flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
