"""What there is to say of a call that ranks must make alike, in numbers and in words."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

from allnorm.core import _native
from allnorm.core.launch import Launch

_OPS = {
    _native.ALL_REDUCE: "all_reduce",
    _native.ADD_RMS_NORM: "all_reduce_add_rms_norm",
    _native.ALL_GATHER_ROWS: "all_gather_rows",
}
_REFUSED = -1


class Announcement(NamedTuple):
    """What ranks compare of a call, in whole numbers: what abi/tag.h compares of the others."""

    op: int
    num_tokens: int
    hidden_size: int
    dtype: int
    sharded: int
    has_residual: int
    numerics: int
    eps: int
    """The bits of a float32, as `weight_bias` is."""
    weight_bias: int
    weight_dtype: int
    quant: int
    group_size: int
    scale_format: int
    wants_normed: int

    @classmethod
    def of(cls, launch: Launch) -> Announcement:
        """Of a bound call."""
        call = launch.native
        norm = call.op == _native.ADD_RMS_NORM
        return cls(
            op=call.op,
            num_tokens=launch.num_tokens,
            hidden_size=call.hidden_size,
            dtype=call.dtype,
            sharded=int(launch.shard is not None),
            has_residual=int(norm and bool(call.residual)),
            numerics=call.numerics,
            eps=_bits_of(call.eps),
            weight_bias=_bits_of(call.weight_bias),
            weight_dtype=call.weight_dtype if norm else 0,
            quant=call.quant,
            group_size=call.group_size,
            scale_format=call.scale_format,
            wants_normed=int(not call.quant or bool(call.out)),
        )

    @classmethod
    def of_refusal(cls) -> Announcement:
        """Of no call: this rank has refused it."""
        return cls(_REFUSED, *(0,) * (len(cls._fields) - 1))

    def announced(self) -> dict[str, str]:
        """What a CallTag says of it in words, as `_native.shape_fields` does, but the algorithm."""
        fields = {
            "op": _OPS[self.op] + ("_quant" if self.quant else ""),
            "num_tokens": str(self.num_tokens),
            "hidden_size": str(self.hidden_size),
            "dtype": _native.name_of(_native.DTYPE, self.dtype),
        }
        if self.op == _native.ADD_RMS_NORM:
            fields["numerics"] = _native.name_of(_native.NUMERICS, self.numerics)
            fields["residual"] = "given" if self.has_residual else "none"
        if self.quant:
            fields["quantisation"] = _native.quant_words(self.quant, self.group_size)
            fields["normed"] = "wanted" if self.wants_normed else "not wanted"
        return fields

    def hashed(self) -> dict[str, str]:
        """What a CallTag has as a hash, or as bits that a fault does not keep."""
        if self.op != _native.ADD_RMS_NORM:
            return {}
        fields = {
            "eps": _text_of(self.eps),
            "weight_bias": _text_of(self.weight_bias),
            "dtype of the weight": _native.name_of(_native.DTYPE, self.weight_dtype),
        }
        if self.quant:
            formats = _native.name_of(_native.SCALE_FORMAT, self.scale_format)
            fields["format of the scales"] = formats
        return fields

    def __str__(self) -> str:
        if self.op == _REFUSED:
            return "no call, it has refused it"
        dtype = _native.name_of(_native.DTYPE, self.dtype)
        rows = f"{self.num_tokens}x{self.hidden_size} {dtype}"
        if self.op != _native.ADD_RMS_NORM:
            return f"{_OPS[self.op]} of {rows}"
        parts = [
            f"{_OPS[self.op]}{'_quant' if self.quant else ''} of {rows}",
            f"numerics {_native.name_of(_native.NUMERICS, self.numerics)}",
            self._residual(),
            f"eps {_text_of(self.eps)}",
            f"weight {_native.name_of(_native.DTYPE, self.weight_dtype)}",
        ]
        if self.weight_bias:
            parts[-1] += f" + {_text_of(self.weight_bias)}"
        if self.quant:
            kind = _native.name_of(_native.QUANT, self.quant)
            parts += [
                f"{kind} {self.group_size}" if self.group_size else kind,
                f"scales {_native.name_of(_native.SCALE_FORMAT, self.scale_format)}",
                f"{'with' if self.wants_normed else 'without'} normed",
            ]
        return ", ".join(parts)

    def _residual(self) -> str:
        if self.has_residual:
            return "with a sharded residual" if self.sharded else "with residual"
        return "without residual" + (", residual_out sharded" if self.sharded else "")


def _bits_of(number: float) -> int:
    return int(struct.unpack("=I", struct.pack("=f", number))[0])


def _text_of(bits: int) -> str:
    """The float32 in as few digits as tell it from any other."""
    number = struct.unpack("=f", struct.pack("=I", bits))[0]
    texts = (f"{number:.{digits}g}" for digits in range(1, 9))
    exact = (text for text in texts if ctypes.c_float(float(text)).value == number)
    return next(exact, f"{number:.9g}")
