"""Tests partial sums: an addition or a norm fuses with the reduction; other uses reduce first."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import pytest
import torch
from rank_helpers import message_of, on
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

pytest.importorskip("transformers")
from allnorm import reference
from allnorm.integrations.transformers.partial import PartialSum
from allnorm.integrations.transformers.sites import SWITCH, Norm, Site
from allnorm.integrations.transformers.wiring import _norm_forward


class Doubles:
    """A fake communicator of two ranks with equal inputs, in one process."""

    def all_reduce(self, x: torch.Tensor, algorithm: str) -> torch.Tensor:
        return x + x

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, *arguments: Any, algorithm: str, **more: Any
    ) -> Any:
        return reference.add_rms_norm(x + x, *arguments, **more)


class Model:
    """A site with its linear layer, its norms and its inputs."""

    def __init__(self, *, norm=True, post=False, bias=False, is_scaled=False) -> None:
        self.module, self.post_module = (torch.nn.RMSNorm(8, eps=eps) for eps in (1e-6, 1e-3))
        torch.nn.init.uniform_(self.post_module.weight)
        self.norm = Norm(self.module, 1e-6, 0.0, "rounded", self.module.forward)
        self.post = Norm(self.post_module, 1e-3, 0.0, "rounded", self.post_module.forward)
        self.linear = torch.nn.Linear(8, 8, bias).eval()
        link: Any = Doubles()
        norms = (self.norm if norm else None, self.post if post else None)
        self.site = Site("o_proj", *norms, is_scaled, link, "", self.linear)
        self.forward = functools.partial(_norm_forward, self.norm)
        self.post_forward = functools.partial(_norm_forward, self.post)
        self.x, self.residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        self.total = 2 * self.x + (self.linear.bias if bias else 0.0)
        self.partial = PartialSum(self.x, self.site)

    def calls(self) -> tuple[int, int]:
        return self.site.calls, self.site.unfused_calls


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Enables fusion, and disables gradients."""
    monkeypatch.setattr(SWITCH, "enabled", True)
    with torch.no_grad():
        yield


