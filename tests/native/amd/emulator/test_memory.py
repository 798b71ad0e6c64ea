"""Tests that the emulator's memory is as weak as memory.h says, and that each effect can be off."""

from __future__ import annotations

import dataclasses

import pytest

from .machine import Settings, StopError
from .test_accesses import LANES, Bench

PLAIN = Settings(late_stores=False, late_loads=False, torn=False, caches=False, noise=False)
WAIT = "s_waitcnt vmcnt(0) lgkmcnt(0)"


def settings(**changes: object) -> Settings:
    """Returns settings with all effects off but the given ones."""
    return dataclasses.replace(PLAIN, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "register"),
    [
        ("global_load_dword v12, v[2:3], off\nv_mov_b32 v13, v12", "v12"),
        ("global_load_dword v12, v[2:3], off\nv_mov_b32 v12, 0", "v12"),
        ("global_load_dwordx2 v[12:13], v[2:3], off\nv_add_u32 v14, v13, v4", "v13"),
        ("ds_read_b32 v12, v10\nv_mov_b32 v13, v12", "v12"),
        ("ds_read_b32 v12, v10\ns_waitcnt vmcnt(0)\nv_mov_b32 v13, v12", "v12"),
        ("s_load_dword s16, s[2:3], 0x0\ns_mov_b32 s17, s16", "s16"),
        ("flat_load_dword v12, v[2:3]\ns_waitcnt vmcnt(0)\nv_mov_b32 v13, v12", "v12"),
        ("scratch_load_dword v12, off, off\nv_mov_b32 v13, v12", "v12"),
        # A wait that lets the newest load go on.
        ("global_load_dword v12, v[2:3], off\nglobal_load_dword v13, v[2:3], off offset:4\n"
         "s_waitcnt vmcnt(1)\nv_mov_b32 v14, v13", "v13"),
        # Scalar loads return in any order, so that only a wait for all of them counts.
        ("s_load_dword s16, s[2:3], 0x0\ns_load_dword s17, s[2:3], 0x4\n"
         "s_waitcnt lgkmcnt(1)\ns_mov_b32 s18, s16", "s16"),
    ],
)  # fmt: skip
def test_a_register_cannot_be_used_before_the_wait_for_its_load(text: str, register: str) -> None:
    with pytest.raises(StopError, match=f"{register[0]}{register[1:]} is used before"):
        Bench(text).run()
    Bench(text, settings(checks_waits=False)).run()


def test_a_load_may_replace_what_an_earlier_one_has_yet_to_write() -> None:
    text = (
        f"global_load_dword v12, v[2:3], off\nglobal_load_dword v12, v[2:3], off offset:4\n{WAIT}"
    )
    for seed in range(8):
        bench = Bench(text, Settings(seed=seed))
        bench.memory[:] = [k % 4 for k in range(len(bench.memory))]
        bench.run()
        assert bench.wave.vectors[12][0] == 1
    # Shared memory is not in order with them.
    with pytest.raises(StopError, match="v12 is used before"):
        Bench("ds_read_b32 v12, v10\nglobal_load_dword v12, v[2:3], off").run()


def test_a_register_can_be_used_after_the_wait_for_its_load() -> None:
    bench = Bench(
        "global_load_dword v12, v[2:3], off\nglobal_load_dword v13, v[2:3], off offset:4\n"
        "s_waitcnt vmcnt(1)\nv_mov_b32 v14, v12\nds_read_b32 v15, v10\nds_read_b32 v16, v10\n"
        f"s_waitcnt lgkmcnt(1)\nv_mov_b32 v17, v15\n{WAIT}"
    )
    bench.memory[:] = 7
    bench.run()
    assert bench.wave.vectors[14][0] == 7


def test_stores_are_late_but_the_wave_itself_sees_them() -> None:
    text = (
        "global_store_dword v[2:3], v4, off sc0 sc1\n{}\nglobal_load_dword v12, v[2:3], off sc0 sc1"
    )
    bench = Bench(text.format("s_nop 0") + f"\n{WAIT}")
    bench.run()
    assert bench.wave.vectors[12][0] == 0xAA00_0000


# A message between two blocks of different devices, which a lone wave cannot show: two kernels.
MESSAGE = """
  .amdgcn_target "amdgcn-amd-amdhsa--gfx942"
  .text
  .p2align 8
  .globl {name}
{name}:
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  v_lshlrev_b32 v1, 4, v0
  v_mov_b32 v2, 1
  v_mov_b32 v3, 2
  v_mov_b32 v4, 3
  v_mov_b32 v5, 4
  v_mov_b32 v8, 0
  s_waitcnt lgkmcnt(0)
{body}
  s_endpgm
  .rodata
  .p2align 6
  .amdhsa_kernel {name}
    .amdhsa_next_free_vgpr 32
    .amdhsa_next_free_sgpr 32
    .amdhsa_accum_offset 32
    .amdhsa_user_sgpr_kernarg_segment_ptr 1
    .amdhsa_float_denorm_mode_32 3
  .end_amdhsa_kernel
"""
# s[4:5]: the data, 16 bytes per lane. s[6:7]: a flag, and results behind it.
SEND = """  global_store_dwordx4 v1, v[2:5], s[4:5]{scope}
{release}  global_store_dword v8, v2, s[6:7] sc0 sc1"""
RELEASE = "  buffer_wbl2 sc0 sc1\n  s_waitcnt vmcnt(0)\n"
LOOP = """{early}.L{name}_poll:
  global_load_dword v6, v8, s[6:7] sc0 sc1
  s_waitcnt vmcnt(0)
  v_readfirstlane_b32 s8, v6
  s_cmp_eq_u32 s8, 0
  s_cbranch_scc1 .L{name}_poll
{acquire}  global_load_dwordx4 v[10:13], v1, s[4:5]{scope}
  s_waitcnt vmcnt(0)
  v_lshlrev_b32 v7, 4, v0
  global_store_dwordx4 v7, v[10:13], s[6:7] offset:128 sc0 sc1"""
