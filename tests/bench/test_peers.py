"""Tests peer libraries as arms: the calls they receive, and missing or failing libraries."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from allnorm.bench import modes as bench_modes
from allnorm.bench import peers
from allnorm.bench import run as ranks_bench
from allnorm.bench.arms import Reduction
from allnorm.bench.case import Case, make_case
from allnorm.bench.modes import Mode, Shape
from allnorm.bench.peers.base import Peer, Setting
from allnorm.testing import run_ranks
from allnorm.testing.agreement import first_line
from allnorm.testing.spawn import RankError

from . import fake_peers

Records = list[dict[str, Any]]
Ran = tuple[Records, list[tuple[str, dict[str, Any]]]]
ENGINES = ("flashinfer", "sglang", "vllm")


def job(*names: str, modes: tuple[Mode, ...] = (Mode(),), **changes: Any) -> ranks_bench.Job:
    settings = {"shapes": (Shape(5, 256),), "dtype": "bfloat16", "numerics": "rounded"}
    return ranks_bench.Job(
        **{**settings, **changes}, modes=modes, arms=names, device="cpu", seconds=0.01
    )


def on_cpu(
    rank: int,
    world_size: int,
    what: ranks_bench.Job,
    installed: Iterable[str] = (),
    sglang: Mapping[str, Any] = MappingProxyType({}),
) -> Ran:
    """Runs the benchmark on CPU ranks with fakes of peers that normally need a GPU."""
    fake_peers.install(*installed, **sglang)
    bench_modes.peer_names = lambda device, mode: [] if mode.residual_sharded else [*peers.REGISTRY]
    for peer in peers.REGISTRY.values():
        peer.device_type = "cpu"
    return ranks_bench.run(rank, world_size, what), fake_peers.calls


def run(what: ranks_bench.Job, installed: Iterable[str] = ENGINES, **sglang: Any) -> Ran:
    """Returns the records and the calls of rank 0."""
    return result(run_ranks(on_cpu, 2, args=(what, installed, sglang)))


def result(ranks: list[Ran]) -> Ran:
    """Returns rank 0's result; all ranks' records must be equal except for times."""
    plain = [
        [{k: v for k, v in record.items() if not k.endswith("_us")} for record in records]
        for records, _ in ranks
    ]
    assert all(other == plain[0] for other in plain)
    return ranks[0]


@pytest.mark.parametrize(
    ("what", "sglang", "names"),
    [
        (
            job(*ENGINES),
            {},
            [
                *("flashinfer", "flashinfer:one_shot", "flashinfer:two_shot"),
                *("sglang", "sglang:one_shot", "sglang:two_shot", "sglang+local"),
                *("vllm", "vllm+local"),
            ],
        ),
        (
            job("vllm", "sglang", modes=(Mode("per_group:128"),)),
            {},
            [
                *("sglang+quant", "sglang:one_shot+quant", "sglang:two_shot+quant"),
                *("sglang+local+quant", "vllm+quant", "vllm+local+quant"),
            ],
        ),
        (job("sglang"), {"fused": False}, ["sglang+local"]),
    ],
    ids=["16 bits", "quantized", "an older SGLang"],
)
def test_every_kernel_of_a_peer_is_an_arm(
    what: ranks_bench.Job, sglang: dict[str, Any], names: list[str]
) -> None:
    records, _ = run(what, **sglang)
    assert [record["arm"] for record in records] == names
    for record in records:
        assert record["error"] == record["reason"] == ""
        assert record["p50_us"] > 0


def test_two_peers_mix_four_streams() -> None:
    records, calls = run(job(*ENGINES, modes=(Mode(streams=4),)))
    found = {record["arm"]: record["reason"] for record in records}
    assert [name for name in found if not found[name]] == ["flashinfer+mix", "sglang"]
    assert found["vllm"] == "no kernel for this mode"
    assert all(record["error"] == "" for record in records)
    assert {"mhc_post", "mhc"} <= {name for name, _ in calls}


def test_the_next_input_follows_a_peer() -> None:
    records, _ = run(job(*ENGINES, modes=(Mode(streams=4, next_input=True),)))
    assert [r["arm"] for r in records if not r["reason"]] == ["flashinfer+mix", "sglang"]
    assert all(record["error"] == "" for record in records)


def test_sglang_mixes_streams_of_one_width() -> None:
    records, _ = run(job("sglang", modes=(Mode(streams=4),), shapes=(Shape(5, 512),)))
    assert [record["reason"] for record in records] == ["no kernel for this mode"]


def test_kernels_receive_the_arguments_of_their_arms() -> None:
    _, calls = run(job(*ENGINES))
    assert ("create", {"capacity": 5 * 256, "fp32": False}) in calls
    fusions = [arguments for name, arguments in calls if name == "fusion"]
    assert {arguments["pattern"] for arguments in fusions} == {1}
    assert {arguments["one_shot"] for arguments in fusions} == {None, True, False}
    sglang = [arguments for name, arguments in calls if name == "sglang"]
    assert {arguments["two_shot"] for arguments in sglang} == {None, True, False}
    names = [name for name, _ in calls]
    assert names.index("compile") < names.index("create")
    assert names.count("close") == 3


@pytest.mark.parametrize(
    ("quant", "return_normed", "pattern"),
    [
        ("per_tensor", False, 2),
        ("per_tensor", True, 4),
        ("per_group:64:column_major_tma:ue8m0_packed", False, 8),
        ("per_group:64:column_major_tma:ue8m0_packed", True, 9),
        ("per_token", False, 10),
        ("per_token", True, 11),
        ("per_group:128", False, None),
    ],
)
def test_flashinfer_quantizes_with_the_pattern_of_the_mode(
    quant: str, return_normed: bool, pattern: int | None
) -> None:
    mode = Mode(quant, return_normed=return_normed)
    records, calls = run(job("flashinfer", modes=(mode,)))
    assert all(record["error"] == record["reason"] == "" for record in records)
    names = [record["arm"] for record in records]
    assert ("flashinfer" in names) == (pattern is not None)
    assert "flashinfer+quant" in names
    patterns = {arguments["pattern"] for name, arguments in calls if name == "fusion"}
    assert patterns == ({1} if pattern is None else {1, pattern})


@pytest.mark.parametrize("quant", ["", "per_group:128"])
def test_symmetric_memory_holds_the_partial_sums_of_each_buffer_set(quant: str) -> None:
    what = job("symm_mem", modes=(Mode(quant),), shapes=(Shape(5, 256), Shape(2, 512)))
    records, calls = run(what, ["symm_mem"])
    suffix = "+local+quant" if quant else "+local"
    assert [r["arm"] for r in records] == [f"symm_mem:{a}_shot{suffix}" for a in ("one", "two")] * 2
    assert all(record["error"] == record["reason"] == "" for record in records)
    sizes = [arguments["elems"] for name, arguments in calls if name == "rendezvous"]
    assert sizes == [5 * 256] * 2


def test_weights_with_a_bias_and_float32() -> None:
    shape = Shape(3, 256, 1e-6, weight_bias=1.0)
    records, _ = run(job(*ENGINES, shapes=(shape,), dtype="float32"))
    by_arm = {record["arm"]: record for record in records}
    assert by_arm["sglang"]["reason"] == "no kernel for torch.float32"
    assert by_arm["flashinfer"]["error"] == by_arm["vllm"]["error"] == ""


def test_a_library_that_is_not_installed_is_missing_with_a_reason() -> None:
    records, _ = run(job("allnorm", *ENGINES), installed=())
    reasons = {record["arm"]: record["reason"] for record in records}
    assert reasons["allnorm"] == ""
    for name in ENGINES:
        assert reasons[name].startswith("missing: rank 0: ModuleNotFoundError: No module")


def test_overwritten_inputs_end_the_benchmark() -> None:
    with pytest.raises(RankError, match=r"has overwritten the inputs .*\(rank [01]: 5x256"):
        run(job("allnorm", "sglang"), norm=fake_peers.overwriting_norm)


class Failing(Peer):
    """A peer that fails on rank 1 only, in the step named by `where`."""

    name = "failing"
    device_type = "cpu"
    where = ""

    def _step(self, name: str) -> None:
        if self.where == name and self.setting.rank == 1:
            raise RuntimeError(f"broken {name}\nand more lines")

    def load(self) -> str:
        self._step("load")
        return ""

    def open(self) -> str | None:
        self._step("open")
        return None

    def supports(self, case: Case, mode: Mode) -> str:
        return "only even rows" if case.shape.num_tokens % 2 else ""

    def reductions(self, case: Case) -> list[Reduction]:
        def call(index: int) -> torch.Tensor:
            self._step("call")
            total = case.batches[index].xs[0] + case.batches[index].xs[1]
            return total * 2 if self.where == "result" else total

        return [Reduction(self.name, call)]


def on_cpu_failing(rank: int, world_size: int, where: str, what: ranks_bench.Job) -> Ran:
    Failing.where = where
    peers.REGISTRY = {"failing": Failing}
    return on_cpu(rank, world_size, what)


def run_failing(where: str, what: ranks_bench.Job) -> Records:
    return result(run_ranks(on_cpu_failing, 2, args=(where, what)))[0]


@pytest.mark.parametrize("where", ["load", "open", "call"])
def test_a_peer_that_fails_on_one_rank_is_dropped_on_all(where: str) -> None:
    own, other = run_failing(where, job("allnorm", "failing", shapes=(Shape(4, 256),)))
    assert own["p50_us"] > 0
    prefix = "" if where == "call" else "missing: "
    assert other["reason"] == f"{prefix}rank 1: RuntimeError: broken {where}"
    assert other["error"] == ""
    assert math.isnan(other["p50_us"])


def test_a_wrong_result_of_a_peer_is_not_timed() -> None:
    record = run_failing("result", job("failing", shapes=(Shape(4, 256),)))[0]
    assert record["error"].startswith("rank 0: residual_out")
    assert math.isnan(record["p50_us"])


def test_an_unsupported_shape_is_reported_with_the_reason() -> None:
    records = run_failing("", job("failing", shapes=(Shape(3, 256), Shape(2, 256))))
    assert [record["reason"] for record in records] == ["only even rows", ""]
    assert [record["arm"] for record in records] == ["failing", "failing+local"]


def test_gpu_libraries_are_rejected_on_cpu_and_with_multicast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = peers.Setting(0, 2, torch.device("cpu"), torch.bfloat16, None, ())  # type: ignore[arg-type]
    assert peers.REGISTRY["symm_mem"](setting).missing() == "runs on cuda only"
    monkeypatch.setattr(Failing, "where", "")
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    assert "multicast is not switched off" in Failing(setting).missing()
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    assert Failing(setting).missing() == ""


def test_an_exception_is_formatted_in_one_line() -> None:
    assert first_line(ValueError("a\nb")) == "ValueError: a"
    assert first_line(ValueError()) == "ValueError"
    assert len(first_line(ValueError("x" * 1000))) == 200


class InPlace(Peer):
    """A fake peer that reduces in place."""

    name = "in_place"
    device_type = "cpu"
    overwrites_inputs = True
    captures = 0

    def load(self) -> str:
        return ""

    def reductions(self, case: Case) -> list[Reduction]:
        @contextlib.contextmanager
        def capturing() -> Iterator[None]:
            self.captures += 1
            yield

        return [Reduction("in_place", lambda i: case.xs[i].add_(1.0), capturing=capturing)]


def test_a_peer_that_overwrites_its_inputs_gets_copies() -> None:
    cpu = torch.device("cpu")
    case = make_case(Shape(3, 64), "float32", "rounded", cpu, rank=1, world_size=2, seed=0)
    made, first = case.checksums(), case.xs[0].clone()
    setting = Setting(1, 2, cpu, torch.float32, None, (case.shape,))  # type: ignore[arg-type]
    peer = InPlace(setting)
    (reduction,) = peers.Peers([], cpu, torch.float32, ())._reductions(peer, case)
    assert torch.equal(reduction.call(0), first + 1)  # it gets a copy of the other arms' inputs
    assert case.checksums() == made
    with reduction.capturing():
        assert peer.captures == 1
        assert not torch.any(reduction.call(0) - 1)
    peer.reductions(case)[0].call(0)
    assert case.checksums() != made
