"""Tests a trace's counts by kind and module."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_helpers import comm, on
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import Interval

import allnorm
from allnorm.core.dispatch import Dispatcher
from allnorm.testing import RankPool
from allnorm.tracing import Entry, TraceReport
from allnorm.tracing.collect import Collector, kernel


class RMSNorm(torch.nn.Module):
    """An RMSNorm in plain arithmetic, as models define it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Layer(torch.nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.norm = RMSNorm()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return comm().all_reduce_add_rms_norm(x, x, self.weight, 1e-6)[0]
        x = x.clone()
        dist.all_reduce(x)
        return self.norm(x)


class Model(torch.nn.Module):
    def __init__(self, *fused: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(one) for one in fused)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def found(report: TraceReport) -> list[tuple[str, str, str, int]]:
    assert all(entry.time_us > 0 for entry in report.entries)
    return sorted((entry.kind, entry.what, entry.module, entry.calls) for entry in report.entries)


@torch.no_grad()
def count(rank: int, world_size: int) -> dict[str, Any]:
    """Traces models in ranks; returns the reports."""
    c, x = comm(), torch.randn(4, 64)
    launch = Dispatcher._launch
    model = Model(True, True, False)
    model(x)
    with allnorm.trace() as report:
        assert Dispatcher._launch is not launch
        assert not report.entries
        model(x)
        model(x)
    assert Dispatcher._launch is launch
    results: dict[str, Any] = {"two passes": (found(report), report.summary(), str(report))}
    assert TraceReport.from_dict(report.to_dict()).entries == report.entries
    assert (report.rank, report.world_size) == (rank, world_size)

    with allnorm.trace() as report:
        c.all_reduce(x)
        c.all_reduce_add_rms_norm(x, x, torch.ones(64), 1e-6, algorithm="two_shot")
        c.all_reduce_add_rms_norm(x, x, torch.ones(64), 1e-6, algorithm="unfused")
        c.all_reduce_add_rms_norm_quant(x, x, torch.ones(64), 1e-6, quant=allnorm.Fp8PerToken())
        c.all_gather_rows(x[: len(range(*c.row_shard(4)))], 4)
        allnorm.add_rms_norm(x, x, torch.ones(64), 1e-6)
        torch.nn.functional.rms_norm(x, (64,))
    results["calls"] = (found(report), report.summary())

    with pytest.raises(ValueError), allnorm.trace() as report:
        model(torch.cat([model(x), x[:, :1]], dim=-1))  # the weight has a different width
    results["raised"] = report.summary()

    def compiled(x: Tensor) -> Tensor:
        normed, _ = c.all_reduce_add_rms_norm(x, x, torch.ones(64), 1e-6)
        return normed + 1

    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for name in ("compiling", "compiled"):
        with allnorm.trace() as report:
            run(x)
        results[name] = report.summary()
    return results


@on(cpu=(2,))
def test_counts(pool: RankPool) -> None:
    for results in pool.run(count):
        counts, summary, text = results["two passes"]
        assert counts == [
            ("fused", "one_shot", "layers.*", 4),
            ("norm", "RMSNorm", "layers.*.norm", 2),
            ("reduction", "c10d::allreduce_", "layers.*", 2),
        ]
        assert summary == "2 of 3 fused, 2 times"
        assert "c10d::allreduce_ in layers.*" in text
        counts, summary = results["calls"]
        assert counts == [
            ("fused", "one_shot", "", 1),
            ("fused", "two_shot", "", 1),
            ("norm", "allnorm local", "", 1),
            ("norm", "aten::rms_norm", "", 1),
            ("reduction", "allnorm all_reduce, one_shot", "", 1),
            ("reduction", "allnorm unfused", "", 1),
        ]
        assert summary == "2 of 4 fused"
        assert results["raised"] == "2 of 3 fused in 2 forward passes"
        assert results["compiling"] == results["compiled"] == "1 of 1 fused"


def threads() -> list[str]:
    return sorted(path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


@on(cpu=(2,))
def test_a_trace_does_not_keep_process_groups_alive(rank: int, world_size: int) -> None:
    """A group's threads may abort the process if they still run while it exits."""
    before = threads()
    group = dist.new_group()
    dist.all_reduce(torch.ones(4), group=group)
    assert threads() != before
    with allnorm.trace():
        dist.all_reduce(torch.ones(4), group=group)
    dist.destroy_process_group(group)
    del group
    assert threads() == before


def test_trace_is_callable_after_its_package_is_imported() -> None:
    import allnorm.tracing

    assert callable(allnorm.trace)


def test_a_running_profiler_is_an_error() -> None:
    tracing = allnorm.trace()
    with torch.profiler.profile(), pytest.raises(allnorm.AllnormError, match="already running"):
        tracing.__enter__()


def test_a_trace_without_reductions() -> None:
    with allnorm.trace() as report:
        torch.ones(3) + 1
    assert (report.entries, report.fraction, report.summary()) == ((), 0.0, "0 of 0 fused")


def test_counts_that_the_passes_do_not_divide() -> None:
    entries = [Entry("fused", "one_shot", "", 5, 1.0), Entry("reduction", "NCCL", "", 1, 1.0)]
    report = TraceReport(0, 2, 3, entries)
    assert report.summary() == "5 of 6 fused in 3 forward passes"
    assert report.fraction == pytest.approx(5 / 6)


KERNELS = {
    "void allnorm::fused_kernel<allnorm::FusedKernel<allnorm::Bfloat16, 4, allnorm::DenseRows, "
    "allnorm::OneShot, allnorm::OneRowAhead, (allnorm::Grid)0, allnorm::Features{false, false, "
    "false, false, false}, allnorm::Plain> >(allnorm::FusedParams)": ("fused", "one_shot"),
    "void allnorm::fused_kernel<allnorm::FusedKernel<allnorm::Float16, 8, allnorm::ExpertRows, "
    "allnorm::TwoShot, allnorm::Relayed, (allnorm::Grid)0, allnorm::Features{true, true, true, "
    "true, true}, allnorm::AnyQuantized> >(allnorm::FusedParams)": ("fused", "two_shot"),
    "void allnorm::owned_rows_kernel<allnorm::OwnedKernel<allnorm::Float32, 2, allnorm::DenseRows, "
    "(allnorm::Owned)0, false, allnorm::Features{false, false, false, false, false}, "
    "allnorm::E4m3> >"
    "(allnorm::OwnedRowsParams)": ("fused", "two_shot"),
    "void allnorm::owned_rows_kernel<allnorm::OwnedKernel<allnorm::Float32, 2, allnorm::DenseRows, "
    "(allnorm::Owned)1, false, allnorm::Features{false, false, false, false, false}, "
    "allnorm::E4m3> >"
    "(allnorm::OwnedRowsParams)": ("fused", "two_shot, sharded"),
    "void allnorm::owned_rows_kernel<allnorm::OwnedKernel<allnorm::Float32, 2, allnorm::DenseRows, "
    "(allnorm::Owned)2, false, allnorm::Features{false, false, false, false, false}, "
    "allnorm::Plain> >"
    "(allnorm::OwnedRowsParams)": None,
    "void allnorm::local_kernel<allnorm::AnyRowsKernel<allnorm::Float32, true, allnorm::Features{"
    "false, false, false, false, false}, allnorm::Plain> >(allnorm::LocalParams)": (
        "norm",
        "allnorm local",
    ),
    "void allnorm::local_rows_kernel<allnorm::LocalRowsKernel<allnorm::Float16, "
    "allnorm::SummedRows, allnorm::Features{false, false, false, false, false}, "
    "allnorm::Plain> >"
    "(allnorm::LocalParams)": ("norm", "allnorm local"),
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": (
        "reduction",
        "NCCL",
    ),
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": None,
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(int)": (
        "reduction",
        "custom all-reduce",
    ),
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>()": (
        "fused",
        "another library",
    ),
    "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(int)": ("norm", "kernel"),
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, "
    "true>(int, float, c10::BFloat16 const*)": ("norm", "PyTorch"),
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, "
    "false>(int, float, c10::BFloat16 const*)": None,
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": ("norm", "compiled kernel"),
    "ampere_bf16_s16816gemm_bf16_64x64_ldg8_f2f_stages_64x5_tn": None,
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_identified_by_name(name: str) -> None:
    assert kernel(name) == KERNELS[name]


