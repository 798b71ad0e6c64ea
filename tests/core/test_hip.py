"""Tests the conditions under which the preview for AMD GPUs opens, on a machine without them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import allnorm
from allnorm import topology
from allnorm.cli import app, options
from allnorm.core import _native, backends, hip
from allnorm.integrations import engines
from allnorm.verify import run as verify_run
from allnorm.verify.context import Job


class Gpus:
    """Stands in for a machine with AMD GPUs, torch for ROCm, and a built library."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path) -> None:
        self.path = folder / "liballnorm_hip.so"
        self.path.write_bytes(b"a library")
        self.build = {"backend": "hip", "commit": "abc", "architectures": "gfx942 gfx950"}
        self.gpus = [self.gpu("gfx950:sramecc+:xnack-", number) for number in range(4)]
        self.library = SimpleNamespace(build_info=lambda: dict(self.build))
        self.monkeypatch = monkeypatch
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setenv("ALLNORM_HIP", "1")
        monkeypatch.setattr(torch.version, "hip", "7.0.51831")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.gpus))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: self.gpus[index])
        library, library_path = _native.library, _native.library_path
        monkeypatch.setattr(
            _native, "library", lambda name: self.library if name == "hip" else library(name)
        )
        monkeypatch.setattr(
            _native, "library_path", lambda name: self.path if name == "hip" else library_path(name)
        )
        monkeypatch.setattr(hip, "_proving", False)
        self.forget()

    @staticmethod
    def gpu(target: str, number: int) -> Any:
        return SimpleNamespace(name="AMD GPU", gcnArchName=target, uuid=f"uuid {number}")

    def forget(self) -> None:
        """Forgets what a process reads only once."""
        hip._hash.cache_clear()
        hip._gpu_names.cache_clear()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    yield Gpus(monkeypatch, tmp_path)
    hip._hash.cache_clear()
    hip._gpu_names.cache_clear()


def refusal(world_size: int | None = None) -> str:
    with pytest.raises(allnorm.UnsupportedError) as caught:
        backends.library("cuda", world_size)
    return str(caught.value)


def test_a_proof_opens_the_library_for_the_numbers_of_ranks_it_covers(gpus: Gpus) -> None:
    assert "the proof: none of this library" in refusal(2)
    hip.store_proof([2], hip.LEAST_SOAK_CALLS)
    assert backends.library("cuda", 2) is gpus.library
    assert backends.library("cuda") is gpus.library  # calls of one rank
    assert "2 ranks, not 4" in refusal(4)
    hip.store_proof([4], 2 * hip.LEAST_SOAK_CALLS)
    for world_size in (1, 2, 4):
        assert backends.library("cuda", world_size) is gpus.library
    gpus.gpus = gpus.gpus[:1]  # a process may see some of the GPUs only
    gpus.forget()
    assert backends.library("cuda", 2) is gpus.library


def test_a_proof_is_about_this_library_and_these_gpus(gpus: Gpus) -> None:
    hip.store_proof([2], hip.LEAST_SOAK_CALLS)
    gpus.gpus[3] = gpus.gpu("gfx950", 7)
    gpus.forget()
    assert "without AMD GPU, gfx950, uuid 7" in refusal(2)
    gpus.gpus = gpus.gpus[:3]
    gpus.forget()
    assert backends.library("cuda", 2) is gpus.library
    gpus.monkeypatch.setattr(torch.version, "hip", "7.1.0")
    assert "made with HIP 7.0" in refusal(2)
    gpus.monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    gpus.path.write_bytes(b"a different library")
    gpus.forget()
    assert "none of this library" in refusal(2)


def test_a_damaged_proof_is_none(gpus: Gpus) -> None:
    path = hip.store_proof([2], hip.LEAST_SOAK_CALLS)
    path.write_text(path.read_text()[:-20])
    assert "none of this library" in refusal(2)


def test_a_short_soak_is_no_proof(gpus: Gpus) -> None:
    with pytest.raises(allnorm.AllnormError, match="a soak of 9 calls: expected 10000"):
        hip.store_proof([2], 9)
    assert "none of this library" in refusal(2)


def test_the_run_that_makes_the_proof_opens_the_library(gpus: Gpus) -> None:
    hip.prove()
    assert backends.library("cuda", 4) is gpus.library
    gpus.monkeypatch.setenv("ALLNORM_HIP", "0")
    assert "the switch: ALLNORM_HIP is not set" in refusal(4)


