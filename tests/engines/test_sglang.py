"""Tests the plugin in the real SGLang on CPU ranks: `make test-engines` installs it.

Skipped without SGLang, which requires different versions of torch and transformers than the
development environment has.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from limits import HANG_SECONDS

import allnorm
from allnorm.testing import (
    RankPool,
    assert_same_bits,
    rank_input,
    run_ranks,
    shared_input,
    ulp_distance,
)

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: make test-engines", allow_module_level=True)

import sglang_ranks as engine
from sglang_ranks import is_old, ranks
from two_hosts import on_its_own_host

__all__ = ["ranks"]  # a fixture
HIDDEN = engine.HIDDEN_SIZE


def families() -> list[str]:
    """Returns the families in which at least one sum is fused."""
    return [each for each in engine.FAMILIES if is_old() or each not in engine.AT_BOUNDARIES]


# ---- functions that run on each rank -----------------------------------------------------------


@engine.with_plugin
def run_fused_and_not(
    plugin: Any, rank: int, world_size: int, family: str, num_tokens: int
) -> tuple[int, int, int, list[tuple[str, str]]]:
    """Returns the reductions without and with fusion, the fused sites, and the log."""
    log = engine.Log()
    model = engine.tiny_model(family)
    engine.by_definition(model)
    with engine.counted_all_reduces() as before:
        want = engine.run(model, num_tokens)
    engine.warm_up(model)
    assert plugin.current() is not None, log.lines
    with engine.counted_all_reduces() as after:
        got = engine.run(model, num_tokens)
    assert_same_bits(got, want)
    again = engine.run(model, num_tokens)
    assert_same_bits(again, want)
    sites = len(plugin.current().sites)
    assert not sites or "forward" not in model.__dict__, "the first pass reports the sites"
    return len(before), len(after), sites, log.lines


@engine.with_plugin
def run_on_policy(plugin: Any, rank: int, world_size: int, native: bool) -> tuple[int, int]:
    """Runs Qwen3 with residuals in float32; returns the reductions without fusion and the sites.

    If `native`, SGLang's own functions compute the norms, with their order of additions.
    """
    from sglang.srt.runtime_context import get_exec

    with get_exec().deterministic.override(rl_on_policy_target="fsdp"):
        model = engine.tiny_model("qwen3")
        if not native:
            engine.by_definition(model)
        norm = model.model.layers[1].input_layernorm
        assert norm.fp32_residual
        assert norm.override_orig_dtype == norm.weight.dtype == torch.float32
        with engine.counted_all_reduces() as before:
            want = engine.run(model)
        engine.warm_up(model)
        fused = plugin.current()
        assert fused is not None
        got = engine.run(model)
    assert got.dtype == want.dtype
    if native:
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=2.0**-7)
    else:
        assert_same_bits(got, want)
    return len(before), len(fused.sites)


def run_over_two_hosts(
    rank: int, world_size: int, family: str, num_tokens: int
) -> tuple[Any, int, int]:
    """Runs a model as if each rank were on its own host; also returns the islands."""
    with on_its_own_host(rank) as islands:
        before, after, *_ = run_fused_and_not(rank, world_size, family, num_tokens)
    return islands[-1], before, after


@engine.with_plugin
def prefetched_weights(plugin: Any, rank: int, world_size: int, family: str) -> list[str]:
    """Returns the names of the weights that a model's fused calls prefetch, in order."""
    model = engine.tiny_model(family)
    engine.by_definition(model)
    engine.warm_up(model)
    names = {weight.data_ptr(): name for name, weight in model.named_parameters()}
    comm, seen = plugin.current().communicator, []
    run = comm.all_reduce_add_rms_norm

    def watching(*args: Any, prefetch: Any, **kwargs: Any) -> Any:
        seen.append("none" if prefetch is None else names[prefetch.data_ptr()])
        return run(*args, prefetch=prefetch, **kwargs)

    comm.all_reduce_add_rms_norm = watching
    with mock.patch("allnorm.policy._PREFETCH_TOKENS", 32):
        engine.run(model)
    return [name.removeprefix("model.layers.").removesuffix(".weight") for name in seen]


