"""Tests the fused norms of q and k of MiniMax-M2 with a fake of SGLang's class."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_helpers import comm, on

from allnorm import reference
from allnorm.errors import UnsupportedError
from allnorm.integrations.sglang import fusion, qk_norm
from allnorm.testing import assert_same_bits, rank_input, ulp_distance

EPS, SIZES, bf16 = 1e-6, (128, 64, 64), torch.bfloat16


class QKNorm:
    """A fake of SGLang's MiniMaxM2QKRMSNorm; it computes what SGLang's kernels compute."""

    def __init__(self, rank: int, world_size: int, own_kernel: bool = False) -> None:
        self._q_norm, self._k_norm = (SimpleNamespace(weight=w) for w in weights(rank))
        self._world_size, self._eps = world_size, EPS
        self._forward_impl = self._forward_fused if own_kernel else self._forward_naive

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> Any:
        return self._forward_impl(q, k)

    def _forward_naive(self, q: torch.Tensor, k: torch.Tensor) -> Any:
        results = []
        for x, norm in ((q, self._q_norm), (k, self._k_norm)):
            total = x.float().square().sum(-1, keepdim=True)
            dist.all_reduce(total)
            root = torch.rsqrt(total / x.shape[-1] / self._world_size + self._eps)
            results.append((x.float() * root * norm.weight.float()).to(x.dtype))
        return tuple(results)

    def _forward_fused(self, q: torch.Tensor, k: torch.Tensor) -> Any:
        raise AssertionError("not called")


def weights(rank: int) -> list[torch.Tensor]:
    return [rank_input((size,), bf16, rank, call=i) for i, size in enumerate(SIZES[:2])]


def slices(rank: int) -> Any:
    """Returns q and k as SGLang passes them: columns of one matrix."""
    return rank_input((5, sum(SIZES)), bf16, rank, call=7).split(SIZES, -1)[:2]


def model(norm: Any) -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    layer.qk_norm_impl = norm
    return torch.nn.Sequential(layer, torch.nn.ReLU())


@contextlib.contextmanager
def plugin() -> Iterator[tuple[fusion.Fusion, list[str]]]:
    """Yields an active fusion and what it logs; SGLang's class is a fake."""
    messages: list[str] = []
    active = fusion.Fusion(comm(), lambda x: x, messages.append)
    module = SimpleNamespace(MiniMaxM2QKRMSNorm=QKNorm)
    with mock.patch.dict(sys.modules, {"sglang.srt.models.minimax_m2": module}):
        fusion.activate(active)
        try:
            yield active, messages
        finally:
            fusion.activate(None)


@on(cpu=(2,))
def test_q_and_k_are_normed_in_one_call(rank: int, world_size: int) -> None:
    norm, given = QKNorm(rank, world_size), slices(rank)
    unfused = norm.forward(*given)
    with plugin() as (active, messages), torch.inference_mode():
        found = qk_norm.sites(model(norm), world_size)
        assert found == [norm]
        qk_norm.wire(found)
        fused = norm.forward(*given)
        assert active.sites == {id(norm)}
        assert not messages
    ranks = range(world_size)
    wanted = reference.rms_norm_sharded(
        [slices(r) for r in ranks], [weights(r) for r in ranks], EPS
    )
    for mine, theirs, exact in zip(fused, unfused, wanted[rank], strict=True):
        assert_same_bits(mine, exact, "the reference")
        assert int(ulp_distance(mine, theirs).max()) <= 1
    for mine, theirs in zip(norm.forward(*given), unfused, strict=True):
        assert_same_bits(mine, theirs, "without a fusion, SGLang's own function")


@on(cpu=(2,))
def test_norms_that_sglang_keeps(rank: int, world_size: int) -> None:
    with plugin() as (active, messages):
        own = QKNorm(rank, world_size, own_kernel=True)
        for kept in (own, QKNorm(rank, world_size + 1), object()):
            assert not qk_norm.sites(model(kept), world_size)
        renamed = QKNorm(rank, world_size)
        del renamed._eps
        with pytest.raises(UnsupportedError, match=r"a norm of q and k .* without _eps"):
            qk_norm.sites(model(renamed), world_size)
        norm, (q, k) = QKNorm(rank, world_size), slices(rank)
        qk_norm.wire([norm])
        for given, words in (
            ((q, k.float()), "q in torch.bfloat16 with k in torch.float32"),
            ((q.half(), k.half()), "weights in torch.bfloat16 and torch.bfloat16 with rows in"),
            ((q, k.t().contiguous().t()), "not contiguous"),
            ((q.clone().requires_grad_(), k), "requires gradients"),
        ):
            for mine, theirs in zip(norm.forward(*given), norm._forward_naive(*given), strict=True):
                assert_same_bits(mine.detach(), theirs.detach(), words)
            assert words in messages.pop(), words
        assert not active.sites
