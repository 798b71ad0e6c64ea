"""A code object for AMD GPUs: its bytes, kernels and instructions, as the emulator takes them.

The instructions are read from the text of llvm-objdump, so that AMD's own tables decode them.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import pathlib
import re
import struct
from collections.abc import Iterable

from .toolchain import run_tool

_LINE = re.compile(r"^\t(\S+)\s*(.*?)\s*// ([0-9A-F]{12}): ((?:[0-9A-F]{8} ?)+)")
_REGISTER = re.compile(r"^([vsa])(\d+)$|^([vsa])\[(\d+):(\d+)\]$")
_NUMBER = re.compile(r"^-?(?:0x[0-9a-f]+|\d+)$")
_ENCODINGS = re.compile(r"_(?:e32|e64|sdwa)$")

_NONE, _SCALAR, _VECTOR, _CONSTANT = range(4)
_NAMED = {
    "vcc": (106, 2),
    "vcc_lo": (106, 1),
    "vcc_hi": (107, 1),
    "exec": (126, 2),
    "exec_lo": (126, 1),
    "exec_hi": (127, 1),
    "m0": (124, 1),
}
_FLOATS = ("0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0", "0.15915494")
_PRIVATE_APERTURE = 0x0002_0000_0000_0000
_ACCUMULATORS = 256  # accumulation registers follow the other vector registers
_FLAGS = {"sc0": 1, "sc1": 2, "nt": 4, "clamp": 8, "offen": 16}
_PRESERVE = 32
# Modifiers that change nothing: `src0_sel:DWORD` and the like are handled by name.
_PARTS = {"DWORD": 0, **{f"BYTE_{i}": 1 + i for i in range(4)}, "WORD_0": 5, "WORD_1": 6}
# The operands whose op_sel_hi bit is 1 unless the text says otherwise; v_fma_mix has none.
_ALL_HIGH = 7
_MODES = 0xF0  # FLOAT_MODE of a kernel: rounding to nearest even, denormals of all types are kept


class UnknownTextError(ValueError):
    """Text of an instruction that this module does not understand."""


class Operand(ctypes.Structure):
    """An operand: struct Operand in wave.h."""

    _fields_ = (
        ("value", ctypes.c_uint64),
        ("kind", ctypes.c_uint8),
        ("words", ctypes.c_uint8),
        ("negate", ctypes.c_uint8),
        ("absolute", ctypes.c_uint8),
        ("select", ctypes.c_uint8),
        ("is_float", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 2),
    )


class Encoded(ctypes.Structure):
    """An instruction: struct Encoded in wave.h."""

    _fields_ = (
        ("name", ctypes.c_char * 40),
        ("operands", Operand * 6),
        ("num_operands", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_int32),
        ("second_offset", ctypes.c_int32),
        ("op_sel", ctypes.c_uint32),
        ("op_sel_hi", ctypes.c_uint32),
        ("neg_lo", ctypes.c_uint32),
        ("neg_hi", ctypes.c_uint32),
        ("select", ctypes.c_uint32),
        ("table", ctypes.c_uint32),
        ("vmcnt", ctypes.c_int32),
        ("lgkmcnt", ctypes.c_int32),
        ("target", ctypes.c_int32),
        ("bytes", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
    )


class Kernel(ctypes.Structure):
    """The properties of a kernel that a launch needs: struct Kernel in machine.h."""

    _fields_ = (
        ("entry", ctypes.c_uint64),
        ("vectors", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("scratch_bytes", ctypes.c_uint32),
        ("arguments_bytes", ctypes.c_uint32),
        ("resources", ctypes.c_uint32),
        ("properties", ctypes.c_uint32),
    )


@dataclasses.dataclass
class Line:
    """An instruction as text.

    Attributes:
        address: Its offset in the image.
        name: The mnemonic.
        operands: The rest of the text.
        num_bytes: Its length.
    """

    address: int
    name: str
    operands: str
    num_bytes: int


def parse_operand(text: str) -> Operand:
    """Parses an operand.

    Raises:
        UnknownTextError: It is of no known kind.
    """
    operand = Operand(words=1)
    if re.match(r"^-[vs|a]", text):
        operand.negate, text = 1, text[1:]
    if text.startswith("|"):
        operand.absolute, text = 1, text.strip("|")
    if text.startswith("lit("):  # a constant that also has a shorter encoding
        text = text[4:-1]
    if found := _REGISTER.match(text):
        kind = found[1] or found[3]
        first = int(found[2] or found[4])
        last = int(found[2] or found[5])
        operand.kind = _SCALAR if kind == "s" else _VECTOR
        operand.value = first + (_ACCUMULATORS if kind == "a" else 0)
        operand.words = last - first + 1
    elif text in _NAMED:
        operand.kind = _SCALAR
        operand.value, operand.words = _NAMED[text]
    elif text in _FLOATS:
        operand.kind, operand.is_float = _CONSTANT, 1
        (operand.value,) = struct.unpack("<I", struct.pack("<f", float(text)))
    elif text == "src_private_base":
        operand.kind, operand.value = _CONSTANT, _PRIVATE_APERTURE
    elif text in ("off", "null"):
        operand.kind, operand.words = _NONE, 0
    elif _NUMBER.match(text):
        operand.kind, operand.value = _CONSTANT, int(text, 0) & (1 << 64) - 1
    else:
        raise UnknownTextError(f"unknown operand {text!r}")
    return operand


def _split(text: str) -> tuple[list[str], dict[str, str]]:
    """Returns the operands and the modifiers of an instruction's text."""
    parts = re.split(r",\s*(?![^\[]*\])", text)
    *operands, last = parts
    words = last.split()
    operands += words[:1]
    modifiers = {}
    for word in words[1:]:
        name, _, value = word.partition(":")
        modifiers[name] = value
    return [part for part in operands if part], modifiers