def hints_for_weights(rank: int, world_size: int) -> dict[str, bool]:
    """Returns which kinds of weights are passed on as hints."""
    from sglang.srt.layers.parameter import ModelWeightParameter

    from allnorm.integrations.sglang.norms import NormArithmetic, next_weight

    plain, device = torch.ones(8, 8), torch.device("cpu")
    of_sglang = ModelWeightParameter(
        data=plain, input_dim=1, output_dim=0, weight_loader=lambda *args: None
    )
    weights = {
        "a parameter": torch.nn.Parameter(plain),
        "SGLang's parameter": of_sglang,
        "float8": plain.to(torch.float8_e4m3fn),
        "on a different device": plain.to("meta"),
        "sparse": plain.to_sparse(),
        "not a tensor": "weight",
    }
    found = {"no layer": next_weight(NormArithmetic(), device) is not None}
    for name, weight in weights.items():
        layer = torch.nn.Module()
        layer.weight = weight
        hint = next_weight(NormArithmetic(next_gemm=layer), device)
        if hint is not None:
            assert hint.data_ptr() == weight.data_ptr()
            assert type(hint) is torch.Tensor
            assert not hint.requires_grad
        found[name] = hint is not None
    return found


@engine.with_plugin
def norm_q_and_k(plugin: Any, rank: int, world_size: int) -> tuple[int, int, int]:
    """Norms q and k of MiniMax-M2; compares them with SGLang's own norms and the reference.

    SGLang's function for both needs a GPU, so its norms of one tensor stand in for it.

    Returns:
        The fused sites, the greatest distance in ulps, and SGLang's reductions when fused.
    """
    from sglang.srt.models import minimax_m2

    heads = {"q": 8, "k": 4}
    own = [minimax_m2.MiniMaxM2RMSNormTP(64 * n, n, eps=1e-6) for n in heads.values()]
    widths = [32 * n for n in heads.values()]

    def of(peer: int) -> tuple[Any, list[torch.Tensor]]:
        """Returns q, k and the weights of a rank."""
        qkv = rank_input((5, 2 * sum(widths)), torch.bfloat16, peer)
        drawn = [rank_input((n,), torch.bfloat16, peer, call=n) for n in widths]
        return qkv.split([*widths, sum(widths)], -1)[:2], drawn

    given, weights = of(rank)
    layer = torch.nn.Module()
    for norm, weight in zip(own, weights, strict=True):
        norm.weight.data = weight
    layer.q_norm, layer.k_norm = own
    layer.qk_norm_impl = minimax_m2.MiniMaxM2QKRMSNorm(*own)
    one = minimax_m2.MiniMaxM2RMSNormTP.forward
    one = getattr(one, "_torchdynamo_orig_callable", one)
    with torch.inference_mode():
        expected = [one(norm, x) for norm, x in zip(own, given, strict=True)]
        engine.warm_up(torch.nn.Sequential(layer))
        with engine.counted_all_reduces() as after:
            got = layer.qk_norm_impl.forward(*given)
    ranks = [of(peer) for peer in range(world_size)]
    exact = allnorm.reference.rms_norm_sharded([x for x, _ in ranks], [w for _, w in ranks], 1e-6)
    for mine, wanted in zip(got, exact[rank], strict=True):
        assert_same_bits(mine, wanted)
    apart = max(int(ulp_distance(*pair).max()) for pair in zip(got, expected, strict=True))
    return len(plugin.current().sites), apart, len(after)


