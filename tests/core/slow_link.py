"""A link with a known delay and rate between two network namespaces.

It consists of two TUN devices and a thread that forwards packets when they are due.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import pathlib
import select
import struct
import threading
import time

_TUN = pathlib.Path("/dev/net/tun")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
MTU = 16000  # large, because Python takes a few microseconds to forward a packet
_MOST_BYTES = 8 << 20  # in flight per direction; like a switch, drops packets beyond it


def available() -> bool:
    """Returns whether this process is allowed to create TUN devices."""
    return os.access(_TUN, os.R_OK | os.W_OK)


class _Direction:
    """The packets in flight from one device to the other."""

    def __init__(self, delay: float, bytes_per_second: float) -> None:
        self._delay, self._bytes_per_second = delay, bytes_per_second
        self._packets: collections.deque[tuple[float, bytes]] = collections.deque()
        self._bytes = 0
        self._sent = 0.0  # when the sender will have sent the last packet

    def take(self, packet: bytes, now: float) -> None:
        if self._bytes + len(packet) > _MOST_BYTES:
            return
        self._sent = max(now, self._sent) + len(packet) / self._bytes_per_second
        self._packets.append((self._sent + self._delay, packet))
        self._bytes += len(packet)

    def due(self, now: float) -> list[bytes]:
        found = []
        while self._packets and self._packets[0][0] <= now:
            found.append(self._packets.popleft()[1])
            self._bytes -= len(found[-1])
        return found

    def next_time(self) -> float:
        return self._packets[0][0] if self._packets else float("inf")


class SlowLink:
    """A link between two devices, one in each namespace.

    Args:
        names: the devices' names.
        delay: seconds, one way.
        bits_per_second: rate per direction.
    """

    def __init__(self, names: list[str], delay: float, bits_per_second: float) -> None:
        self._devices = [self._device(name) for name in names]
        self._ways = [_Direction(delay, bits_per_second / 8) for _ in names]
        self._over, self._end = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @staticmethod
    def _device(name: str) -> int:
        device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(device, _TUNSETIFF, request)
        return device

    def close(self) -> None:
        """Removes the link's devices."""
        os.write(self._end, b"x")
        self._thread.join()
        for descriptor in (*self._devices, self._over, self._end):
            os.close(descriptor)

    def _run(self) -> None:
        while True:
            wait = min(way.next_time() for way in self._ways) - time.monotonic()
            timeout = None if wait == float("inf") else max(0.0, wait)
            readable, _, _ = select.select([*self._devices, self._over], [], [], timeout)
            if self._over in readable:
                return
            for number, way in enumerate(self._ways):
                if self._devices[number] in readable:
                    self._read(self._devices[number], way)
                for packet in way.due(time.monotonic()):
                    self._write(self._devices[1 - number], packet)

    @staticmethod
    def _read(device: int, way: _Direction) -> None:
        try:
            while True:
                way.take(os.read(device, 65536), time.monotonic())
        except BlockingIOError:
            pass
        except OSError:  # the device is down
            time.sleep(0.001)

    @staticmethod
    def _write(device: int, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # the device is down, or its queue is full
            os.write(device, packet)