def test_the_first_missing_condition_is_named_with_its_remedy(gpus: Gpus) -> None:
    hip.store_proof([2], hip.LEAST_SOAK_CALLS)
    gpus.gpus.append(gpus.gpu("gfx90a", 4))
    text = refusal(2)
    assert "the GPUs: gfx90a, gfx950. Use GPUs of gfx942 or gfx950 only." in text
    gpus.path.unlink()
    assert "make HIP=on inplace" in refusal(2)
    gpus.monkeypatch.setattr(torch.version, "hip", "6.4.2")
    assert "Install torch for ROCm 7.0 or later" in refusal(2)
    gpus.monkeypatch.delenv("ALLNORM_HIP")
    text = refusal(2)
    assert "Set ALLNORM_HIP=1" in text
    assert "allnorm doctor" in text
    assert "device='cpu'" in text


def test_the_cpu_needs_no_proof(gpus: Gpus) -> None:
    assert backends.library("cpu", 2) is _native.library("cpu")


def test_plugins_stay_off(gpus: Gpus) -> None:
    assert "AMD GPUs are a preview" in engines.disabled_reason()


def test_gfx942_is_verified_without_quantization(gpus: Gpus) -> None:
    job = Job("cuda", 1, False, 1.0, 1, proves=True)
    assert hip.quantizes("cuda")
    assert "quantization" in verify_run.checks_of(job)
    gpus.gpus = [gpus.gpu("gfx942:sramecc+", 0)]
    assert not hip.quantizes("cuda")
    assert hip.quantizes("cpu")
    left = verify_run.checks_of(job)
    assert "ordering soak" in left
    assert not any("quanti" in name for name in left)


def test_verify_stores_a_proof_if_nothing_was_left_out(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []

    record = {"check": "soak", "cases": 1, "failures": 0, "seconds": 0.1, "details": [], "note": ""}

    def passes(job: Job, world_size: int, on_message: Any) -> list[dict[str, Any]]:
        jobs.append(job)
        return [record]

    monkeypatch.setattr(verify_run, "verify", passes)
    monkeypatch.setattr(options, "device", lambda text: "cuda")
    monkeypatch.setattr(options, "world_sizes", lambda *args, **kwargs: [2, 4])
    monkeypatch.setattr(options, "crowded", lambda *args: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "AMD GPU")
    enough = ["--stress", str(hip.LEAST_SOAK_CALLS)]
    for arguments, stored in (([], False), ([*enough, "--only", "soak"], False), (enough, True)):
        done = CliRunner(env={"COLUMNS": "180"}).invoke(app.app, ["verify", *arguments])
        assert done.exit_code == 0, done.output
        shown = " ".join(done.output.split())
        assert ("No proof is stored" in shown) != stored, shown
        if stored:
            assert backends.library("cuda", 4) is gpus.library
        else:
            assert "none of this library" in refusal(2)
    assert all(job.proves for job in jobs)


def test_doctor_lists_all_conditions(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    names = [step.name for step in hip.steps()]
    assert names == ["the switch", "torch for ROCm", "the library", "the GPUs", "the proof"]
    assert [step.name for step in hip.steps() if step.remedy] == ["the proof"]
    assert dataclasses.asdict(hip.subject())["gpus"][0] == "AMD GPU, gfx950, uuid 0"
    facts = topology.Machine("", 1, None, None, (), (), None, None, None, None, "")
    monkeypatch.setattr(topology, "probe", lambda: facts)
    monkeypatch.setattr(options, "device", lambda text: "cuda")
    monkeypatch.setattr(options, "world_sizes", lambda *args: [2])
    known = {"version": "1", "backends": {}, "fast_calls": True, "multicast": {"switches": {}}}
    monkeypatch.setattr(allnorm, "capabilities", lambda: known)
    written = tmp_path / "doctor.json"
    command = ["doctor", "--json", str(written)]
    done = CliRunner(env={"COLUMNS": "180"}).invoke(app.app, command)
    shown = " ".join(done.output.split())
    assert done.exit_code == 1, shown
    assert "gfx950" in shown
    assert "the preview for AMD GPUs is closed here. the proof: Run" in shown
    (row,) = map(json.loads, written.read_text().splitlines())
    assert [step["name"] for step in row["preview"]] == names
    assert "machine" in row


def test_finds_the_runtime_that_the_process_has_loaded(tmp_path: pathlib.Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 1  /opt/a b/libc.so.6\n"
        "7f02-7f03 rw-p 00000000 00:00 0\n"
        "7f04-7f05 r-xp 00000000 08:01 2  /opt/a b/torch/lib/libamdhip64.so.7\n"
    )
    assert _native.hip_runtime(str(maps)) == "/opt/a b/torch/lib/libamdhip64.so.7"
    assert _native.hip_runtime() is None
