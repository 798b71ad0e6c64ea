"""Finds a model's sites in its constructor, and makes its norms return the sites' normed rows."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from allnorm.integrations.transformers.families import FAMILIES, Family, Layout
from allnorm.integrations.transformers.partial import PartialSum
from allnorm.integrations.transformers.sites import Norm, Place, Site

# The attribute in which a module keeps its site, and in which a model keeps the list of its sites.
SITE = "_allnorm_site"
SITES = "_allnorm_sites"


def wired_constructors() -> Iterator[tuple[Any, Callable[..., None]]]:
    """Yields each family's model class, with a constructor for it that also wires the model.

    `AutoModel` and the classes with a head use the same constructor.
    """
    for family in FAMILIES:
        name = f"transformers.models.{family.package}.modeling_{family.package}"
        stock = getattr(importlib.import_module(name), family.model)
        yield stock, _wired_constructor(stock, family)


def _wired_constructor(model_class: Any, family: Family) -> Callable[..., None]:
    stock = model_class.__init__

    @functools.wraps(stock)
    def __init__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        stock(self, *args, **kwargs)
        if type(self) is model_class:  # a subclass may have a different forward
            setattr(self, SITES, wire(self, family))

    return __init__


def wire(model: Any, family: Family) -> list[Site]:
    """Gives each of a model's reducing modules a site; returns the sites in execution order."""
    sites = []
    layers, layout = list(model.layers), family.layout
    last_norm = "norm" if layout.final else ""
    for index, layer in enumerate(layers):
        here = f"layers.{index}."
        if index + 1 < len(layers):
            next_norm = f"layers.{index + 1}.{layout.next_norm}" if layout.next_norm else ""
        else:
            next_norm = last_norm
        attention_norm = here + layout.attention_norm if layout.attention_norm else ""
        ends = [("self_attn.o_proj", layout.attention_post, attention_norm)]
        ends += [(path, post, next_norm) for path, post in _tails(layer, layout)]
        for path, post, norm in ends:
            sites.append(_site(model, here + path, norm, here + post if post else "", family))
    return sites


def _tails(layer: Any, layout: Layout) -> list[tuple[str, str]]:
    """Returns the modules after a layer's attention that reduce, each with its post norm."""
    if hasattr(layer, "experts"):  # Gemma 4 has both experts and an MLP, each with a post norm
        posts = [f"{layout.mlp_post}_{number}" for number in (1, 2)]
        return list(zip(("mlp.down_proj", "experts"), posts, strict=True))
    return [("mlp.experts" if hasattr(layer.mlp, "experts") else "mlp.down_proj", layout.mlp_post)]


def _site(model: Any, path: str, norm: str, post: str, family: Family) -> Site:
    """Creates a reducing module's site; arguments are paths in the model, "" for none."""
    layer = ".".join(path.split(".")[:2])
    # Outermost module first. Only hooks on modules inside the layer receive the sum.
    way = {place.name: place for place in _way(model, path)}
    inside = [place.module for name, place in way.items() if name.startswith(f"{layer}.")]
    sum_hooks = [hooks for module in inside for hooks in _output_hooks(module)]
    later_hooks = []
    if post:
        way.update((place.name, place) for place in _way(model, post))
        module = way[post].module
        sum_hooks += [module._forward_pre_hooks, *_output_hooks(module)]
    if norm:
        way.update((place.name, place) for place in _way(model, norm))
        entered = [place.module for name, place in way.items() if f"{norm}.".startswith(f"{name}.")]
        if not norm.startswith(f"{layer}."):
            later_hooks += [way[layer].module._forward_hooks]
            later_hooks += [module._forward_pre_hooks for module in entered]
        later_hooks += [way[norm].module._forward_pre_hooks]
    site = Site(
        *(path, _norm(model, norm, family), _norm(model, post, family), family.is_scaled),
        module=way[path].module,
        places=tuple(way.values()),
        sum_hooks=tuple(sum_hooks),
        later_hooks=tuple(later_hooks),
    )
    setattr(way[path].module, SITE, site)
    return site


def _way(model: Any, path: str) -> Iterator[Place]:
    """Yields the modules along the path from the model to one of its submodules."""
    parent, name = model, ""
    for key in path.split("."):
        name = f"{name}.{key}" if name else key
        module = parent._modules[key]
        yield Place(name, parent, key, module)
        parent = module


def _output_hooks(module: Any) -> tuple[dict[int, Any], ...]:
    """Returns the module's forward and backward hooks that receive its result."""
    return module._forward_hooks, module._backward_hooks, module._backward_pre_hooks


def _norm(model: Any, path: str, family: Family) -> Norm | None:
    if not path:
        return None
    module = model.get_submodule(path)
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    norm = Norm(module, float(eps), family.weight_bias, family.numerics, module.forward)
    module.forward = types.MethodType(_norm_forward, norm)  # a deep copy copies the method, too
    return norm


def _norm_forward(norm: Norm, hidden_states: Any) -> Any:
    if isinstance(hidden_states, PartialSum):
        if hidden_states.can_norm(norm):
            return hidden_states.normed()
        hidden_states = hidden_states.reduced()
    return norm.forward(hidden_states)
