"""Tests the disassembly reader and the rules with handwritten code; needs no CUDA toolkit."""

from __future__ import annotations

import dataclasses
import json

import pytest

from . import rules
from .disassembly import Kernel, parse
from .kernels import ANY_WORLD_SIZE, Variant, all_variants, variant_of

BASIC = "XtlNS_8FeaturesELb0ELb0ELb0ELb0ELb0EEE"
EXTENDED = BASIC.replace("b0", "b1")
EXTENDED_DENSE = EXTENDED.replace("b1", "b0", 1)
ONE_SHOT = (
    "_ZN7allnorm12fused_kernelINS_11FusedKernelINS_8Bfloat16ELi2ENS_9DenseRowsENS_7OneShotE"
    f"NS_11OneRowAheadELNS_4GridE0E{BASIC}NS_4E4m3EEEEEvNS_11FusedParamsE"
)
OWNED = (
    "_ZN7allnorm17owned_rows_kernelINS_11OwnedKernelINS_7Float32ELi0ENS_9DenseRowsELNS_5OwnedE1E"
    f"Lb0E{BASIC}NS_4E4m3EEEEEvNS_15OwnedRowsParamsE"
)
LOCAL = (
    "_ZN7allnorm12local_kernelINS_13AnyRowsKernelINS_7Float16ELb1E"
    f"{BASIC}NS_5PlainEEEEEvNS_11LocalParamsE"
)
LOCAL_ROWS = (
    "_ZN7allnorm17local_rows_kernelINS_15LocalRowsKernelINS_7Float16ENS_10SummedRowsE"
    f"{BASIC}NS_5PlainEEEEEvNS_11LocalParamsE"
)
TEAMS = (
    "_ZN7allnorm16team_rows_kernelINS_10TeamKernelINS_8Bfloat16ELi2ENS_4E4m3EEEEEvNS_11FusedParamsE"
)
VARIANT = Variant("one_shot", "Bfloat16", 2, False)

WAIT = "ACQBULK"
NUMBER_LOAD = "LDG.E.STRONG.SYS R12,desc[UR14][R2.64]"
NUMBER_STORE = "STG.E.STRONG.SYS desc[UR14][R2.64+0x2280],R50"
FENCE = ("MEMBAR.ALL.CTA", "MEMBAR.ALL.SYS", "ERRBAR", "CCTL.IVALL")


def kernel(*lines: str, frame_bytes: int = 0) -> Kernel:
    """Returns a kernel with one instruction per line, parsed from JSON like nvdisasm's output."""
    instructions = []
    for line in lines:
        words = line.split()
        found = {"predicate": words.pop(0)} if words[0].startswith("@") else {}
        found["opcode"] = words.pop(0)
        if words:
            found["operands"] = " ".join(words)
        instructions.append(found)
    function = {"function-name": "k", "start": 0, "sass-instructions": instructions}
    (made,) = parse(json.dumps([{}, [function]]), {"k": frame_bytes})
    return made


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        (ONE_SHOT, Variant("one_shot", "Bfloat16", 2, True)),
        (
            ONE_SHOT.replace("11OneRowAheadELNS_4GridE0", "5PacedELNS_4GridE1"),
            Variant("one_shot_dense", "Bfloat16", 2, True),
        ),
        (TEAMS, Variant("one_shot_few", "Bfloat16", 2, True)),
        (
            ONE_SHOT.replace("OneShot", "TwoShot").replace("11OneRowAhead", "7Relayed"),
            Variant("two_shot", "Bfloat16", 2, True),
        ),
        (OWNED, Variant("owned_finished", "Float32", ANY_WORLD_SIZE, True)),
        (LOCAL, Variant("local_aligned", "Float16", 1, False)),
        (LOCAL_ROWS, Variant("local_rows", "Float16", 1, False)),
        (
            ONE_SHOT.replace("9DenseRows", "10ExpertRows")
            .replace(BASIC, EXTENDED)
            .replace("4E4m3", "12AnyQuantized"),
            Variant("one_shot", "Bfloat16", 2, True, "kExtended"),
        ),
        (
            ONE_SHOT.replace(BASIC, EXTENDED_DENSE).replace("4E4m3", "12AnyQuantized"),
            Variant("one_shot", "Bfloat16", 2, True, "kExtendedDense"),
        ),
        (
            LOCAL_ROWS.replace("10SummedRows", "15LocalExpertRows").replace(BASIC, EXTENDED),
            Variant("local_rows", "Float16", 1, False, "kExtended"),
        ),
    ],
)
def test_names_of_kernels(name: str, variant: Variant) -> None:
    assert variant_of(name) == variant
    assert variant in all_variants()
    assert variant_of("_Z3foov") is None