ADDITIONS = {
    "residual + partial": lambda r, p: r + p,
    "partial + residual": lambda r, p: p + r,
    "torch.add": torch.add,
    "Tensor.add": lambda r, p: r.add(p),
    "reshaped": lambda r, p: r + p.reshape(-1, 8).view(2, 3, 8),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", ADDITIONS)
def test_addition_fuses(how: str, bias: bool) -> None:
    model = Model(bias=bias)
    summed = ADDITIONS[how](model.residual, model.partial)
    torch.testing.assert_close(summed, model.total + model.residual)
    assert model.norm.ready is not None
    normed = model.norm.ready.normed
    assert model.forward(summed) is normed
    torch.testing.assert_close(normed, model.module(summed))
    assert model.calls() == (1, 0)
    assert model.norm.ready is None
    torch.testing.assert_close(model.forward(summed), normed)  # the model's norm computes it again


@pytest.mark.parametrize("bias", [False, True])
def test_a_post_norm_alone_fuses(bias: bool) -> None:
    """Tests a norm whose result is not added to a residual."""
    model = Model(post=True, norm=False, bias=bias)
    normed = model.post_forward(model.partial)
    assert model.calls() == (0, 0)
    torch.testing.assert_close(torch.relu(normed), torch.relu(model.post_module(model.total)))
    assert model.calls() == (1, 0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_post_norm_fuses_with_the_addition(scale: float | None, norm: bool, bias: bool) -> None:
    """Tests that a post norm fuses with the residual addition after it, unless there is a bias."""
    model = Model(post=True, norm=norm, bias=bias)
    normed, branch = model.post_forward(model.partial), model.post_module(model.total)
    if scale is not None:
        normed, branch = normed * scale, branch * scale
    summed = model.residual + normed.view(2, 3, 8)
    torch.testing.assert_close(summed, model.residual + branch)
    assert model.calls() == (1, 0)
    assert (model.norm.ready is not None) == (norm and not bias)
    torch.testing.assert_close(model.forward(summed), model.module(summed))
    assert model.norm.ready is None


@pytest.mark.parametrize("bias", [False, True])
def test_a_scaled_sum_fuses_with_the_addition(bias: bool) -> None:
    model = Model(bias=bias, is_scaled=True)
    summed = 0.3 * model.partial + model.residual
    torch.testing.assert_close(summed, model.residual + model.total * 0.3)
    # With a bias nothing fuses: a fused call would scale before it adds the bias.
    assert model.calls() == ((0, 1) if bias else (1, 0))
    torch.testing.assert_close(model.forward(summed), model.module(summed))


def test_a_sum_that_skips_its_post_norm_is_not_fused() -> None:
    model = Model(post=True)
    torch.testing.assert_close(model.residual + model.partial, model.residual + model.total)
    assert model.calls() == (0, 1)


FACTORS = {"one": 1, "zero": 0.0, "too large": 1e39, "infinite": float("inf"), "complex": 1j}


@pytest.mark.parametrize("factor", FACTORS)
def test_factors(factor: str) -> None:
    model, number = Model(is_scaled=True), FACTORS[factor]
    summed = model.residual + model.partial * number
    want = model.residual + model.total * number
    torch.testing.assert_close(summed, want, equal_nan=True)
    assert model.calls() == ((1, 0) if factor in ("one", "zero") else (0, 1))


USES = {
    "scaled": lambda r, p: p * r,
    "scaled from the left": lambda r, p: torch.full((), 2.0) * p,
    "scaled twice": lambda r, p: (p * 2 * 3) + r,
    "scaled and not added": lambda r, p: torch.relu(p * 2),
    "a scaled addition": lambda r, p: torch.add(r, p, alpha=3),
    "an addition that broadcasts": lambda r, p: r[:1, :1] + p,
    "an addition of a number": lambda r, p: 1 + p,
    "different dtype": lambda r, p: r.double() + p,
    "indexed": lambda r, p: p[0],
    "a function": lambda r, p: torch.nn.functional.dropout(p, 0.0),
    "a list": lambda r, p: torch.cat([r, p]),
    "a method": lambda r, p: p.float().transpose(0, 1),
    "an attribute": lambda r, p: p.T if p.ndim == 2 else p.mT,
    "other rows": lambda r, p: p.reshape(2, 12, 2),
    "a different norm": lambda r, p: torch.nn.functional.rms_norm(p, (8,)),
    "two partial sums": lambda r, p: p + p,
    "in place": lambda r, p: r.clone().add_(p),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("use", USES)
def test_other_uses_reduce_first(use: str, bias: bool) -> None:
    model = Model(bias=bias)
    got = USES[use](model.residual, model.partial)
    torch.testing.assert_close(got, USES[use](model.residual, model.total))
    assert model.calls() == (0, 1)
    assert model.norm.ready is None
    if use not in ("scaled twice", "scaled and not added"):
        torch.testing.assert_close(model.residual + model.partial, model.residual + model.total)
        assert model.calls() == (0, 1)  # the sum is computed once


def test_a_weight_of_a_different_dtype_is_not_fused() -> None:
    model = Model()
    partial = PartialSum(model.x.bfloat16(), model.site)
    model.residual.bfloat16() + partial
    assert model.calls() == (0, 1)


def test_queries_do_not_reduce() -> None:
    model = Model()
    assert (model.partial.shape, model.partial.dtype) == (model.x.shape, torch.float32)
    assert model.partial.device == model.x.device
    assert model.calls() == (0, 0)


def test_disable_drops_the_pending_norm() -> None:
    model = Model()
    summed = model.residual + model.partial
    SWITCH.enabled = False
    torch.testing.assert_close(model.forward(summed), model.module(summed))
    assert model.norm.ready is None


USES_OF_THE_SUM = {
    "read": lambda summed: summed.abs().max(),
    "copied": lambda summed: summed.clone().mul_(2),
}
CHANGES = {
    "in place": lambda summed: summed.mul_(2),
    "some rows in place": lambda summed: summed[0].zero_(),
    "through a view": lambda summed: summed.view(-1)[3:5].fill_(7.0),
    "through detach": lambda summed: summed.detach().add_(1.0),
    "as out=": lambda summed: torch.add(summed, 1.0, out=summed),
}


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("use", USES_OF_THE_SUM | CHANGES)
def test_only_a_written_residual_is_normed_again(use: str, is_inference: bool) -> None:
    model = Model()
    with torch.inference_mode() if is_inference else torch.no_grad():
        summed = model.residual + model.partial
        (USES_OF_THE_SUM | CHANGES)[use](summed)
        torch.testing.assert_close(model.forward(summed), model.module(summed))
    assert model.calls() == ((0, 1) if use in CHANGES else (1, 0))


VALUES = {
    "scaled": lambda summed: summed * 2,
    "rows": lambda summed: summed[:, -1:],
    "the whole": lambda summed: summed[:],
    "different shape": lambda summed: summed.view(-1, 8),
    "detached": lambda summed: summed.detach(),
    "copied": lambda summed: summed.clone(),
    "strided": lambda summed: summed.transpose(0, 1),
}


@pytest.mark.parametrize("value", VALUES)
def test_views_and_other_tensors_are_normed_again(value: str) -> None:
    model = Model()
    value = VALUES[value](model.residual + model.partial)
    torch.testing.assert_close(model.forward(value), model.module(value))
    assert model.calls() == (0, 1)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_gradients_enabled_before_the_norm(is_frozen: bool) -> None:
    model = Model()
    model.module.requires_grad_(not is_frozen)
    summed = model.residual + model.partial
    with torch.enable_grad():
        value = summed.requires_grad_() if is_frozen else summed
        model.forward(value).sum().backward()
    assert (value if is_frozen else model.module.weight).grad is not None
    assert model.calls() == (0, 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("post", [False, True])
def test_gradients_enabled_before_the_addition(post: bool, bias: bool) -> None:
    """Tests attention under no_grad in a layer whose later operations record gradients."""
    model = Model(post=post, bias=bias)
    with torch.enable_grad():
        residual, total = model.residual.requires_grad_(), model.total.detach()
        branch = model.post_forward(model.partial) if post else model.partial
        got = model.forward(residual + branch)
        want = model.module(residual + (model.post_module(total) if post else total))
        torch.testing.assert_close(got, want)
        trained = [residual, model.module.weight, *([model.post_module.weight] if post else [])]
        grads, expected = (torch.autograd.grad(out.square().sum(), trained) for out in (got, want))
    for grad, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, other)
    assert model.linear.bias is None or model.linear.bias.grad is None


def test_unused_norms_are_counted() -> None:
    model = Model()
    for _ in range(2):
        model.residual + PartialSum(model.x, model.site)
    assert model.calls() == (1, 1)  # the second norm is still pending


def test_training_is_not_fused() -> None:
    model = Model()
    assert model.site.fuses()
    model.linear.train()
    assert not model.site.fuses()


def test_negative_zeros_of_an_unfused_sum() -> None:
    """Tests that reducing an unfused sum, which adds a residual of zeros, preserves -0.0."""
    model = Model()
    partial = PartialSum(torch.full((2, 8), -0.0), model.site)
    assert torch.signbit(partial.reduced()).all()


def test_a_norm_can_be_copied() -> None:
    model = Model()
    model.module.forward = types.MethodType(_norm_forward, model.norm)
    twin = copy.deepcopy(model.module)
    twin.weight.mul_(2.0)
    rows = torch.randn(3, 8)
    torch.testing.assert_close(twin(rows), 2 * model.module(rows))


def test_sites_cannot_be_copied() -> None:
    with pytest.raises(TypeError, match="o_proj"):
        copy.deepcopy(Model().site)


def test_conversion_to_the_same_dtype_does_not_reduce() -> None:
    model = Model()
    assert model.partial.to(torch.float32) is model.partial
    torch.testing.assert_close(model.partial.to(torch.float64), model.total.double())
    assert model.calls() == (0, 1)


@on(cpu=(2,))
def test_a_sharded_bias_is_refused(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for placement, part in ((Replicate(), 8), (Shard(0), 8 // world_size), (Partial(), 8)):
        for use in ("add", "reduce"):
            model = Model(bias=True)
            whole = model.linear.bias.detach()
            start = rank * part if placement == Shard(0) else 0
            bias = DTensor.from_local(whole[start : start + part], mesh, [placement])
            model.linear.bias = torch.nn.Parameter(bias, requires_grad=False)

            def total(model: Model = model, use: str = use) -> torch.Tensor:
                with torch.no_grad():
                    partial = model.partial if use == "add" else model.partial.reduced()
                    return model.residual + partial

            if placement == Replicate():
                torch.testing.assert_close(total(), 2 * model.x + whole + model.residual)
            else:
                message = message_of(ValueError, total)
                assert "the bias of o_proj" in message
                assert repr(placement) in message, message
