"""Tests the disassembly reader and the rules with handwritten code; needs no LLVM."""

from __future__ import annotations

import pytest

from native.sass.kernels import Variant, all_variants, instantiation, traits, variant_of

from . import rules
from .compiler import Resources, units
from .disassembly import Function, parse

VARIANT = Variant("one_shot", "Bfloat16", 2, False)
NAME = "kernel"
WAIT = "s_waitcnt vmcnt(0)"
NUMBER_LOAD = "global_load_dword v0, v[2:3], off sc0 sc1"
NUMBER_STORE = "global_store_dword v[2:3], v0, off sc0 sc1"
PUSH = "global_store_dwordx2 v[2:3], v[0:1], off sc0 sc1"
POLL = "global_load_dwordx2 v[0:1], v[2:3], off sc0 sc1"
WRITE_BACK = ("buffer_wbl2 sc0 sc1", WAIT, "buffer_inv sc0 sc1")
END = "s_endpgm"


def kernel(*lines: str, spills: int = 0, scratch_bytes: int = 0) -> Function:
    """Returns a kernel with one instruction per line, parsed from text like llvm-objdump's.

    `-> 3` at the end of a line is a jump to line 3.
    """
    text = f"0000000000001000 <{NAME}>:\n"
    for i, line in enumerate(lines):
        code, _, target = line.partition(" -> ")
        where = f" <{NAME}+0x{4 * int(target):x}>" if target not in ("", "0") else ""
        where = f" <{NAME}>" if target == "0" else where
        text += f"\t{code}  // {0x1000 + 4 * i:012X}: BF800000{where}\n"
    needs = Resources(NAME, 64, spills, 0, 0, scratch_bytes)
    (made,) = parse(text, {NAME: needs})
    return made


def test_names_of_kernels() -> None:
    name = (
        "_ZN7allnorm16wide_rows_kernelINS_14WideRowsKernelINS_8Bfloat16ELi2ENS_10ExpertRowsE"
        "NS_7OneShotEXtlNS_8FeaturesELb1ELb1ELb1ELb1ELb1EEENS_5PlainELi4EEEEEvNS_11FusedParamsE"
    )
    variant = Variant("one_shot_wide", "Bfloat16", 2, False, "kExtended")
    assert variant_of(name) == variant
    assert variant in all_variants(clusters=False) - all_variants()
    assert traits(variant) == ("bfloat16", "one_shot_wide", "x2", "extended", "plain")
    assert instantiation(variant).startswith(
        "wide_rows_kernel<WideRowsKernel<Bfloat16, 2, ExpertRows, OneShot, kExtended, Plain>>("
    )


def test_units_contain_the_chosen_kernels() -> None:
    (unit,) = units(["bfloat16", "two_shot", "x2", "x8", "basic"])
    assert unit.name == "bfloat16-two_shot"
    assert {v.world_size for v in unit.variants} == {2, 8}
    assert unit.source.count("template __global__") == 4
    assert sum(len(unit.variants) for unit in units()) == len(all_variants(clusters=False))
    with pytest.raises(ValueError, match="three_shot: expected any, "):
        units(["three_shot"])


def test_classification_of_instructions() -> None:
    push, poll, atomic, plain, wait, scratch = kernel(
        PUSH,
        "global_load_dwordx4 v[0:3], v[4:5], off offset:16 sc0 sc1",
        "global_atomic_add_x2 v2, v[0:1], s[6:7] offset:16",
        "global_store_byte v[0:1], v2, off",
        "s_waitcnt vmcnt(3) lgkmcnt(0)",
        "scratch_store_dword off, v40, s33",
        END,
    ).instructions[:6]
    assert (push.is_store, push.is_load, push.access_bytes, push.is_system_wide) == (1, 0, 8, 1)
    assert (poll.is_store, poll.is_load, poll.access_bytes, poll.is_system_wide) == (0, 1, 16, 1)
    assert atomic.is_atomic
    assert (plain.access_bytes, plain.is_system_wide) == (1, False)
    assert (wait.most_outstanding, wait.waits_for_all) == (3, False)
    assert [found.is_global for found in (push, atomic, wait, scratch)] == [
        True,
        True,
        False,
        False,
    ]
    assert str(scratch) == "1014: scratch_store_dword off, v40, s33"