@engine.with_plugin
def one_norm(plugin: Any, rank: int, world_size: int, gemma: bool) -> tuple[float, int]:
    """Compares a site with SGLang's own all-reduce and native norm."""
    from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
    from sglang.srt.runtime_context import get_parallel

    norm = (GemmaRMSNorm if gemma else RMSNorm)(HIDDEN, eps=1e-5).bfloat16()
    norm.weight.data.copy_(shared_input((HIDDEN,), torch.bfloat16, "weight"))
    engine.warm_up(torch.nn.Sequential(norm))
    x = rank_input((64, HIDDEN), torch.bfloat16, rank)
    residual = shared_input((64, HIDDEN), torch.bfloat16, "residual")
    kept = residual.clone()
    with torch.inference_mode():
        got, total = norm.forward_with_allreduce_fusion(x, residual)
        assert_same_bits(residual, kept, "the residual that was given")
        assert total.data_ptr() != residual.data_ptr()
        reduced = get_parallel().tp_group.all_reduce(x.clone())
        want, want_total = norm.forward_native(reduced, residual.clone())
    assert_same_bits(total, want_total, "the new residual")
    distance = ulp_distance(got, want)
    return float((distance != 0).double().mean()), int(distance.max())


@engine.with_plugin
def compiled(plugin: Any, rank: int, world_size: int) -> int:
    """Compiles SGLang's calls into a graph without breaks, for any number of tokens."""
    from sglang.srt.layers.layernorm import RMSNorm

    from allnorm.integrations.sglang.fusion import Before, complete_sums_in
    from allnorm.integrations.sglang.norms import ATTRIBUTE

    modules = [RMSNorm(HIDDEN, eps=1e-5).bfloat16() for _ in range(5)]
    engine.warm_up(torch.nn.Sequential(*modules))
    called, wired, quantized, post, behind = modules
    complete_sums_in(wired)
    complete_sums_in(behind, Before(post, 0.22))
    how = getattr(quantized, ATTRIBUTE)
    quant = allnorm.Fp8PerGroup(128, "column_major_tma")
    setattr(quantized, ATTRIBUTE, dataclasses.replace(how, quant=quant))

    def layer(x: torch.Tensor, residual: torch.Tensor) -> Any:
        x, residual = called.forward_with_allreduce_fusion(x, residual, use_attn_tp_group=False)
        x, residual = wired(x, residual)
        x, residual = behind(post(x), residual)
        (fp8, scale), residual = quantized.forward_with_allreduce_fusion(x, residual)
        return fp8.float() * scale.repeat_interleave(128, 1), residual

    traced = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (3, 5, 64):
        x = rank_input((num_tokens, HIDDEN), torch.bfloat16, rank)
        residual = shared_input((num_tokens, HIDDEN), torch.bfloat16, "residual")
        with torch.inference_mode():
            for got, want in zip(traced(x, residual), layer(x, residual), strict=True):
                assert_same_bits(got, want)
    return len(plugin.current().sites)


@engine.with_plugin
def between_layers(plugin: Any, rank: int, world_size: int) -> bool:
    """Runs two layers of 0.5.17: the first leaves its sum for the second to reduce."""
    from sglang.srt.layers.communicator import LayerCommunicator, LayerScatterModes
    from sglang.srt.layers.layernorm import RMSNorm

    norms = torch.nn.Sequential(*(RMSNorm(HIDDEN, eps=1e-5).bfloat16() for _ in range(2)))
    engine.by_definition(norms)
    modes = LayerScatterModes.init_new(
        layer_id=1,
        num_layers=3,
        is_layer_sparse=False,
        is_previous_layer_sparse=False,
        is_next_layer_sparse=False,
    )
    layer = LayerCommunicator(modes, norms[0], norms[1])
    batch = engine.batch_of(6)

    def forward() -> tuple[bool, torch.Tensor, torch.Tensor]:
        x: Any = rank_input((6, HIDDEN), torch.bfloat16, rank)
        residual = shared_input((6, HIDDEN), torch.bfloat16, "residual")
        leaves = layer.should_fuse_mlp_allreduce_with_next_layer(batch)
        x._sglang_needs_allreduce_fusion = True
        x, residual = layer.prepare_attn(x, residual, batch)
        x, residual = layer.prepare_mlp(x * (1 + rank), residual, batch)
        return leaves, x, residual

    with torch.inference_mode():
        leaves_before, *want = forward()
        engine.warm_up(norms)
        with engine.counted_all_reduces() as shapes:
            leaves, *got = forward()
    for mine, expected in zip(got, want, strict=True):
        assert_same_bits(mine, expected)
    assert (leaves_before, leaves, shapes) == (False, True, [])
    return True


