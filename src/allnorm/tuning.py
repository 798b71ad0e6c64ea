"""Tuning tables: reading and checking their files, and choosing which table is used.

Each kind of device and number of ranks has its own file. `allnorm tune` writes files into the
user's cache; the package ships others in `seeds/`. Files are not trusted: one that is not valid in
every detail is ignored with a warning, and results never depend on a table.

All ranks must use the same table. Otherwise they would choose different algorithms and wait for
each other forever. Each rank reads its own file when a Communicator is created, and `agree` decides
whether to use these files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from allnorm import config, topology
from allnorm._version import __version__
from allnorm.names import ALGORITHMS, DTYPES, EPILOGUES
from allnorm.policy import MOST_BLOCKS, Curve, Step, Table

FORMAT = 2  # version 1 had no link_gbps, and was measured without pacing
_MAX_FILE_BYTES = 4 << 20
_SEEDS = pathlib.Path(__file__).parent / "seeds"

Curves = dict[tuple[str, str], list[Curve]]

# Blocks per row; 0: the library chooses.
CLUSTER_SIZES = (0, 1, 2, 4, 8)

# Minimum and maximum link rate in GB/s, as in allnorm.h.
LINK_GBPS = (1.0, 1e6)


@dataclass(frozen=True)
class Measured:
    """The contents of a table."""

    curves: Curves = field(default_factory=dict)  # keyed by dtype and epilogue
    link_gbps: float = 0.0  # as in policy.Plan
    prefetch_tokens: int | None = None  # as in policy.Table


class TableError(ValueError):
    """Raised if a file is not a table for this device and number of ranks; the message says why."""


@dataclass(frozen=True)
class TableSummary:
    """A summary of one rank's tables, which it sends to its peers."""

    device: str  # name of this rank's device
    seed: str  # digest of the shipped table for the device; "" if there is none
    path: str  # path of the user's file, even if it does not exist
    digest: str = ""  # digest of the user's file; "" if it does not exist
    problem: str = ""  # why the user's file cannot be used; "" if it can or does not exist
    date: str = ""  # date of the measurement


# The device name in a table: the name of the GPU or of the processor.
device_name = functools.cache(topology.device_name)


def file_name(device: str, world_size: int) -> str:
    """Returns the file name of the table for a device name and number of ranks."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"{slug or 'unknown'}-{world_size}.json"


def path_of(directory: pathlib.Path | None, device: str, world_size: int) -> pathlib.Path:
    """Returns the path of the user's table; None means `ALLNORM_TUNING_DIR`, then the cache."""
    if directory is None:
        directory = config.read_settings().tuning_dir or config.cache_dir() / "tuning"
    return directory / file_name(device, world_size)


def load(
    directory: str | os.PathLike[str] | None, device: str, index: int | None, world_size: int
) -> RankTables:
    """Reads the tables for a device ("cuda" or "cpu") and its index; see `path_of` and `read`."""
    name = device_name(device, index or 0)
    folder = None if directory is None else pathlib.Path(directory)
    return read(path_of(folder, name, world_size), name, world_size)


# ---- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankTables:
    """The tables that one rank has read."""

    found: TableSummary  # their summary for the peers
    tuned: Measured  # the user's table
    seed: Measured  # the shipped table


def read(path: pathlib.Path, device: str, world_size: int) -> RankTables:
    """Reads the user's file and the shipped one; never raises because of their contents."""
    seed, seed_digest = Measured(), ""
    with contextlib.suppress(TableError):  # tests check every shipped table
        shipped = _SEEDS / file_name(device, world_size)
        seed, seed_digest, _ = _read(shipped, device, world_size, release="")
    try:
        tuned, digest, date = _read(path, device, world_size, release=__version__)
    except TableError as error:
        return RankTables(
            TableSummary(device, seed_digest, str(path), problem=str(error)), Measured(), seed
        )
    return RankTables(TableSummary(device, seed_digest, str(path), digest, date=date), tuned, seed)