def test_paths_take_both_values_of_a_condition() -> None:
    code = kernel("s_cbranch_vccz 2 -> 3", "s_nop 0", END, "s_branch 1 -> 5", "s_nop 0", END)
    assert code.reachable() == {0, 1, 2, 3, 5}
    assert kernel("s_nop 0", "s_cbranch_execnz 9 -> 0", END).after(1)[0].opcode == "s_nop"


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ((*WRITE_BACK, NUMBER_STORE, END), None),
        ((NUMBER_STORE, END), "0 write-backs"),
        ((*WRITE_BACK, *WRITE_BACK, NUMBER_STORE, END), "2 write-backs"),
        ((*WRITE_BACK, NUMBER_LOAD, NUMBER_STORE, END), "followed by 100c: global_load"),
        ((NUMBER_STORE, *WRITE_BACK, END), "followed by , not"),
        (("s_cbranch_vccz 3 -> 4", *WRITE_BACK, NUMBER_STORE, END), "has not passed"),
    ],
)
def test_place_of_the_fence(code: tuple[str, ...], word: str | None) -> None:
    found = list(rules.one_system_fence(kernel(*code), VARIANT))
    if word is None:
        assert found == []
    else:
        assert any(word in text for text in found), found


def test_a_write_back_that_one_path_does_not_wait_for() -> None:
    good = kernel("buffer_wbl2 sc0 sc1", WAIT, NUMBER_STORE, END)
    assert list(rules.write_backs_are_waited_for(good)) == []
    bad = kernel("buffer_wbl2 sc0 sc1", "s_cbranch_vccz 1 -> 3", WAIT, NUMBER_STORE, END)
    assert list(rules.write_backs_are_waited_for(bad)) != []
    partly = kernel("buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(1)", NUMBER_STORE, END)
    assert list(rules.write_backs_are_waited_for(partly)) != []


def test_polls_that_are_waited_for_one_by_one() -> None:
    of_four = Variant("one_shot", "Bfloat16", 4, False)
    assert list(rules.polls_in_flight(kernel(*[POLL] * 6, WAIT, END), of_four)) == []
    pairs = kernel(*[POLL, POLL, "s_waitcnt vmcnt(1)"] * 3, END)
    assert any("expected 6" in text for text in rules.polls_in_flight(pairs, of_four))


def test_a_half_without_a_scope() -> None:
    upper = "global_load_dwordx2 v[4:5], v[2:3], off offset:8 sc0 sc1"
    for pair in ((POLL, upper), (upper.replace("8 sc", "-8 sc"), POLL), (POLL, "v_mov", upper)):
        assert list(rules.halves_alike(kernel(*pair, END))) == []
        for plain in range(len(pair)):
            lines = [
                line.replace(" sc0 sc1", "") if i == plain else line for i, line in enumerate(pair)
            ]
            expected = lines[plain] != pair[plain]
            assert bool(list(rules.halves_alike(kernel(*lines, END)))) == expected
    # A load of 8 bytes of ordinary memory.
    other = "global_load_dwordx2 v[4:5], v[6:7], off"
    assert list(rules.halves_alike(kernel(POLL, WAIT, other, END))) == []


def test_narrow_scopes() -> None:
    counter = "global_atomic_add_x2 v2, v[0:1], s[6:7] offset:16"
    assert list(rules.scopes(kernel(counter, PUSH, END), VARIANT)) == []
    for line in (PUSH.replace("sc0 ", ""), "buffer_inv sc1", f"{counter} sc1"):
        assert list(rules.scopes(kernel(counter, line, END), VARIANT)) != []


def test_scratch_memory_of_kernels_with_and_without_spills() -> None:
    store = "scratch_store_dwordx2 off, v[0:1], off"
    load = "global_load_dword v0, v[2:3], off"
    assert list(rules.head(kernel(store, load, END), VARIANT)) != []
    assert list(rules.head(kernel(load, store, END), VARIANT)) == []
    assert list(rules.spills(kernel(load, store, END), VARIANT)) != []
    assert list(rules.spills(kernel(END, spills=1, scratch_bytes=32), VARIANT)) != []
    assert list(rules.spills(kernel(END, scratch_bytes=16), VARIANT)) == []
    assert list(rules.spills(kernel(END, scratch_bytes=496), VARIANT)) != []


def test_order_of_a_fault_record() -> None:
    store = NUMBER_STORE
    assert list(rules.fault_record(kernel(*[store] * 8, *WRITE_BACK, store, END))) == []
    assert len(list(rules.fault_record(kernel(*[store] * 9, *WRITE_BACK, END)))) == 2
