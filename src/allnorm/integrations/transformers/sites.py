"""A model's sites, where a norm follows a reduction: their fused calls and counters.

A site belongs to the module whose output is a partial sum. The model's stock forward then adds the
residual and norms the result. The addition makes the fused call and returns the new residual. The
normed rows are saved on the norm module, which returns them if its input is that new residual and
cannot have changed. Otherwise the norm makes a local call, which gives bit-identical results. If
the model norms or scales the sum before it adds the residual, that step becomes part of the fused
call as well.

The ranks must agree on the call that each site makes. The decision therefore depends only on facts
that are equal on all ranks: the switch, the grad mode, `training`, the model's structure, shapes
and dtypes. It does not depend on hooks, because not all ranks may have them. A rank that needs the
sum itself makes the same call as its peers, with a residual of -0.0, which leaves the bits of the
sum unchanged. Only sites that norm or scale the sum before the addition cannot return the sum: see
`Site.keeps_sum`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as nn_module

import allnorm
from allnorm.core.sharding import whole_local

# Hooks from these packages, such as FSDP's, only read their arguments or return different tensors.
_TRUSTED_HOOKS = ("transformers.", "torch.distributed.")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Global module hooks.
_Hooks = tuple[Mapping[int, Any], ...]
_GLOBAL_SUM_HOOKS: _Hooks = (
    nn_module._global_forward_hooks,
    nn_module._global_backward_hooks,
    nn_module._global_backward_pre_hooks,
)
_GLOBAL_LATER_HOOKS: _Hooks = (
    nn_module._global_forward_hooks,
    nn_module._global_forward_pre_hooks,
)


@dataclass
class Switch:
    """The settings that `enable()` and `disable()` change.

    Every call reads them, and compiled graphs have guards on them.

    Attributes:
        enabled: whether sites make fused calls.
        algorithm: the algorithm of all calls, as in `Communicator.all_reduce_add_rms_norm`.
    """

    enabled: bool = False
    algorithm: str = "auto"


SWITCH = Switch()


class Ready:
    """Normed rows that a site's call computed, and the residual from which it computed them."""

    def __init__(self, normed: torch.Tensor, residual: torch.Tensor, site: Site) -> None:
        self.normed = normed
        self.residual = residual
        self.site = site
        self._version = None if torch.compiler.is_compiling() else _version(residual)

    def is_norm_of(self, value: torch.Tensor) -> bool:
        """Returns whether `value` is the residual, with unchanged contents.

        The version counter does not count writes through `.data`, and tensors in compiled graphs
        have no version counter. Therefore a hook that could have written counts as a write.
        """
        hooks = (*self.site.later_hooks, *_GLOBAL_LATER_HOOKS)
        if value is not self.residual or _any_hook(hooks):
            return False
        if torch.compiler.is_compiling():
            return True
        return self._version is not None and self._version == _version(value)


