"""ctypes binding of the C ABI (csrc/allnorm.h). Nothing here knows torch."""

from __future__ import annotations

import ctypes
import functools
import json
import pathlib
from typing import Any

from allnorm import names
from allnorm.errors import NativeLibraryError

ABI_VERSION = 5
MAX_WORLD_SIZE = 64
OK, INVALID_ARGUMENT, UNSUPPORTED, TIMEOUT, DIVERGED, SYSTEM, BUSY = range(7)
PEER_DIED, PEER_LEFT, INTERRUPTED, CLOSED = range(7, 11)
_IPC_HANDLE_BYTES = 64
ALGORITHM = {name: code for code, name in enumerate(names.FUSED)}
ALL_REDUCE, ADD_RMS_NORM, ALL_GATHER_ROWS = range(3)
NUMERICS = {name: code for code, name in enumerate(names.NUMERICS)}
DTYPE = {name: code for code, name in enumerate(names.DTYPES)}
QUANT = {name: code for code, name in enumerate(names.QUANTS, start=1)}
SCALE_FORMAT = {name: code for code, name in enumerate(names.SCALE_FORMATS)}
RESIDUAL_SHARDED, SCALED, NO_NORM = 2, 4, 8  # AllnormCallFlags
LATE_TRIGGER, NO_DEPENDENT_LAUNCH = 1, 2  # AllnormCommFlags
NO_SHAPE = 0xFFFFFFFF  # where a CallShape would be: none was announced
MISSING_CALL = 0xFFFFFFFE  # likewise: the rank could not make the call

_c_int32, _c_int64, _c_uint32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32
_pointer = ctypes.c_void_p


class Call(ctypes.Structure):
    """Mirror of AllnormCall."""

    _fields_ = [
        ("struct_bytes", _c_uint32),
        ("op", _c_int32),
        ("algorithm", _c_int32),
        ("dtype", _c_int32),
        ("weight_dtype", _c_int32),
        ("numerics", _c_int32),
        ("eps", ctypes.c_float),
        ("weight_bias", ctypes.c_float),
        ("num_tokens", _c_int64),
        ("hidden_size", _c_int64),
        ("x", _pointer),
        ("residual", _pointer),
        ("weight", _pointer),
        ("out", _pointer),
        ("residual_out", _pointer),
        ("x_stride", _c_int64),
        ("residual_stride", _c_int64),
        ("out_stride", _c_int64),
        ("residual_out_stride", _c_int64),
        ("source_stride", _c_int64),
        ("num_sources", _c_int32),
        ("num_blocks", _c_int32),
        ("cluster_size", _c_int32),
        ("flags", _c_int32),
        ("stream", _pointer),
        ("quant", _c_int32),
        ("scale_format", _c_int32),
        ("group_size", _c_int32),
        ("scale_padding_rows", _c_int32),
        ("quantized", _pointer),
        ("scale", _pointer),
        ("quantized_stride", _c_int64),
        ("scale_row_stride", _c_int64),
        ("scale_group_stride", _c_int64),
        ("link_gbps", ctypes.c_double),
        ("post_weight", _pointer),
        ("post_weight_dtype", _c_int32),
        ("post_eps", ctypes.c_float),
        ("post_weight_bias", ctypes.c_float),
        ("sum_scale", ctypes.c_float),
    ]


class Fault(ctypes.Structure):
    """Mirror of AllnormFault."""

    _fields_ = [
        ("status", _c_int32),
        ("rank", _c_int32),
        ("peer", _c_int32),
        ("expected_op", _c_uint32),
        ("seen_op", _c_uint32),
        ("expected_shape", _c_uint32),
        ("seen_shape", _c_uint32),
        ("expected_tokens", _c_uint32),
        ("seen_tokens", _c_uint32),
        ("died", _c_uint32),
    ]


class Stats(ctypes.Structure):
    """Mirror of AllnormStats."""

    _fields_ = [("one_shot", ctypes.c_uint64), ("two_shot", ctypes.c_uint64)]


class CommConfig(ctypes.Structure):
    """Mirror of AllnormCommConfig."""

    _fields_ = [
        ("struct_bytes", _c_uint32),
        ("rank", _c_int32),
        ("world_size", _c_int32),
        ("device", _c_int32),
        ("workspace_bytes", _c_int64),
        ("timeout_ns", _c_int64),
        ("first_op", _c_uint32),
        ("flags", _c_int32),
        ("workspaces", _pointer * MAX_WORLD_SIZE),
    ]


class DeviceCode(ctypes.Structure):
    """Mirror of AllnormDeviceCode."""

    _fields_ = [
        ("capability", _c_int32),
        ("compiled_for", _c_int32),
        ("max_row_bytes", _c_int64),
    ]


