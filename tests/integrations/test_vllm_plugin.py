"""Tests the vLLM plugin in one process, with fakes of vLLM's modules.

tests/engines/test_vllm.py runs the plugin in the real package.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import multiprocessing
import pathlib
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from limits import HANG_SECONDS

import allnorm.integrations.vllm as plugin
from allnorm.integrations.engines import Announcer
from allnorm.integrations.vllm import (
    eager,
    engine,
    fusion_pass,
    install,
    late,
    norms,
    seams,
    switch,
)
from allnorm.integrations.vllm.seams import Option, Seam


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Creates a package on the import path; its modules are not imported yet."""
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
        "    device: str\n"
        "    mode: str = 'none'\n"
        "    def __init__(self, config):\n"
        "        self.config = config\n"
        "        if config: self.group, self.rank = config\n"
        "    def ready(self): self.late = 'ready'\n"
        "    @property\n"
        "    def size(self): return 1\n"
        "def more(config, new, old=1): return rank\n"
        "def named(config, *, new): return rank\n"
        "def optional(config, new=1, *, other=2): return rank\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    seams._parsed.cache_clear()
    yield name
    for loaded in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[loaded]


# ---- actions on imports -------------------------------------------------------------------------


def test_actions_run_after_the_import(package: str) -> None:
    seen: list[Any] = []
    name = f"{package}.inner.work"
    late.when_imported(name, seen.append, pytest.fail)
    late.when_imported(name, lambda module: setattr(module, "start", "ours"), pytest.fail)
    assert not seen
    assert name not in sys.modules, "the action imported the module"
    module = importlib.import_module(name)
    assert seen == [module]
    assert module.start == "ours"
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    late.when_imported(name, seen.append, pytest.fail)
    assert seen == [module, module], "the action did not run at once for an imported module"


def test_actions_of_modules_that_do_not_exist(package: str) -> None:
    late.when_imported(f"{package}.nowhere", lambda module: None, pytest.fail)
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        __import__(f"{package}.nowhere")


def test_imports_do_not_raise_errors_of_actions(package: str) -> None:
    failed: list[str] = []
    seen: list[Any] = []

    def broken(module: Any) -> None:
        raise KeyError("fuse_allreduce_rms")

    name = f"{package}.inner.work"
    late.when_imported(name, broken, lambda error: failed.append(repr(error)))
    late.when_imported(name, seen.append, pytest.fail)
    module = importlib.import_module(name)
    assert seen == [module], "later actions did not run"
    late.when_imported(name, broken, lambda error: failed.append(repr(error)))
    assert failed == ["KeyError('fuse_allreduce_rms')"] * 2


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
        # Fields are declared, assigned in the constructor, or properties. Later ones do not count.
        ("Worker.device", (), True),
        ("Worker.mode", (), True),
        ("Worker.config", (), True),
        ("Worker.rank", (), True),
        ("Worker.size", (), True),
        ("Worker.late", (), False),
        # A function must not require unknown parameters.
        ("more", ("config",), False),
        ("more", ("config", "new"), True),
        ("named", ("config",), False),
        ("optional", ("config",), True),
    ],
)
def test_seams_are_found_in_sources(
    package: str, name: str, parameters: tuple[str, ...], is_there: bool
) -> None:
    seam = Seam(f"{package}.inner.work", name, parameters)
    assert seams.missing((seam,)) == ([] if is_there else [str(seam)])
    assert f"{package}.inner.work" not in sys.modules


def test_seams_of_missing_modules(package: str) -> None:
    assert seams.missing((Seam(f"{package}.other", "start"),)) == [f"{package}.other.start"]


@pytest.mark.parametrize("in_worker", [False, True])
def test_nothing_is_installed_without_a_seam(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, in_worker: bool
) -> None:
    """Tests that the plugin names the missing seam once, and not in vLLM's workers."""
    if in_worker:
        monkeypatch.setattr(multiprocessing, "parent_process", object)
    touched: list[str] = []
    monkeypatch.setattr(seams, "missing", lambda: ["vllm.somewhere.something"])
    monkeypatch.setattr(install, "when_imported", lambda name, action: touched.append(name))
    monkeypatch.setattr(plugin, "_registered", False)
    with caplog.at_level(logging.INFO):
        plugin.register()
        plugin.register()
    assert not touched
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (not in_worker)
    assert in_worker or "this vLLM has no vllm.somewhere.something" in caplog.text


def test_fields_of_vllms_objects_are_seams() -> None:
    """Tests that a renamed field is found before a worker fails, or fuses regardless of it."""
    known = {seam.name for seam in seams.REQUIRED}
    known |= {seam.name for option in seams.OPTIONAL for seam in option.needs}
    for field in (
        "PassConfig.fuse_allreduce_rms",
        "PassConfig.fi_allreduce_fusion_max_size_mb",
        "ParallelConfig.tensor_parallel_size",
        "ParallelConfig.use_ubatching",
        "CompilationConfig.mode",
        "CompilationConfig.pass_config",
        "SchedulerConfig.max_num_batched_tokens",
        "ModelConfig.get_hidden_size",
        "GroupCoordinator.device_group",
        "GroupCoordinator.unique_name",
        "RMSNorm.variance_size_override",
        "IrOpImpl.provider",
        "Platform.is_cuda",
    ):
        assert field in known


