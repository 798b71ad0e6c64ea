"""Tests the package's top-level public names."""

from __future__ import annotations

import datetime
import json
import re
import warnings

import pytest
import torch

import allnorm
from allnorm import config
from allnorm.core import fast_call


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (allnorm.UnsupportedError, (allnorm.AllnormError, ValueError)),
        (allnorm.ConfigurationError, (allnorm.AllnormError, ValueError)),
        (allnorm.CommunicatorClosedError, (allnorm.AllnormError,)),
        (allnorm.PeerTimeoutError, (allnorm.AllnormError,)),
        (allnorm.PeerDivergedError, (allnorm.PeerTimeoutError,)),
        (allnorm.NativeLibraryError, (allnorm.AllnormError, ImportError)),
    ],
)
def test_errors_are_caught_as(error: type[Exception], bases: tuple[type[Exception], ...]) -> None:
    assert all(issubclass(error, base) for base in bases)


def test_capabilities() -> None:
    found = allnorm.capabilities()
    json.dumps(found)
    assert found["version"] == allnorm.__version__
    assert found["torch"] == torch.__version__
    assert found["cuda"] == torch.version.cuda
    assert set(found["backends"]) == {"cpu", "cuda"}
    assert "error" not in found["backends"]["cpu"]
    assert found["multicast"]["used"] is False
    assert len(found["devices"]) == torch.cuda.device_count()
    assert found["fast_calls"] is fast_call.available()


def test_settings_are_read_from_the_environment() -> None:
    assert config.read_settings({}) == config.Settings()
    settings = config.read_settings(
        {"ALLNORM_WORKSPACE_BYTES": "1048576", "ALLNORM_TIMEOUT_SECONDS": "0.5", "HOME": "/"}
    )
    assert settings.workspace_bytes == 1 << 20
    assert settings.timeout is not None
    assert settings.timeout.total_seconds() == 0.5
    long = config.read_settings({"ALLNORM_TIMEOUT_SECONDS": "1e14"})
    assert long.timeout == datetime.timedelta.max
    short = config.read_settings({"ALLNORM_TIMEOUT_SECONDS": "1e-9"})
    assert short.timeout == datetime.timedelta.resolution
    with pytest.raises(allnorm.ConfigurationError) as refused:
        config.read_settings({"ALLNORM_WORKSPACE": "64"})
    named = set(re.findall(r"ALLNORM_\w+", str(refused.value)))
    # ALLNORM_HIP opens a preview; the others are few, and each is an argument too.
    assert len(named - {"ALLNORM_WORKSPACE", "ALLNORM_HIP"}) == 4
    for value in ("x", "-1", "0", "inf", "nan"):
        with pytest.raises(allnorm.ConfigurationError, match="ALLNORM_TIMEOUT_SECONDS"):
            config.read_settings({"ALLNORM_TIMEOUT_SECONDS": value})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *[(name, "DISABLE") for name in ("DISABEL", "DISABLED", "DISBALE", "DISABLE_PLUGIN")],
        *[(name, "WORKSPACE_BYTES") for name in ("WORKSPACE", "WORKSPACE_BYTE", "WORKSPACE_MB")],
        *[(name, "TIMEOUT_SECONDS") for name in ("TIMEOUT", "TIMEOUT_S", "TIMEOUT_SECS")],
        *[(name, "TUNING_DIR") for name in ("TUNING", "TUNINGDIR", "TUNE_DIR")],
    ],
)
def test_misspelled_variables_are_errors(name: str, meant: str) -> None:
    with pytest.raises(allnorm.ConfigurationError, match=f"ALLNORM_{name}: .*ALLNORM_{meant}, or"):
        config.read_settings({f"ALLNORM_{name}": "1"})


def test_other_variables_are_ignored_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets variables as Kubernetes does for a service named allnorm, and images' variables."""
    port = ("PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR", "PORT_80_TCP_PORT", "PORT_80_TCP_PROTO")
    service = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "SERVER_SERVICE_HOST")
    others = ("VERSION", "HOME", "IMAGE", "TAG", "COMMIT", "LOG_LEVEL", "BUILD_DIR", "CACHE_DIR")
    names = {f"ALLNORM_{name}": "1" for name in (*port, *service, *others)}
    monkeypatch.setattr(config, "_ignored", set())
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.warns(UserWarning, match="ignores the environment variable") as caught:
        assert config.read_settings(names) == config.Settings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.read_settings(names) == config.Settings()
    assert len(caught) == 1
    assert all(name in str(caught[0].message) for name in names)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.read_settings({"ALLNORM_REVISION": "1"})