EARLY = "  global_load_dword v9, v1, s[4:5]\n  s_waitcnt vmcnt(0)\n"
ACQUIRE = "  buffer_inv sc0 sc1\n"


def stale_words(
    send: str, receive: str, given: Settings, *, cached: bool = True, seeds: int = 20
) -> int:
    """Returns how many of the words of a message are stale or missing, over all seeds."""
    from .launches import run_kernels

    wrong = 0
    for seed in range(seeds):
        _data, results = run_kernels(
            {0: MESSAGE.format(name="send", body=send),
             1: MESSAGE.format(name="receive", body=receive.replace("{name}", "receive"))},
            dataclasses.replace(given, seed=seed),
            cached=cached,
        )  # fmt: skip
        wrong += int((results[32 : 32 + 4 * LANES].reshape(LANES, 4) != [1, 2, 3, 4]).sum())
    return wrong


def receiver(*, early: bool = False, acquire: bool = True, scope: str = "") -> str:
    """Returns the text of the kernel that receives."""
    return LOOP.format(
        early=EARLY if early else "",
        name="receive",
        acquire=ACQUIRE if acquire else "",
        scope=scope,
    )


def test_a_message_with_release_and_acquire_arrives() -> None:
    send = SEND.format(scope="", release=RELEASE)
    assert stale_words(send, receiver(early=True), Settings()) == 0


def test_late_stores_show_a_missing_wait() -> None:
    send = SEND.format(scope=" sc0 sc1", release="")
    receive = receiver(scope=" sc0 sc1")
    assert stale_words(send, receive, settings(late_stores=True)) > 0
    assert stale_words(send, receive, settings(torn=True)) == 0


def test_a_cache_shows_a_missing_write_back() -> None:
    send = SEND.format(scope="", release="  s_waitcnt vmcnt(0)\n")
    receive = receiver(scope=" sc0 sc1")
    assert stale_words(send, receive, settings(caches=True)) > 0
    assert stale_words(send, receive, settings(late_stores=True)) == 0
    # Uncached memory is not kept in the cache that needs it.
    assert stale_words(send, receive, settings(caches=True), cached=False) == 0


@pytest.mark.parametrize("cached", [True, False])
def test_a_cache_shows_a_missing_invalidation(cached: bool) -> None:
    send = SEND.format(scope="", release=RELEASE)
    receive = receiver(early=True, acquire=False)
    given = settings(caches=True, schedule=0)
    assert stale_words(send, receive, given, cached=cached) > 0
    assert stale_words(send, receive, settings(), cached=cached) == 0


def test_torn_stores_show_a_test_of_one_word() -> None:
    # The receiver polls the last word of the data, and takes the others as arrived.
    send = "  global_store_dwordx4 v1, v[2:5], s[4:5] sc0 sc1"
    receive = """.Lreceive_poll:
  global_load_dwordx4 v[10:13], v1, s[4:5] sc0 sc1
  s_waitcnt vmcnt(0)
  v_cmp_eq_u32 vcc, 0, v13
  s_cbranch_vccnz .Lreceive_poll
  v_lshlrev_b32 v7, 4, v0
  global_store_dwordx4 v7, v[10:13], s[6:7] offset:128 sc0 sc1"""
    assert stale_words(send, receive, settings(torn=True, late_stores=True)) > 0
    assert stale_words(send, receive, settings(late_stores=True)) == 0


def test_late_loads_show_a_missing_order_of_loads() -> None:
    # The data is loaded before the flag is known.
    send = SEND.format(scope=" sc0 sc1", release="  s_waitcnt vmcnt(0)\n")
    receive = """.Lreceive_poll:
  global_load_dword v6, v8, s[6:7] sc0 sc1
  global_load_dwordx4 v[10:13], v1, s[4:5] sc0 sc1
  s_waitcnt vmcnt(0)
  v_readfirstlane_b32 s8, v6
  s_cmp_eq_u32 s8, 0
  s_cbranch_scc1 .Lreceive_poll
  v_lshlrev_b32 v7, 4, v0
  global_store_dwordx4 v7, v[10:13], s[6:7] offset:128 sc0 sc1"""
    given = settings(late_loads=True, late_stores=True, torn=True, quantum=3)
    assert stale_words(send, receive, given, seeds=200) > 0
    assert stale_words(send, receive, settings(late_stores=True, torn=True, quantum=3)) == 0


def test_runs_are_equal_for_equal_seeds() -> None:
    send = SEND.format(scope=" sc0 sc1", release="")
    counts = [stale_words(send, receiver(scope=" sc0 sc1"), Settings(), seeds=8) for _ in range(2)]
    assert counts[0] == counts[1]


def test_an_unknown_instruction_stops_with_its_name() -> None:
    with pytest.raises(StopError, match="v_mfma_f32_4x4x1"):
        Bench("v_mfma_f32_4x4x1_16b_f32 a[0:3], v0, v1, a[0:3]").run()


def instructions() -> set[str]:
    """Returns the instructions that this file tests."""
    return {"buffer_inv", "buffer_wbl2", "s_waitcnt", "s_barrier"}