def test_classification_of_accesses() -> None:
    wide, number, atomic, shared = kernel(
        "LDG.E.128.STRONG.SYS R4,desc[UR4][R2.64]",
        "@!P0 STG.E.STRONG.GPU desc[UR4][R2.64],R4",
        "ATOM.E.CAS.64.STRONG.GPU PT,R2,[R4],R6,R8",
        "STS [R0],R1",
    ).instructions
    assert (wide.is_load, wide.is_store, wide.access_bytes) == (True, False, 16)
    assert wide.is_system_wide
    assert (number.is_store, number.access_bytes, number.predicate) == (True, 4, "@!P0")
    assert not number.is_system_wide
    assert [i.is_global for i in (wide, number, atomic, shared)] == [True, True, True, False]
    assert str(number) == "/*0010*/ @!P0 STG.E.STRONG.GPU desc[UR4][R2.64],R4"


def test_paths_take_both_values_of_a_predicate() -> None:
    branches = kernel("@P0 BRA 0x30", "NOP", "EXIT", "NOP", "EXIT", "LDG.E R0,[R2]")
    assert branches.reachable() == {0, 1, 2, 3, 4}
    assert [i.opcode for i in branches.subroutines] == ["LDG.E"]
    assert kernel("BRA 0x20", "NOP", "EXIT").reachable() == {0, 2}
    assert kernel("BRA P1,0x20", "NOP", "EXIT").reachable() == {0, 1, 2}
    assert kernel("@P0 EXIT", "NOP", "EXIT").reachable() == {0, 1, 2}


def test_paths_join_at_the_end_of_a_barrier() -> None:
    nested = ("BSSY B0,0x40", "@P0 BRA 0x30", "NOP", "BSYNC B0", "EXIT", "NOP", "EXIT")
    assert kernel(*nested).reachable() == {0, 1, 2, 3, 4}
    elsewhere = ("BSSY B0,0x50", "@P0 BRA 0x30", "NOP", "BSYNC B0", "EXIT", "NOP", "EXIT")
    assert kernel(*elsewhere).reachable() >= {5, 6}


def test_paths_end_at_stop() -> None:
    code = kernel("@P0 BRA 0x30", WAIT, "EXIT", "NOP", "EXIT")
    assert code.reachable(stop=lambda found: found.verb == WAIT) == {0, 1, 3, 4}


def test_a_computed_jump_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="BRX"):
        kernel("BRX R2", "EXIT").reachable()


def test_access_before_the_wait_on_one_path() -> None:
    good = kernel("@P0 BRA 0x20", "NOP", WAIT, "LDG.E R0,[R2]", "PREEXIT", "EXIT")
    assert list(rules.dependent_launch(good, VARIANT)) == []
    bad = kernel("@P0 BRA 0x30", "NOP", WAIT, "LDG.E R0,[R2]", "PREEXIT", "EXIT")
    assert any("LDG.E" in text for text in rules.dependent_launch(bad, VARIANT))


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ((WAIT, *FENCE, NUMBER_STORE, "EXIT"), None),
        ((WAIT, NUMBER_STORE, "EXIT"), "0 system-wide fences"),
        ((WAIT, *FENCE, *FENCE, NUMBER_STORE, "EXIT"), "2 system-wide fences"),
        ((WAIT, *FENCE, NUMBER_LOAD, NUMBER_STORE, "EXIT"), "followed by /*0050*/ LDG"),
        ((WAIT, NUMBER_STORE, *FENCE, "EXIT"), "followed by no access"),
        ((*FENCE, WAIT, NUMBER_STORE, "EXIT"), "before the wait for the preceding grid"),
        ((WAIT, "@P0 BRA 0x60", *FENCE, NUMBER_STORE, "EXIT"), "has not passed"),
    ],
)
def test_place_of_the_fence(code: tuple[str, ...], word: str | None) -> None:
    found = list(rules.one_system_fence(kernel(*code), VARIANT))
    if word is None:
        assert found == []
    else:
        assert any(word in text for text in found), found