def _bits(text: str) -> int:
    return sum(int(bit) << i for i, bit in enumerate(text.strip("[]").split(",")))


def _set_modifiers(encoded: Encoded, modifiers: dict[str, str]) -> None:
    for name, value in modifiers.items():
        if name in _FLAGS:
            encoded.flags |= _FLAGS[name]
        elif name in ("offset", "offset0"):
            encoded.offset = int(value, 0)
        elif name == "offset1":
            encoded.second_offset = int(value, 0)
        elif name in ("op_sel", "op_sel_hi", "neg_lo", "neg_hi"):
            setattr(encoded, name, _bits(value))
        elif name == "bitop3":
            encoded.table = int(value, 0)
        elif name == "dst_sel":
            encoded.select = _PARTS[value]
        elif name == "dst_unused" and value in ("UNUSED_PAD", "UNUSED_PRESERVE"):
            encoded.flags |= _PRESERVE if value == "UNUSED_PRESERVE" else 0
        elif name in ("src0_sel", "src1_sel"):
            first = _first_source(encoded)
            encoded.operands[first + int(name[3])].select = _PARTS[value]
        else:
            raise UnknownTextError(f"unknown modifier {name}:{value}")


def _first_source(encoded: Encoded) -> int:
    has_carry = encoded.name.startswith((b"v_add_co", b"v_sub_co", b"v_subrev_co", b"v_addc_co"))
    return 2 if has_carry else 1


def encode(line: Line) -> Encoded:
    """Encodes an instruction; branches get the address of their target as `target`.

    Raises:
        UnknownTextError: The text has a part that is not known.
    """
    name = _ENCODINGS.sub("", line.name)
    encoded = Encoded(name=name.encode(), address=line.address, bytes=line.num_bytes)
    encoded.vmcnt = encoded.lgkmcnt = -1
    encoded.op_sel_hi = 0 if name.startswith("v_fma_mix") else _ALL_HIGH
    if name == "s_waitcnt":
        for counter, number in re.findall(r"(\w+)\((\d+)\)", line.operands):
            if counter in ("vmcnt", "lgkmcnt"):
                setattr(encoded, counter, int(number))
        return encoded
    if name == "s_branch" or name.startswith("s_cbranch"):
        words = int(line.operands.split()[0])
        words -= 1 << 16 if words >= 1 << 15 else 0
        encoded.target = line.address + 4 + 4 * words
        return encoded
    texts, modifiers = _split(line.operands)
    if name == "buffer_inv" or name == "buffer_wbl2":
        texts, modifiers = [], dict.fromkeys(line.operands.split(), "")
    elif name in ("s_nop", "s_sleep", "s_setprio", "s_barrier", "s_endpgm"):
        texts = []
    encoded.num_operands = len(texts)
    for i, text in enumerate(texts):
        encoded.operands[i] = parse_operand(text)
    _set_modifiers(encoded, modifiers)
    return encoded


def encode_all(lines: Iterable[Line], base: int) -> ctypes.Array[Encoded]:
    """Encodes instructions that are in memory from `base` on.

    An instruction whose text is not understood becomes one that stops the emulator with its name.

    Raises:
        ValueError: A branch leaves the code.
    """
    lines = list(lines)
    index = {line.address: i for i, line in enumerate(lines)}
    code = (Encoded * len(lines))()
    for i, line in enumerate(lines):
        try:
            encoded = encode(line)
        except UnknownTextError:
            text = f"{line.name} {line.operands}"[:39]
            encoded = Encoded(name=text.encode(), address=line.address, bytes=line.num_bytes)
        if encoded.name.startswith((b"s_branch", b"s_cbranch")):
            if encoded.target not in index:
                raise ValueError(f"a branch to {encoded.target:#x}, where no instruction is")
            encoded.target = index[encoded.target]
        encoded.address += base
        code[i] = encoded
    return code


