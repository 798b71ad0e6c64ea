"""Tests starting ranks: results, failures, deaths, time limits and cleanup."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from limits import HANG_SECONDS

import allnorm
from allnorm.testing import RankError, RankPool, report, run_ranks
from allnorm.testing.rank import device


def add(rank: int, world_size: int, offset: int = 0) -> tuple[int, float, int]:
    total = torch.ones(2) * rank
    dist.all_reduce(total)
    return rank + offset, total[0].item(), world_size


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("something specific")


def exit_on_one(rank: int, world_size: int) -> int:
    if rank == 1:
        os._exit(7)
    return rank


def sleep_on_one(rank: int, world_size: int, seconds: float) -> None:
    if rank == 0:
        time.sleep(seconds)


def tell(rank: int, world_size: int) -> str:
    for i in range(3):
        report({"rank": rank, "step": i})
    return "done"


def unpicklable(rank: int, world_size: int) -> object:
    return lambda: None


def settings(rank: int, world_size: int) -> tuple[int, list[str | None], int]:
    names = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
    return torch.get_num_threads(), [os.environ.get(name) for name in names], os.getpid()


def surroundings(rank: int, world_size: int, text: str) -> tuple[str | None, str | None, str]:
    os.write(1, f"{text} out\n".encode())
    os.write(2, f"{text} err\n".encode())
    return os.environ.get("SET_LATER"), os.environ.get("GONE"), os.getcwd()


def alive(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}").exists()


def test_results_in_rank_order() -> None:
    assert run_ranks(add, 3, args=(10,)) == [(10, 3.0, 3), (11, 3.0, 3), (12, 3.0, 3)]


def test_a_pool_keeps_its_processes_and_ends_them() -> None:
    with RankPool(2) as pool:
        first, second = pool.run(settings), pool.run(settings)
        assert first == second
        assert [(threads, switches) for threads, switches, _ in first] == [(1, ["0", "1", "1"])] * 2
        pids = [pid for _, _, pid in first]
        assert len({*pids, os.getpid()}) == 3
    assert not any(alive(pid) for pid in pids)
    pool.close()


def test_ranks_inherit_environment_folder_and_outputs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks inherit these even if they are forked from a process that started long before."""
    monkeypatch.setenv("GONE", "1")
    assert run_ranks(surroundings, 1, args=("first",))[0][:2] == (None, "1")
    assert capfd.readouterr() == ("first out\n", "first err\n")
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("SET_LATER", "2")
    monkeypatch.chdir(tmp_path)
    with open(tmp_path / "log", "wb") as log:
        saved = os.dup(1)
        os.dup2(log.fileno(), 1)
        try:
            results = run_ranks(surroundings, 2, args=("second",))
        finally:
            os.dup2(saved, 1)
            os.close(saved)
    assert results == [("2", None, str(tmp_path))] * 2
    assert (tmp_path / "log").read_text() == "second out\n" * 2
    assert capfd.readouterr() == ("", "second err\n" * 2)


def test_failures_show_the_traceback_and_the_pool_goes_on() -> None:
    with RankPool(2) as pool:
        with pytest.raises(RankError) as caught:
            pool.run(fail_on_one)
        assert list(caught.value.failures) == [1]
        assert "KeyError: 'something specific'" in str(caught.value)
        assert "fail_on_one" in caught.value.failures[1]
        assert len(pool.run(add)) == 2


def test_a_death_is_reported_or_expected() -> None:
    with RankPool(3) as pool:
        with pytest.raises(RankError, match="rank 1: its process ended with exit code 7"):
            pool.run(exit_on_one)
        assert pool.run(exit_on_one, may_die=[1]) == [0, None, 2]
        assert len(pool.run(add)) == 3


def test_time_limit() -> None:
    with RankPool(2) as pool:
        pids = [pid for _, _, pid in pool.run(settings)]
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            pool.run(sleep_on_one, 600.0, timeout=0.5)
        assert time.monotonic() - start < 10
        assert list(caught.value.failures) == [0]
        assert "within 0.5 s" in str(caught.value)
        assert not any(alive(pid) for pid in pids)


