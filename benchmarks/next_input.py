"""Times hyper_connection_input on one GPU, beside kernels of PyTorch, FlashInfer and SGLang.

    python benchmarks/next_input.py [--json FILE]

A graph has one call per layer, each with its own projection and streams, so the L2 cache holds no
projection when a call begins. FlashInfer's kernel makes everything between the projection and the
norm; in its arm the projection is PyTorch's GEMM with TF32, and the norm FlashInfer's own kernel.
SGLang's arm has its Triton kernels and PyTorch's norm, without DeepGEMM and TileLang. The arm
allnorm+fp8 also quantizes the input, in groups of 128, by a second launch. Every arm's results are
compared with the reference before it is timed: allnorm's bit for bit, the others within a
tolerance.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import pathlib
import shlex
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

import allnorm
from allnorm import reference
from allnorm.bench.peers.base import optional_module
from allnorm.cli import output
from allnorm.testing import same_bits
from allnorm.testing.timing import capture

STREAMS, LAYERS, REPLAYS = 4, 60, 30
WIDTHS = (4096, 7168)
TOKENS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)

Layer = tuple[torch.Tensor, allnorm.HyperConnectionProjection, torch.Tensor]


def plain(streams: torch.Tensor, projection: Any, weight: torch.Tensor) -> Any:
    """Computes the input in PyTorch: the formula in the docstring of hyper_connection_input."""
    n, (fn, scale, base, eps, hc_eps, iterations, post_scale) = STREAMS, projection
    flat = streams.flatten(-2).float()
    rstd = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    pre, post, mix = ((flat @ fn.mT) * rstd).split([n, n, n * n], -1)
    pre = torch.sigmoid(pre * scale[0] + base[:n]) + hc_eps
    post = post_scale * torch.sigmoid(post * scale[1] + base[n : 2 * n])
    mix = torch.softmax((mix * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), -1) + hc_eps
    mix = mix / (mix.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + hc_eps)
        mix = mix / (mix.sum(-2, keepdim=True) + hc_eps)
    x = (pre.unsqueeze(-1) * streams).sum(-2).to(streams.dtype)
    normed = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)
    return normed, allnorm.HyperConnection(post, mix.mT)


def fused(streams: torch.Tensor, projection: Any, weight: torch.Tensor) -> Any:
    return allnorm.hyper_connection_input(streams, projection, weight, 1e-6)


def quantized(streams: torch.Tensor, projection: Any, weight: torch.Tensor) -> Any:
    normed, connection = fused(streams, projection, weight)
    return normed, connection, *allnorm.quantize(normed)


def of_flashinfer() -> Callable[..., Any] | None:
    """Returns the formula with FlashInfer's kernels; None if it has none or is not installed."""
    mhc = optional_module("flashinfer.mhc")
    if mhc is None or not hasattr(mhc, "mhc_pre_big_fuse_with_prenorm"):
        return None
    rms_norm = importlib.import_module("flashinfer.norm").rmsnorm

    def call(streams: torch.Tensor, projection: Any, weight: torch.Tensor) -> Any:
        fn, scale, base, eps, hc_eps, iterations, post_scale = projection
        torch.backends.cuda.matmul.allow_tf32 = True
        dots = streams.flatten(-2).float() @ fn.mT
        torch.backends.cuda.matmul.allow_tf32 = False
        post, mix, x = mhc.mhc_pre_big_fuse_with_prenorm(
            *(dots, streams, scale, base),
            *(eps, hc_eps, hc_eps, post_scale, iterations),
        )
        return rms_norm(x, weight, 1e-6), allnorm.HyperConnection(post.squeeze(-1), mix.mT)

    return call


def of_sglang() -> Callable[..., Any] | None:
    """Returns the formula with SGLang's Triton kernels; None if it is not installed."""
    mhc = optional_module("sglang.kernels.ops.layernorm.mhc")
    if mhc is None:
        return None

    def call(streams: torch.Tensor, projection: Any, weight: torch.Tensor) -> Any:
        fn, scale, base, eps, hc_eps, iterations, _ = projection
        flat = streams.flatten(-2)
        pre, post, mix = mhc.hc_mix_stats_sinkhorn(
            *(flat, fn, scale, base, STREAMS, iterations, eps, hc_eps)
        )
        x = mhc.mhc_combine(flat, pre, STREAMS, streams.dtype)
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)
        return normed, allnorm.HyperConnection(post, mix.mT)

    return call


