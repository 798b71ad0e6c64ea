"""Random delays of a rank: its host, its stream, and the GPU that its kernels share."""

from __future__ import annotations

import random
import time

import torch

_HOST_SHARE, _LONG_HOST_SHARE = 0.02, 0.0005
_STREAM_SHARE, _LONG_STREAM_SHARE = 0.08, 0.002
_NOISE_SHARE = 0.03
_STREAM_CYCLES, _LONG_STREAM_CYCLES = 100_000, 4_000_000  # 50 us and 2 ms on an H200
_NOISE_ELEMS = 1 << 24  # read and written by a kernel beside the calls: up to 30 us of an H200


class Delays:
    """Decides, before each call, whether this rank waits, and where. Each rank has its own."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self._rng = random.Random(f"delays {seed} {rank}")
        self._noise: torch.Tensor | None = None
        self._beside: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._noise = torch.ones(_NOISE_ELEMS, device=device)
            self._beside = torch.cuda.Stream(device)

    def before_call(self) -> None:
        """Waits, or makes the stream wait, now and then."""
        chance = self._rng.random()
        if chance < _LONG_HOST_SHARE:
            time.sleep(self._rng.random() * 2e-2)
        elif chance < _HOST_SHARE:
            time.sleep(self._rng.random() * 1e-3)
        if self._noise is None:
            return
        chance = self._rng.random()
        if chance < _LONG_STREAM_SHARE:
            torch.cuda._sleep(self._rng.randrange(_LONG_STREAM_CYCLES))
        elif chance < _STREAM_SHARE:
            torch.cuda._sleep(self._rng.randrange(_STREAM_CYCLES))
        elif chance < _STREAM_SHARE + _NOISE_SHARE:
            # Takes SMs and bandwidth from the calls beside it: their blocks start one by one.
            with torch.cuda.stream(self._beside):
                for _ in range(self._rng.randint(1, 4)):
                    self._noise[: self._rng.randint(1, _NOISE_ELEMS)].mul_(1.0)
