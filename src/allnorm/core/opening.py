"""Opens a communicator: compares the ranks' arguments, allocates its memory, and starts it."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from allnorm import config, islands, policy, tuning
from allnorm._version import __version__
from allnorm.core import _native, arguments, backends, between, channel, watch, workspace
from allnorm.core.connection import Connection
from allnorm.core.dispatch import Chooser
from allnorm.core.endpoint import Endpoint
from allnorm.core.hierarchical import Hierarchy, backend_obstacle
from allnorm.core.opened import Opened
from allnorm.core.rendezvous import Rendezvous
from allnorm.core.resolve import resolve_device
from allnorm.errors import AllnormError, ConfigurationError
from allnorm.names import NUMERICS, check_choice

_OPERATIONS = 1 << 32  # number of operation numbers
_MAX_TIMEOUT_NS = (1 << 63) - 1  # the library's limit


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The unchecked arguments of a constructor; see Communicator."""

    device: Any
    workspace_bytes: Any = None
    numerics: Any = "rounded"
    timeout: Any = None
    tuning_dir: Any = None
    max_blocks: Any = None
    early_trigger: Any = True
    dependent_launch: Any = True
    first_op: Any = 0
    islands: Any = "auto"


@dataclass(frozen=True)
class _Checked:
    """The checked settings of this rank."""

    device: torch.device
    library: _native.Library
    timeout: datetime.timedelta
    workspace_bytes: int
    max_blocks: int
    first_op: int
    flags: int
    islands: islands.Islands | None  # None: to be detected
    agreed: dict[str, Any]  # values that must be equal on every rank, keyed by name


def open_endpoint(
    group: dist.ProcessGroup,
    settings: Settings,
    last_number: Callable[[torch.device], tuple[int, bool]],
) -> Endpoint:
    """Opens this rank's end of a communicator. Collective; every rank raises if one does.

    `last_number` takes a device. It returns the highest number among this process's communicators
    of groups with this name, and whether the new communicator may have the group's name. The
    communicator gets that name only if all ranks allow it.
    """
    with Rendezvous(group, _wait_seconds(settings.timeout)) as meeting:
        return _open(meeting, group, settings, last_number)


