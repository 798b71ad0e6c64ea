"""Tests a tiny model of every family on two ranks: reductions, bits and tokens."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_helpers import destroy_groups, on

import allnorm
from allnorm.errors import UnsupportedError
from allnorm.testing import RankPool, assert_same_bits, ulp_distance

from . import transformers_models as models

pytest.importorskip("transformers")
from allnorm.integrations import transformers as fused
from allnorm.integrations.transformers import styles

# Reductions of each rank in one forward pass: two per layer. The plan for GPT-OSS shards no
# experts, so it has no sums over experts.
SITES = dict.fromkeys(models.FAMILIES, 2 * models.LAYERS) | {"gpt_oss": models.LAYERS}
PROMPT = torch.arange(2, 82).view(2, 40)


def expected_calls(family: str) -> dict[str, int]:
    """Returns the arguments of a forward pass's fused calls, without the residual, with counts."""
    sites = SITES[family]
    if family in ("gemma2", "gemma3", "glm4"):
        return {"post norm, norm": sites}
    if family == "gemma4":
        return {"post norm, norm": sites // 2, "post norm": sites // 2}
    if family in (
        "exaone4",
        "olmo2",
        "olmo3",
        "flex_olmo",
    ):  # the model's own norm follows the last layer
        return {"post norm": sites - 1, "post norm, norm": 1}
    scale = {"granite": 0.22, "minicpm3": 1.4 / models.LAYERS**0.5}.get(family)
    return {"norm" if scale is None else f"scale {scale:g}, norm": sites}


def counted(model: Any, **more: Any) -> tuple[Any, int]:
    """Runs a forward pass; returns its result and its number of calls of dist.all_reduce."""
    calls = 0
    real = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*args, **kwargs)

    dist.all_reduce = counting
    try:
        return model(PROMPT, output_hidden_states=True, **more), calls
    finally:
        dist.all_reduce = real


@contextlib.contextmanager
def recorded_calls() -> Iterator[collections.Counter[str]]:
    """Records the arguments of fused calls."""
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


@torch.no_grad()
def compare_with_stock(rank: int, world_size: int, place: str, family: str) -> str:
    """Runs in ranks; returns the report."""
    stock = models.load(place, family)
    want, stock_calls = counted(stock)
    want_tokens = tokens(stock)
    assert stock_calls == SITES[family]
    try:
        fused.enable()
        model = models.load(place, family)
        with recorded_calls() as given:
            got, calls = counted(model)
        assert calls == 0
        assert given == expected_calls(family)
        report = fused.report(model)
        assert all(site.calls == 1 and not site.unfused_calls for site in report.fused)
        assert len(report.fused) == SITES[family]

        for algorithm in ("unfused", "two_shot"):
            fused.enable(algorithm=algorithm)
            same, _ = counted(model)
            assert_same_bits(same.logits, got.logits, f"{family} with {algorithm}")
        fused.enable()

        assert len(got.hidden_states) == len(want.hidden_states)
        for state in got.hidden_states:
            assert type(state) is torch.Tensor
        distance = ulp_distance(got.hidden_states[-1], want.hidden_states[-1])
        assert int(distance.max()) <= 2, f"{int(distance.max())} ulps from the stock model"
        assert torch.equal(tokens(model), want_tokens)

        fused.disable()
        again, calls = counted(model)
        assert calls == SITES[family]
        assert_same_bits(again.logits, want.logits, "disabled")
    finally:
        fused.disable()
    return str(report)


@on(cpu=(2,))
@pytest.mark.parametrize("family", models.FAMILIES)
def test_family(pool: RankPool, family: str, tmp_path: pathlib.Path) -> None:
    report = pool.run(compare_with_stock, models.save(family, tmp_path), family)[0]
    total = 2 * models.LAYERS + (family != "gpt_oss")
    assert report.startswith(f"{SITES[family]} of {total} reductions fused")
    if family == "gpt_oss":
        assert "mlp.experts: not in the tensor-parallel plan" in report
    else:
        assert "embed_tokens: its vocabulary is sharded" in report


def differ_in_dtype(rank: int, world_size: int, place: str, family: str) -> None:
    """Runs in ranks: float32, more ranks than two, and training, which stays stock."""
    stock = models.load(place, family)
    fused.enable()
    try:
        model = models.load(place, family)
        with torch.no_grad():
            torch.testing.assert_close(model(PROMPT).logits, stock(PROMPT).logits)
            assert torch.equal(tokens(model), tokens(stock))
        before = [site.calls for site in fused.report(model).sites]
        got, calls = counted(model)  # with gradients
        want, stock_calls = counted(stock)
        assert calls == stock_calls
        assert_same_bits(got.logits, want.logits, "with gradients")
        assert [site.calls for site in fused.report(model).sites] == before
    finally:
        fused.disable()


@on(cpu=(2,))
def test_float32_and_gradients(pool: RankPool, tmp_path: pathlib.Path) -> None:
    pool.run(differ_in_dtype, models.save("llama", tmp_path, torch.float32), "llama")


