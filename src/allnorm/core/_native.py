"""ctypes bindings for the C ABI (csrc/allnorm.h). Does not import torch."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import pathlib
import sys
from typing import Any

from allnorm import names
from allnorm.errors import AllnormError, NativeLibraryError, UnsupportedError

ABI_VERSION = 12
MAX_WORLD_SIZE = 64
MAX_SLICES = 4
MAX_STREAMS = 8
OK, INVALID_ARGUMENT, UNSUPPORTED, TIMEOUT, DIVERGED, SYSTEM, BUSY = range(7)
PEER_DIED, PEER_LEFT, INTERRUPTED, CLOSED = range(7, 11)
_IPC_HANDLE_BYTES = 64
ALGORITHM = {name: code for code, name in enumerate(names.FUSED)}
ALL_REDUCE, ADD_RMS_NORM, ALL_GATHER_ROWS, SUM_ROWS, RMS_NORM_SHARDED = range(5)
HYPER_CONNECTION, QUANTIZE = 5, 6
NUMERICS = {name: code for code, name in enumerate(names.NUMERICS)}
DTYPE = {name: code for code, name in enumerate(names.DTYPES)}
QUANT = {name: code for code, name in enumerate(names.QUANTS, start=1)}
SCALE_FORMAT = {name: code for code, name in enumerate(names.SCALE_FORMATS)}
# AllnormCallFlags
RESIDUAL_SHARDED, SCALED, NO_NORM, SWIZZLED_SCALES, ISLAND_SUMS, ANNOUNCEMENT = 2, 4, 8, 16, 32, 64
FLOAT32_RESIDUAL, NO_GATHER = 128, 256
LATE_TRIGGER, NO_DEPENDENT_LAUNCH = 1, 2  # AllnormCommFlags
NO_SHAPE = 0xFFFFFFFF  # in place of a CallShape: no call was announced
MISSING_CALL = 0xFFFFFFFE  # in place of a CallShape: the rank could not launch its call

_c_int32, _c_int64, _c_uint32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32
_pointer = ctypes.c_void_p


def _fields(type_: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, type_) for name in names.split()]


# The fields of AllnormSlice. The array `slices` of AllnormCall is flattened, so that every field of
# a call is a number or an address: slice0_x, slice0_weight, and so on.
SLICE_FIELDS = (
    *_fields(_pointer, "x weight out"),
    *_fields(_c_int64, "local_size x_stride out_stride"),
    *_fields(_c_int32, "weight_dtype padding"),
)


class Call(ctypes.Structure):
    """The C struct AllnormCall."""

    _fields_ = [
        *_fields(_c_uint32, "struct_bytes"),
        *_fields(_c_int32, "op algorithm dtype weight_dtype numerics"),
        *_fields(ctypes.c_float, "eps weight_bias"),
        *_fields(_c_int64, "num_tokens hidden_size"),
        *_fields(_pointer, "x residual weight out residual_out"),
        *_fields(_c_int64, "x_stride residual_stride out_stride residual_out_stride source_stride"),
        *_fields(_c_int32, "num_sources num_blocks cluster_size flags"),
        *_fields(_pointer, "stream"),
        *_fields(_c_int32, "quant scale_format group_size scale_padding_rows"),
        *_fields(_pointer, "quantized scale"),
        *_fields(_c_int64, "quantized_stride scale_row_stride scale_group_stride"),
        *_fields(ctypes.c_double, "link_gbps"),
        *_fields(_pointer, "post_weight"),
        *_fields(_c_int32, "post_weight_dtype"),
        *_fields(ctypes.c_float, "post_eps post_weight_bias sum_scale"),
        *_fields(_c_int32, "top_k expert_padding"),
        *_fields(_c_int64, "num_rows"),
        *_fields(_pointer, "expert_index expert_weights shared"),
        *_fields(_c_int64, "expert_index_stride expert_weights_stride shared_stride"),
        *_fields(_pointer, "global_scale"),
        *_fields(_c_int64, "first_scale_row"),
        *_fields(_pointer, "prefetch"),
        *_fields(_c_int64, "prefetch_bytes"),
        *((f"slice{i}_{name}", type_) for i in range(MAX_SLICES) for name, type_ in SLICE_FIELDS),
        *_fields(_c_int32, "num_slices slices_padding"),
        *_fields(_pointer, "square_sums post mix"),
        *_fields(_c_int64, "post_stride mix_stride stream_stride stream_out_stride"),
        *_fields(_c_int32, "num_streams streams_padding"),
    ]

    def set_slice(self, number: int, **fields: int) -> None:
        """Sets fields of one slice."""
        for name, value in fields.items():
            setattr(self, f"slice{number}_{name}", value)


class StreamInput(ctypes.Structure):
    """The C struct AllnormStreamInput."""

    _fields_ = [
        *_fields(_c_uint32, "struct_bytes"),
        *_fields(_c_int32, "dtype stream_dtype weight_dtype numerics num_streams iterations"),
        *_fields(ctypes.c_float, "eps weight_bias stream_eps hc_eps post_scale"),
        *_fields(_c_int64, "num_tokens hidden_size"),
        *_fields(_pointer, "streams"),
        *_fields(_c_int64, "token_stride stream_stride"),
        *_fields(_pointer, "fn scale base weight out"),
        *_fields(_c_int64, "out_stride"),
        *_fields(_pointer, "post mix cuda_stream"),
    ]


class Fault(ctypes.Structure):
    """The C struct AllnormFault."""

    _fields_ = [
        *_fields(_c_int32, "status rank peer"),
        *_fields(_c_uint32, "expected_op seen_op expected_shape seen_shape"),
        *_fields(_c_uint32, "expected_tokens seen_tokens died"),
    ]


class Stats(ctypes.Structure):
    """The C struct AllnormStats."""

    _fields_ = _fields(ctypes.c_uint64, "one_shot two_shot")


class CommConfig(ctypes.Structure):
    """The C struct AllnormCommConfig."""

    _fields_ = [
        *_fields(_c_uint32, "struct_bytes"),
        *_fields(_c_int32, "rank world_size device"),
        *_fields(_c_int64, "workspace_bytes timeout_ns"),
        *_fields(_c_uint32, "first_op"),
        *_fields(_c_int32, "flags"),
        *_fields(_pointer * MAX_WORLD_SIZE, "workspaces"),
    ]


class DeviceCode(ctypes.Structure):
    """The C struct AllnormDeviceCode."""

    _fields_ = [*_fields(_c_int32, "capability compiled_for"), *_fields(_c_int64, "max_row_bytes")]


def _out(value: Any) -> Any:
    """Returns the address of an output argument, as a ctypes pointer."""
    return _pointer(ctypes.addressof(value))


class Library:
    """One loaded backend. Its methods are the C functions without their prefix."""

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
        self.run_with_input = self._bind("run_with_input", _pointer, _pointer, _pointer)
        self.local = self._bind("local", _pointer)
        self.stream_input = self._bind("stream_input", _pointer)
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

    def _ask(self, name: str, *arguments: Any) -> int:
        """Calls a C function with ctypes arguments; raises OSError if it fails."""
        status = int(self._bind(name, *map(type, arguments))(*arguments))
        if status not in (OK, BUSY):
            raise OSError(self.last_error())
        return status

    def last_error(self) -> str:
        """Returns the error message of this thread's last failed call."""
        return (self._last_error() or b"").decode(errors="replace")

    def build_info(self) -> dict[str, Any]:
        """Returns the build's backend, version, compilers and architectures."""
        return dict(json.loads(self._build_info()))

    def set_interrupt(self, look: int) -> None:
        """Sets the C function that waiting threads call periodically. CPU library only."""
        self._bind("set_interrupt", _pointer)(look)

    def set_beat(self, handle: int, address: int) -> None:
        """Sets where a communicator's waits store the current time; 0: nowhere. CPU only."""
        try:
            function = self._bind("comm_set_beat", _pointer, _pointer)
        except AttributeError as error:
            raise NativeLibraryError(
                f"{error}: the library is older than the package. Reinstall allnorm, or build it "
                "(`make inplace` in a source tree)."
            ) from error
        function(handle, address)

    # POSIX shared memory, CPU library only.

    def shm_create(self, name: str, num_bytes: int) -> int:
        """Creates and maps a shared-memory object; returns its address."""
        return self._shm_map("shm_create", name, num_bytes)

    def shm_open(self, name: str, num_bytes: int) -> int:
        """Maps an existing shared-memory object; returns its address."""
        return self._shm_map("shm_open", name, num_bytes)

    def _shm_map(self, function: str, name: str, num_bytes: int) -> int:
        address = _pointer()
        self._ask(function, ctypes.c_char_p(name.encode()), _c_int64(num_bytes), _out(address))
        return int(address.value or 0)

    def shm_unlink(self, name: str) -> None:
        """Removes the name of a shared-memory object; existing mappings stay valid."""
        self._ask("shm_unlink", ctypes.c_char_p(name.encode()))

    def shm_unmap(self, address: int, num_bytes: int) -> None:
        """Unmaps memory that `shm_create` or `shm_open` has mapped."""
        self._ask("shm_unmap", _pointer(address), _c_int64(num_bytes))

    # CUDA library only.

    def device_code(self, device: int) -> DeviceCode:
        """Returns the limits of the kernels that the driver loaded. Creates a CUDA context."""
        code = DeviceCode()
        self._ask("device_code", _c_int32(device), _out(code))
        return code

    def stream_lasts(self, stream: int) -> None:
        """Tells the library that a CUDA stream is never destroyed."""
        self._bind("stream_lasts", _pointer)(stream)

    # Device memory shared between processes, CUDA library only.

    def ipc_create(self, device: int, num_bytes: int) -> tuple[int, bytes]:
        """Allocates device memory; returns its address and the handle for other processes."""
        address, handle = _pointer(), ctypes.create_string_buffer(_IPC_HANDLE_BYTES)
        size = _c_int64(num_bytes)
        self._ask("ipc_create", _c_int32(device), size, _out(address), _out(handle))
        return int(address.value or 0), handle.raw

    def ipc_open(self, device: int, handle: bytes) -> int:
        """Maps a peer's device memory; returns its address here."""
        address = _pointer()
        self._ask("ipc_open", _c_int32(device), ctypes.c_char_p(handle), _out(address))
        return int(address.value or 0)

    def ipc_probe(self, device: int, rank: int, addresses: list[int]) -> None:
        """Stores a word in every peer's workspace."""
        array = (_pointer * len(addresses))(*addresses)
        numbers = _c_int32(device), _c_int32(rank), _c_int32(len(addresses))
        self._ask("ipc_probe", *numbers, _out(array))

    def ipc_probed(
        self, device: int, rank: int, world_size: int, address: int, timeout_ns: int
    ) -> list[int]:
        """Returns the peers whose word has not arrived in this rank's workspace, at `address`."""
        missing = _c_uint32()
        numbers = _c_int32(device), _c_int32(rank), _c_int32(world_size)
        self._ask("ipc_probed", *numbers, _pointer(address), _c_int64(timeout_ns), _out(missing))
        return [peer for peer in range(world_size) if missing.value >> peer & 1]

    def ipc_leave(self, device: int, rank: int, addresses: list[int]) -> None:
        """Tells the peers that this rank has left, and unmaps their memory; skips addresses 0."""
        array = (_pointer * len(addresses))(*addresses)
        numbers = _c_int32(device), _c_int32(rank), _c_int32(len(addresses))
        self._ask("ipc_leave", *numbers, _out(array))

    def ipc_free(self, device: int, rank: int, world_size: int, address: int) -> bool:
        """Frees this rank's memory; returns False while a peer may still have it mapped."""
        numbers = _c_int32(device), _c_int32(rank), _c_int32(world_size)
        return self._ask("ipc_free", *numbers, _pointer(address)) == OK