def _open(
    meeting: Rendezvous,
    group: dist.ProcessGroup,
    settings: Settings,
    last_number: Callable[[torch.device], tuple[int, bool]],
) -> Endpoint:
    mine: list[tuple[_Checked, tuning.RankTables]] = []

    def check() -> tuple[Any, ...]:
        checked = _check(settings, meeting.world_size)
        place = checked.device.type, checked.device.index, meeting.world_size
        loaded = tuning.load(settings.tuning_dir, *place)
        mine[:] = [(checked, loaded)]
        made = last_number(checked.device)
        return checked.agreed, made, _max_row_bytes(checked.device), loaded.found

    answers = meeting.agree(check, "checking the arguments of Communicator")
    ((checked, loaded),) = mine
    _check_alike([agreed for agreed, *_ in answers])
    # Processes may have created different numbers of communicators; no rank has used the next one.
    number = 1 + max(last for _, (last, _), *_ in answers)
    as_group = all(wanted for _, (_, wanted), *_ in answers)
    name = str(group.group_name) if as_group else f"{group.group_name}#{number}"
    tables, warning = tuning.tables(loaded, [found for *_, found in answers])
    if warning and meeting.rank == 0:
        warnings.warn(warning, stacklevel=4)
    place = _find_place(meeting, group, checked)
    memory = place.memory
    widest = min((most for *_, most, _ in answers if most is not None), default=None)
    apart = len(place.islands) > 1
    traits = policy.Traits(
        checked.device.type,
        meeting.world_size,
        exchange=_apart(place) if apart else memory.obstacle,
        split=place.split,
        max_row_bytes=widest,
        tables=() if apart else tables,  # measured with all ranks in one island
        max_blocks=checked.max_blocks if checked.device.type == "cuda" else 0,
        islands=place.islands,
        between=memory.obstacle if apart else "",
    )
    handles: list[int] = []
    words = hierarchy = connection = None
    try:
        # This exchange of results is also the barrier that comm_create requires.
        meeting.agree(
            lambda: handles.append(_start(place.meeting, checked, memory)),
            "starting the communicator",
        )
        if apart and not memory.obstacle:
            made: list[Hierarchy] = []
            settled = meeting, place.islands, memory, checked.device, place.backend

            def connect() -> None:
                if checked.device.type == "cuda":
                    torch.cuda.set_device(checked.device)  # for this thread
                made.append(Hierarchy(*settled, checked.timeout))

            meeting.agree(connect, "connecting the islands", waits=True)
            (hierarchy,) = made
        if meeting.world_size > 1:
            own = handles[0] if checked.device.type == "cpu" and not apart else 0
            words = channel.create(meeting, own, memory, _nanoseconds(checked.timeout))
            sends_by = between.backend_of(group, checked.device)
            sends_by = sends_by if sends_by in between.BACKENDS else "gloo"
            connection = Connection(meeting, checked.device, sends_by, checked.timeout)
        opened = Opened(
            name=name,
            number=number,
            key=f"{group.group_name}/{meeting.name}",
            group=weakref.ref(group),
            rank=meeting.rank,
            world_size=meeting.world_size,
            device=checked.device,
            timeout=checked.timeout,
            library=checked.library,
            workspace=memory,
            handle=handles[0],
            channel=words,
            hierarchy=hierarchy,
            connection=connection,
        )
        endpoint = Endpoint(opened, Chooser(checked.library, traits, memory.num_bytes))
    except BaseException:
        if hierarchy is not None:
            hierarchy.between.close()
        if words is not None:
            words.end_waits()
            words.close()
            words.destroy()
        for handle in filter(None, handles):
            checked.library.comm_destroy(handle)
        memory.release()
        raise
    if meeting.world_size > 1:
        endpoint.failure.watch = watch.Watch(meeting.processes, _reporter(weakref.ref(endpoint)))
    return endpoint


@dataclass(frozen=True)
class _Place:
    """The position of this rank among islands."""

    islands: islands.Islands  # islands of all ranks
    meeting: Rendezvous  # meeting of this rank's island; of all ranks if islands have no memory
    memory: workspace.Workspace  # memory of this rank's island, or why there is none
    backend: str = ""  # backend of the process group for the device
    split: str = ""  # why devices of one host form multiple islands; empty if not


