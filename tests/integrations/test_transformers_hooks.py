"""Tests hooks, gradients and replaced modules: fused models compute the same as stock models.

Both models get the same hooks, on all ranks or on one. Communication must not depend on hooks, and
a model must not use a norm of values that a hook has changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from rank_helpers import on

from allnorm.errors import PeerDivergedError
from allnorm.testing import assert_same_bits

from . import transformers_models as models

pytest.importorskip("transformers")
from allnorm.integrations import transformers as fused

PROMPT = torch.arange(2, 26).view(2, 12)

# Maps a hook's place to the Llama site whose fused norm cannot be used because of the hook.
AFTER = {
    "layers.0": "layers.0.mlp.down_proj",
    "layers.1": "layers.1.mlp.down_proj",
    "layers.1.self_attn": "layers.1.self_attn.o_proj",
    "layers.0.self_attn.o_proj": "layers.0.self_attn.o_proj",
    "layers.1.mlp": "layers.1.mlp.down_proj",
    "layers.2.mlp.down_proj": "layers.2.mlp.down_proj",
}
BEFORE = {
    "layers.1": "layers.0.mlp.down_proj",
    "layers.1.input_layernorm": "layers.0.mlp.down_proj",
    "layers.1.post_attention_layernorm": "layers.1.self_attn.o_proj",
    "norm": "layers.2.mlp.down_proj",
}
# Places where a hook receives the sum or the post norm. If the family has a post norm or scales,
# either all ranks or none must have such a hook (docs/transformers.md).
SUMS = {*AFTER, "layers.1.post_attention_layernorm"} - {"layers.0", "layers.1"}
# Modules that get hooks: "" is the base model, "*" is every module.
PLACES = (
    *AFTER,
    "layers.1.input_layernorm",
    "layers.1.post_attention_layernorm",
    "norm",
    "layers.2.self_attn.q_proj",
    "",
    "*",
)


def first_of(value: Any) -> torch.Tensor | None:
    """Returns the hidden states among a module's arguments or results."""
    if isinstance(value, dict):
        value = value.get("last_hidden_state")
    if isinstance(value, tuple | list):
        value = value[0] if value else None
    is_hidden = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value if is_hidden else None


def with_first(value: Any, new: torch.Tensor) -> Any:
    if isinstance(value, dict):  # the output of the model
        value["last_hidden_state"] = new
        return value
    if isinstance(value, tuple | list):
        return type(value)([new, *value[1:]])
    return new


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "write": lambda states: states.mul_(1.25),
    "write_rows": lambda states: states[:, -1:].add_(0.5),
    "write_data": lambda states: states.data.add_(0.25),
}
REPLACEMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "replace": lambda states: states * 0.75 + 0.125,
    "copied": lambda states: states.clone(),
}
ACTIONS = ("read", "keep", *WRITES, *REPLACEMENTS)


def act(action: str, value: Any, kept: list[Any]) -> Any:
    """Applies an action to a module's arguments or results; returns the hook's result."""
    states = first_of(value)
    if states is None:
        return None
    if action in REPLACEMENTS:
        return with_first(value, REPLACEMENTS[action](states))
    if action in WRITES:
        WRITES[action](states)
    else:
        kept.append(float(states.detach().abs().max()) if action == "read" else states)
    return None


@dataclasses.dataclass(frozen=True)
class Hook:
    """A hook that the test registers on a module.

    Attributes:
        place: the module; "" for the base model, "*" for every module.
        when: "before" or "after" its forward, or "backward".
        action: a key of ACTIONS.
        ranks: the ranks that have it.
    """

    place: str
    when: str
    action: str
    ranks: tuple[int, ...]

    def put(self, base: Any, rank: int, kept: list[Any]) -> list[Any]:
        """Registers the hook if this rank has it; returns the handles."""
        if rank not in self.ranks:
            return []
        module = torch.nn.modules.module if self.place == "*" else base.get_submodule(self.place)
        kind, hook = {
            "backward": ("full_backward_hook", lambda *_: None),
            "before": ("forward_pre_hook", lambda _, given: act(self.action, given, kept)),
            "after": ("forward_hook", lambda _, given, output: act(self.action, output, kept)),
        }[self.when]
        return [getattr(module, f"register_{'module_' * (self.place == '*')}{kind}")(hook)]


