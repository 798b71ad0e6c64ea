"""Injects faults into ranks at random moments; a standalone program.

    python kill_rig.py --seconds 1800 --seed 1     # runs for 1800 s
    python kill_rig.py --rounds 100 --kinds flat --hurts kill

Ranks are forked from this process, which has imported torch and has only one thread. In each round
they form a group and call in a loop until a fault is injected into one rank, the victim: it is
killed, stopped (SIGSTOP), or a signal handler raises in it or closes its communicator. In some
rounds ranks also fork children. The program prints a line of JSON per round, with the observations
of the ranks and any problems.

Exit code 1 means that a round had problems. A survivor has a problem if it raised too late or not
at all, named a healthy rank, had a wrong result before, could call afterwards, or disagreed with
check() or stats(). A round also has a problem if it left a process or shared memory.
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

# Far longer than a round, because a wait for a dead rank must not end by its timeout.
TIMEOUT_SECONDS = 600.0
# Timeout if the victim is stopped, because then only the timeout ends the wait.
STOPPED_SECONDS = 3.0
# Limit for a busy machine; an idle machine takes a tenth of a second.
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
    # PeerDivergedError if the rank was interrupted before sending: its peers see a refusal.
    "interrupt": ("PeerLeftError", "PeerDivergedError"),
    "close": ("PeerLeftError",),
}


class InterruptError(Exception):
    """The error that an interrupted rank's signal handler raises."""


def inputs(number: int, world_size: int) -> list[torch.Tensor]:
    """Returns all ranks' partial sums in call `number`, which are integers."""
    rows = torch.arange(7 * 256, dtype=torch.float32).view(7, 256)
    return [(rows + 3 * number) % 13 * (rank + 1) - rank for rank in range(world_size)]


def calls(comm: allnorm.Communicator, shuffled: random.Random, kind: str, where: list[str]) -> None:
    """Makes and checks calls, in the same order on every rank, until one raises."""
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
        for _ in range(4):  # C dispatches the call from the third time on
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


def fork_child() -> int:
    """Forks a child that exits immediately as by sys.exit(); returns its process ID."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(ROUND_SECONDS)
        ctypes.pythonapi.Py_Exit(0)  # like sys.exit(), without unwinding the rank's frames
    return pid


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
        except allnorm.AllnormError:  # close() is refused within a call: retries a little later
            signal.setitimer(signal.ITIMER_REAL, 0.0003)

    if victim and config["hurt"] in ("interrupt", "close"):
        handler = interrupts if config["hurt"] == "interrupt" else closes
        signal.signal(signal.SIGUSR1, handler)
        signal.signal(signal.SIGALRM, handler)
    child = fork_child() if config["forks"] else None
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
    if child is not None and not ends(child):
        problems.append(f"a forked child does not exit: {child}")
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
    os.read(done, 1)  # if a survivor exited now, others might name it as the cause
    start = time.monotonic()
    comm.close()
    if time.monotonic() - start > LATE_SECONDS:
        os.write(2, f"rank {rank}: close() took {time.monotonic() - start:.1f} s\n".encode())


def aftermath(comm: allnorm.Communicator, error: BaseException | None, victim: bool) -> list[str]:
    """Returns how check(), stats() and the next call disagree with the error of the failed call."""
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
            # The victim was interrupted before a call started. Its peers wait for it or were
            # refused, and make no further calls, so another call of the victim would hang.
            comm.close()
            return []
    if victim:  # a victim that was interrupted between calls has no error
        return []
    if any(type(one) is not type(error) for one in said):
        problems.append(f"check() and the next call raised {said}, the call {error!r}")
    elif str(said[0]) != str(error):
        problems.append(f"check() raised {said[0]}, the call {error}")
    fault = comm.stats().fault
    if fault != f"{type(error).__name__}: {error}":
        problems.append(f"stats().fault is {fault}, the call's error {error!r}")
    if comm.is_closed:
        problems.append("is_closed is True, but nothing closed the communicator")
    return problems


def ends(pid: int) -> bool:
    """Returns whether a child exits; kills it if it does not."""
    deadline = time.monotonic() + LATE_SECONDS
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def hurt_one(seed: int, folder: str, kinds: list[str], hurts: list[str]) -> dict[str, Any]:
    """Runs a round: injects a fault into one of the ranks."""
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
    # Only these ranks' files, because other tests create communicators at the same time.
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
    """Returns the problems of a round."""
    hurt, victim = config["hurt"], config["victim"]
    problems = [f"left in shared memory: {name}" for name in left]
    silent = set(range(config["world_size"])) - {one["rank"] for one in ranks}
    if hurt in ("kill", "stop"):
        silent.discard(victim)
    problems += [f"rank {rank} did not answer" for rank in sorted(silent)]
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
    parser.add_argument("--seconds", type=float, default=0.0, help="minimum time; 0: only --rounds")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--hurts", default=",".join(HURTS))
    parser.add_argument("--quiet", action="store_true", help="print only rounds with problems")
    options = parser.parse_args()
    end, number, bad = time.monotonic() + options.seconds, 0, 0
    folder = tempfile.mkdtemp()  # not TemporaryDirectory, which forked children would remove
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