@torch.no_grad()
def biased(rank: int, world_size: int, place: str, family: str) -> None:
    """Runs in ranks: a bias in every projection is added once, where the stock model adds it."""
    want = models.load(place, family)(PROMPT).logits
    fused.enable()
    try:
        model = models.load(place, family)
        got, calls = counted(model)
        assert calls == 0
        assert_same_bits(got.logits, want, "with biases")
    finally:
        fused.disable()


@on(cpu=(2,))
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_bias(pool: RankPool, family: str, tmp_path: pathlib.Path) -> None:
    bias = {"attention_bias": True, **({"mlp_bias": True} if family != "gemma2" else {})}
    pool.run(biased, models.save(family, tmp_path, **bias), family)


@torch.no_grad()
def compare_expert_parallel(rank: int, world_size: int, place: str, family: str) -> str:
    """Runs in ranks: expert parallelism, whose sums are fused too."""
    stock = models.load(place, family, ep_size=world_size)
    want, stock_calls = counted(stock)
    assert stock_calls == 2 * models.LAYERS
    fused.enable()
    try:
        model = models.load(place, family, ep_size=world_size)
        got, calls = counted(model)
        assert calls == 0
        fused.enable(algorithm="unfused")
        assert_same_bits(counted(model)[0].logits, got.logits, "unfused")
        distance = ulp_distance(got.hidden_states[-1], want.hidden_states[-1])
        assert int(distance.max()) <= 2, f"{int(distance.max())} ulps from the stock model"
        fused.enable()
        assert torch.equal(tokens(model), tokens(stock))
        return str(fused.report(model))
    finally:
        fused.disable()


@on(cpu=(2,))
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_expert_parallel(pool: RankPool, family: str, tmp_path: pathlib.Path) -> None:
    report = pool.run(compare_expert_parallel, models.save(family, tmp_path), family)[0]
    total = 2 * models.LAYERS + (family != "gpt_oss")
    assert report.startswith(f"{2 * models.LAYERS} of {total} reductions fused")


@torch.no_grad()
def compare_parts_of_gemma4(rank: int, world_size: int, place: str, sites: int) -> None:
    """Runs in ranks: features that only some variants of Gemma 4 have."""
    stock = models.load(place, "gemma4")
    want, stock_calls = counted(stock)
    assert stock_calls == sites
    fused.enable()
    try:
        model = models.load(place, "gemma4")
        got, calls = counted(model)
        assert calls == 0
        assert len(fused.report(model).fused) == sites
        fused.enable(algorithm="unfused")
        assert_same_bits(counted(model)[0].logits, got.logits, "unfused")
        torch.testing.assert_close(got.logits, want.logits)
        assert torch.equal(tokens(model), tokens(stock))
    finally:
        fused.disable()


PARTS_OF_GEMMA4 = {
    "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
    "inputs of layers": {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96},
}


@on(cpu=(2,))
@pytest.mark.parametrize("part", PARTS_OF_GEMMA4)
def test_parts_of_gemma4(pool: RankPool, part: str, tmp_path: pathlib.Path) -> None:
    more: dict[str, Any] = PARTS_OF_GEMMA4[part]
    if part == "experts":
        more = {**more, "moe_intermediate_size": 64}
    place = models.save("gemma4", tmp_path, torch.float32, **more)
    sites = (3 if part == "experts" else 2) * models.LAYERS
    pool.run(compare_parts_of_gemma4, place, sites)


@torch.no_grad()
def load_again(rank: int, world_size: int, place: str) -> None:
    """Runs in ranks: garbage collection of a dropped model happens only on some ranks."""
    fused.enable()
    gc.disable()
    try:
        want = models.load(place, "llama")(PROMPT).logits
        if rank == 1:
            gc.collect()
        assert_same_bits(models.load(place, "llama")(PROMPT).logits, want, "loaded again")
    finally:
        gc.enable()
        fused.disable()


@on(cpu=(2,))
def test_another_model_after_one_that_was_dropped(pool: RankPool, tmp_path: pathlib.Path) -> None:
    pool.run(load_again, models.save("llama", tmp_path), timeout=60.0)


@torch.no_grad()
def load_after_the_end(rank: int, world_size: int, place: str, how: str) -> None:
    """Runs in ranks: the communicator of the first model was closed, or has failed."""
    fused.enable()
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    group = mesh.get_group()
    try:
        link = styles._communicator(group, "cpu")
        if how == "failed":
            with pytest.raises(allnorm.PeerTimeoutError):
                link.all_reduce(torch.ones(1 + rank, 64))
        elif how == "closed" or rank == 1:
            link.close()
        new = styles._communicator(group, "cpu")
        assert new is not link
        assert styles._communicator(group, "cpu") is new, "one that is open is kept"
        for tokens in (1, 3):
            got = new.all_reduce(torch.full((tokens, 65), rank + 1.5))
            assert_same_bits(got, torch.full_like(got, 4.0), how)

        want = models.load(place, "llama")(PROMPT).logits
        for used in list(styles._links.values()):
            if rank == 1 or how == "closed":
                used.close()
        assert_same_bits(models.load(place, "llama")(PROMPT).logits, want, how)
    finally:
        fused.disable()
        destroy_groups(rank, world_size)


