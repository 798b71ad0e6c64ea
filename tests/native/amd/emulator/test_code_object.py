"""Tests the decoder, and that every instruction of the emulator has a test of its own."""

from __future__ import annotations

import pytest

from . import test_accesses, test_floats, test_memory, test_scalar, test_vector
from .code_object import Line, UnknownTextError, encode, encode_all, parse_operand
from .machine import known_instructions


def without_encoding(name: str) -> str:
    """Returns a mnemonic without the suffix of its encoding."""
    for suffix in ("_e32", "_e64", "_sdwa"):
        name = name.removesuffix(suffix)
    return name


def test_every_instruction_is_tested() -> None:
    files = (test_accesses, test_floats, test_memory, test_scalar, test_vector)
    tested = {without_encoding(name) for file in files for name in file.instructions()}
    untested = known_instructions() - tested - {"s_code_end"}
    assert untested == set()
    assert tested - known_instructions() == set()


@pytest.mark.parametrize(
    ("text", "kind", "value", "words", "signs"),
    [
        ("v7", 2, 7, 1, (0, 0)),
        ("-v[6:7]", 2, 6, 2, (1, 0)),
        ("-|v3|", 2, 3, 1, (1, 1)),
        ("a2", 2, 258, 1, (0, 0)),
        ("s[4:7]", 1, 4, 4, (0, 0)),
        ("vcc", 1, 106, 2, (0, 0)),
        ("exec_hi", 1, 127, 1, (0, 0)),
        ("-1", 3, (1 << 64) - 1, 1, (0, 0)),
        ("0xff", 3, 255, 1, (0, 0)),
        ("lit(0xff)", 3, 255, 1, (0, 0)),
        ("-0.5", 3, 0xBF00_0000, 1, (0, 0)),
        ("off", 0, 0, 0, (0, 0)),
    ],
)
def test_operands(text: str, kind: int, value: int, words: int, signs: tuple[int, int]) -> None:
    operand = parse_operand(text)
    assert (operand.kind, operand.value, operand.words) == (kind, value, words)
    assert (operand.negate, operand.absolute) == signs


@pytest.mark.parametrize("text", ["ttmp3", "v[0:", "lits", "sext(v1)", "0.25"])
def test_unknown_operands_are_refused(text: str) -> None:
    with pytest.raises(UnknownTextError, match="unknown operand"):
        parse_operand(text)


def test_modifiers() -> None:
    store = encode(Line(8, "global_store_dword", "v[0:1], v2, off offset:-16 sc0 sc1", 8))
    assert (store.offset, store.flags, store.num_operands) == (-16, 3, 3)
    wait = encode(Line(8, "s_waitcnt", "vmcnt(3) lgkmcnt(0)", 4))
    assert (wait.vmcnt, wait.lgkmcnt) == (3, 0)
    only = encode(Line(8, "s_waitcnt", "vmcnt(3)", 4))
    assert only.lgkmcnt == -1
    packed = encode(Line(8, "v_pk_add_f32", "v[0:1], v[2:3], v[4:5] op_sel_hi:[0,1]", 8))
    assert (packed.op_sel, packed.op_sel_hi) == (0, 2)
    with pytest.raises(UnknownTextError, match="unknown modifier"):
        encode(Line(8, "v_mul_f32_e64", "v0, v1, v2 mul:2", 8))


def test_branches() -> None:
    lines = [Line(0, "s_nop", "0", 4), Line(4, "s_branch", "65534", 4)]
    assert encode_all(lines, 0)[1].target == 0
    with pytest.raises(ValueError, match="no instruction"):
        encode_all([Line(4, "s_branch", "7", 4)], 0)


def test_text_that_is_not_understood_becomes_an_unknown_instruction() -> None:
    (unknown,) = encode_all([Line(0, "v_mul_f32_e64", "v0, v1, v2 mul:2", 8)], 0)
    assert unknown.name.startswith(b"v_mul_f32_e64 v0")
