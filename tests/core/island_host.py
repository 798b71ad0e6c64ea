"""Runs the two ranks of one host of test_island_hosts.py, inside the host's namespaces.

    python island_host.py HOST MASTER_ADDRESS PORT INTERFACE SCENARIO

Each rank prints what it observed as a line of JSON.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any

RANKS_PER_HOST, HOSTS = 2, 2
TIMEOUT_SECONDS = 2.0


def tell(found: dict[str, Any]) -> None:
    """Prints a rank's observations in a single write, because two ranks share the pipe."""
    os.write(sys.stdout.fileno(), json.dumps(found).encode() + b"\n")


def rank_main(rank: int, address: str, port: int, interface: str, scenario: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    import torch
    import torch.distributed as dist

    import allnorm
    from allnorm import reference
    from allnorm.testing import rank_input, same_bits, shared_input

    world_size = RANKS_PER_HOST * HOSTS
    store = dist.TCPStore(address, port, world_size, is_master=rank == 0)
    minute = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=minute)
    comm = allnorm.Communicator(device="cpu", timeout=TIMEOUT_SECONDS if scenario != "bits" else 60)
    seen: dict[str, Any] = {"rank": rank, "islands": comm.islands}
    plan = comm.plan(32, 512, torch.float32)
    seen["algorithm"] = plan.algorithm

    seconds: list[float] = []

    def call(number: int = 0, shape: tuple[int, int] = (32, 512)) -> bool:
        xs = [rank_input(shape, torch.float32, r, call=number) for r in range(world_size)]
        residual = shared_input(shape, torch.float32, "residual")
        weight = shared_input(shape[1:], torch.float32, "weight")
        began = time.monotonic()
        got = comm.all_reduce_add_rms_norm(xs[rank], residual, weight, 1e-6)
        seconds.append(time.monotonic() - began)
        want = reference.all_reduce_add_rms_norm(xs, residual, weight, 1e-6, islands=comm.islands)
        return all(map(same_bits, got, want))

    # The last call is slow because it is large.
    seen["right"] = all([*(call(number) for number in range(3)), call(3, (1024, 1024))])
    seen |= {"fastest": min(seconds), "slowest": max(seconds)}
    dist.barrier()
    if scenario == "killed" and rank == world_size - 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if scenario == "slow" and rank == world_size - 1:
        time.sleep(4 * TIMEOUT_SECONDS)
        os._exit(0)
    if scenario == "lost":
        tell({"ready": rank})
    began, calls = time.monotonic(), 0
    try:
        while scenario != "bits" and time.monotonic() - began < 30:
            last = time.monotonic()
            call()
            calls += 1
    except allnorm.PeerTimeoutError as error:
        seen |= {"error": type(error).__name__, "peer": error.peer, "text": str(error)}
        seen["seconds"] = time.monotonic() - last
    tell(seen)
    # Other ranks may still need the store, which rank 0 serves.
    time.sleep(6 if scenario != "bits" and rank == 0 else 0.5)
    os._exit(0)


def main() -> None:
    host, address, port, interface, scenario = sys.argv[1:]
    ranks = range(int(host) * RANKS_PER_HOST, (int(host) + 1) * RANKS_PER_HOST)
    processes = [
        multiprocessing.Process(target=rank_main, args=(r, address, int(port), interface, scenario))
        for r in ranks
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