@dataclass(eq=False)
class Norm:
    """One of the model's RMSNorms, with its rounding mode and its stock forward.

    Attributes:
        site: the site to which this norm belongs; None in a copy of the module.
        ready: rows from a fused call that the next forward may return, or None.
    """

    module: torch.nn.Module
    eps: float
    weight_bias: float
    numerics: str
    stock: Callable[[torch.Tensor], torch.Tensor]
    site: Site | None = None
    ready: Ready | None = None

    def obstacle(self, value: torch.Tensor) -> str:
        """Returns why no call can norm a tensor like `value`, or "". Equal on every rank."""
        weight = self.weight
        if weight is None:
            return "the weight of its norm is sharded, by FSDP for example, when it reduces"
        if value.dtype not in _DTYPES:
            return f"its sum is {value.dtype}: expected float32, float16 or bfloat16"
        if weight.dtype != value.dtype:  # the model's result would be promoted
            return f"its norm has a weight in {weight.dtype}: expected {value.dtype}, as the sum"
        return ""

    @property
    def weight(self) -> torch.Tensor | None:
        """The weight as a local tensor; None if this rank does not hold all of it.

        Read at each call, because FSDP and weight loading replace the parameter.
        """
        weight: Any = self.module.weight
        assert isinstance(weight, torch.Tensor)
        return whole_local(weight)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the norm of a reduced tensor: the saved rows if valid, else computed now."""
        ready, self.ready = self.ready, None
        fuses = self.site is not None and self.site.fuses()
        if ready is not None:
            if fuses and ready.is_norm_of(value):
                return ready.normed
            ready.site.count_unused()
        # A rank with hooks must compute the same bits as its peers, so it does not use the stock
        # norm.
        if not fuses or self.obstacle(value):
            return self.stock(value)
        normed, _ = allnorm.add_rms_norm(
            *(value.contiguous(), None, self.weight, self.eps),
            weight_bias=self.weight_bias,
            numerics=self.numerics,
        )
        return normed

    def __deepcopy__(self, memo: dict[int, Any]) -> Norm:
        """Returns the norm for a copied module, which computes as it would without allnorm."""
        module = copy.deepcopy(self.module, memo)
        stock = copy.deepcopy(self.stock, memo)
        return Norm(module, self.eps, self.weight_bias, self.numerics, stock)


@dataclass(eq=False)
class Place:
    """A module with its path in the model, its parent, and its name in the parent."""

    name: str
    parent: torch.nn.Module
    key: str
    module: torch.nn.Module

    def obstacle(self) -> str:
        """Returns the reason not to fuse after the module was removed or replaced."""
        found = self.parent._modules.get(self.key)
        if found is None:
            return f"{self.name} has been removed from the model"
        kind = type(found)
        return (
            f"{self.name} has been replaced by a {kind.__module__}.{kind.__qualname__}, "
            "which may use the sum before it is added to the residual"
        )


@dataclass(eq=False)
class Site:
    """One of a model's reductions.

    Attributes:
        name: the path of the module that reduces, such as "layers.3.self_attn.o_proj".
        norm: the norm after the residual is added; None if no norm follows directly.
        post: the norm of the reduced sum before the residual is added, or None.
        is_scaled: whether the model multiplies the sum by a number before it adds the residual.
        link: the communicator; None until a tensor-parallel plan includes the module.
        reason: why the loaded model does not fuse this reduction; "" if it does.
        module: the module that reduces.
        places: the modules between the model and the reduction, and between it and the norms.
        sum_hooks: this rank's hooks that receive the sum before the residual is added, as the
            modules' hook dictionaries.
        later_hooks: this rank's hooks that receive the new residual before its norm, as such
            dictionaries.
        calls: number of fused calls in eager mode whose norm was used.
        unfused_calls: number of all other calls in eager mode.
        last_obstacle: why the latest reduction was not a fused call; "" if it was.
    """

    name: str
    norm: Norm | None
    post: Norm | None = None
    is_scaled: bool = False
    link: allnorm.Communicator | None = None
    reason: str = "not in the tensor-parallel plan that the model was loaded with"
    module: torch.nn.Module | None = None
    places: tuple[Place, ...] = ()
    sum_hooks: _Hooks = ()
    later_hooks: _Hooks = ()
    calls: int = 0
    unfused_calls: int = 0
    last_obstacle: str = ""

    def __post_init__(self) -> None:
        for norm in (self.norm, self.post):
            if norm is not None:
                norm.site = self

    def obstacle(self) -> str:
        """Returns why the site cannot make fused calls, or "". Equal on every rank."""
        if self.reason:
            return self.reason
        for place in self.places:
            if place.parent._modules.get(place.key) is not place.module:
                return place.obstacle()
        return ""

    def fuses(self) -> bool:
        """Returns whether the module's output may now stay a partial sum. Equal on every rank."""
        if not SWITCH.enabled or torch.is_grad_enabled():
            return False
        # Reentrant checkpointing first runs a training step's forward without gradients.
        is_training = self.module is not None and self.module.training
        return not is_training and not self.obstacle()

    def has_hooks(self) -> bool:
        """Returns whether hooks on this rank receive the sum before the residual is added."""
        hooks = (*self.sum_hooks, *_GLOBAL_SUM_HOOKS)
        return _any_hook(hooks if self.post is None else (*hooks, *_GLOBAL_LATER_HOOKS))

    @property
    def keeps_sum(self) -> bool:
        """Whether a rank can get the sum from the same call that a rank without hooks makes.

        With a bias it can: the call adds the bias, and a local call adds the residual.
        """
        return self._bias() is not None or (self.post is None and not self.is_scaled)

    def reduce(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks plus the bias. Collective."""
        self._count("unfused_calls")
        return self._reduce(value)[1]

    def can_add(
        self, value: torch.Tensor, residual: torch.Tensor, is_normed: bool, scale: float
    ) -> bool:
        """Returns whether the fused call can compute `residual + sum`."""
        norms = [norm for norm in (self.post, self.norm) if norm is not None]
        if is_normed != (self.post is not None) or not norms:
            return False
        if residual.shape != value.shape or residual.dtype != value.dtype:
            return False
        if self._bias() is not None and (is_normed or scale != 1.0):
            return False  # the call would norm and scale before it adds the bias
        return not self._find_obstacle(norms, value)

    def add(
        self, value: torch.Tensor, residual: torch.Tensor, is_normed: bool, scale: float
    ) -> torch.Tensor:
        """Makes the fused call. Returns the new residual, and saves its normed rows on the norm.

        With a bias, the stock model rounds three times: after the sum, after the bias and after the
        residual. The collective call makes the first two of these roundings, and a local call makes
        the third.
        """
        norm = self.norm
        if self._bias() is None or norm is None:
            normed, summed = self._call(value, residual, norm, self.post, scale)
        else:
            _, biased = self._reduce(value)
            normed, summed = _tracked(allnorm.add_rms_norm)(
                *(biased, residual, norm.weight, norm.eps),
                weight_bias=norm.weight_bias,
                numerics=norm.numerics,
            )
        self._count("calls")
        if norm is not None:
            assert normed is not None
            if norm.ready is not None:
                norm.ready.site.count_unused()
            norm.ready = Ready(normed, summed, self)
        return summed

    def normed(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the sum plus bias after its post norm. Collective."""
        assert self.post is not None
        normed, summed = self._reduce(value, wants_norm=True)
        self._count("unfused_calls" if normed is None else "calls")
        return self.post.stock(summed) if normed is None else normed

    def count_unused(self) -> None:
        """Changes the counters for a fused call whose norm was not used."""
        self._count("calls", -1)
        self._count("unfused_calls")

    def _reduce(
        self, value: torch.Tensor, wants_norm: bool = False
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Returns the norm of the sum (None if no call computes it) and sum + bias. Collective."""
        bias, norm = self._bias(), self.post or self.norm
        is_fused = wants_norm or (self.keeps_sum and not (self.is_scaled and self.post is None))
        if norm is not None and is_fused and not self._find_obstacle([norm], value):
            if bias is not None:
                residual = bias.expand_as(value)
            elif self.post is not None:
                residual = None
            else:  # -0.0 adds nothing; peers may pass the model's residual
                residual = value.new_full(value.shape[-1:], -0.0).expand_as(value)
            return self._call(value, residual, norm)
        assert self.link is not None
        call = _in_graph_or_break(self.link.all_reduce)
        reduced: torch.Tensor = call(value, algorithm=SWITCH.algorithm)
        return None, reduced if bias is None else reduced + bias

    def _call(
        self,
        value: torch.Tensor,
        residual: torch.Tensor | None,
        norm: Norm | None,
        post: Norm | None = None,
        scale: float = 1.0,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        assert self.link is not None
        call = _in_graph_or_break(_tracked(self.link.all_reduce_add_rms_norm))
        more: dict[str, Any] = {} if scale == 1.0 else {"scale": scale}
        if post is not None:
            assert post.weight is not None
            more["post_norm"] = allnorm.PostNorm(post.weight, post.eps, post.weight_bias)
        weight = None if norm is None else norm.weight
        norm = norm or post
        assert norm is not None
        results: tuple[torch.Tensor | None, torch.Tensor] = call(
            *(value, residual, weight, norm.eps),
            weight_bias=norm.weight_bias,
            numerics=norm.numerics,
            algorithm=SWITCH.algorithm,
            **more,
        )
        return results

    def _find_obstacle(self, norms: list[Norm], value: torch.Tensor) -> str:
        """Returns why these norms cannot be part of a call, or ""; the report shows it too."""
        found = next((reason for norm in norms if (reason := norm.obstacle(value))), "")
        if not torch.compiler.is_compiling():
            self.last_obstacle = found
        return found

    def _bias(self) -> torch.Tensor | None:
        """Returns the bias, [hidden_size], as a local tensor; None if the module has none.

        Raises:
            ValueError: no rank holds the whole bias.
        """
        bias = None if self.module is None else self.module._parameters.get("bias")
        whole = None if bias is None else whole_local(bias)
        if isinstance(bias, DTensor) and whole is None:
            raise ValueError(
                f"the bias of {self.name} is a DTensor with placements {bias.placements} during "
                "the reduction: expected a bias that every rank holds whole, as in the "
                "tensor-parallel plans of transformers. Let FSDP shard whole layers, or load the "
                "model after disable()."
            )
        return whole

    def _count(self, what: str, more: int = 1) -> None:
        # A change of the counter would make torch.compile recompile the graph.
        if not torch.compiler.is_compiling():
            setattr(self, what, getattr(self, what) + more)

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        """Returns the site for a copied model. Raises if this site already has a communicator."""
        if self.link is not None:
            raise TypeError(
                f"{self.name} belongs to a communicator: a model with fused sites cannot be "
                "copied. Load it a second time."
            )
        return Site(self.name, copy.deepcopy(self.norm, memo), copy.deepcopy(self.post, memo))


def _version(value: torch.Tensor) -> int | None:
    """Returns a tensor's version counter; None if it has none."""
    return None if value.is_inference() else value._version


def _tracked(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `call` so that its results have version counters, which inference tensors lack."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return call

    def outside(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return call(*args, **kwargs)

    return outside


def _any_hook(hooks: _Hooks) -> bool:
    """Returns whether a hook may keep or change its arguments."""
    for of_module in hooks:
        if of_module:  # runs at every site, so it must be fast without hooks
            for hook in of_module.values():
                if not str(getattr(hook, "__module__", "")).startswith(_TRUSTED_HOOKS):
                    return True
    return False


def _in_graph_or_break(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `call`, kept out of compiled graphs if the algorithm is not "auto"."""
    if torch.compiler.is_compiling() and SWITCH.algorithm != "auto":
        return torch.compiler.disable(call)  # operators have no argument for the algorithm
    return call