def library_path(backend: str) -> pathlib.Path:
    """Returns where the library of a backend is, if this installation contains it."""
    return pathlib.Path(__file__).parent.parent / "lib" / f"liballnorm_{backend}.so"


def gpu_backend() -> str:
    """Returns the backend for torch's CUDA devices: "cuda", or "hip" with torch for ROCm."""
    version = getattr(sys.modules.get("torch"), "version", None)  # torch is not imported here
    return "hip" if getattr(version, "hip", None) else "cuda"


def available_backends() -> list[str]:
    """Returns the backends that this installation contains and this process can use."""
    return [backend for backend in ("cpu", gpu_backend()) if library_path(backend).exists()]


def hip_runtime(maps: str = "/proc/self/maps") -> str | None:
    """Returns the path of the HIP runtime that this process has loaded; None if there is none."""
    with open(maps) as lines:
        for line in lines:
            path = line.rstrip("\n")[line.find("/") :] if "/" in line else ""
            if pathlib.PurePath(path).name.startswith("libamdhip64.so"):
                return path
    return None


def _show_hip_runtime() -> None:
    """Makes the functions of this process's HIP runtime visible to libraries that load later.

    torch loads the runtime without doing so. The library names no file of a runtime, because a
    process must not have two.
    """
    path = hip_runtime()
    if path is None:
        raise NativeLibraryError(
            "this process has no HIP runtime: expected libamdhip64.so, which torch for ROCm loads. "
            "Import that torch first."
        )
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)