class Library:
    """One loaded backend. Methods are the C functions with the prefix taken off."""

    def __init__(self, path: pathlib.Path) -> None:
        try:
            self._lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
            abi = int(self._lib.allnorm_abi_version())
        except (OSError, AttributeError) as error:
            raise NativeLibraryError(
                f"cannot load {path.name}: {error}. Reinstall allnorm for this system "
                "(pip install --force-reinstall allnorm), or build it here with `pip install .`."
            ) from error
        if abi != ABI_VERSION:
            raise NativeLibraryError(
                f"{path.name} has ABI {abi}, this package needs {ABI_VERSION}: the package and its "
                "library come from different builds. Reinstall allnorm."
            )
        self.run = self._bind("run", _pointer, _pointer)
        self.local = self._bind("local", _pointer)
        self.comm_create = self._bind("comm_create", _pointer, _pointer)
        self.comm_destroy = self._bind("comm_destroy", _pointer)
        self.comm_close = self._bind("comm_close", _pointer)
        self.comm_peers_died = self._bind("comm_peers_died", _pointer, ctypes.c_uint64, _c_int32)
        self.comm_check = self._bind("comm_check", _pointer, _pointer)
        self.comm_stats = self._bind("comm_stats", _pointer, _pointer)
        self.rows_per_chunk = self._bind(
            "rows_per_chunk", _c_int32, _c_int64, _pointer, result=_c_int64
        )
        self._last_error = self._bind("last_error", result=ctypes.c_char_p)
        self._build_info = self._bind("build_info", result=ctypes.c_char_p)

    def _bind(self, name: str, *arguments: Any, result: Any = _c_int32) -> Any:
        function = getattr(self._lib, f"allnorm_{name}")
        function.argtypes = arguments
        function.restype = result
        return function

    def last_error(self) -> str:
        """What went wrong in this thread's last failing call."""
        return (self._last_error() or b"").decode(errors="replace")

    def build_info(self) -> dict[str, Any]:
        """The build: backend, version, compilers, architectures."""
        return dict(json.loads(self._build_info()))

    def set_interrupt(self, look: int) -> None:
        """CPU library only: the C function that threads call now and then while they wait."""
        self._bind("set_interrupt", _pointer)(look)

    # POSIX shared memory, CPU library only.

    def shm_create(self, name: str, num_bytes: int) -> int:
        """Creates and maps a shared-memory object; returns its address."""
        return self._shm_map("shm_create", name, num_bytes)

    def shm_open(self, name: str, num_bytes: int) -> int:
        """Maps an existing shared-memory object; returns its address."""
        return self._shm_map("shm_open", name, num_bytes)

    def _shm_map(self, function: str, name: str, num_bytes: int) -> int:
        address = _pointer()
        call = self._bind(function, ctypes.c_char_p, _c_int64, _pointer)
        if call(name.encode(), num_bytes, ctypes.byref(address)) != OK:
            raise OSError(self.last_error())
        return int(address.value or 0)

    def shm_unlink(self, name: str) -> None:
        """Removes the name; mappings stay."""
        if self._bind("shm_unlink", ctypes.c_char_p)(name.encode()) != OK:
            raise OSError(self.last_error())

    def shm_unmap(self, address: int, num_bytes: int) -> None:
        """Unmaps what `shm_create` or `shm_open` mapped."""
        if self._bind("shm_unmap", _pointer, _c_int64)(address, num_bytes) != OK:
            raise OSError(self.last_error())

    # CUDA library only.

    def device_code(self, device: int) -> DeviceCode:
        """What the kernels can do that the driver has loaded on a device. Makes a context there."""
        code = DeviceCode()
        if self._bind("device_code", _c_int32, _pointer)(device, ctypes.addressof(code)) != OK:
            raise OSError(self.last_error())
        return code

    def stream_lasts(self, stream: int) -> None:
        """Notes that a CUDA stream is there as long as the process."""
        self._bind("stream_lasts", _pointer)(stream)

    # Device memory shared between processes, CUDA library only.

    def ipc_create(self, device: int, num_bytes: int) -> tuple[int, bytes]:
        """Allocates device memory; returns its address and the handle for other processes."""
        address, handle = _pointer(), ctypes.create_string_buffer(_IPC_HANDLE_BYTES)
        call = self._bind("ipc_create", _c_int32, _c_int64, _pointer, _pointer)
        if call(device, num_bytes, ctypes.byref(address), handle) != OK:
            raise OSError(self.last_error())
        return int(address.value or 0), handle.raw

    def ipc_open(self, device: int, handle: bytes) -> int:
        """Maps a peer's device memory; returns its address here."""
        address = _pointer()
        call = self._bind("ipc_open", _c_int32, _pointer, _pointer)
        if call(device, handle, ctypes.byref(address)) != OK:
            raise OSError(self.last_error())
        return int(address.value or 0)

    def ipc_leave(self, device: int, rank: int, addresses: list[int]) -> None:
        """Tells the peers that this rank has left, and unmaps their memory; 0 is skipped."""
        array = (_pointer * len(addresses))(*addresses)
        call = self._bind("ipc_leave", _c_int32, _c_int32, _c_int32, _pointer)
        if call(device, rank, len(addresses), array) != OK:
            raise OSError(self.last_error())

    def ipc_free(self, device: int, rank: int, world_size: int, address: int) -> bool:
        """Frees own memory; False while a peer may still have it mapped."""
        call = self._bind("ipc_free", _c_int32, _c_int32, _c_int32, _pointer)
        status = call(device, rank, world_size, address)
        if status not in (OK, BUSY):
            raise OSError(self.last_error())
        return int(status) == OK