def _read(
    path: pathlib.Path, device: str, world_size: int, *, release: str
) -> tuple[Measured, str, str]:
    """Reads a file's contents, digest and date; empty values if it does not exist."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return Measured(), "", ""
    except OSError as error:
        raise TableError(f"it cannot be read: {error.strerror or error}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise TableError(f"it has more than {_MAX_FILE_BYTES} bytes")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise TableError(f"it is not valid JSON: {error}") from None
    measured = check(document, device, world_size, release)
    return measured, hashlib.sha256(content).hexdigest(), str(document.get("date", ""))[:10]


def check(document: Any, device: str, world_size: int, release: str = __version__) -> Measured:
    """Checks a table completely and returns its contents.

    Args:
        document: parsed contents of the file.
        device: expected device.
        world_size: expected number of ranks.
        release: expected version of allnorm that wrote it; "": any.

    Raises:
        TableError: the format, version, device or number of ranks differs.
    """
    if not isinstance(document, dict):
        raise TableError("it is not a JSON object")
    expectations = {"format": FORMAT, "device": device, "world_size": world_size}
    if release:
        expectations["allnorm"] = release
    for key, expected in expectations.items():
        if document.get(key) != expected or isinstance(document.get(key), bool):
            raise TableError(f"its {key} is {document.get(key)!r}: expected {expected!r}")
    entries = document.get("entries")
    if not isinstance(entries, list):
        raise TableError("it has no list of entries")
    curves: Curves = {}
    for entry in entries:
        if not isinstance(entry, dict):
            raise TableError("an entry is not a JSON object")
        name = (str(entry.get("dtype")), str(entry.get("epilogue")))
        if name[0] not in DTYPES or name[1] not in EPILOGUES:
            raise TableError(
                f"an entry has dtype {name[0]!r} and epilogue {name[1]!r}: expected one of "
                f"{', '.join(DTYPES)} and one of {', '.join(EPILOGUES)}"
            )
        gemm = [_integer(entry, key, 0) for key in ("product", "product_tokens") if key in entry]
        curve = Curve(_integer(entry, "hidden_size", 1), _steps(entry.get("steps")), *gemm)
        if len(gemm) == 1:
            raise TableError("an entry has only one of product and product_tokens: expected both")
        curves.setdefault(name, []).append(curve)
    for name, found in curves.items():
        if len({curve.hidden_size for curve in found}) < len(found):
            raise TableError(f"a hidden size of {' and '.join(name)} has two entries")
    ahead = _integer(document, "prefetch_tokens", 0) if "prefetch_tokens" in document else None
    return Measured(curves, _link(document.get("link_gbps", 0)), ahead)


def _link(value: Any) -> float:
    least, most = LINK_GBPS
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (value == 0 or least <= value <= most):
        raise TableError(f"link_gbps is {value!r}: expected 0 (unknown) or {least:g} to {most:g}")
    return float(value)


def _steps(steps: Any) -> tuple[Step, ...]:
    if not isinstance(steps, list) or not steps:
        raise TableError("an entry has no list of steps")
    result: list[Step] = []
    for step in steps:
        if not isinstance(step, dict) or step.get("algorithm") not in ALGORITHMS:
            raise TableError(
                f"a step is {step!r}: expected an algorithm of {', '.join(ALGORITHMS)}"
            )
        last = step is steps[-1]
        if last != (step.get("max_tokens") is None):
            raise TableError("max_tokens must be null in the last step, and only there")
        least = (result[-1].max_tokens or 0) + 1 if result else 1
        max_tokens = None if last else _integer(step, "max_tokens", least)
        cluster_size = _integer(step, "cluster_size", 0) if "cluster_size" in step else 0
        if cluster_size not in CLUSTER_SIZES:
            known = ", ".join(map(str, CLUSTER_SIZES))
            raise TableError(f"cluster_size is {cluster_size}: expected one of {known}")
        num_blocks = _integer(step, "num_blocks", 0)
        result.append(Step(max_tokens, step["algorithm"], num_blocks, cluster_size))
    return tuple(result)


def _integer(fields: dict[str, Any], name: str, least: int) -> int:
    value = fields.get(name)
    most = MOST_BLOCKS if name == "num_blocks" else 1 << 40
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise TableError(f"{name} is {value!r}: expected an integer from {least} to {most}")
    return value


# ---- choosing ------------------------------------------------------------------------------------


def agree(summaries: Sequence[TableSummary]) -> tuple[bool, str]:
    """Returns whether the user's table is used, and a warning; both are equal on every rank.

    Args:
        summaries: all ranks' summaries, in rank order.
    """
    remedy = "allnorm uses its built-in choice instead; results are bit-identical."
    for rank, found in enumerate(summaries):
        if found.problem:
            text = f"the tuning table {found.path} of rank {rank} is ignored: {found.problem}."
            return False, f"{text} Run `allnorm tune` again, or delete the file. {remedy}"
    if len({found.digest for found in summaries}) > 1:
        paths = ", ".join(
            f"rank {rank}: {found.path} ({found.digest[:8] or 'does not exist'})"
            for rank, found in enumerate(summaries)
        )
        return False, (
            f"the ranks have different tuning tables ({paths}), so none is used. Make all ranks "
            "read the same file: run `allnorm tune` once and share its folder, or set "
            f"ALLNORM_TUNING_DIR. {remedy}"
        )
    return bool(summaries[0].digest), ""


def tables(own: RankTables, summaries: Sequence[TableSummary]) -> tuple[tuple[Table, ...], str]:
    """Returns a communicator's tables, best first, and a warning or "".

    Args:
        own: this rank's tables.
        summaries: all ranks' summaries, in rank order.
    """
    if len({(found.device, found.seed) for found in summaries}) > 1:
        return (), ""  # no table applies to a mix of devices
    used, warning = agree(summaries)
    result = []
    if used:
        # Uses rank 0's path and date, so that plans are equal on every rank.
        source = f"tuned {summaries[0].path}, {summaries[0].date}"
        tuned = own.tuned
        result.append(Table(source, tuned.curves, tuned.link_gbps, tuned.prefetch_tokens))
    if own.seed.curves:
        name = own.found.device.lower().removeprefix("nvidia ")
        seed = own.seed
        result.append(Table(f"seed {name}", seed.curves, seed.link_gbps, seed.prefetch_tokens))
    return tuple(result), warning


# ---- writing -------------------------------------------------------------------------------------


def document(
    measured: Measured, device: str, world_size: int, provenance: dict[str, Any]
) -> dict[str, Any]:
    """Returns a table in the form in which it is stored.

    Args:
        measured: contents of the table.
        device: name of the measured device.
        world_size: number of ranks.
        provenance: commit, versions, command and date of the measurement.
    """
    ahead = measured.prefetch_tokens
    return {
        "format": FORMAT,
        "allnorm": __version__,
        "device": device,
        "world_size": world_size,
        **provenance,
        "link_gbps": measured.link_gbps,
        **({} if ahead is None else {"prefetch_tokens": ahead}),
        "entries": [
            {
                "dtype": dtype,
                "epilogue": epilogue,
                "hidden_size": curve.hidden_size,
                "product": curve.product,
                "product_tokens": curve.product_tokens,
                "steps": [dataclasses.asdict(step) for step in curve.steps],
            }
            for (dtype, epilogue), found in sorted(measured.curves.items())
            for curve in sorted(found, key=lambda c: c.hidden_size)
        ],
    }


def save(path: pathlib.Path, table: dict[str, Any]) -> None:
    """Writes a table atomically, so that readers never see a partial file; creates the folder.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=1)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