@on(cpu=(2,))
@pytest.mark.parametrize("how", ["closed", "closed by one rank", "failed"])
def test_another_model_after_the_end_of_a_communicator(
    pool: RankPool, tmp_path: pathlib.Path, how: str
) -> None:
    pool.run(load_after_the_end, models.save("llama", tmp_path), how, timeout=120.0)


@torch.no_grad()
def load_what_is_unknown(rank: int, world_size: int, place: str) -> str:
    """Runs in ranks: a model of an unknown family runs unfused, with a warning."""
    want = models.load(place, "smollm3")(PROMPT).logits
    fused.enable()
    try:
        with pytest.warns(UserWarning, match="has no fusable site"):
            model = models.load(place, "smollm3")
        assert_same_bits(model(PROMPT).logits, want, "a model that is not known")
        with pytest.raises(UnsupportedError, match="no fusable site") as error:
            fused.report(model)
        return str(error.value)
    finally:
        fused.disable()


@on(cpu=(2,))
def test_unknown_family(pool: RankPool, tmp_path: pathlib.Path) -> None:
    message = pool.run(load_what_is_unknown, models.save("smollm3", tmp_path))[0]
    assert "SmolLM3ForCausalLM" in message
    assert "FAMILIES" in message


def test_enable_and_disable_leave_no_trace() -> None:
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
def test_versions_that_are_no_plain_numbers(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", version)
    fused.enable()
    fused.disable()


def test_model_without_a_plan() -> None:
    from transformers import AutoModelForCausalLM

    fused.enable()
    try:
        model = AutoModelForCausalLM.from_config(models.config("llama"))
    finally:
        fused.disable()
    report = fused.report(model)
    assert not report.fused
    assert all("not in the tensor-parallel plan" in site.reason for site in report.missed)
    assert str(report).startswith(f"0 of {2 * models.LAYERS} reductions fused")


def test_copies_of_models_without_a_plan_compute_by_themselves() -> None:
    from transformers import AutoModelForCausalLM

    fused.enable()
    try:
        model = AutoModelForCausalLM.from_config(models.config("llama")).eval()
        with torch.no_grad():
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
    finally:
        fused.disable()


@torch.no_grad()
def load_as(rank: int, world_size: int, place: str, family: str, head: str) -> list[str]:
    """Runs in ranks: whatever class builds the model, it is wired; returns the report."""
    import transformers

    more: dict[str, Any] = {"auto_class": getattr(transformers, head)}
    want = models.load(place, family, **more)(PROMPT)[0]
    fused.enable()
    try:
        model = models.load(place, family, **more)
        output, calls = counted(model)
        distance = ulp_distance(output[0], want)
        if not head.startswith("AutoModelFor"):  # other heads have random weights
            assert int(distance.max()) <= 2, f"{int(distance.max())} ulps from the stock model"
        assert calls == 0
        return str(fused.report(model)).splitlines()
    finally:
        fused.disable()


HEADS = {
    "llama": ("AutoModel", "LlamaModel", "AutoModelForTokenClassification"),
    "gemma2": ("AutoModel",),
}


@on(cpu=(2,))
@pytest.mark.parametrize("family", HEADS)
def test_models_with_other_heads_and_without_one(
    pool: RankPool, family: str, tmp_path: pathlib.Path
) -> None:
    place = models.save(family, tmp_path)
    for head in HEADS[family]:
        first, *rest = pool.run(load_as, place, family, head)[0]
        assert first == f"{2 * models.LAYERS} of {2 * models.LAYERS + 1} reductions fused"
        assert len(rest) == 1, rest


@torch.no_grad()
def shard_over_data_too(rank: int, world_size: int, place: str) -> list[str]:
    """Runs in ranks: FSDP shards the weights of norms outside of their forwards."""
    more = {"tp_size": 2, "fsdp_size": 2}
    stock = models.load(place, "llama", **more)
    want, want_tokens = stock(PROMPT).logits, tokens(stock)
    fused.enable()
    try:
        model = models.load(place, "llama", **more)
        for _ in range(2):
            distance = ulp_distance(model(PROMPT).logits, want)
            assert int(distance.max()) <= 2, f"{int(distance.max())} ulps from the stock model"
        assert torch.equal(tokens(model), want_tokens)
        for site in fused.report(model).fused:
            assert site.calls >= 2, site
        return str(fused.report(model)).splitlines()
    finally:
        fused.disable()


@pytest.mark.slow
@on(cpu=(4,))
def test_tensor_parallel_and_fsdp(pool: RankPool, tmp_path: pathlib.Path) -> None:
    lines = pool.run(shard_over_data_too, models.save("llama", tmp_path))[0]
    attention = [line for line in lines if "o_proj" in line]
    assert not attention, "its norm is unsharded with its layer"
    why = "the weight of its norm is sharded, by FSDP for example"
    assert sum(why in line for line in lines) >= models.LAYERS - 1
