"""The plugin's own logic beside stand-ins for vLLM's modules; tests/engines has the real ones."""

from __future__ import annotations

import logging
import multiprocessing
import pathlib
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import allnorm.integrations.vllm as plugin
from allnorm.integrations.vllm import install, late, norms, seams, switch
from allnorm.integrations.vllm.seams import Seam


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package on the path, with modules that need not be imported."""
    name = "standin_engine"
    folder = tmp_path / name
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "inner" / "__init__.py").write_text("")
    (folder / "inner" / "work.py").write_text(
        "import sys\n"
        "if sys.platform:\n"
        "    from pathlib import Path as Pass\n"
        "TABLE: dict = {}\n"
        "def start(config, rank, *more): return rank\n"
        "class Worker:\n"
        "    def ready(self): return 'ready'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    seams._parsed.cache_clear()
    yield name
    for loaded in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[loaded]


# ---- acting on imports --------------------------------------------------------------------------


def test_an_action_follows_the_import(package: str) -> None:
    import importlib

    seen: list[Any] = []
    name = f"{package}.inner.work"
    late.when_imported(name, seen.append)
    late.when_imported(name, lambda module: setattr(module, "start", "ours"))
    assert not seen
    assert name not in sys.modules, "nothing is imported early"
    module = importlib.import_module(name)
    assert seen == [module]
    assert module.start == "ours"
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    late.when_imported(name, seen.append)
    assert seen == [module, module], "a module that is there is acted on at once"


def test_a_module_that_does_not_exist_still_does_not(package: str) -> None:
    late.when_imported(f"{package}.nowhere", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        __import__(f"{package}.nowhere")


# ---- seams --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "is_there"),
    [
        ("start", ("config", "rank"), True),
        ("start", ("config", "device"), False),
        ("Worker.ready", (), True),
        ("Worker.gone", (), False),
        ("TABLE", (), True),
        ("Pass", (), True),
        ("TABLE", ("config",), False),
        ("nothing", (), False),
    ],
)
def test_seams_are_found_in_sources(
    package: str, name: str, parameters: tuple[str, ...], is_there: bool
) -> None:
    seam = Seam(f"{package}.inner.work", name, "", parameters)
    assert seams.missing((seam,)) == ([] if is_there else [str(seam)])
    assert f"{package}.inner.work" not in sys.modules


def test_a_module_that_is_gone_is_a_missing_seam(package: str) -> None:
    assert seams.missing((Seam(f"{package}.other", "start", ""),)) == [f"{package}.other.start"]


def test_a_missing_seam_is_named_and_nothing_is_touched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    touched: list[str] = []
    monkeypatch.setattr(seams, "missing", lambda: ["vllm.somewhere.something"])
    monkeypatch.setattr(install, "when_imported", lambda name, action: touched.append(name))
    monkeypatch.setattr(plugin, "_registered", False)
    with caplog.at_level(logging.INFO):
        plugin.register()
        plugin.register()
    assert not touched
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "this vLLM has no vllm.somewhere.something" in record.getMessage()


def test_workers_do_not_repeat_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(seams, "missing", lambda: ["vllm.somewhere.something"])
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    with caplog.at_level(logging.INFO):
        install.install()
    assert not caplog.records


def test_the_entry_point_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(install, "install", broken)
    monkeypatch.setattr(plugin, "_registered", False)
    plugin.register()
    assert "nothing is fused: RuntimeError: no luck" in caplog.text


def test_loading_it_imports_no_vllm() -> None:
    code = (
        "import sys; from allnorm.integrations.vllm import register; register();"
        "assert not any(name.startswith('vllm.') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---- following functions ------------------------------------------------------------------------


def test_what_follows_sees_the_arguments_and_the_result() -> None:
    owner = types.SimpleNamespace(start=lambda config, rank=0: rank)
    seen: list[Any] = []

    def then(result: Any, config: Any, *_: Any, **__: Any) -> Any:
        seen.append((result, config))
        return result

    for _ in range(2):
        install._after(owner, "start", then)
    assert owner.start("settings", rank=3) == 3
    assert owner.start(config="others") == 0
    assert seen == [(3, "settings"), (0, "others")]


# ---- the switch ---------------------------------------------------------------------------------


def config_with(additional: Any, on: bool = False) -> Any:
    passes = types.SimpleNamespace(fuse_allreduce_rms=on, fi_allreduce_fusion_max_size_mb=None)
    return types.SimpleNamespace(
        additional_config=additional,
        compilation_config=types.SimpleNamespace(pass_config=passes),
    )


def test_a_default_of_vllm_stays_when_ours_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tables = {"compilation_config": {"pass_config": {switch.FIELD: lambda config: True}}}
    module: Any = types.SimpleNamespace(OPTIMIZATION_LEVEL_TO_CONFIG={2: tables})
    switch.patch_defaults(module)
    switch.patch_defaults(module)
    default = tables["compilation_config"]["pass_config"][switch.FIELD]

    def broken(config: Any) -> str:
        raise RuntimeError("no luck")

    monkeypatch.setattr(switch, "obstacle", broken)
    monkeypatch.setattr(switch, "_announcer", switch.Announcer(logging.getLogger("vllm.allnorm")))
    assert default(config_with({})) is True
    assert "nothing is fused: RuntimeError: no luck" in caplog.text


def test_additional_config_that_is_no_dictionary_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(switch, "obstacle", lambda config: "")
    theirs = object()
    config = config_with(theirs)
    assert switch._Default(lambda _: False)(config) is False
    assert config.additional_config is theirs
    assert not switch.was_left_alone(config)


@pytest.mark.parametrize(
    ("cuda", "ranks", "two_batches", "words"),
    [
        (True, 2, False, ""),
        (True, 1, False, "tensor_parallel_size is 1"),
        (True, 2, True, "two batches run at once"),
        (False, 2, False, "the platform is tpu, expected CUDA"),
    ],
)
def test_what_has_nothing_to_fuse(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, ranks: int, two_batches: bool, words: str
) -> None:
    platforms: Any = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(is_cuda=lambda: cuda, device_name="tpu")
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    parallel = types.SimpleNamespace(tensor_parallel_size=ranks, use_ubatching=two_batches)
    why = switch.obstacle(types.SimpleNamespace(parallel_config=parallel))
    assert words in why
    assert bool(words) == bool(why)


def test_what_vllm_would_do_without_us() -> None:
    for stock in (True, False):
        assert switch.stock_default(config_with({"allnorm": {"stock": stock}}, on=True)) is stock
    assert switch.stock_default(config_with({}, on=True))


# ---- norms --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "float32_weight", "mode"),
    [
        ("native", False, "vllm"),
        ("native", True, "unrounded"),
        ("vllm_c", False, "rounded"),
        ("oink", False, ""),
    ],
)
def test_the_mode_of_an_eager_norm(provider: str, float32_weight: bool, mode: str) -> None:
    assert norms.mode_of(provider, float32_weight=float32_weight) == mode
