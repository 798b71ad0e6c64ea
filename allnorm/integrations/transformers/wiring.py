"""Finds the sites of a model when it is built, and lets its norms give out what a site has made."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from allnorm.integrations.transformers.families import FAMILIES, Family, Layout
from allnorm.integrations.transformers.partial import PartialSum
from allnorm.integrations.transformers.sites import SWITCH, Norm, Site

# Where a module keeps its site, and a model the list of them.
SITE = "_allnorm_site"
SITES = "_allnorm_sites"


def patch_mapping() -> dict[str, type[torch.nn.Module]]:
    """For `register_patch_mapping`: each family's model class, and its subclass that wires itself.

    Nothing but the constructor is replaced; the forward of every module of the model stays.
    """
    mapping: dict[str, type[torch.nn.Module]] = {}
    for family in FAMILIES:
        name = f"transformers.models.{family.package}.modeling_{family.package}"
        stock = getattr(importlib.import_module(name), family.model)
        mapping[f"^{family.model}$"] = _wired_class(stock, family)
    return mapping


def _wired_class(stock: type[torch.nn.Module], family: Family) -> type[torch.nn.Module]:
    def __init__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        stock.__init__(self, *args, **kwargs)
        if type(self) is wired:
            setattr(self, SITES, wire(self, family))

    # transformers looks up the class's source, and derives names from the class's.
    members = {
        "__init__": __init__,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    wired: type[torch.nn.Module] = type(stock.__name__, (stock,), members)
    return wired


def wire(model: Any, family: Family) -> list[Site]:
    """Gives each reducing module of a model its site; returns them in the order of execution."""
    sites = []
    layers, layout = list(model.layers), family.layout
    following = [_norm(layer, layout.next_norm, family) for layer in layers[1:]]
    following.append(_norm(model, "norm" if layout.final else "", family))
    for index, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
        attention_norm = _norm(layer, layout.attention_norm, family)
        ends = [("self_attn.o_proj", layout.attention_post, attention_norm)]
        ends += [(path, post, next_norm) for path, post in _tails(layer, layout)]
        for path, post, norm in ends:
            site = Site(f"layers.{index}.{path}", norm, _norm(layer, post, family))
            setattr(layer.get_submodule(path), SITE, site)
            sites.append(site)
    return sites


def _tails(layer: Any, layout: Layout) -> list[tuple[str, str]]:
    """The modules of a layer's MLP whose output is reduced, and the norm of each."""
    if hasattr(layer, "experts"):  # Gemma 4: beside the MLP, and both are normed
        posts = [f"{layout.mlp_post}_{number}" for number in (1, 2)]
        return list(zip(("mlp.down_proj", "experts"), posts, strict=True))
    return [("mlp.experts" if hasattr(layer.mlp, "experts") else "mlp.down_proj", layout.mlp_post)]


def _norm(owner: Any, name: str, family: Family) -> Norm | None:
    if not name:
        return None
    module = getattr(owner, name)
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    norm = Norm(module, float(eps), family.weight_bias, family.numerics)
    module.forward = _norm_forward(norm, module.forward)
    return norm


def _norm_forward(norm: Norm, stock: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden_states: Any) -> Any:
        if isinstance(hidden_states, PartialSum):
            if hidden_states.can_norm(norm):
                return hidden_states.normed()
            hidden_states = hidden_states.reduced()
        waiting, normed = norm.residual, norm.normed
        if waiting is not None:
            norm.residual = norm.normed = None
            if SWITCH.enabled and waiting is hidden_states:
                return normed
        return stock(hidden_states)

    return forward
