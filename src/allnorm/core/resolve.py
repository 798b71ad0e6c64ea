"""Resolves a caller's arguments `group` and `device`."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from allnorm.errors import UnsupportedError


def resolve_group(group: Any) -> dist.ProcessGroup:
    """Returns the process group for an argument `group`.

    Raises:
        ValueError, TypeError: `group` is not a process group, or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group() "
            "before making a Communicator."
        )
    mesh = sys.modules.get("torch.distributed.device_mesh")  # not imported here, to save time
    if mesh is not None and isinstance(group, mesh.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions, {group.mesh_dim_names}: "
                "expected one. Pass the dimension of tensor parallelism, such as mesh['tp']."
            )
        group = group.get_group()
    resolved = dist.group.WORLD if group is None else group
    if resolved is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"group={group!r}: this process is not in the group. Expected a group that it is in: "
            "new_group() returns this value to the other processes."
        )
    if not isinstance(resolved, dist.ProcessGroup):
        raise ValueError(
            f"group={group!r}: expected a process group as init_process_group() and new_group() "
            "make it, a DeviceMesh of one dimension, or None for the default group."
        )
    return resolved


def group_called(name: str) -> dist.ProcessGroup | None:
    """Returns the process group called `name`; None if there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    groups = dist.distributed_c10d._world.pg_map
    return next((group for group in groups if group.group_name == name), None)


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Returns the device for an argument `device`.

    Raises:
        ValueError, TypeError, UnsupportedError: `device` is not a device, or is not supported.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    expected = "expected a torch.device or its name, such as 'cuda:0' or 'cpu'"
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device={device!r}: {expected}.")
    try:
        resolved = torch.device(device)
    except (RuntimeError, ValueError):
        raise ValueError(f"device={device!r}: {expected}.") from None
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise UnsupportedError(f"device={device}: expected a CUDA device or the CPU.")
    if not torch.cuda.is_available():
        raise UnsupportedError(f"device={device}: torch finds no CUDA device. Use device='cpu'.")
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    return torch.device("cuda", index)
