"""Calls of all ranks in the emulator, with every bit of the results compared."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterable

from native.amd.compiler import BUILD, compile_unit, unit_of
from native.sass.kernels import ANY_WORLD_SIZE, Variant, all_variants, world_sizes

from .code_object import CodeObject
from .machine import Machine, Settings
from .toolchain import CSRC, HERE, compile_library, key_of, locked, publish

FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", f"-I{CSRC}", f"-I{CSRC / 'gpu/hip'}"]
_OTHERWISE = {
    "one_shot_dense": "one_shot",
    "owned_sum_few": "owned_sum",
    "streams_one_shot_dense": "streams_one_shot",
}
_FEATURES = {
    "kBasic": frozenset[str](),
    "kExperts": frozenset({"experts"}),
    "kExtendedDense": frozenset({"islands", "post_step", "float32_residual", "all_formats"}),
    "kExtended": frozenset({"experts", "islands", "post_step", "float32_residual", "all_formats"}),
}
DTYPES = ("Float32", "Float16", "Bfloat16")  # AllnormDtype
ENDLESS_NS = 1 << 60
MOST_INSTRUCTIONS = 50_000_000
MOST_SLICES = 4  # ALLNORM_MAX_SLICES


class _Spec(ctypes.Structure):
    """struct Spec in group_call.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "op", "algorithm", "dtype", "weight_dtype", "quant", "group_size", "scale_format",
            "numerics", "flags", "normed", "experts", "dense", "few", "post_norm", "num_blocks",
        )),
        ("num_tokens", ctypes.c_int64),
        ("hidden_size", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in (
            "values", "sources", "streams", "islands", "num_slices", "prefetch",
        )),
        ("slices", ctypes.c_int64 * MOST_SLICES),
    )  # fmt: skip


class _LaunchInfo(ctypes.Structure):
    """struct LaunchInfo in group_call.h."""

    _fields_ = (
        ("kind", ctypes.c_char * 24),
        *((name, ctypes.c_int32) for name in (
            "dtype", "format", "experts", "islands", "post_step", "float32_residual", "all_formats",
            "num_blocks", "num_threads", "shared_bytes", "num_bytes",
        )),
        ("parameters", ctypes.c_uint8 * 2048),
    )  # fmt: skip


