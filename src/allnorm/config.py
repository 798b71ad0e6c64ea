"""The only module that reads environment variables.

| variable                  | replaces the argument              |
|---------------------------|------------------------------------|
| `ALLNORM_WORKSPACE_BYTES` | `Communicator(workspace_bytes=)`   |
| `ALLNORM_TIMEOUT_SECONDS` | `Communicator(timeout=)`           |
| `ALLNORM_DISABLE`         | turns the plugins off              |
| `ALLNORM_TUNING_DIR`      | `Communicator(tuning_dir=)`        |
| `ALLNORM_HIP`             | allows the preview for AMD GPUs    |

`ALLNORM_DISABLE=1` disables the plugins of serving engines. It does not affect calls of the
library's own API.

An argument takes precedence over its variable. A name similar to one of these is an error, because
a misspelled setting would silently have no effect. Other unknown `ALLNORM_*` variables are ignored
with one warning: Kubernetes sets such names for a service called allnorm, and images set
ALLNORM_VERSION.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import os
import pathlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from allnorm.errors import ConfigurationError

DEFAULT_TIMEOUT = datetime.timedelta(seconds=600)

_PREFIX = "ALLNORM_"
# Minimum similarity by difflib: TUNE_DIR and TUNING_DIR have 0.78, BUILD_DIR and TUNING_DIR 0.63.
_ALIKE = 0.74
_ignored: set[str] = set()
_KNOWN = (
    *("ALLNORM_WORKSPACE_BYTES", "ALLNORM_TIMEOUT_SECONDS"),
    *("ALLNORM_DISABLE", "ALLNORM_TUNING_DIR", "ALLNORM_HIP"),
)


@dataclass(frozen=True)
class Settings:
    """The values of the environment variables; None: the variable is not set."""

    workspace_bytes: int | None = None
    timeout: datetime.timedelta | None = None
    disabled: bool = False
    tuning_dir: pathlib.Path | None = None
    hip: bool = False


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads every ``ALLNORM_*`` variable.

    Raises:
        ConfigurationError: a name resembles a known variable's name, or a value is invalid.
    """
    environ = os.environ if environ is None else environ
    _check_names(k for k in environ if k.startswith(_PREFIX) and k not in _KNOWN)
    workspace = _positive(environ, "ALLNORM_WORKSPACE_BYTES")
    seconds = _positive(environ, "ALLNORM_TIMEOUT_SECONDS")
    return Settings(
        workspace_bytes=None if workspace is None else int(workspace),
        timeout=None if seconds is None else duration(seconds),
        disabled=_switch(environ, "ALLNORM_DISABLE"),
        tuning_dir=_folder(environ, "ALLNORM_TUNING_DIR"),
        hip=_switch(environ, "ALLNORM_HIP"),
    )


def _check_names(unknown: Iterable[str]) -> None:
    """Raises for a misspelled name; warns once about other names, on one rank per host."""
    others = []
    for name in sorted(unknown):
        meant = _resembled(name)
        if meant is not None:
            raise ConfigurationError(
                f"unknown environment variable {name}: expected {meant}, or a different one of "
                f"{', '.join(_KNOWN)}. Correct the name or unset it."
            )
        if name not in _ignored:
            others.append(name)
    _ignored.update(others)
    if others and local_rank() == 0:
        warnings.warn(
            f"allnorm ignores the environment variable {', '.join(others)}: it reads "
            f"{', '.join(_KNOWN)} only. Unset it if it was meant for allnorm.",
            stacklevel=4,
        )


def _resembled(name: str) -> str | None:
    """Returns the variable that `name` may be a misspelling of, or None."""
    words = name.removeprefix(_PREFIX)
    for known in _KNOWN:
        meant = known.removeprefix(_PREFIX)
        alike = difflib.SequenceMatcher(None, words, meant).ratio() >= _ALIKE
        if alike or words.split("_")[0] == meant.split("_")[0]:
            return known
    return None


def cache_dir(environ: Mapping[str, str] | None = None) -> pathlib.Path:
    """Returns allnorm's folder in the user's cache (XDG base directories)."""
    environ = os.environ if environ is None else environ
    root = _folder(environ, "XDG_CACHE_HOME")
    if root is None or not root.is_absolute():  # the specification ignores relative paths
        root = pathlib.Path(os.path.expanduser("~"), ".cache")
    return root / "allnorm"


def local_rank() -> int:
    """Returns the local rank that torchrun set for this process; 0 without torchrun."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else 0


def multicast_switches() -> dict[str, str | None]:
    """Returns the variables that keep NCCL, PyTorch and NVSHMEM from using multicast."""
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
    """Converts positive seconds to a timedelta, limited to its smallest and largest values."""
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
    """Sets another library's environment variable within the context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
