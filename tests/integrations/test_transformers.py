"""Tests a tiny model of every family on two ranks: reduction counts, bits and tokens."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import pathlib
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_helpers import on

import allnorm
from allnorm.errors import UnsupportedError
from allnorm.testing import assert_same_bits, ulp_distance

from . import transformers_models as models

pytest.importorskip("transformers")
from allnorm.integrations import transformers as fused
from allnorm.integrations.transformers import styles

# Each rank's reductions in one forward pass: two per layer. The plan for GPT-OSS does not shard
# experts, so their sums need no reduction.
SITES = dict.fromkeys(models.FAMILIES, 2 * models.LAYERS) | {"gpt_oss": models.LAYERS}
PROMPT = torch.arange(2, 82).view(2, 40)


def expected_calls(family: str) -> dict[str, int]:
    """Returns how many fused calls of each kind a forward pass makes."""
    sites = SITES[family]
    if family in ("gemma2", "gemma3", "glm4"):
        return {"post norm, norm": sites}
    if family == "gemma4":
        return {"post norm, norm": sites // 2, "post norm": sites // 2}
    if family in ("exaone4", "olmo2", "olmo3", "flex_olmo"):
        # The model's own norm follows the last layer.
        return {"post norm": sites - 1, "post norm, norm": 1}
    scale = {"granite": 0.22, "minicpm3": 1.4 / models.LAYERS**0.5}.get(family)
    return {"norm" if scale is None else f"scale {scale:g}, norm": sites}


def counted(model: Any, **more: Any) -> tuple[Any, int]:
    """Runs a forward pass; returns its result and how often it calls dist.all_reduce."""
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        return model(PROMPT, output_hidden_states=True, **more), all_reduce.call_count


@contextlib.contextmanager
def recorded_calls() -> Iterator[collections.Counter[str]]:
    """Counts fused calls by kind."""
    calls: collections.Counter[str] = collections.Counter()
    real: Any = allnorm.Communicator.all_reduce_add_rms_norm

    def recording(self: Any, x: Any, residual: Any, weight: Any, eps: float, **more: Any) -> Any:
        assert residual is not None
        parts = ["post norm"] if "post_norm" in more else []
        parts += [f"scale {more['scale']:g}"] if "scale" in more else []
        calls[", ".join([*parts, *(["norm"] if weight is not None else [])])] += 1
        return real(self, x, residual, weight, eps, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allnorm.Communicator, "all_reduce_add_rms_norm", recording)
        yield calls


def tokens(model: Any) -> torch.Tensor:
    return model.generate(PROMPT[:, :6], max_new_tokens=64, do_sample=False)


def assert_close(actual: Any, expected: Any) -> None:
    """Compares results to within two ulps: the norms add squares in different orders."""
    distance = int(ulp_distance(actual, expected).max())
    assert distance <= 2, f"{distance} ulps from the stock model"


@pytest.mark.sampled(4)
@on(cpu=(2,))
@pytest.mark.parametrize("family", models.FAMILIES)
@torch.no_grad()
def test_family(rank: int, world_size: int, tmp_path: pathlib.Path, family: str) -> None:
    place, sites = models.save(family, tmp_path), SITES[family]
    stock = models.load(place, family)
    want, stock_calls = counted(stock)
    assert stock_calls == sites
    with models.fusion():
        model = models.load(place, family)
        with recorded_calls() as given:
            got, calls = counted(model)
        assert calls == 0
        assert given == expected_calls(family)
        report = fused.report(model)
        assert all(site.calls == 1 and not site.unfused_calls for site in report.fused)
        assert len(report.fused) == sites

        for algorithm in ("unfused", "two_shot"):
            fused.enable(algorithm=algorithm)
            same, _ = counted(model)
            assert_same_bits(same.logits, got.logits, f"{family} with {algorithm}")
        fused.enable()

        assert len(got.hidden_states) == len(want.hidden_states)
        for state in got.hidden_states:
            assert type(state) is torch.Tensor
        assert_close(got.hidden_states[-1], want.hidden_states[-1])
        assert torch.equal(tokens(model), tokens(stock))

        fused.disable()
        again, calls = counted(model)
        assert calls == sites
        assert_same_bits(again.logits, want.logits, "disabled")
    total = 2 * models.LAYERS + (family != "gpt_oss")
    assert str(report).startswith(f"{sites} of {total} reductions fused")
    if family == "gpt_oss":
        assert "mlp.experts: not in the tensor-parallel plan" in str(report)
    else:
        assert "embed_tokens: its vocabulary is sharded" in str(report)


@on(cpu=(2,))
def test_float32_and_gradients(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    """Tests float32, and training, which is not fused."""
    place = models.save("llama", tmp_path, torch.float32)
    stock = models.load(place, "llama")
    with models.fusion():
        model = models.load(place, "llama")
        with torch.no_grad():
            torch.testing.assert_close(model(PROMPT).logits, stock(PROMPT).logits)
            assert torch.equal(tokens(model), tokens(stock))
        before = [site.calls for site in fused.report(model).sites]
        got, calls = counted(model)  # with gradients
        want, stock_calls = counted(stock)
        assert calls == stock_calls
        assert_same_bits(got.logits, want.logits, "with gradients")
        assert [site.calls for site in fused.report(model).sites] == before


@on(cpu=(2,))
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
@torch.no_grad()
def test_bias(rank: int, world_size: int, tmp_path: pathlib.Path, family: str) -> None:
    """Tests that each projection's bias is added once, where the stock model adds it."""
    bias = {"attention_bias": True, **({"mlp_bias": True} if family != "gemma2" else {})}
    place = models.save(family, tmp_path, **bias)
    want = models.load(place, family)(PROMPT).logits
    with models.fusion():
        got, calls = counted(models.load(place, family))
        assert calls == 0
        assert_same_bits(got.logits, want, "with biases")


