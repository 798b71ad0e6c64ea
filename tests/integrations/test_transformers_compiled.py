"""Tests compiled models, static caches and continuous batching."""

from __future__ import annotations

import collections
import pathlib
from typing import Any

import pytest
import torch
from rank_helpers import on

from allnorm.testing import assert_same_bits

from . import transformers_models as models

pytest.importorskip("transformers")
from allnorm.integrations import transformers as fused

PROMPT = torch.arange(2, 14).view(2, 6)


class Graphs:
    """A torch.compile backend that runs graphs unchanged and counts their collectives.

    Attributes:
        compiled: the counts of each graph that was compiled.
        ran: the counts of the graph that ran most recently.
    """

    def __init__(self) -> None:
        self.compiled: list[dict[str, int]] = []
        self.ran: dict[str, int] = {}

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if "all_reduce" in str(node.target)]
        spaces = ("allnorm" if "allnorm" in name else "c10d" for name in names)
        counts = dict(collections.Counter(spaces))
        self.compiled.append(counts)

        def run(*args: Any) -> Any:
            self.ran = counts
            return graph.forward(*args)

        return run


def static_cache(model: Any) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=32)


MORE_FAMILIES = ("gemma2", "granite", "gpt_oss")


@on(cpu=(2,))
@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(each, marks=pytest.mark.long) for each in MORE_FAMILIES)],
)
@torch.no_grad()
def test_toggling_never_runs_a_stale_graph(
    rank: int, world_size: int, tmp_path: pathlib.Path, family: str
) -> None:
    """Tests a compiled model while its fusion is disabled and enabled."""
    place = models.save(family, tmp_path)
    sites = models.LAYERS if family == "gpt_oss" else 2 * models.LAYERS
    with models.fusion():
        model = models.load(place, family)
        eager = model(PROMPT, past_key_values=static_cache(model)).logits
        torch._dynamo.reset()
        graphs = Graphs()
        compiled = torch.compile(model, backend=graphs, fullgraph=True)
        for switch, where in ((fused.enable, "allnorm"), (fused.disable, "c10d")) * 2:
            switch()
            logits = compiled(PROMPT, past_key_values=static_cache(model)).logits
            want = model(PROMPT, past_key_values=static_cache(model)).logits
            assert_same_bits(logits, want, f"{family} compiled, {where}")
            assert graphs.ran == {where: sites}
            if where == "allnorm":
                assert_same_bits(logits, eager, f"{family} compiled")
        assert graphs.compiled == [{"allnorm": sites}, {"c10d": sites}]


@pytest.mark.long
@on(cpu=(2,))
@torch.no_grad()
def test_static_cache_compiled(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    """Tests prefill and decode with Inductor and a static cache."""
    place = models.save("llama", tmp_path, torch.float32, num_hidden_layers=1)
    want = models.load(place, "llama").generate(PROMPT, max_new_tokens=16, do_sample=False)
    with models.fusion():
        model = models.load(place, "llama")
        torch._dynamo.reset()
        model.forward = torch.compile(model.forward, fullgraph=True)
        got = model.generate(
            PROMPT, max_new_tokens=16, do_sample=False, cache_implementation="static"
        )
        assert torch.equal(got, want)
        assert not any(site.calls or site.unfused_calls for site in fused.report(model).sites)


@on(cpu=(2,))
@torch.no_grad()
def test_continuous_batching(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    """Tests prompts of different lengths in one batch."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    place = models.save("llama", tmp_path, torch.float32)
    prompts = [[3, 4, 5, 6, 7], [9, 8, 7], [20, 21, 22, 23, 24, 25, 26]]
    generation = GenerationConfig(
        max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=64)

    def answers() -> list[list[int]]:
        model = models.load(place, "llama")
        done = model.generate_batch(
            inputs=prompts,
            generation_config=generation,
            continuous_batching_config=batching,
            progress_bar=False,
        )
        if fused.is_enabled():
            sites = fused.report(model).fused
            assert len(sites) == 2 * models.LAYERS
            ((calls, unfused_calls),) = {(site.calls, site.unfused_calls) for site in sites}
            assert calls >= 12
            assert not unfused_calls
        return [done[key].generated_tokens for key in sorted(done)]

    want = answers()
    assert len(want) == 3
    with models.fusion():
        assert answers() == want