@functools.cache
def library(backend: str) -> Library:
    """Returns the library for "cpu", "cuda" or "hip", which is loaded on the first call.

    For devices of torch, call backends.library().

    Raises:
        NativeLibraryError: the library is not installed, or cannot be loaded.
    """
    path = library_path(backend)
    if not path.exists():
        remedies = {
            "cuda": "it was built without CUDA. Install it with nvcc on PATH: `pip install .`",
            "hip": "it is a preview, built from source only: `make HIP=on inplace`",
            "cpu": "the package was not built. Install it with `pip install .` from its source.",
        }
        raise NativeLibraryError(f"this installation has no {path.name}: {remedies[backend]}")
    if backend == "hip":
        _show_hip_runtime()
    return Library(path)


def build_info() -> dict[str, Any]:
    """Returns the build properties that the native libraries record.

    Returns:
        `version` of the package; `commit`, the git hash of the sources, or None without git;
        `dirty`, whether the sources had uncommitted changes, or None without a commit; `cuda`, the
        version of the CUDA compiler, or None without a CUDA library; `architectures`, the compute
        capabilities of its kernels, such as ["90"], or targets such as "gfx942"; `compiler`, the
        C++ compiler. If the libraries have different commits, `commit` is the GPU library's, and
        `dirty` is True.

    Raises:
        NativeLibraryError: the package contains no library.
    """
    builds = [library(backend).build_info() for backend in available_backends() or ["cpu"]]
    commits = [build.get("commit", "") for build in builds]
    commit = commits[-1].removesuffix("-dirty")
    return {
        "version": builds[0]["version"],
        "commit": commit or None,
        "dirty": any(each != commit for each in commits) if commit else None,
        "cuda": builds[-1].get("nvcc"),
        "architectures": builds[-1].get("architectures", "").split(),
        "compiler": builds[0].get("compiler"),
    }


def built_commit() -> str | None:
    """Returns 12 digits of build_info()'s commit, plus "-dirty" after uncommitted changes."""
    info = build_info()
    return info["commit"] and info["commit"][:12] + ("-dirty" if info["dirty"] else "")


def raise_status(library: Library, status: int) -> None:
    """Raises the error of a failed native call. Not for failures that a peer caused."""
    if status == OK:
        return
    text = library.last_error()
    if status == INVALID_ARGUMENT:
        raise ValueError(text)
    if status == UNSUPPORTED:
        raise UnsupportedError(text)
    raise AllnormError(text)
