"""What ranks must make alike of a call, as they announce it to each other; the words for it.

Fused calls announce a CallTag (csrc/protocol/call_tag.h), which has some of it as a hash only;
unfused and hierarchical ones an Announcement, which has all of it. Errors describe both with the
same fields.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

from allnorm import names
from allnorm.core import _native
from allnorm.core.launch import Launch

_OPS = {
    _native.ALL_REDUCE: "all_reduce",
    _native.ADD_RMS_NORM: "all_reduce_add_rms_norm",
    _native.ALL_GATHER_ROWS: "all_gather_rows",
}
_REFUSED = -1
_WITHOUT_NORM = " without a second norm"
# By the `op` of a CallShape.
_TAG_QUANTS = (
    *("", "", ""),
    *(f"groups of {size}" for size in names.GROUP_SIZES),
    *("per token", "per tensor"),
)
_TAG_OPS = (
    *("all_reduce", "all_gather_rows", "all_reduce_add_rms_norm"),
    *("all_reduce_add_rms_norm_quant" for _ in _TAG_QUANTS[3:]),
    f"all_reduce_add_rms_norm{_WITHOUT_NORM}",
    "all_reduce_add_rms_norm_quant",
)
_TAG_NVFP4 = 12
_TAG_ALGORITHMS = (*names.FUSED, "two_shot with a sharded residual", "unknown")


def tag_fields(shape: int, num_tokens: int) -> dict[str, str]:
    """What a CallTag says of its call, by name; see CallShape in csrc/protocol/call_tag.h."""
    op = shape >> 28
    fields = {
        "op": _TAG_OPS[op] if op < len(_TAG_OPS) else f"op {op}",
        "num_tokens": str(num_tokens),
        "hidden_size": str(shape & 0xFFFFF),
        "dtype": (*names.DTYPES, "unknown dtype")[shape >> 20 & 3],
    }
    if op != 1:
        fields["algorithm"] = _TAG_ALGORITHMS[shape >> 22 & 3]
    if op >= 2:
        fields["numerics"] = names.NUMERICS[shape >> 24 & 3]
        fields["residual"] = "given" if shape >> 26 & 1 else "none"
    if 3 <= op < len(_TAG_QUANTS) or op == _TAG_NVFP4:
        fields["quantisation"] = "nvfp4" if op == _TAG_NVFP4 else _TAG_QUANTS[op]
        fields["normed"] = "wanted" if shape >> 27 & 1 else "not wanted"
    return fields


def describe(fields: dict[str, str]) -> str:
    """A call in words, from what `tag_fields`, or an Announcement, says of it."""
    rest = dict(fields)
    text = f"{rest.pop('op')} of {rest.pop('num_tokens')}x{rest.pop('hidden_size')} "
    text += rest.pop("dtype")
    if "algorithm" in rest:
        text += f" by {rest.pop('algorithm')}"
    if "numerics" in rest:
        given = "with" if rest.pop("residual") == "given" else "without"
        text += f", numerics {rest.pop('numerics')}, {given} residual"
    if "quantisation" in rest:
        wanted = "with" if rest.pop("normed") == "wanted" else "without"
        text += f", {rest.pop('quantisation')}, {wanted} normed"
    return text + "".join(f", {name} {value}" for name, value in rest.items())


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
    ends_with_sum: int
    """There is no second norm."""
    post_norm: int
    """0: none, else 1 + the dtype of its weight."""
    post_eps: int
    post_weight_bias: int
    scale: int
    hierarchical: int
    """Else it is unfused."""

    @classmethod
    def of(cls, launch: Launch) -> Announcement:
        """Of a bound call."""
        call = launch.native
        norm = call.op == _native.ADD_RMS_NORM
        scaled = norm and call.flags & _native.SCALED
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
            ends_with_sum=int(norm and bool(call.flags & _native.NO_NORM)),
            post_norm=1 + call.post_weight_dtype if call.post_weight else 0,
            post_eps=_bits_of(call.post_eps),
            post_weight_bias=_bits_of(call.post_weight_bias),
            scale=_bits_of(call.sum_scale if scaled else 1.0),
            hierarchical=int(launch.plan.algorithm == "hierarchical"),
        )

    @classmethod
    def of_refusal(cls) -> Announcement:
        """Of no call: this rank has refused it."""
        return cls(_REFUSED, *(0,) * (len(cls._fields) - 1))

    def tagged(self) -> dict[str, str]:
        """The fields that the CallTag of such a call has, but the algorithm; as `tag_fields`."""
        fields = {
            "op": _OPS[self.op]
            + ("_quant" if self.quant else "")
            + (_WITHOUT_NORM if self.ends_with_sum else ""),
            "num_tokens": str(self.num_tokens),
            "hidden_size": str(self.hidden_size),
            "dtype": names.DTYPES[self.dtype],
        }
        if self.op == _native.ADD_RMS_NORM:
            fields["numerics"] = names.NUMERICS[self.numerics]
            fields["residual"] = "given" if self.has_residual else "none"
        if self.quant:
            kind = names.QUANTS[self.quant - 1]
            groups = f"groups of {self.group_size}"
            fields["quantisation"] = groups if self.group_size else kind.replace("_", " ")
            fields["normed"] = "wanted" if self.wants_normed else "not wanted"
        return fields

    def hashed(self) -> dict[str, str]:
        """The fields that a CallTag has as a hash, or as bits that a fault does not keep."""
        if self.op != _native.ADD_RMS_NORM:
            return {}
        fields = {
            "eps": _text_of(self.eps),
            "weight_bias": _text_of(self.weight_bias),
            "dtype of the weight": names.DTYPES[self.weight_dtype],
        }
        if self.quant:
            fields["format of the scales"] = names.SCALE_FORMATS[self.scale_format]
        if self.post_norm:
            fields["eps of the post norm"] = _text_of(self.post_eps)
            fields["weight_bias of the post norm"] = _text_of(self.post_weight_bias)
            fields["dtype of its weight"] = names.DTYPES[self.post_norm - 1]
        if self.scale != _ONE:
            fields["scale"] = _text_of(self.scale)
        return fields

    def __str__(self) -> str:
        if self.op == _REFUSED:
            return "no call, it has refused it"
        algorithm = "hierarchical" if self.hierarchical else "unfused"
        algorithm += " with a sharded residual" if self.sharded else ""
        by = {} if self.op == _native.ALL_GATHER_ROWS else {"algorithm": algorithm}
        return describe({**self.tagged(), **by, **self.hashed()})


def _bits_of(number: float) -> int:
    return int(struct.unpack("=I", struct.pack("=f", number))[0])


_ONE = _bits_of(1.0)


def _text_of(bits: int) -> str:
    """The float32 in as few digits as tell it from any other."""
    number = struct.unpack("=f", struct.pack("=I", bits))[0]
    texts = (f"{number:.{digits}g}" for digits in range(1, 9))
    exact = (text for text in texts if ctypes.c_float(float(text)).value == number)
    return next(exact, f"{number:.9g}")
