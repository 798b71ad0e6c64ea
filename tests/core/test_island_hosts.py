"""Tests hierarchical calls between two simulated hosts.

Namespaces give each host its own network, processes and /dev/shm. Sums cross sockets over a link
with 1 ms delay and 1 Gb/s (slow_link.py). Needs root, `ip`, `unshare` and /dev/net/tun.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from limits import HANG_SECONDS

import allnorm

from . import slow_link

HERE = pathlib.Path(__file__).resolve().parent
SECONDS = 2.0  # the communicators' timeout: TIMEOUT_SECONDS in island_host.py
DELAY = 1e-3  # seconds, one way
BITS_PER_SECOND = 1e9
NETWORK = "10.213.7"
PORT = 29711


def sh(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)


class Hosts:
    """Two network namespaces and the link between them."""

    def __init__(self) -> None:
        tag = f"an{os.getpid() % 100000}"
        self.names = [f"{tag}a", f"{tag}b"]
        self.interfaces = [f"{tag}va", f"{tag}vb"]
        self._link: slow_link.SlowLink | None = None

    def make(self) -> None:
        for name in self.names:
            sh("ip", "netns", "add", name)
        self._link = slow_link.SlowLink(self.interfaces, DELAY, BITS_PER_SECOND)
        for number, (name, interface) in enumerate(zip(self.names, self.interfaces, strict=True)):
            sh("ip", "link", "set", interface, "netns", name)
            sh("ip", "-n", name, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", interface)
            sh("ip", "-n", name, "link", "set", interface, "mtu", str(slow_link.MTU))
            for up in ("lo", interface):
                sh("ip", "-n", name, "link", "set", up, "up")

    def cut(self) -> None:
        sh("ip", "-n", self.names[0], "link", "set", self.interfaces[0], "down")

    def remove(self) -> None:
        if self._link is not None:
            self._link.close()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def start(self, host: int, scenario: str) -> subprocess.Popen[str]:
        inside = f"mount -t tmpfs tmpfs /dev/shm && exec {sys.executable} {HERE / 'island_host.py'}"
        command = f"{inside} {host} {NETWORK}.1 {PORT} {self.interfaces[host]} {scenario}"
        unshared = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", command]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *unshared],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(pathlib.Path(allnorm.__file__).parent.parent)},
        )


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("needs root, ip and unshare, for network namespaces")
    if not slow_link.available():
        pytest.skip("needs /dev/net/tun, for the link")
    made = Hosts()
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield made
    made.remove()


def run(hosts: Hosts, scenario: str) -> dict[int, dict[str, Any]]:
    """Runs a scenario; returns what each rank observed, keyed by rank."""
    processes = [hosts.start(host, scenario) for host in range(2)]
    seen: dict[int, dict[str, Any]] = {}
    try:
        ready = 0
        if scenario == "lost":
            for process in processes:
                assert process.stdout is not None
                for line in process.stdout:
                    ready += "ready" in line
                    if "ready" in line and ready % 2 == 0:
                        break
            hosts.cut()
        for process in processes:
            for line in process.communicate(timeout=HANG_SECONDS)[0].splitlines():
                found = json.loads(line)
                if "rank" in found:
                    seen[found["rank"]] = found
    finally:
        for process in processes:
            process.kill()
    for found in seen.values():
        assert found["right"], found
        assert found["islands"] == [[0, 1], [2, 3]]
        assert found["algorithm"] == "hierarchical"
    return seen


def test_bits_between_two_hosts(hosts: Hosts) -> None:
    seen = run(hosts, "bits")
    assert sorted(seen) == [0, 1, 2, 3]
    # Ranks compare their calls, then exchange sums. Each step takes the link's delay once.
    fastest = min(found["fastest"] for found in seen.values())
    assert fastest > 2 * DELAY, "the link has no delay"
    # Each of the two ranks sends half of 1024 x 1024 float32 sums over the shared link.
    assert min(found["slowest"] for found in seen.values()) > 8 * 4 * 1024 * 1024 / BITS_PER_SECOND


@pytest.mark.long
def test_a_killed_rank_of_the_other_host_is_named(hosts: Hosts) -> None:
    seen = run(hosts, "killed")
    assert sorted(seen) == [0, 1, 2]
    for found in seen.values():
        assert (found["error"], found["peer"]) == ("PeerDiedError", 3), found
        assert found["seconds"] < SECONDS + 4


@pytest.mark.long
def test_a_slow_rank_of_the_other_host_is_named(hosts: Hosts) -> None:
    seen = run(hosts, "slow")
    assert sorted(seen) == [0, 1, 2]
    for found in seen.values():
        assert (found["error"], found["peer"]) == ("PeerTimeoutError", 3), found
        assert SECONDS - 0.1 < found["seconds"] < SECONDS + 4


@pytest.mark.long
def test_a_lost_link_names_a_rank_of_the_other_host(hosts: Hosts) -> None:
    """Must be the last test, because the link stays down."""
    seen = run(hosts, "lost")
    assert sorted(seen) == [0, 1, 2, 3]
    for rank, found in seen.items():
        assert found["error"] == "PeerTimeoutError", found
        assert found["peer"] in ((2, 3) if rank < 2 else (0, 1)), found
        assert found["seconds"] < SECONDS + 8, found