def _find_place(
    meeting: Rendezvous, group: dist.ProcessGroup, checked: _Checked, split: str = ""
) -> _Place:
    """Finds the islands, and allocates the memory of each. Collective."""
    world_size, device, num_bytes = meeting.world_size, checked.device, checked.workspace_bytes
    if world_size == 1:
        return _Place(((0,),), meeting, workspace.create(meeting, device, num_bytes))
    hosts = workspace.hosts(meeting)
    found = checked.islands or hosts
    for island in found:
        if not any(set(island) <= set(host) for host in hosts):
            raise ValueError(
                f"islands={found!r}: ranks {list(island)} are on different machines, or in "
                f"containers without a common /dev/shm; expected islands within "
                f"{islands.describe(hosts)}. Pass islands='auto'."
            )
    if len(found) == 1:
        memory = workspace.create(meeting, device, num_bytes)
        if checked.islands is not None or len(memory.reach) < 2:
            return _Place(found, meeting, memory)
        memory.release()
        found, split = memory.reach, memory.obstacle
    backend = between.backend_of(group, device)
    obstacle = islands.obstacle_of(found) or backend_obstacle(group, backend, between.BACKENDS)
    if obstacle:
        return _Place(found, meeting, workspace.Workspace([], num_bytes, obstacle), split=split)
    if len(found) == world_size:  # islands of one rank need no memory
        return _Place(found, meeting, workspace.Workspace([], num_bytes), backend, split)
    part = meeting.part(next(island for island in found if meeting.rank in island))
    made: list[workspace.Workspace] = []

    def make() -> tuple[str, islands.Islands]:
        made.append(workspace.create(part, device, num_bytes))
        reach = made[0].reach
        return made[0].obstacle, tuple(tuple(part.ranks[i] for i in group) for group in reach)

    try:
        answers = meeting.agree(make, "making the memory of islands")
    except BaseException:
        for memory in made:
            memory.release()
        raise
    (memory,) = made
    obstacles = [text for text, _ in answers if text]
    if not obstacles:
        return _Place(found, part, memory, backend, split)
    memory.release()
    # GPUs of one host may have peer access only within groups. These groups then become islands.
    whole = [next(island for island in found if rank in island) for rank in range(world_size)]
    parts = {
        part
        for island, (_, reach) in zip(whole, answers, strict=True)
        for part in (reach or (island,))
    }
    finer = islands.in_order(sorted(parts))
    if checked.islands is None and finer != found:
        settled = dataclasses.replace(checked, islands=finer)
        return _find_place(meeting, group, settled, obstacles[0])
    none = workspace.Workspace([], num_bytes, obstacles[0])
    return _Place(found, meeting, none, backend, split)


def _apart(place: _Place) -> str:
    """Returns why ranks in different islands cannot run one_shot or two_shot calls."""
    return (
        f"the ranks are {len(place.islands)} islands, {islands.describe(place.islands)}, which do "
        "not write to each other's memory" + (f" ({place.split})" if place.split else "")
    )