@pytest.mark.sampled(2)
@on(cpu=(2,))
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
@torch.no_grad()
def test_expert_parallel(rank: int, world_size: int, tmp_path: pathlib.Path, family: str) -> None:
    place = models.save(family, tmp_path)
    stock = models.load(place, family, ep_size=world_size)
    want, stock_calls = counted(stock)
    assert stock_calls == 2 * models.LAYERS
    with models.fusion():
        model = models.load(place, family, ep_size=world_size)
        got, calls = counted(model)
        assert calls == 0
        fused.enable(algorithm="unfused")
        assert_same_bits(counted(model)[0].logits, got.logits, "unfused")
        assert_close(got.hidden_states[-1], want.hidden_states[-1])
        fused.enable()
        assert torch.equal(tokens(model), tokens(stock))
        total = 2 * models.LAYERS + (family != "gpt_oss")
        report = str(fused.report(model))
        assert report.startswith(f"{2 * models.LAYERS} of {total} reductions fused")


VARIANTS_OF_GEMMA4: dict[str, dict[str, Any]] = {
    "experts": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "inputs of layers": {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96},
}


@pytest.mark.sampled(2)
@on(cpu=(2,))
@pytest.mark.parametrize("variant", VARIANTS_OF_GEMMA4)
@torch.no_grad()
def test_variants_of_gemma4(
    rank: int, world_size: int, tmp_path: pathlib.Path, variant: str
) -> None:
    place = models.save("gemma4", tmp_path, torch.float32, **VARIANTS_OF_GEMMA4[variant])
    sites = (3 if variant == "experts" else 2) * models.LAYERS
    stock = models.load(place, "gemma4")
    want, stock_calls = counted(stock)
    assert stock_calls == sites
    with models.fusion():
        model = models.load(place, "gemma4")
        got, calls = counted(model)
        assert calls == 0
        assert len(fused.report(model).fused) == sites
        fused.enable(algorithm="unfused")
        assert_same_bits(counted(model)[0].logits, got.logits, "unfused")
        torch.testing.assert_close(got.logits, want.logits)
        assert torch.equal(tokens(model), tokens(stock))