class Fault(ctypes.Structure):
    """AllnormFault in allnorm.h."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in (
            "status", "rank", "peer", "expected_op", "seen_op", "expected_shape", "seen_shape",
            "expected_tokens", "seen_tokens", "died",
        )
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """A call to make; numbers are those of allnorm.h.

    Attributes:
        op: AllnormOp; -1 draws everything else except the dtype; -2 makes a layer's input.
        dtype: The name of a dtype in csrc.
        float32_weight: Whether the weight is float32.
        normed: Whether a quantizing call also returns the normed row.
        experts: Whether partials are sums of experts' rows.
        dense: Whether the kernels for many rows are used.
        few: Whether some ranks use the kernels for few blocks.
        post_norm: Whether the sum is normed before the residual is added.
        num_blocks: Blocks of a launch at most; 0 draws 2 to 4.
        values: `mixed`, `finite`, `zeros` or `nasty`.
        sources: Partial sums that a local kernel adds; 0: the call exchanges rows among ranks.
        streams: Residual streams of HYPER_CONNECTION, or of a layer's input.
        slices: Sizes of the tensors' slices of RMS_NORM_SHARDED.
        islands: If not 0, the rows are sums of so many islands.
        prefetch: Whether the call names a next weight to prefetch, which no kernel may access.
    """

    rows: int = 1
    hidden: int = 512
    op: int = 1
    algorithm: int = 0
    dtype: str = "Bfloat16"
    float32_weight: bool = False
    quant: int = 0
    group_size: int = 0
    scale_format: int = 0
    numerics: int = 0
    flags: int = 0
    normed: bool = True
    experts: bool = False
    dense: bool = False
    few: bool = True
    post_norm: bool = False
    num_blocks: int = 0
    values: str = "mixed"
    sources: int = 0
    streams: int = 0
    slices: tuple[int, ...] = ()
    islands: int = 0
    prefetch: bool = False

    def _spec(self) -> _Spec:
        dtype = DTYPES.index(self.dtype)
        return _Spec(
            op=self.op,
            algorithm=self.algorithm,
            dtype=dtype,
            weight_dtype=0 if self.float32_weight else dtype,
            quant=self.quant,
            group_size=self.group_size,
            scale_format=self.scale_format,
            numerics=self.numerics,
            flags=self.flags,
            normed=self.normed,
            experts=self.experts,
            dense=self.dense,
            few=self.few,
            post_norm=self.post_norm,
            num_blocks=self.num_blocks,
            num_tokens=self.rows,
            hidden_size=self.hidden,
            values=("mixed", "finite", "zeros", "nasty").index(self.values),
            sources=self.sources,
            streams=self.streams,
            islands=self.islands,
            num_slices=len(self.slices),
            prefetch=self.prefetch,
            slices=self.slices,
        )


@dataclasses.dataclass
class Outcome:
    """The outcome of a run of calls.

    Attributes:
        wrong: For each call, the number of wrong elements on all ranks.
        not_at_rest: Counters and slots that are not as they must be after the calls.
        faults: Each rank's failure record.
        instructions: Instructions that waves have run.
        kernels: The kernels that were used.
        executed: For each kernel, the addresses of the instructions that some wave has run.
    """

    wrong: list[int]
    not_at_rest: int
    faults: list[Fault]
    instructions: int
    kernels: set[Variant]
    executed: dict[Variant, set[int]]

    @property
    def is_right(self) -> bool:
        """True if every bit is right and no rank has failed."""
        failed = any(fault.status for fault in self.faults)
        return not any(self.wrong) and self.not_at_rest == 0 and not failed


@functools.cache
def _library() -> ctypes.CDLL:
    abi = ("check", "check_memory", "error")
    sources = [HERE / "calls.cpp", *(CSRC / "abi" / f"{name}.cpp" for name in abi)]
    headers = [*CSRC.rglob("*.h"), *HERE.glob("*.h")]
    library = ctypes.CDLL(str(compile_library("calls", sources, headers, FLAGS)))
    library.calls_create.restype = ctypes.c_void_p
    library.calls_wrong.restype = library.calls_not_at_rest.restype = ctypes.c_int64
    return library


def kernel_for(info: _LaunchInfo, world_size: int) -> Variant:
    """Returns the kernel of a launch, as csrc/gpu/kernel_table.cuh chooses it.

    Raises:
        ValueError: No kernel has the launch's features.
    """
    dtype = DTYPES[info.dtype]
    size = world_size if world_size in world_sizes(dtype) else ANY_WORLD_SIZE
    if info.kind == b"slices":
        size = ANY_WORLD_SIZE
    if info.kind.startswith(b"local"):
        size = 1
    needs = {name for name in _FEATURES["kExtended"] if getattr(info, name)}
    kind = info.kind.decode()
    for name in (kind, _OTHERWISE.get(kind, kind)):
        for features, has in _FEATURES.items():
            variant = Variant(name, dtype, size, info.format != 0, features)
            if needs <= has and variant in all_variants(clusters=False):
                return variant
    raise ValueError(f"no kernel of kind {kind} for {size} ranks with {needs}")


@functools.cache
def loaded(variant: Variant, cpu: str, faults: tuple[str, ...] = ()) -> CodeObject:
    """Returns a kernel's code object, compiled once.

    Args:
        variant: The kernel.
        cpu: The GPU.
        faults: Names of switches for deliberate faults (csrc/protocol/fault_switch.h).
    """
    unit = unit_of(variant)
    flags = [f"-DALLNORM_FAULT_{fault}=1" for fault in faults]
    flags += ["-Wno-error"] if faults else []
    headers = (path for part in ("gpu", "protocol", "abi") for path in (CSRC / part).rglob("*.*h"))
    build = BUILD / key_of([*headers, CSRC / "allnorm.h"], flags)
    target = unit.at(cpu, build)
    with locked(target), tempfile.TemporaryDirectory() as scratch:
        if not target.exists():
            compile_unit(unit, cpu, pathlib.Path(scratch), flags)
            publish(unit.at(cpu, pathlib.Path(scratch)), target)
    return CodeObject(target, cpu)


Edit = Callable[[CodeObject], CodeObject]


class Group:
    """Ranks that make the same calls.

    Attributes:
        world_size: The number of ranks.
        cpu: The GPU, for example `gfx942`.
    """

    def __init__(
        self,
        world_size: int,
        cpu: str,
        seed: int,
        *,
        first_op: int = 1,
        timeout_ns: int = ENDLESS_NS,
        workspace_bytes: int = 1 << 20,
    ) -> None:
        """Creates workspaces; the seed chooses all values."""
        self.world_size, self.cpu = world_size, cpu
        self._calls = ctypes.c_void_p(
            _library().calls_create(
                world_size,
                ctypes.c_uint64(seed),
                ctypes.c_uint32(first_op),
                ctypes.c_int64(timeout_ns),
                ctypes.c_int64(workspace_bytes),
            )
        )
        self._number = 0

    def add(self, call: Call) -> None:
        """Adds a call of all ranks."""
        _library().calls_add(self._calls, ctypes.byref(call._spec()))
        self._number += 1

    def set_died(self, rank: int, peers: int) -> None:
        """Tells a rank that the processes of some peers, a bit mask, have ended."""
        _library().calls_set_died(self._calls, rank, ctypes.c_uint32(peers))

    def set_different(self, op: int, rank: int, fewer_rows: int = 0) -> None:
        """Lets a rank make a different call: of fewer rows, or with different rounding if 0."""
        _library().calls_set_different(self._calls, op, rank, fewer_rows)

    def describe(self) -> str:
        """Returns a line per call."""
        text = ctypes.create_string_buffer(200)
        lines = []
        for op in range(self._number):
            _library().calls_describe(self._calls, op, text, len(text))
            lines.append(text.value.decode())
        return "\n".join(lines)

    def run(
        self,
        settings: Settings,
        *,
        absent: Iterable[int] = (),
        late: Iterable[int] = (),
        edit: Edit | None = None,
        faults: tuple[str, ...] = (),
        caches_workspaces: bool = False,
        most_instructions: int = MOST_INSTRUCTIONS,
    ) -> Outcome:
        """Runs all calls; may be called once.

        Args:
            settings: What the emulator does.
            absent: Ranks that make no call.
            late: Ranks that begin late.
            edit: Returns a code object to use in place of the given one.
            faults: Switches for deliberate faults that the kernels are compiled with.
            caches_workspaces: Whether caches may keep workspaces, which the host code prevents.
            most_instructions: Instructions after which the run has failed to end.

        Raises:
            StopError: The kernels did something that is not allowed, or did not end.
        """
        machine = Machine(self.world_size, settings)
        try:
            self._declare(machine, caches_workspaces)
            return self._run(machine, set(absent), set(late), edit, faults, most_instructions)
        finally:
            machine.close()
            _library().calls_destroy(self._calls)

    def _declare(self, machine: Machine, caches_workspaces: bool) -> None:
        def add(begin: int, num_bytes: int, cached: int) -> None:
            machine.add_region(begin, num_bytes, cached=bool(cached) or caches_workspaces)

        declare = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
        _library().calls_regions(self._calls, declare(add))

    def _run(
        self,
        machine: Machine,
        absent: set[int],
        late: set[int],
        edit: Edit | None,
        faults: tuple[str, ...],
        most_instructions: int,
    ) -> Outcome:
        codes: dict[Variant, CodeObject] = {}
        for rank in sorted(set(range(self.world_size)) - absent):
            if rank in late:
                machine.delay(rank, 20_000)
            for op in range(self._number):
                for number in range(_library().calls_num_launches(self._calls, op)):
                    info = _LaunchInfo()
                    _library().calls_launch(self._calls, op, rank, number, ctypes.byref(info))
                    variant = kernel_for(info, self.world_size)
                    if variant not in codes:
                        code = loaded(variant, self.cpu, faults)
                        codes[variant] = edit(code) if edit else code
                        machine.add_code(codes[variant])
                    (name,) = codes[variant].kernels()
                    parameters = bytes(info.parameters[: info.num_bytes])
                    kernel = codes[variant].kernel(name)
                    kernel.shared_bytes += info.shared_bytes
                    machine.enqueue(
                        rank,
                        kernel,
                        info.num_blocks,
                        info.num_threads,
                        parameters,
                    )
        machine.run(most_instructions)
        faults = []
        for rank in range(self.world_size):
            faults.append(Fault())
            _library().calls_fault(self._calls, rank, ctypes.byref(faults[-1]))
        ranks = [rank for rank in range(self.world_size) if rank not in absent]
        return Outcome(
            wrong=[
                sum(
                    _library().calls_wrong(self._calls, op, rank, int(bool(absent)))
                    for rank in ranks
                )
                for op in range(self._number)
            ],
            not_at_rest=sum(_library().calls_not_at_rest(self._calls, rank) for rank in ranks),
            faults=faults,
            instructions=machine.instructions,
            kernels=set(codes),
            executed={variant: machine.executed(code) for variant, code in codes.items()},
        )