def disassemble(path: pathlib.Path, cpu: str) -> list[Line]:
    """Returns the instructions of a code object or an assembled file."""
    text = run_tool("llvm-objdump", "-d", f"--mcpu={cpu}", path)
    found = map(_LINE.match, text.splitlines())
    return [
        Line(int(line[3], 16), line[1], line[2], 4 * len(line[4].split()))
        for line in found
        if line is not None
    ]


class CodeObject:
    """A code object in this process's memory.

    Attributes:
        path: Its file.
        lines: Its instructions.
        image: Its bytes as they are loaded; kernels read constants from there.
        base: The address of the image.
    """

    def __init__(self, path: pathlib.Path, cpu: str) -> None:
        """Loads a code object for `cpu`, for example `gfx942`."""
        self.path = path
        self.lines = disassemble(path, cpu)
        raw = path.read_bytes()
        program_at, section_at = struct.unpack_from("<QQ", raw, 0x20)
        program_bytes, programs, section_bytes, sections = struct.unpack_from("<HHHH", raw, 0x36)
        segments = [
            struct.unpack_from("<IIQQQQQQ", raw, program_at + i * program_bytes)
            for i in range(programs)
        ]
        loaded = [segment for segment in segments if segment[0] == 1]
        size = max(address + memory for _, _, _, address, _, _, memory, _ in loaded)
        self.image = ctypes.create_string_buffer(size + 4096)
        self.base = (ctypes.addressof(self.image) + 4095) // 4096 * 4096
        for _, _, offset, address, _, count, _, _ in loaded:
            ctypes.memmove(self.base + address, raw[offset : offset + count], count)
        table = [
            struct.unpack_from("<IIQQQQIIQQ", raw, section_at + i * section_bytes)
            for i in range(sections)
        ]
        self.size = size
        self._encoded: ctypes.Array[Encoded] | None = None
        accumulators = any(re.search(r"\ba(\d|\[)", line.operands) for line in self.lines)
        self._vectors = 2 * _ACCUMULATORS if accumulators else 0
        self._symbols: dict[str, int] = {}
        for section in table:
            if section[1] != 2:  # SHT_SYMTAB
                continue
            names_at = table[section[6]][4]
            for i in range(section[5] // 24):
                name_at, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", raw, section[4] + 24 * i)
                name = raw[names_at + name_at :].split(b"\0", 1)[0].decode()
                self._symbols[name] = value

    def kernels(self) -> list[str]:
        """Returns the mangled names of all kernels."""
        return [name[:-3] for name in self._symbols if name.endswith(".kd")]

    def kernel(self, name: str) -> Kernel:
        """Returns a kernel from its descriptor.

        Raises:
            ValueError: The kernel asks for a mode that the emulator does not have.
        """
        at = self._symbols[f"{name}.kd"]
        descriptor = ctypes.string_at(self.base + at, 64)
        shared, scratch, arguments = struct.unpack_from("<III", descriptor, 0)
        (entry,) = struct.unpack_from("<q", descriptor, 16)
        resources1, resources2 = struct.unpack_from("<II", descriptor, 48)
        properties, preloaded = struct.unpack_from("<HH", descriptor, 56)
        if resources1 >> 12 & 0xFF != _MODES or preloaded != 0:
            raise ValueError(f"{name}: modes {resources1:#x}, {preloaded} preloaded registers")
        return Kernel(
            entry=self.base + at + entry,
            vectors=self._vectors or 8 * ((resources1 & 63) + 1),
            shared_bytes=shared,
            scratch_bytes=scratch,
            arguments_bytes=arguments,
            resources=resources2,
            properties=properties,
        )

    def encoded(self) -> ctypes.Array[Encoded]:
        """Returns all instructions as the emulator takes them; computed once."""
        if self._encoded is None:
            self._encoded = encode_all(self.lines, self.base)
        return self._encoded

    def edited(self, changes: dict[int, tuple[str, str]]) -> CodeObject:
        """Returns a code object with other instructions at some addresses.

        Args:
            changes: The mnemonic and the operands, by the address in the image. They must not be
                branches.
        """
        result = copy.copy(self)
        encoded = self.encoded()
        result._encoded = type(encoded)(*encoded)
        result.lines = list(self.lines)
        for i, line in enumerate(self.lines):
            if line.address in changes:
                result.lines[i] = Line(line.address, *changes[line.address], line.num_bytes)
                result._encoded[i] = encode_all([result.lines[i]], self.base)[0]
        return result