def random_hooks(source: random.Random, family: str, modes: str) -> list[Hook]:
    hooks = []
    for _ in range(source.choice((0, 1, 1, 2, 3))):
        place = source.choice(PLACES)
        when = source.choice(("before", "after", "after", "backward"))
        action = source.choice(ACTIONS)
        if place == "*":
            action = source.choice(("read", "keep"))
        if modes == "grad" and action.startswith(
            "write"
        ):  # autograd forbids writes to leaves and saved tensors
            action = "replace"
        ranks = source.choice(((0, 1), (0,), (1,)))
        if family == "olmo2" and place == "layers.1.input_layernorm":  # OLMo has no such norm
            place = "layers.1"
        if family not in ("llama", "biased") and (place in SUMS or place == "*"):
            ranks = (0, 1)
        if place == "" and when == "before":
            action = "read"
        hooks.append(Hook(place, when, action, ranks))
    return hooks


@contextlib.contextmanager
def hooked(base: Any, hooks: list[Hook], rank: int, kept: list[Any]) -> Iterator[None]:
    handles = [handle for hook in hooks for handle in hook.put(base, rank, kept)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = grad.to_local() if hasattr(grad, "to_local") else grad
        parameter.grad = None
    return found


MODES = ("no_grad", "no_grad", "inference", "inference", "grad", "train", "reentrant", "checkpoint")


def outcome(model: Any, hooks: list[Hook], rank: int, mode: str) -> dict[str, Any]:
    """Runs a model once with hooks; returns tensors to compare with those of the other model."""
    kept: list[Any] = []
    with hooked(model.base_model, hooks, rank, kept):
        if mode in ("no_grad", "train"):
            model.train(mode == "train")
            with torch.no_grad():
                result = {"logits": model(PROMPT).logits}
            model.eval()
        elif mode == "inference":
            with torch.inference_mode():
                result = {"logits": model(PROMPT).logits}
        elif mode == "generate":
            tokens = model.generate(
                PROMPT, max_new_tokens=4, do_sample=False, cache_implementation="static"
            )
            result = {"tokens": tokens}
        else:
            is_checkpointed = mode in ("reentrant", "checkpoint")
            if is_checkpointed:
                kwargs = {"use_reentrant": mode == "reentrant"}
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
                model.enable_input_require_grads()
                model.train()
            loss = model(PROMPT, labels=PROMPT).loss
            loss.backward()
            result = {"loss": loss.detach(), **gradients(model)}
            if is_checkpointed:
                model.gradient_checkpointing_disable()
                model.disable_input_require_grads()
                model.eval()
    values = [
        torch.tensor(item) if isinstance(item, float) else item.detach().clone() for item in kept
    ]
    return result | {f"seen {index}": value for index, value in enumerate(values)}


def counts(model: Any) -> dict[str, tuple[int, int]]:
    sites = fused.report(model).sites
    return {site.name: (site.calls, site.unfused_calls) for site in sites}


def check_counts(
    rank: int, before: dict[str, Any], after: dict[str, Any], hooks: list[Hook], mode: str
) -> None:
    """Checks the call counts that `report()` shows after one forward pass of a Llama model."""
    touched = set()
    for hook in hooks:
        if rank in hook.ranks and hook.place == "*":
            touched |= set(after)
        elif rank in hook.ranks:
            names = AFTER | ({} if hook.when == "after" else {"layers.0": "", "layers.1": ""})
            touched.add((BEFORE if hook.when == "before" else names).get(hook.place, ""))
    for name, (calls, unfused) in after.items():
        if name.endswith("embed_tokens"):
            continue
        more = (calls - before[name][0], unfused - before[name][1])
        if mode not in ("no_grad", "inference"):
            assert more == (0, 0), f"{name} in mode {mode}"
        else:
            assert more == ((0, 1) if name in touched else (1, 0)), f"{name}: {more}, {hooks}"


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "gemma2": ("gemma2", {}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
}


def compare_scenarios(rank: int, folder: pathlib.Path, kind: str, seeds: Iterable[int]) -> None:
    """Runs each seed's scenario on the stock and the fused model; compares them. Collective."""
    family, more = KINDS[kind]
    place = models.save(family, folder, torch.float32, **more)
    stock = models.load(place, family)
    with models.fusion():
        model = models.load(place, family)
        for seed in seeds:
            source = random.Random(seed)
            mode = source.choice((*MODES, "generate"))
            hooks = random_hooks(source, kind, mode if mode in MODES[:4] else "grad")
            want = outcome(stock, hooks, rank, mode)
            before = counts(model)
            got = outcome(model, hooks, rank, mode)
            what = f"seed {seed}, {family}, {mode}, {hooks}"
            assert list(got) == list(want), what
            is_stock = mode not in ("no_grad", "inference", "generate")
            for name, value in want.items():
                if is_stock:
                    assert_same_bits(got[name], value, f"{name}: {what}")
                else:
                    torch.testing.assert_close(got[name], value, msg=f"{name}: {what}")
            if kind == "llama" and mode != "generate":
                check_counts(rank, before, counts(model), hooks, mode)


@pytest.mark.sampled(3)
@on(cpu=(2,))
@pytest.mark.parametrize("kind", ["llama", "biased", "gemma2"])
def test_random_hooks(rank: int, world_size: int, tmp_path: pathlib.Path, kind: str) -> None:
    # Seeds 200 and 233 have hooks before every module.
    compare_scenarios(rank, tmp_path, kind, (*range(24), 200, 233))


@pytest.mark.long
@pytest.mark.timeout(3600)
@on(cpu=(2,))
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_hooks(rank: int, world_size: int, tmp_path: pathlib.Path, kind: str) -> None:
    compare_scenarios(rank, tmp_path, kind, range(1000, 1500))


@on(cpu=(2,))
@torch.no_grad()
def test_sum_that_one_rank_reads(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    """Tests a hook on one rank that reads a sum, which the peers' calls do not return."""
    place = models.save("gemma2", tmp_path)
    with models.fusion():
        model = models.load(place, "gemma2")
        hook = Hook("layers.1.self_attn", "after", "read", (0,))
        with hooked(model.base_model, [hook], rank, []), pytest.raises(PeerDivergedError) as error:
            model(PROMPT)
    notes = getattr(error.value, "__notes__", [])
    if rank == 0:
        assert "the sum of layers.1.self_attn.o_proj" in notes[0]
        assert "on every rank or on none" in notes[0]
    else:
        assert notes == []


class Adapter(torch.nn.Module):
    """A LoRA adapter around a linear layer, as in peft."""

    def __init__(self, base_layer: torch.nn.Linear, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = base_layer.weight
        rows, columns = (weight.to_local() if hasattr(weight, "to_local") else weight).shape
        self.base_layer = base_layer
        self.down = torch.nn.Parameter(torch.randn(4, columns, generator=generator) / 8)
        self.up = torch.nn.Parameter(torch.randn(rows, 4, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the layer's output and the correction."""
        return self.base_layer(x) + (x @ self.down.T) @ self.up.T


def adapt(model: Any, names: tuple[str, ...]) -> None:
    for name in names:
        parent, _, key = name.rpartition(".")
        owner = model.base_model.get_submodule(parent)
        setattr(owner, key, Adapter(getattr(owner, key), len(name)))


@on(cpu=(2,))
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.no_grad()
def test_adapters(rank: int, world_size: int, tmp_path: pathlib.Path, family: str) -> None:
    """Tests a model while LoRA adapters are added and removed."""
    place = models.save(family, tmp_path, torch.float32)
    names = ("layers.0.self_attn.o_proj", "layers.1.mlp.down_proj", "layers.1.self_attn.q_proj")
    stock = models.load(place, family)
    adapt(stock, names)
    with models.fusion():
        model = models.load(place, family)
        plain = model(PROMPT).logits
        adapt(model, names)
        before = counts(model)
        got = model(PROMPT).logits
        torch.testing.assert_close(got, stock(PROMPT).logits)
        assert (got - plain).abs().max() > 0.1, "the adapters change nothing"
        for site in fused.report(model).sites:
            done = (site.calls - before[site.name][0], site.unfused_calls - before[site.name][1])
            assert done == ((0, 0) if site.reason else (1, 0)), site
        first, *rest = str(fused.report(model)).splitlines()
        assert first == f"{2 * models.LAYERS - 2} of {2 * models.LAYERS + 1} reductions fused"
        for name in names[:2]:
            assert any(f"{name}: {name} has been replaced by a" in line for line in rest), rest
        assert len(rest) == 3, "the missed sites are the embedding and two adapters"
        for name in names:
            parent, _, key = name.rpartition(".")
            owner = model.base_model.get_submodule(parent)
            setattr(owner, key, getattr(owner, key).base_layer)
        assert_same_bits(model(PROMPT).logits, plain, "without adapters")
        assert len(fused.report(model).fused) == 2 * models.LAYERS


@pytest.mark.long
@on(cpu=(2,))
@torch.no_grad()
def test_compiled_with_hooks(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    """Tests hooks in compiled models; because of the hooks, the models compute norms again."""
    hooks = [
        Hook("layers.0", "after", "write", (0, 1)),
        Hook("layers.1", "after", "copied", (0,)),
        Hook("layers.2.self_attn", "after", "replace", (1,)),
    ]
    place = models.save("llama", tmp_path, torch.float32)
    stock = models.load(place, "llama")
    with models.fusion():
        model = models.load(place, "llama")
        for chosen in ([], *([hook] for hook in hooks), hooks):
            torch._dynamo.reset()
            want = outcome(stock, chosen, rank, "no_grad")["logits"]
            with hooked(model.base_model, chosen, rank, []):
                compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
                for _ in range(2):
                    torch.testing.assert_close(compiled(PROMPT).logits, want, msg=str(chosen))
