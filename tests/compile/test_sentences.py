"""Tests that every sentence in the graph pass's sources is produced by a test."""

from __future__ import annotations

import ast
import pathlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_helpers import comm, on
from torch.fx import symbolic_trace

import allnorm.compile
from allnorm.compile import agreement, fuse
from allnorm.testing import RankPool

from . import test_boundaries, test_experts, test_quantized, test_refusals, test_sharded
from .helpers import Inputs
from .test_reasons import CASES, hooked, norm_module, texts_of

# Maps parts of sentences to the test file that produces them, if it is not test_reasons.py.
ELSEWHERE = {
    "the store of process group {} fails": "test_sentences.py",
    "keeps symbolic": "test_contents.py",
    "is not a matrix": "test_experts.py",
    "reads the sum before it is reduced": "test_experts.py",
    "a layout allnorm does not write": "test_decompositions.py",
    "is a DTensor: pass its whole local tensor": "test_dtensors.py",
    "torch.distributed is not initialized": "test_refusals.py",
    "it is the residual of": "test_matches.py",
    "effect token": "test_tracing.py",
    "changes an argument other than its first tensor": "test_contents.py",
    "a part of the tensor": "test_contents.py",
    "in a shape other than that of the rank's rows": "test_scatter.py",
    "follows the reduce-scatter": "test_scatter.py",
    "reduce-scatters a tensor of": "test_scatter.py",
    "reduce-scatter in a graph that works in place": "test_scatter.py",
    "the number of ranks that it reduces over is unknown": "test_sharded.py",
    "rounds a part of the new streams": "test_streams.py",
    "adds residual streams that are not mixed": "test_streams.py",
    "is not a sum of streams": "test_streams.py",
    "has leading dimensions other than those of": "test_streams.py",
    "the dtype of the old streams": "test_streams.py",
    "residual streams: expected 2 to 8": "test_streams.py",
    "an input of the streams' sum": "test_streams.py",
    ", next layer's input": "test_next_inputs.py",
    "the next layer's input is not fused": "test_next_inputs.py",
    "is computed from the streams": "test_next_inputs.py",
    "comes after the reduction": "test_next_inputs.py",
    "are not those of": "test_stream_inputs.py",
    "would differ in their last bits": "test_stream_inputs.py",
    "from which the next input is made": "test_stream_inputs.py",
    "is not shaped like the streams": "test_stream_inputs.py",
}
# Maps parts of sentences that no graph produces to the cause, or to where the text appears instead.
GUARDS = {
    "the shape of {} is computed from the reduced tensor": "sizes do not depend on elements",
    "the shapes and dtypes of its tensors are unknown": "a reduction without a shape comes first",
    "a tensor that exists only while it is traced": "constants are recorded as themselves",
    "in a graph without in-place operations": "such results are refused earlier",
    "reduces several tensors in place": "PyTorch refuses to record such an operator",
    "over a dimension of unknown size": "the reduction itself is refused for such rows",
    "sum of {} experts' rows": "part of a fused site",
    "tensor added after the reduction": "part of a fused site",
    "no second norm": "part of a fused site",
    "rows over ranks": "part of a fused site",
    "the streams or their factors are not on": "PyTorch computes on one device",
    "is used as a whole": "tracers take each of an operator's results",
    "writes to memory before": "graphs with sites are functional",
    "<guards of a graph>": "a file name",
}
ERRORS = {"ValueError", "TypeError", "RuntimeError", "AllnormError", "CommunicatorClosedError"}
NOT_REASONS = ERRORS | {"NotImplementedError", "define"}
OTHER_FILES = ("report.py", "inductor.py", "generation.py", "vocabulary.py")


def all_texts(rank: int, world_size: int) -> list[str]:
    texts = []
    for case in CASES.values():
        texts += texts_of(case.fuse(*case.make(rank, True)))
    for fn in test_sharded.NEARLY.values():
        texts += texts_of(fuse(test_sharded.nearly(fn, 1), test_sharded.inputs(rank), comm()))
    given = Inputs().make(rank)
    functions = [fn for reason in test_refusals.REFUSALS for fn in test_refusals.graphs_of(reason)]
    functions += [fn for fn, *_ in test_boundaries.NEARLY.values()]
    functions += [fn for fn, *_ in test_quantized.QUANTIZED.values()]
    for fn in functions:
        texts += texts_of(fuse(symbolic_trace(fn), [t.clone() for t in given], comm()))
    for (top_k, _), fn in test_experts.NEARLY.items():
        module = test_experts.traced(fn, top_k)
        texts += texts_of(fuse(module, test_experts.inputs(rank, top_k, torch.bfloat16), comm()))
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    texts += texts_of(fuse(*norm_module(hooked)(given, False), comm()))
    handle.remove()
    return texts


def sentences() -> dict[str, str]:
    """Returns the pass's texts, except docstrings and errors, keyed by patterns that match them."""
    found = {}
    for path in sorted(pathlib.Path(allnorm.compile.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        others: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr):
                others.update(ast.walk(node) if isinstance(node.value, ast.Constant) else ())
            elif isinstance(node, ast.JoinedStr):
                others.update(part for part in node.values if isinstance(part, ast.Constant))
            elif isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                others.update(ast.walk(node) if called in NOT_REASONS else ())
        for node in ast.walk(tree):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if node in others or not isinstance(node, ast.JoinedStr | ast.Constant):
                continue
            words = [p.value if isinstance(p, ast.Constant) else None for p in parts]
            if not all(word is None or isinstance(word, str) for word in words):
                continue
            text = "".join("{}" if word is None else str(word) for word in words)
            if (
                len(re.findall("[a-z]{2,}", text)) > 2
                and " " in text
                and path.name not in OTHER_FILES
            ):
                found[".*".join("" if w is None else re.escape(str(w)) for w in words)] = text
    return found


@pytest.mark.long
@on(cpu=(1,))
def test_every_sentence(pool: RankPool) -> None:
    (texts,) = pool.run(all_texts)
    known = dict.fromkeys(ELSEWHERE | GUARDS, 0)
    for pattern, sentence in sentences().items():
        parts = [part for part in known if part in sentence]
        seen = any(re.search(pattern, text, re.DOTALL) for text in texts)
        assert seen or parts, f"no test for {sentence!r}"
        for part in parts:
            known[part] += not seen
    assert set(known.values()) == {1}, f"remove or correct the entries that are not 1: {known}"
    here = pathlib.Path(__file__).parent
    assert all(part in (here / file).read_text() for part, file in ELSEWHERE.items())


class LostStore:
    group_name = "0"

    def settle(self, *_: Any) -> str:
        raise RuntimeError("connection reset")


def test_store_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: Any = LostStore()
    monkeypatch.setattr(agreement, "verdicts_of", lambda *_: lost)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    reason = agreement.settle(lost, None, [], [])
    assert reason == "ranks cannot agree: the store of process group 0 fails (connection reset)"