@on(cpu=(2,))
@torch.no_grad()
def test_model_after_a_dropped_one(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    """Tests a dropped model that only one rank has garbage-collected."""
    place = models.save("llama", tmp_path)
    gc.disable()
    try:
        with models.fusion():
            want = models.load(place, "llama")(PROMPT).logits
            if rank == 1:
                gc.collect()
            assert_same_bits(models.load(place, "llama")(PROMPT).logits, want, "loaded again")
    finally:
        gc.enable()


@on(cpu=(2,))
@pytest.mark.parametrize("how", ["closed", "closed by one rank", "failed"])
@torch.no_grad()
def test_model_after_the_end_of_a_communicator(
    rank: int, world_size: int, tmp_path: pathlib.Path, how: str
) -> None:
    """Tests models that are loaded after the first model's communicator was closed or failed."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    group = mesh.get_group()
    with models.fusion():
        link = styles._communicator(group, "cpu")
        if how == "failed":
            with pytest.raises(allnorm.PeerTimeoutError):
                link.all_reduce(torch.ones(1 + rank, 64))
        elif how == "closed" or rank == 1:
            link.close()
        new = styles._communicator(group, "cpu")
        assert new is not link
        assert styles._communicator(group, "cpu") is new, "the open communicator was not reused"
        for tokens in (1, 3):
            got = new.all_reduce(torch.full((tokens, 65), rank + 1.5))
            assert_same_bits(got, torch.full_like(got, 4.0), how)

        place = models.save("llama", tmp_path)
        want = models.load(place, "llama")(PROMPT).logits
        for used in list(styles._links.values()):
            if rank == 1 or how == "closed":
                used.close()
        assert_same_bits(models.load(place, "llama")(PROMPT).logits, want, how)


@on(cpu=(2,))
@torch.no_grad()
def test_unknown_family(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    """Tests that a model of an unknown family runs unfused, with a warning."""
    place = models.save("smollm3", tmp_path)
    want = models.load(place, "smollm3")(PROMPT).logits
    with models.fusion():
        with pytest.warns(UserWarning, match="has no fusable site"):
            model = models.load(place, "smollm3")
        assert_same_bits(model(PROMPT).logits, want, "an unknown model")
        with pytest.raises(UnsupportedError, match="no fusable site") as error:
            fused.report(model)
        assert "SmolLM3ForCausalLM" in str(error.value)
        assert "FAMILIES" in str(error.value)


def test_disable_restores_transformers() -> None:
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.models.llama.modeling_llama import LlamaModel

    def registered() -> dict[str, Any]:
        return {name: ALL_PARALLEL_STYLES[name] for name in ALL_PARALLEL_STYLES}

    styles, constructor = registered(), LlamaModel.__init__
    for _ in range(2):
        fused.enable()
        fused.enable(algorithm="one_shot")
        assert fused.is_enabled()
        assert registered() != styles
        assert LlamaModel.__init__ is not constructor
        fused.disable()
        fused.disable()
        assert not fused.is_enabled()
        assert registered() == styles
        assert LlamaModel.__init__ is constructor


def test_wrong_algorithm() -> None:
    with pytest.raises(ValueError, match="three_shot"):
        fused.enable(algorithm="three_shot")


def test_old_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    for version in ("4.57.1", "5.22.1rc1", "5", "a fork"):
        monkeypatch.setattr(transformers, "__version__", version)
        with pytest.raises(UnsupportedError, match=re.escape(f"transformers {version}: expected")):
            fused.enable()


@pytest.mark.parametrize("version", ["6.0rc1", "5.23.0.dev0", "5.24.0+local", "6"])
def test_versions_with_suffixes(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", version)
    with models.fusion():
        pass


def test_model_without_a_plan() -> None:
    from transformers import AutoModelForCausalLM

    with models.fusion():
        model = AutoModelForCausalLM.from_config(models.config("llama"))
    report = fused.report(model)
    assert not report.fused
    assert all("not in the tensor-parallel plan" in site.reason for site in report.missed)
    assert str(report).startswith(f"0 of {2 * models.LAYERS} reductions fused")


@torch.no_grad()
def test_copies_of_models_without_a_plan() -> None:
    from transformers import AutoModelForCausalLM

    with models.fusion():
        model = AutoModelForCausalLM.from_config(models.config("llama")).eval()
        twin, norm = copy.deepcopy(model), copy.deepcopy(model.model.norm)
        want = model(PROMPT).logits
        assert_same_bits(twin(PROMPT).logits, want, "a copy")
        twin.model.norm.weight.mul_(2.0)
        norm.weight.mul_(3.0)
        assert_same_bits(model(PROMPT).logits, want, "the original")
        doubled = twin(PROMPT, output_hidden_states=True).hidden_states[-1]
        last = model(PROMPT, output_hidden_states=True).hidden_states[-1]
        assert_same_bits(doubled, 2 * last, "the norm of the copy has a weight of its own")
        rows = torch.randn(2, 64)
        assert_same_bits(norm(rows), 3 * model.model.norm(rows), "the copy of a norm")
        assert not fused.report(twin).fused


@on(cpu=(2,))
@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("llama", "AutoModel"),
        ("llama", "LlamaModel"),
        ("llama", "AutoModelForTokenClassification"),
        ("gemma2", "AutoModel"),
    ],
)
@torch.no_grad()
def test_models_with_different_heads(
    rank: int, world_size: int, tmp_path: pathlib.Path, family: str, head: str
) -> None:
    import transformers

    place = models.save(family, tmp_path)
    more: dict[str, Any] = {"auto_class": getattr(transformers, head)}
    want = models.load(place, family, **more)(PROMPT)[0]
    with models.fusion():
        model = models.load(place, family, **more)
        output, calls = counted(model)
        if not head.startswith("AutoModelFor"):  # other heads have random weights
            assert_close(output[0], want)
        assert calls == 0
        first, *rest = str(fused.report(model)).splitlines()
        assert first == f"{2 * models.LAYERS} of {2 * models.LAYERS + 1} reductions fused"
        assert len(rest) == 1, rest


@pytest.mark.long
@pytest.mark.slow
@on(cpu=(4,))
@torch.no_grad()
def test_tensor_parallel_and_fsdp(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    """Tests FSDP, which shards the norms' weights outside of their forward methods."""
    place, more = models.save("llama", tmp_path), {"tp_size": 2, "fsdp_size": 2}
    stock = models.load(place, "llama", **more)
    want, want_tokens = stock(PROMPT).logits, tokens(stock)
    with models.fusion():
        model = models.load(place, "llama", **more)
        for _ in range(2):
            assert_close(model(PROMPT).logits, want)
        assert torch.equal(tokens(model), want_tokens)
        for site in fused.report(model).fused:
            assert site.calls >= 2, site
        lines = str(fused.report(model)).splitlines()
    attention = [line for line in lines if "o_proj" in line]
    assert not attention, "these sites are fused, because FSDP gathers their norms with the layer"
    why = "the weight of its norm is sharded, by FSDP for example"
    assert sum(why in line for line in lines) >= models.LAYERS - 1
