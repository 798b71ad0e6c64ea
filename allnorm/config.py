"""The only module that reads the environment.

| variable                  | argument it stands for             |
|---------------------------|------------------------------------|
| `ALLNORM_WORKSPACE_BYTES` | `Communicator(workspace_bytes=)`   |
| `ALLNORM_TIMEOUT_SECONDS` | `Communicator(timeout=)`           |
| `ALLNORM_DISABLE`         | the engine's own switch, off       |
| `ALLNORM_TUNING_DIR`      | `Communicator(tuning_dir=)`        |

`ALLNORM_DISABLE=1` keeps the plugins of serving engines from doing anything; calls of the library's
own API are not affected.

An argument that is given wins over its variable. An unknown `ALLNORM_*` variable is an error, since
a misspelt setting that does nothing is found too late.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from allnorm.errors import ConfigurationError

DEFAULT_TIMEOUT = datetime.timedelta(seconds=600)

_KNOWN = (
    *("ALLNORM_WORKSPACE_BYTES", "ALLNORM_TIMEOUT_SECONDS"),
    *("ALLNORM_DISABLE", "ALLNORM_TUNING_DIR"),
)


@dataclass(frozen=True)
class Settings:
    """What the environment asks for; None where it says nothing."""

    workspace_bytes: int | None = None
    timeout: datetime.timedelta | None = None
    disabled: bool = False
    tuning_dir: pathlib.Path | None = None


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads every ``ALLNORM_*`` variable.

    Raises:
        ConfigurationError: a variable is unknown, or its value is not what it must be.
    """
    environ = os.environ if environ is None else environ
    unknown = sorted(k for k in environ if k.startswith("ALLNORM_") and k not in _KNOWN)
    if unknown:
        raise ConfigurationError(
            f"unknown environment variable {', '.join(unknown)}: allnorm knows "
            f"{', '.join(_KNOWN)}. Correct the name or unset it."
        )
    workspace = _positive(environ, "ALLNORM_WORKSPACE_BYTES")
    seconds = _positive(environ, "ALLNORM_TIMEOUT_SECONDS")
    return Settings(
        workspace_bytes=None if workspace is None else int(workspace),
        timeout=None if seconds is None else duration(seconds),
        disabled=_switch(environ, "ALLNORM_DISABLE"),
        tuning_dir=_folder(environ, "ALLNORM_TUNING_DIR"),
    )


def cache_dir(environ: Mapping[str, str] | None = None) -> pathlib.Path:
    """The folder for this user's files that can be made again (XDG base directories)."""
    environ = os.environ if environ is None else environ
    root = _folder(environ, "XDG_CACHE_HOME")
    if root is None or not root.is_absolute():  # as the specification says
        root = pathlib.Path(os.path.expanduser("~"), ".cache")
    return root / "allnorm"


def local_rank() -> int:
    """Which of this host's processes torchrun started this one as; 0 where it did not."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else 0


def multicast_switches() -> dict[str, str | None]:
    """The state of the variables that keep NCCL, PyTorch and NVSHMEM from using multicast."""
    names = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
    return {name: os.environ.get(name) for name in names}


def _positive(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if text is None or text == "":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1e15:
        raise ConfigurationError(
            f"{name}={text!r}: expected a positive number. Correct or unset it."
        )
    return value


def duration(seconds: float) -> datetime.timedelta:
    """A timedelta of so many seconds, more than 0, or the nearest one that is longer than 0."""
    if seconds >= datetime.timedelta.max.total_seconds():
        return datetime.timedelta.max
    return max(datetime.timedelta(seconds=seconds), datetime.timedelta.resolution)


def _switch(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ConfigurationError(f"{name}={text!r}: expected 0 or 1. Correct or unset it.")
    return text == "1"


def _folder(environ: Mapping[str, str], name: str) -> pathlib.Path | None:
    text = environ.get(name)
    return pathlib.Path(text).expanduser() if text else None


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Within it an environment variable, of another library, has this value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