def make_layers(tokens: int, width: int) -> list[Layer]:
    torch.manual_seed(tokens + width)
    count = STREAMS * (STREAMS + 2)
    layers = LAYERS if tokens <= 512 else 6
    return [
        (
            torch.randn(tokens, STREAMS, width, device="cuda").bfloat16(),
            allnorm.HyperConnectionProjection(
                torch.randn(count, STREAMS * width, device="cuda") / (STREAMS * width) ** 0.5,
                torch.randn(3, device="cuda"),
                torch.randn(count, device="cuda"),
            ),
            torch.randn(width, device="cuda").bfloat16(),
        )
        for _ in range(layers)
    ]


def check(call: Callable[..., Any], layer: Layer, exact: bool) -> None:
    """Raises unless the results are right."""
    streams, projection, weight = layer
    part = streams[:64]
    normed, connection, *narrow = call(streams, projection, weight)
    wanted, other = reference.hyper_connection_input(part, projection, weight, 1e-6)
    expected = (wanted, *other, *(reference.quantize(wanted) if narrow else ()))
    for got, want in zip((normed, *connection, *narrow), expected, strict=True):
        if exact and not same_bits(got[:64], want):
            raise AssertionError("the results differ from the reference")
        torch.testing.assert_close(got[:64].float(), want.float(), atol=5e-2, rtol=2e-2)


def time_of(call: Callable[..., Any], layers: list[Layer]) -> list[float]:
    """Returns the times of a call in us, sorted: of each replay, divided by its calls."""
    call(*layers[0])
    torch.cuda.synchronize()
    with capture() as graph:
        for layer in layers:
            call(*layer)
    times = []
    for _ in range(REPLAYS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(layers))
    return sorted(times[3:])


def main() -> None:
    """Prints a table per width, and appends one row per arm and shape to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=pathlib.Path, help="append the results to this file")
    options = parser.parse_args()
    command = shlex.join(["python", *sys.argv])
    found = {"flashinfer": of_flashinfer(), "sglang": of_sglang()}
    peers = {name: call for name, call in found.items() if call is not None}
    packages = {"flashinfer": "flashinfer-python", "sglang": "sglang"}
    for width in WIDTHS:
        lines, rows = [], []
        for tokens in TOKENS:
            torch.compiler.reset()  # or it stops compiling after eight shapes
            arms = {"allnorm": fused, "allnorm+fp8": quantized, "torch": plain}
            arms["torch.compile"] = torch.compile(plain, dynamic=False)
            arms |= peers
            layers, cells = make_layers(tokens, width), [str(tokens)]
            shape = {"num_tokens": tokens, "hidden_size": width, "dtype": "bfloat16"}
            known = output.conditions("cuda", **shape, streams=STREAMS) | {"command": command}
            for name in peers:
                known["versions"][name] = importlib.metadata.version(packages[name])
            for name, call in arms.items():
                check(call, layers[0], exact=name.startswith("allnorm"))
                times = time_of(call, layers)
                p50, p90 = statistics.median(times), times[int(0.9 * len(times))]
                cells.append(f"{p50:.2f} ({p90:.2f})")
                measured = {"p50_us": round(p50, 3), "p90_us": round(p90, 3)}
                rows.append({**known, "arm": name, "calls": len(layers), **measured})
            moved = tokens * (STREAMS + 1) * width * 2  # bytes
            cells.append(f"{moved / rows[-len(arms)]['p50_us'] / 1000:.0f}")
            lines.append(cells)
        title = f"hyper_connection_input of {STREAMS} x {width}, bfloat16: us, p50 (p90)"
        heads = ("tokens", *arms, "allnorm, GB/s")
        output.console().print(output.FittedTable(title, heads, lines))
        output.append_json_lines(options.json, rows)


if __name__ == "__main__":
    main()