@engine.with_plugin
def refuse(
    plugin: Any, rank: int, world_size: int, cause: str
) -> tuple[list[tuple[str, str]], int, bool]:
    """Runs a model with an obstacle to fusion; returns the log, the reductions and the outcome."""
    log = engine.Log()
    from sglang.srt import runtime_context
    from sglang.srt.layers import layernorm

    from allnorm.integrations.sglang import seams

    patch = pytest.MonkeyPatch()
    model = engine.tiny_model("llama")
    engine.by_definition(model)
    want = engine.run(model)
    if cause == "ALLNORM_DISABLE":
        patch.setenv("ALLNORM_DISABLE", "1")
    elif cause == "ALLNORM_DISABLE on rank 1":
        patch.setenv("ALLNORM_DISABLE", str(rank))
    elif cause in ("enforce-disable", "deterministic"):
        now = runtime_context.get_exec()
        settings = _Settings(
            now,
            comm=_Settings(now.comm, enforce_disable_flashinfer_allreduce_fusion=True),
            deterministic=_Settings(enable_deterministic_inference=cause == "deterministic"),
        )
        patch.setattr(runtime_context, "get_exec", lambda: settings)
    elif cause == "a raising probe":
        patch.setattr(seams, "probe", lambda: {}["gate"])
    elif cause == "a stale binding on rank 1" and rank == 1:
        hooked = layernorm._forward_with_allreduce_fusion
        patch.setattr(
            sys.modules["sglang.srt.models.llama"], "old", hooked.__wrapped__, raising=False
        )
    elif cause == "a lost hook on rank 0" and rank == 0:
        hooked = layernorm._forward_with_allreduce_fusion
        patch.setattr(layernorm, "_forward_with_allreduce_fusion", hooked.__wrapped__)
    try:
        engine.warm_up(model, settings={"enable_pdmux": cause == "enable-pdmux"})
    finally:
        patch.undo()
    with engine.counted_all_reduces() as shapes:
        assert_same_bits(engine.run(model), want)
    return log.lines, len(shapes), plugin.current() is not None


def load(rank: int, world_size: int, plugins: str, has_gpu: bool) -> dict[str, Any]:
    """Loads the plugin with SGLang's own loader, after the import of modules that call the gate."""
    os.environ["SGLANG_PLUGINS"] = plugins
    engine.make_importable()
    import sglang.srt.plugins as loader
    from sglang.srt.layers import layernorm
    from sglang.srt.plugins.hook_registry import HookRegistry

    user = importlib.import_module(
        "sglang.srt.models.nemotron_h_utils"
        if is_old()
        else "sglang.srt.layers.layer_boundary.exit"
    )
    name = "apply_flashinfer_allreduce_fusion" if is_old() else "flashinfer_ar_fusion_applies"
    stock, stock_norm = getattr(user, name), layernorm._forward_with_allreduce_fusion
    log = engine.Log()
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    try:
        loader.load_plugins()
        first = layernorm._forward_with_allreduce_fusion
        loader._plugins_loaded = False
        loader.load_plugins()
    finally:
        patch.undo()
    if has_gpu and "allnorm" in plugins:
        from allnorm.integrations.sglang import seams

        assert seams.obstacle(seams.probe()) == ""
        assert all(len(hooks) == 1 for hooks in HookRegistry._hooks.values())
        assert inspect.unwrap(getattr(user, name)) is stock
    return {
        "the user of the gate is hooked": getattr(user, name) is not stock,
        "the norm is hooked": first is not stock_norm,
        "hooked once": layernorm._forward_with_allreduce_fusion is first,
        "hooks": len(HookRegistry._hooks),
        "log": log.lines,
    }


