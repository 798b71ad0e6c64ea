"""What a user finds at the top of the package."""

from __future__ import annotations

import datetime
import json
import re

import pytest
import torch

import allnorm
from allnorm import config
from allnorm.core import fast_call


def test_public_names() -> None:
    for name in (
        "Communicator",
        "Plan",
        "Fp8PerGroup",
        "Fp8PerTensor",
        "Fp8PerToken",
        "QuantizedNorm",
        "add_rms_norm",
        "add_rms_norm_quant",
        "capabilities",
        "reference",
        "AllnormError",
        "UnsupportedError",
        "PeerTimeoutError",
        "CommunicatorClosedError",
        "NativeLibraryError",
    ):
        assert hasattr(allnorm, name), name
        assert name in allnorm.__all__


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
    with pytest.raises(allnorm.ConfigurationError, match=r"ALLNORM_WORKSPACE, .*allnorm knows"):
        config.read_settings({"ALLNORM_WORKSPACE": "1", "ALLNORM_ZZZ": ""})
    long = config.read_settings({"ALLNORM_TIMEOUT_SECONDS": "1e14"})
    assert long.timeout == datetime.timedelta.max
    short = config.read_settings({"ALLNORM_TIMEOUT_SECONDS": "1e-9"})
    assert short.timeout == datetime.timedelta.resolution
    with pytest.raises(allnorm.ConfigurationError) as refused:
        config.read_settings({"ALLNORM_MAX_BLOCKS": "64"})
    named = set(re.findall(r"ALLNORM_\w+", str(refused.value)))
    assert len(named - {"ALLNORM_MAX_BLOCKS"}) == 4, "few variables, each an argument too"
    for value in ("x", "-1", "0", "inf", "nan"):
        with pytest.raises(allnorm.ConfigurationError, match="ALLNORM_TIMEOUT_SECONDS"):
            config.read_settings({"ALLNORM_TIMEOUT_SECONDS": value})