def test_accesses_of_half_size() -> None:
    whole = ["@P0 STG.E.128.STRONG.SYS desc[UR4][R2.64],R4"] * 2
    halves = ["STG.E.64.STRONG.SYS desc[UR4][R2.64],R4"] * 2
    served = ["STG.E.64.STRONG.SYS [R2],R4"] * 2 + ["STG.E.STRONG.SYS [R2],R4"]
    assert list(rules.pushes(kernel(*whole, *served), VARIANT)) == []
    assert len(list(rules.pushes(kernel(whole[0], *halves, *served), VARIANT))) == 2
    polled = ["LDG.E.64.STRONG.SYS R4,[R2]"] * 2 + ["LDG.E.STRONG.SYS R4,[R2]"] * 2
    wide = "LDG.E.128.STRONG.SYS R4,[R2]"
    assert list(rules.polls(kernel(wide, *polled), VARIANT)) == []
    assert len(list(rules.polls(kernel(*polled, polled[0], polled[0]), VARIANT))) == 2


def test_a_kernel_that_never_triggers_dependent_launch() -> None:
    assert list(rules.dependent_launch(kernel(WAIT, "EXIT"), VARIANT)) != []


def test_order_of_a_fault_record() -> None:
    store = "STG.E.STRONG.SYS [R2],R4"
    calls = ("CALL.REL.NOINC 0x30", "EXIT", "NOP")
    good = kernel(*calls, *[store] * 8, *FENCE, store, "RET")
    assert list(rules.fault_record(good, VARIANT)) == []
    early = kernel(*calls, *[store] * 9, *FENCE, "RET")
    assert len(list(rules.fault_record(early, VARIANT))) == 2
    of_gpu = [line.replace("SYS", "GPU") for line in FENCE]
    assert list(rules.fault_record(kernel(*calls, *[store] * 8, *of_gpu, store, "RET"), VARIANT))


def test_polls_used_one_by_one() -> None:
    loads = [f"@P{i} LDG.E.128.STRONG.SYS R{4 * i + 8},desc[UR9][R2.64]" for i in range(3)]
    tests = [f"ISETP.NE.AND P3,PT,R{4 * i + 9},-0x1,PT" for i in range(3)]
    of_three = dataclasses.replace(VARIANT, world_size=3)
    assert list(rules.polls_in_flight(kernel(*loads, *tests), of_three)) == []
    apart = kernel(loads[0], tests[0], *loads[1:], *tests[1:])
    assert any("2 polls" in text for text in rules.polls_in_flight(apart, of_three))
    assert list(rules.polls_in_flight(kernel(loads[0], tests[0]), VARIANT)) == []


def test_spills_and_local_kernels() -> None:
    assert list(rules.frame(kernel("EXIT"), VARIANT)) == []
    assert list(rules.frame(kernel("EXIT", frame_bytes=8), VARIANT)) != []
    local = Variant("local_any", "Float16", 1, False)
    assert rules.complaints(kernel(WAIT, "STG.E.128 [R2],R4", "PREEXIT", "EXIT"), local) == []
    assert rules.complaints(kernel(WAIT, NUMBER_STORE, "PREEXIT", "EXIT"), local) != []
    rows = Variant("local_rows", "Float16", 1, False)
    for variant, scope, accepted in (
        (rows, "GPU", True),
        (rows, "SYS", False),
        (local, "GPU", False),
    ):
        code = kernel(WAIT, f"MEMBAR.ALL.{scope}", "STG.E.128 [R2],R4", "PREEXIT", "EXIT")
        assert (rules.complaints(code, variant) == []) == accepted