def test_messages_of_missing_options(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = f"{package}.inner.work"
    here, gone = Seam(module, "start"), Seam(module, "gone")
    field = Seam(module, "Worker.config")
    assert Option("a is not fused", (gone, here), (field,)).present() == [here]
    lost = Option("b is not fused", (gone, Seam(module, "other")))
    needy = Option("c is not fused", (here,), (field, Seam(module, "Worker.gone")))
    assert lost.present() == needy.present() == []
    acted: list[str] = []
    monkeypatch.setattr(seams, "missing", lambda these=(): _missing(these))
    monkeypatch.setattr(seams, "OPTIONAL", (lost, needy))
    monkeypatch.setattr(seams, "HELPERS", (needy, Option("d", (gone, here))))
    monkeypatch.setattr(install, "when_imported", lambda name, *_: acted.append(name))
    with caplog.at_level(logging.INFO):
        install.install()
    assert [record.getMessage() for record in caplog.records] == [
        f"allnorm: b is not fused: this vLLM has no {module}.gone or {module}.other",
        f"allnorm: c is not fused: this vLLM has no {module}.Worker.gone",
    ]
    assert acted.count(module) == 1


_missing = seams.missing


def test_errors_of_actions_prevent_fusion(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures: dict[str, Any] = {}

    def refuse(name: str, action: Any, failed: Any) -> None:
        failures[name] = failed

    monkeypatch.setattr(seams, "missing", lambda these=(): [])
    monkeypatch.setattr(install, "when_imported", refuse)
    monkeypatch.setattr(install, "_log", Announcer(logging.getLogger("vllm.allnorm")))
    monkeypatch.setattr(engine.STATE, "broken", "")
    install.install()
    failures[seams.CONFIG](KeyError("fuse_allreduce_rms"))
    assert engine.STATE.broken == ""
    assert "fused only if fuse_allreduce_rms is set" in caplog.text
    assert "KeyError: 'fuse_allreduce_rms'" in caplog.text
    for name in (seams.PASS_CONFIG, seams.PASS_MANAGER, seams.WORKER):
        failures[name](AttributeError("gone"))
        assert name in engine.STATE.broken
        assert "AttributeError: gone" in engine.STATE.broken
    assert "AttributeError: gone" in caplog.text


def test_vllm_is_imported_without_the_switch(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tests that the plugin logs its KeyError, and leaves all of vLLM's defaults unchanged."""
    tables = {
        1: {"compilation_config": {"pass_config": {switch.FIELD: True}}},
        2: {"compilation_config": {"pass_config": {"other": True}}},
    }
    monkeypatch.setattr(seams, "missing", lambda *_: [])
    monkeypatch.setattr(seams, "CONFIG", f"{package}.inner.work")
    monkeypatch.setattr(plugin, "_registered", False)
    plugin.register()
    source = pathlib.Path(str(importlib.util.find_spec(package).origin)).parent / "inner/work.py"
    source.write_text(f"OPTIMIZATION_LEVEL_TO_CONFIG = {tables!r}\n")
    module = importlib.import_module(f"{package}.inner.work")
    assert tables == module.OPTIMIZATION_LEVEL_TO_CONFIG
    assert "fuse_allreduce_rms" in caplog.text


def test_the_entry_point_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(install, "install", broken)
    monkeypatch.setattr(plugin, "_registered", False)
    plugin.register()
    assert "RuntimeError: no luck" in caplog.text


def test_registration_does_not_import_vllm() -> None:
    code = (
        "import sys; from allnorm.integrations.vllm import register; register();"
        "assert not any(name.startswith('vllm.') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_SECONDS)


# ---- functions that run after vLLM's ------------------------------------------------------------


def test_arguments_of_functions_that_run_after_vllms() -> None:
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


def test_vllms_default_is_used_if_the_plugins_fails(
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
    assert "RuntimeError: no luck" in caplog.text


def test_additional_config_of_an_unknown_type_is_not_changed(
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
        (True, 2, True, "dual batch overlap"),
        (False, 2, False, "the platform is tpu, expected CUDA"),
    ],
)
def test_engines_with_nothing_to_fuse(
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


def test_vllms_own_default() -> None:
    for stock in (True, False):
        assert switch.stock_default(config_with({"allnorm": {"stock": stock}}, on=True)) is stock
    assert switch.stock_default(config_with({}, on=True))


# ---- helpers and passes --------------------------------------------------------------------------


def test_eager_helpers_do_not_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stock(hidden_states: Any, residual: Any, norm: Any, scale: float = 1.0) -> Any:
        return "stock", scale

    module: Any = types.SimpleNamespace(helper=stock)
    eager.patch_helper(module, "helper", 0.0)
    monkeypatch.setattr(engine.STATE, "announcer", Announcer(logging.getLogger("vllm.allnorm")))
    monkeypatch.setattr(engine, "communicator_for_eager", object)
    x = torch.zeros(2, 64)
    assert module.helper(x, x, object()) == ("stock", 1.0)
    assert "norms of class object are not fused: AttributeError" in caplog.text
    # Calls with unknown arguments run vLLM's own function.
    assert module.helper(x, x, object(), 0.5) == ("stock", 0.5)
    assert module.helper(x, x, object(), scale=2.0) == ("stock", 2.0)


def test_agreement_of_eager_models_does_not_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "STATE", engine.State(vllm_config=config_with({}, on=True)))
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert engine.communicator_for_eager() is None
    assert "nothing is fused, vLLM runs without allnorm" in caplog.text
    assert engine.communicator_for_eager() is None
    assert len(caplog.records) == 1


def test_vllms_pass_is_used_if_the_plugins_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "STATE", engine.State())
    module: Any = types.SimpleNamespace(AllReduceFusionPass=lambda config: "stock")
    fusion_pass.patch_pass_manager(module)
    assert module.AllReduceFusionPass(object()) == "stock"
    assert "graphs are fused by vLLM's own pass" in caplog.text


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
def test_numerics_of_eager_norms(provider: str, float32_weight: bool, mode: str) -> None:
    assert norms.mode_of(provider, float32_weight=float32_weight) == mode
