"""Compares the speed of builds of the CUDA library on a machine with one GPU.

Two ranks in this process share the GPU. Each has a stream and a CUDA graph of 50 calls, and both
graphs are replayed at the same time, as on two GPUs but without a link. The times do not predict
those of two GPUs, but their differences between builds are meaningful. Builds are timed
alternately, after their results are compared bit for bit.

Usage: python benchmarks/one_gpu.py NAME=LIBRARY.so ..., where names are the commits of the builds
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys

import torch

from allnorm.core import _native

_CALLS, _REPLAYS, _ROUNDS = 50, 20, 25
_WORKSPACE_BYTES = 64 << 20
# Rows, columns, algorithm, maximum blocks (0: the library's choice). Both ranks' grids must fit.
_SHAPES = (
    (1, 4096, "one_shot", 0),
    (8, 4096, "one_shot", 0),
    (16, 2880, "one_shot", 0),
    (64, 4096, "one_shot", 0),
    (256, 4096, "one_shot", 64),
    (8, 4096, "two_shot", 0),
    (64, 4096, "two_shot", 0),
    (128, 4096, "two_shot", 64),
)


class Pair:
    """Two ranks on this GPU that use the same build."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.library = ctypes.CDLL(path)
        self.library.allnorm_last_error.restype = ctypes.c_char_p
        self.streams = [torch.cuda.Stream() for _ in range(2)]
        self.workspaces = [
            torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)
        ]
        self.comms = []
        for rank in range(2):
            config = _native.CommConfig(
                struct_bytes=ctypes.sizeof(_native.CommConfig),
                rank=rank,
                world_size=2,
                device=0,
                workspace_bytes=_WORKSPACE_BYTES,
                timeout_ns=2_000_000_000,
            )
            config.workspaces[:2] = [workspace.data_ptr() for workspace in self.workspaces]
            handle = ctypes.c_void_p()
            self._check(
                self.library.allnorm_comm_create(ctypes.byref(config), ctypes.byref(handle))
            )
            self.comms.append(handle)

    def _check(self, status: int) -> None:
        if status != _native.OK:
            raise RuntimeError(f"{self.path}: {self.library.allnorm_last_error().decode()}")

    def capture(
        self, rows: int, columns: int, algorithm: str, blocks: int
    ) -> tuple[list[torch.cuda.CUDAGraph], list[torch.Tensor]]:
        """Captures a graph of calls per rank; returns the graphs and all tensors."""
        generator = torch.Generator("cuda").manual_seed(rows * columns)

        def tensor() -> torch.Tensor:
            values = torch.randn(rows, columns, device="cuda", generator=generator)
            return values.to(torch.bfloat16)

        residual, weight = tensor(), tensor()[0].contiguous()
        options = {
            "op": _native.ADD_RMS_NORM,
            "algorithm": _native.ALGORITHM[algorithm],
            "dtype": _native.DTYPE["bfloat16"],
            "weight_dtype": _native.DTYPE["bfloat16"],
            "num_blocks": blocks,
        }
        graphs, results = [], []
        for rank in range(2):
            x, out, residual_out = tensor(), torch.empty_like(residual), torch.empty_like(residual)
            given = {"x": x, "residual": residual, "out": out, "residual_out": residual_out}
            call = _native.Call(
                struct_bytes=ctypes.sizeof(_native.Call),
                eps=1e-6,
                num_tokens=rows,
                hidden_size=columns,
                weight=weight.data_ptr(),
                num_sources=1,
                stream=self.streams[rank].cuda_stream,
                **options,
                **{name: tensor.data_ptr() for name, tensor in given.items()},
                **{f"{name}_stride": columns for name in given},
            )
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.streams[rank]):
                for _ in range(_CALLS):
                    self._check(self.library.allnorm_run(self.comms[rank], ctypes.byref(call)))
            graphs.append(graph)
            results += [out, residual_out, x, residual, weight]  # keeps the inputs alive
        return graphs, results

    def replay(self, graphs: list[torch.cuda.CUDAGraph]) -> float:
        """Replays the graphs; returns the slower rank's microseconds per call."""
        begin, end = ([torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(2))
        torch.cuda.synchronize()
        for rank in range(2):
            with torch.cuda.stream(self.streams[rank]):
                graphs[rank].replay()
                begin[rank].record()
                for _ in range(_REPLAYS):
                    graphs[rank].replay()
                end[rank].record()
        torch.cuda.synchronize()
        took = max(b.elapsed_time(e) for b, e in zip(begin, end, strict=True))
        return 1e3 * took / (_CALLS * _REPLAYS)

    def check(self) -> None:
        """Raises if a rank recorded a fault."""
        for comm in self.comms:
            fault = _native.Fault()
            self._check(self.library.allnorm_comm_check(comm, ctypes.byref(fault)))


def main() -> int:
    """Prints a row per shape; returns 1 if the results of the builds differ."""
    names, paths = zip(*(argument.split("=", 1) for argument in sys.argv[1:]), strict=True)
    pairs = [Pair(path) for path in paths]
    agree = True
    for rows, columns, algorithm, blocks in _SHAPES:
        captured = [pair.capture(rows, columns, algorithm, blocks) for pair in pairs]
        for pair, (graphs, _) in zip(pairs, captured, strict=True):
            pair.replay(graphs)
            pair.check()
        same = all(
            torch.equal(mine.view(torch.int16), first.view(torch.int16))
            for _, results in captured[1:]
            for mine, first in zip(results, captured[0][1], strict=True)
        )
        agree = agree and same
        times: list[list[float]] = [[] for _ in pairs]
        for _ in range(_ROUNDS):
            for index, (pair, (graphs, _)) in enumerate(zip(pairs, captured, strict=True)):
                times[index].append(pair.replay(graphs))
        for pair in pairs:
            pair.check()
        what = {"shape": f"{rows}x{columns}", "dtype": "bfloat16", "algorithm": algorithm}
        where = {"num_blocks": blocks, "device": torch.cuda.get_device_name(), "same_bits": same}
        us = {
            "p50_us": {
                n: round(statistics.median(s), 3) for n, s in zip(names, times, strict=True)
            },
            "min_us": {n: round(min(s), 3) for n, s in zip(names, times, strict=True)},
        }
        print(json.dumps({"benchmark": "one_gpu", **what, **where, **us}), flush=True)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