def at_one_rank(rank: int, world_size: int) -> tuple[list[tuple[str, str]], bool]:
    plugin = engine.fresh_plugin()
    log = engine.Log()
    model = engine.tiny_model("llama")
    before = {name: id(module.forward) for name, module in model.named_modules()}
    engine.warm_up(model)
    assert set(before) == {name for name, _ in model.named_modules()}
    wired = [name for name, module in model.named_modules() if "forward" in module.__dict__]
    assert all(name.endswith(".attn") for name in wired)  # the fake attention of the test
    assert all(layer.mlp.down_proj.reduce_results is is_old() for layer in model.model.layers)
    return log.lines, plugin.current() is None


class _Settings:
    """SGLang's settings, with some changes."""

    def __init__(self, under: Any = None, **changed: Any) -> None:
        self.__dict__.update(changed)
        self._under = under

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)


# ---- tests -------------------------------------------------------------------------------------


def found_by_sglang() -> bool:
    found = importlib.metadata.entry_points(group="sglang.srt.plugins")
    return any(entry.value == "allnorm.integrations.sglang:register" for entry in found)


@pytest.mark.parametrize(
    ("plugins", "has_gpu", "hooked"),
    [("", True, True), ("allnorm", True, True), ("other", True, False), ("", False, False)],
    ids=["default", "named", "another is named", "no GPU"],
)
def test_the_loader(plugins: str, has_gpu: bool, hooked: bool) -> None:
    assert found_by_sglang(), "allnorm is not installed with its entry point: make install"
    (found,) = run_ranks(load, 1, args=(plugins, has_gpu), timeout=HANG_SECONDS)
    assert found["the user of the gate is hooked"] is found["the norm is hooked"] is hooked
    assert found["hooked once"]
    assert found["hooks"] == (4 if hooked else 0)
    expected = ["INFO"] if not has_gpu else []
    assert [level for level, _ in found["log"]] == expected


def test_one_rank_changes_nothing() -> None:
    ((lines, inactive),) = run_ranks(at_one_rank, 1, timeout=HANG_SECONDS)
    assert inactive
    assert [level for level, _ in lines] == ["INFO"]
    assert "one rank has nothing to reduce" in lines[0][1]


@pytest.mark.parametrize("native", [False, True], ids=["definition", "native"])
def test_float32_residuals(ranks: RankPool, native: bool) -> None:
    """Tests the on-policy mode: all sums are fused but that before the model's last norm."""
    sums = 2 * engine.NUM_LAYERS
    assert ranks.run(run_on_policy, native) == [(sums, sums - 1)] * 2


@pytest.mark.parametrize("num_tokens", [1, 70])
@pytest.mark.parametrize("family", families())
def test_a_dense_model_computes_the_same(ranks: RankPool, family: str, num_tokens: int) -> None:
    before, after, _, lines = ranks.run(run_fused_and_not, family, num_tokens)[0]
    sites = 2 * engine.NUM_LAYERS
    assert before == sites
    assert after == (0 if is_old() or family in engine.REDUCE_THEMSELVES else 1)
    fused = [text for level, text in lines if level == "INFO"]
    assert len(lines) == len(fused) == 1
    assert f"fused at {sites - after} sites" in fused[0]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "granite", "olmo2"])
def test_the_next_weight_is_prefetched(ranks: RankPool, family: str) -> None:
    wanted = []
    for layer in range(engine.NUM_LAYERS):
        after_mlp = f"{layer + 1}.self_attn.qkv_proj"
        if layer == engine.NUM_LAYERS - 1:
            # Gemma 2 has no attribute for its head, which is the embedding.
            after_mlp = "none" if family == "gemma2" else "lm_head"
        # The post norm of OLMo 2 is followed by an add, and the next GEMM belongs to a later layer.
        wanted += [f"{layer}.mlp.gate_up_proj", "none" if family == "olmo2" else after_mlp]
    if not (is_old() or family in engine.REDUCE_THEMSELVES):
        wanted.pop()  # the last layer keeps its all-reduce
    assert ranks.run(prefetched_weights, family) == [wanted, wanted]


