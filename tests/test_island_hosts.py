"""Two hosts made of namespaces: networks, processes and /dev/shm of their own, a link between them.

Islands are found, sums cross real sockets. Needs root, `ip` and `unshare`; a limit of the rate and
a delay on the link where the kernel has the queues for them, which a test says in its output.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import allnorm

HERE = pathlib.Path(__file__).resolve().parent
SECONDS = 2.0  # the timeout of the communicators: TIMEOUT_SECONDS in island_host.py
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

    def make(self) -> str:
        """Makes them; returns what the link is like, in words."""
        for name in self.names:
            sh("ip", "netns", "add", name)
        first, second = self.interfaces
        sh("ip", "link", "add", first, "type", "veth", "peer", "name", second)
        for number, (name, interface) in enumerate(zip(self.names, self.interfaces, strict=True)):
            sh("ip", "link", "set", interface, "netns", name)
            sh("ip", "-n", name, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", interface)
            for up in ("lo", interface):
                sh("ip", "-n", name, "link", "set", up, "up")
        return self.slow_down()

    def slow_down(self) -> str:
        """Delay and rate, or the rate alone, as the kernel can."""
        ways = (
            ("netem", "delay", "1ms", "rate", "1gbit"),
            ("tbf", "rate", "1gbit", "burst", "128kb", "latency", "50ms"),
        )
        for way in ways:
            with contextlib.suppress(subprocess.CalledProcessError):
                for name, interface in zip(self.names, self.interfaces, strict=True):
                    command = ("tc", "qdisc", "replace", "dev", interface, "root")
                    sh("ip", "netns", "exec", name, *command, *way)
                return " ".join(way)
        return "no limit"

    def cut(self) -> None:
        sh("ip", "-n", self.names[0], "link", "set", self.interfaces[0], "down")

    def remove(self) -> None:
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
    made = Hosts()
    try:
        print("the link:", made.make())
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield made
    made.remove()


def run(hosts: Hosts, scenario: str) -> dict[int, dict[str, Any]]:
    """What the ranks saw, by rank."""
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
            for line in process.communicate(timeout=90)[0].splitlines():
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
    assert sorted(run(hosts, "bits")) == [0, 1, 2, 3]


@pytest.mark.long
def test_a_killed_rank_of_another_host_is_named(hosts: Hosts) -> None:
    seen = run(hosts, "killed")
    assert sorted(seen) == [0, 1, 2]
    for found in seen.values():
        assert (found["error"], found["peer"]) == ("PeerDiedError", 3), found
        assert found["seconds"] < SECONDS + 4


@pytest.mark.long
def test_a_slow_rank_of_another_host_is_named(hosts: Hosts) -> None:
    seen = run(hosts, "slow")
    assert sorted(seen) == [0, 1, 2]
    for found in seen.values():
        assert (found["error"], found["peer"]) == ("PeerTimeoutError", 3), found
        assert SECONDS - 0.1 < found["seconds"] < SECONDS + 4


@pytest.mark.long
def test_a_lost_link_names_a_rank_of_the_other_host(hosts: Hosts) -> None:
    """Last: the link stays down."""
    seen = run(hosts, "lost")
    assert sorted(seen) == [0, 1, 2, 3]
    for rank, found in seen.items():
        assert found["error"] == "PeerTimeoutError", found
        assert found["peer"] in ((2, 3) if rank < 2 else (0, 1)), found
        assert found["seconds"] < SECONDS + 8, found