def test_kill_one_rank() -> None:
    with RankPool(2) as pool:
        pids = [pid for _, _, pid in pool.run(settings)]
        pool.kill(1)
        assert [alive(pid) for pid in pids] == [True, False]
        with pytest.raises(RankError, match="rank 1"):
            pool.run(settings)
        assert len(pool.run(add)) == 2


def test_messages() -> None:
    seen: list[tuple[int, object]] = []
    results = run_ranks(tell, 2, on_message=lambda rank, message: seen.append((rank, message)))
    assert results == ["done", "done"]
    for rank in range(2):
        mine = [message for sender, message in seen if sender == rank]
        assert mine == [{"rank": rank, "step": i} for i in range(3)]


def test_report_needs_a_parent() -> None:
    with pytest.raises(RuntimeError, match="run_ranks"):
        report("nobody listens")


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(RankError, match=r"(?i)pickle"):
        run_ranks(unpicklable, 1)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="world_size 0"):
        RankPool(0)
    with pytest.raises(ValueError, match="'tpu'"):
        RankPool(1, "tpu")
    too_many = torch.cuda.device_count() + 1
    with pytest.raises(ValueError, match=f"world_size {too_many} needs {too_many} GPU"):
        RankPool(too_many, "cuda")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="world_size 2 needs 1 GPU; torch sees 0"):
            RankPool(2, "cuda", share_gpus=True)


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a separate interpreter that can import this module."""
    path = os.pathsep.join([str(pathlib.Path(__file__).parents[1]), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )


def test_from_the_command_line_and_without_closing() -> None:
    """A program that fails or does not close its pool leaves no processes running."""
    program = (
        "from allnorm.testing import RankPool\n"
        "from testing.test_spawn import settings\n"
        "pool = RankPool(2)\n"
        "print(*(pid for _, _, pid in pool.run(settings)), flush=True)\n"
        "raise SystemExit(3)\n"
    )
    done = run_program(program)
    assert done.returncode == 3, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def test_nothing_is_reported_as_leaked() -> None:
    """A named semaphore, like those of tqdm, is unlinked when its rank exits."""
    program = (
        "from allnorm.testing import run_ranks\n"
        "from testing.test_spawn import make_semaphore\n"
        "run_ranks(make_semaphore, 2)\n"
    )
    done = run_program(program)
    assert (done.returncode, done.stderr) == (0, "")


_kept: list[object] = []


def make_semaphore(rank: int, world_size: int) -> None:
    _kept.append(multiprocessing.RLock())


@pytest.mark.gpu
@pytest.mark.world_size(2)
def test_cuda_ranks() -> None:
    results = run_ranks(cuda_add, 2, device="cuda")
    assert results == [(0, 3.0, 3.0), (1, 3.0, 3.0)]


@pytest.mark.gpu
def test_ranks_that_share_gpus() -> None:
    world_size = torch.cuda.device_count() + 1
    if world_size > 8:
        pytest.skip(f"{world_size} ranks are more than the kernels know")
    results = run_ranks(cuda_exchange, world_size, device="cuda", share_gpus=True)
    total = world_size * (world_size + 1) / 2
    assert results == [(rank % (world_size - 1), total, "one_shot") for rank in range(world_size)]


def cuda_exchange(rank: int, world_size: int) -> tuple[int, float, str]:
    with allnorm.Communicator() as comm:
        x = torch.full((1, 8), rank + 1.0, device=device())
        reduced = comm.all_reduce(x, algorithm="one_shot")
        plan = comm.plan(1, 8, torch.float32, algorithm="one_shot")
        assert device() == comm.device
        return comm.device.index, reduced[0, 7].item(), plan.algorithm


def cuda_add(rank: int, world_size: int) -> tuple[int, float, float]:
    on_cpu, on_gpu = torch.tensor([rank + 1.0]), torch.tensor([rank + 1.0], device="cuda")
    dist.all_reduce(on_cpu)
    dist.all_reduce(on_gpu)
    return torch.cuda.current_device(), on_cpu.item(), on_gpu.item()