def test_hints_are_plain_tensors_on_the_device(ranks: RankPool) -> None:
    for found in ranks.run(hints_for_weights):
        passed = [name for name, is_passed in found.items() if is_passed]
        assert passed == ["a parameter", "SGLang's parameter", "float8"]


@pytest.mark.parametrize("num_tokens", [1, 70])
def test_two_hosts_compute_the_same(ranks: RankPool, num_tokens: int) -> None:
    for islands, before, after in ranks.run(run_over_two_hosts, "llama", num_tokens):
        assert islands == ((0,), (1,))
        assert before == 2 * engine.NUM_LAYERS
        assert after == (0 if is_old() else 1)


@pytest.mark.skipif(is_old(), reason="0.5.17 has no layer boundaries")
@pytest.mark.parametrize("family", engine.AT_BOUNDARIES)
def test_sums_at_layer_boundaries_are_not_fused(ranks: RankPool, family: str) -> None:
    """Tests a limit that docs/sglang.md documents: these sums are not fused."""
    sites = 2 * engine.NUM_LAYERS
    for *counts, _ in ranks.run(run_fused_and_not, family, 5):
        assert counts == [sites, sites, 0]


def test_compiled_calls(ranks: RankPool) -> None:
    # The sites are counted because the same calls also ran outside the graph.
    assert ranks.run(compiled) == [4, 4]


@pytest.mark.skipif(not is_old(), reason="0.5.23 has no LayerCommunicator")
def test_a_sum_left_to_the_next_layer(ranks: RankPool) -> None:
    assert ranks.run(between_layers) == [True, True]


@pytest.mark.parametrize("gemma", [False, True], ids=["plain", "gemma"])
def test_one_site_and_the_native_norm(ranks: RankPool, gemma: bool) -> None:
    """Tests that the residual is bit-identical, and that the norm differs by at most one ulp.

    SGLang's native Gemma norm rounds the sum, unlike its kernels, so its result is not compared.
    """
    share, furthest = ranks.run(one_norm, gemma)[0]
    if not gemma:
        assert furthest <= 1
        assert share < 0.02


def test_norms_of_q_and_k_over_the_ranks(ranks: RankPool) -> None:
    for sites, apart, reductions in ranks.run(norm_q_and_k):
        assert (sites, reductions) == (1, 0)
        assert apart <= 1, "ulps between SGLang's own results and the fused ones"


@pytest.mark.parametrize(
    ("cause", "level", "words"),
    [
        ("ALLNORM_DISABLE", "INFO", "ALLNORM_DISABLE"),
        ("ALLNORM_DISABLE on rank 1", "WARNING", "ALLNORM_DISABLE=1 (rank 1"),
        ("enforce-disable", "INFO", "--enforce-disable-flashinfer-allreduce-fusion"),
        ("enable-pdmux", "WARNING", "--enable-pdmux"),
        ("a raising probe", "WARNING", "KeyError"),
        ("a stale binding on rank 1", "WARNING", "sglang.srt.models.llama.old still refer"),
        ("a lost hook on rank 0", "WARNING", "is not installed"),
    ],
)
def test_obstacles_prevent_fusion_on_all_ranks(
    ranks: RankPool, cause: str, level: str, words: str
) -> None:
    (lines, reduced, fused), (others, reduced_there, fused_there) = ranks.run(refuse, cause)
    assert not fused
    assert not fused_there
    assert reduced == reduced_there == 2 * engine.NUM_LAYERS
    assert [line[0] for line in lines] == [level]
    assert words in lines[0][1]
    assert not others


def test_deterministic_mode_keeps_the_fusion(ranks: RankPool) -> None:
    """Tests that allnorm still fuses in deterministic mode, unlike SGLang's own fusion."""
    for lines, reduced, fused in ranks.run(refuse, "deterministic"):
        assert fused, lines
        assert reduced == (0 if is_old() else 1)