def _library_path(backend: str) -> pathlib.Path:
    return pathlib.Path(__file__).parent.parent / "lib" / f"liballnorm_{backend}.so"


def available_backends() -> list[str]:
    """The backends that this installation contains."""
    return [backend for backend in ("cpu", "cuda") if _library_path(backend).exists()]


@functools.cache
def library(backend: str) -> Library:
    """Loads the library of "cpu" or "cuda" once.

    Raises:
        NativeLibraryError: it is not part of this installation, or cannot be loaded.
    """
    path = _library_path(backend)
    if not path.exists():
        remedy = (
            "it was built on a machine without nvcc. Rebuild with nvcc on PATH: `pip install .`"
            if backend == "cuda"
            else "the package was not built. Install it with `pip install .` from its source."
        )
        raise NativeLibraryError(f"this installation has no {path.name}: {remedy}")
    return Library(path)


def name_of(codes: dict[str, int], code: int) -> str:
    """The word that stands for a number in ALGORITHM, NUMERICS, DTYPE and the like."""
    return next(name for name, value in codes.items() if value == code)


def describe_shape(shape: int, num_tokens: int) -> str:
    """The call behind a CallTag, in words; see `shape_fields`."""
    if shape == MISSING_CALL:
        return "a call that it could not launch"
    fields = shape_fields(shape, num_tokens)
    dtype = fields["dtype"] if fields["dtype"] in names.DTYPES else "unknown dtype"
    text = f"{fields['op']} of {num_tokens}x{fields['hidden_size']} {dtype}"
    if "algorithm" in fields:
        text += f" by {fields['algorithm']}"
    if "numerics" in fields:
        given = "with" if fields["residual"] == "given" else "without"
        text += f", numerics {fields['numerics']}, {given} residual"
    if "quantisation" in fields:
        wanted = "with" if fields["normed"] == "wanted" else "without"
        text += f", {fields['quantisation']}, {wanted} normed"
    return text


def shape_fields(shape: int, num_tokens: int) -> dict[str, str]:
    """What a CallTag says of its call, by name (csrc/protocol/call_tag.h, CallShape)."""
    op = shape >> 28
    fields = {
        "op": _OP_NAMES[op] if op < len(_OP_NAMES) else f"op {op}",
        "num_tokens": str(num_tokens),
        "hidden_size": str(shape & 0xFFFFF),
        "dtype": (*names.DTYPES, "unknown")[shape >> 20 & 3],
    }
    if op != 1:
        algorithms = ("one_shot", "two_shot", "two_shot with a sharded residual", "unknown")
        fields["algorithm"] = algorithms[shape >> 22 & 3]
    if op >= 2:
        fields["numerics"] = name_of(NUMERICS, shape >> 24 & 3)
        fields["residual"] = "given" if shape >> 26 & 1 else "none"
    if 3 <= op < len(_QUANTS):
        fields["quantisation"] = _QUANTS[op]
        fields["normed"] = "wanted" if shape >> 27 & 1 else "not wanted"
    return fields


def quant_words(quant: int, group_size: int) -> str:
    """How a call quantises, as a CallShape's `op` says it."""
    if quant == QUANT["per_group"]:
        return f"groups of {group_size}"
    return "per token" if quant == QUANT["per_token"] else "per tensor"


# By the `op` of a CallShape.
_QUANTS = ("", "", "", *(f"groups of {8 << i}" for i in range(1, 7)), "per token", "per tensor")
_OP_NAMES = (
    *("all_reduce", "all_gather_rows", "all_reduce_add_rms_norm"),
    *("all_reduce_add_rms_norm_quant" for _ in _QUANTS[3:]),
    "all_reduce_add_rms_norm without a second norm",
)