def event(
    name: str,
    *children: Any,
    device: Any = DeviceType.CPU,
    kernels: Any = (),
    start: float = 0.0,
    stream: int = 7,
) -> Any:
    made = SimpleNamespace(
        name=name,
        cpu_children=list(children),
        cpu_parent=None,
        kernels=[SimpleNamespace(name=name, duration=us) for name, us in kernels],
        device_type=device,
        cpu_time_total=1000.0,
        time_range=Interval(start, start + 5.0),
        device_index=0,
        device_resource_id=stream,
        is_user_annotation=False,
    )
    for child in children:
        child.cpu_parent = made
    return made


def flat(root: Any) -> list[Any]:
    return [root, *(each for child in root.cpu_children for each in flat(child))]


def test_kernels_of_graphs_and_of_operators_are_counted() -> None:
    one_shot, nccl = next(iter(KERNELS)), "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
    host = event(
        "allnorm.module||Model",
        event(
            "allnorm.module|layers.7.mlp|MLP",
            event("allnorm.call|fused|one_shot", kernels=[(one_shot, 4.0)]),
            event("c10d::allreduce_", event("nccl:all_reduce", kernels=[(nccl, 6.0)])),
        ),
        event("allnorm.call|fused|one_shot"),  # captured, not run
        event("c10d::barrier", event("nccl:all_reduce_barrier", kernels=[(nccl, 3.0)])),
    )
    names = [one_shot] * 3 + [nccl] * 2 + ["gemm"]
    device = [event(name, device=DeviceType.CUDA, start=10.0 * i) for i, name in enumerate(names)]
    collector = Collector([*flat(host), *device])
    assert collector.passes == 1
    assert collector.tally.entries() == [
        Entry("fused", "one_shot", "", 2, 11.0),
        Entry("fused", "one_shot", "layers.*.mlp", 1, 4.0),
        Entry("reduction", "c10d::allreduce_", "layers.*.mlp", 1, 6.0),
    ]


def test_time_that_a_kernel_waits_for_the_previous_one_does_not_count() -> None:
    """Runs kernels that start early, inside others, on a different stream and after a gap."""
    one_shot = next(iter(KERNELS))
    kernels = [
        *((one_shot, 3.0, 7), ("gemm", 0.0, 7), (one_shot, 20.0, 7), (one_shot, 20.0, 7)),
        *((one_shot, 22.0, 8), ("gemm", 30.0, 7), (one_shot, 40.0, 7)),
    ]
    device = [
        event(name, device=DeviceType.CUDA, start=start, stream=stream)
        for name, start, stream in kernels
    ]
    # 3 of the first 5 us count, because the GEMM ends at 5. Then 5, 0 (within the same 5), 5, 5.
    entries = Collector(device).tally.entries()
    assert entries == [Entry("fused", "one_shot", "", 5, 18.0)]