def _check(settings: Settings, world_size: int) -> _Checked:
    """Checks the settings of this rank."""
    environment = config.read_settings()
    check_choice("numerics", settings.numerics, NUMERICS)
    device = resolve_device(settings.device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise AllnormError(
            "a Communicator cannot be made while a CUDA graph is captured. Make it, or call "
            "Communicator.for_group(), before the capture begins."
        )
    library = backends.library(device.type, world_size)
    timeout = _checked_timeout(settings.timeout) or environment.timeout or config.DEFAULT_TIMEOUT
    num_bytes = settings.workspace_bytes
    if num_bytes is None:
        is_cuda = device.type == "cuda"
        default = workspace.DEFAULT_BYTES_CUDA if is_cuda else workspace.DEFAULT_BYTES_CPU
        num_bytes = environment.workspace_bytes or default
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int):
        raise TypeError(f"workspace_bytes={num_bytes!r}: expected an int.")
    if num_bytes < workspace.MIN_BYTES:
        raise ValueError(
            f"workspace_bytes={num_bytes}: expected at least {workspace.MIN_BYTES} bytes."
        )
    num_bytes = num_bytes // 4096 * 4096
    max_blocks = 0
    if settings.max_blocks is not None:
        arguments.check_count("max_blocks", settings.max_blocks)
        if settings.max_blocks < 1:
            raise ValueError("max_blocks=0: expected at least 1, or None for no limit.")
        max_blocks = settings.max_blocks
    arguments.check_count("first_op", settings.first_op)
    early, dependent = settings.early_trigger, settings.dependent_launch
    for name, value in (("early_trigger", early), ("dependent_launch", dependent)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: expected True or False.")
    found = None
    if not isinstance(settings.tuning_dir, str | os.PathLike | None):
        raise TypeError(
            f"tuning_dir={settings.tuning_dir!r}: expected a path, or None for the user's folder."
        )
    # Compare only strings, because arrays compare element by element.
    if not (isinstance(settings.islands, str) and settings.islands == "auto"):
        found = islands.check_islands(settings.islands, world_size)
    first_op = settings.first_op % _OPERATIONS
    flags = 0 if early else _native.LATE_TRIGGER
    flags |= 0 if dependent else _native.NO_DEPENDENT_LAUNCH
    agreed = {
        "device type": device.type,
        "workspace_bytes": num_bytes,
        "numerics": settings.numerics,
        "max_blocks": max_blocks or None,
        "first_op": first_op,
        "early_trigger": early,
        "dependent_launch": dependent,
        "islands": "auto" if found is None else found,
        "library": _build_of(library),
    }
    most_blocks = min(max_blocks, policy.MOST_BLOCKS)
    return _Checked(
        device=device,
        library=library,
        timeout=timeout,
        workspace_bytes=num_bytes,
        max_blocks=most_blocks,
        first_op=first_op,
        flags=flags,
        islands=found,
        agreed=agreed,
    )


def _start(meeting: Rendezvous, checked: _Checked, memory: workspace.Workspace) -> int:
    """Starts the native communicator; returns its handle, 0 if ranks cannot exchange directly."""
    if not memory.addresses:
        return 0
    return channel.start(
        checked.library,
        meeting,
        memory,
        _nanoseconds(checked.timeout),
        device=-1 if checked.device.type == "cpu" else checked.device.index,
        first_op=checked.first_op,
        flags=checked.flags,
    )


def _reporter(endpoint: weakref.ref[Endpoint]) -> Callable[[int, bool], None]:
    """Returns the callback for a Watch, which does not keep the endpoint alive."""

    def ended(rank: int, settled: bool) -> None:
        living = endpoint()
        if living is not None:
            living.peer_ended(rank, settled)

    return ended


def _checked_timeout(timeout: Any) -> datetime.timedelta | None:
    if timeout is None:
        return None
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if number and 0 < timeout < math.inf:
        return config.duration(timeout)
    if not isinstance(timeout, datetime.timedelta) or timeout <= datetime.timedelta(0):
        raise ValueError(
            f"timeout={timeout!r}: expected a positive number of seconds or datetime.timedelta."
        )
    return timeout


def _wait_seconds(timeout: Any) -> float:
    """Returns the timeout of the step that checks arguments; `timeout` itself may be invalid."""
    try:
        given = _checked_timeout(timeout) or config.read_settings().timeout
    except (ValueError, ConfigurationError):
        given = None
    return (given or config.DEFAULT_TIMEOUT).total_seconds()


def _nanoseconds(timeout: datetime.timedelta) -> int:
    return min(int(timeout.total_seconds() * 1e9), _MAX_TIMEOUT_NS)


def _build_of(library: _native.Library) -> str:
    """Describes the code that must be equal on every rank.

    Kernels for other instruction sets are bit-identical and use the same protocol.
    """
    parts = {"package": __version__, **library.build_info()}
    return ", ".join(f"{name} {value}" for name, value in parts.items() if name != "isa")


def _check_alike(agreed: list[dict[str, Any]]) -> None:
    """Raises ValueError on every rank unless all ranks have equal values."""
    texts = []
    for name, first in agreed[0].items():
        if any(other[name] != first for other in agreed):
            values = (f"{other[name]!r} on rank {rank}" for rank, other in enumerate(agreed))
            texts.append(f"{name} is {', '.join(values)}")
    if not texts:
        return
    remedy = "Pass the same on every rank"
    if any(other["library"] != agreed[0]["library"] for other in agreed):
        remedy += ", and install the same build of allnorm for all of them"
    raise ValueError(f"the ranks are different: {'; '.join(texts)}. {remedy}.")


def _max_row_bytes(device: torch.device) -> int | None:
    """Returns the widest row that the fused kernels on this device support; None: no limit."""
    if device.type == "cpu":
        return None
    # 512 threads of 16 bytes per block, and up to 8 blocks per cluster. Clusters depend on the code
    # that the driver has loaded, not only on the device.
    return int(backends.library("cuda").device_code(device.index).max_row_bytes)
