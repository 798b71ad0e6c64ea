"""Maps all tracers' nodes to a common vocabulary: a node's operation, and what it writes.

An addition is `operator.add` or a method in Dynamo, and `aten.add.Tensor` in AOTAutograd, and each
may be in place. All of them have the same name here. For unknown names, the operator's schema
declares what it writes. A call without a schema is assumed to write to all of its arguments.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.distributed.tensor import DTensor
from torch.fx import Node

from allnorm.core.sharding import whole_local

_NAMES = {
    "add": "add iadd __add__ __radd__ __iadd__",
    "mul": "mul imul multiply __mul__ __rmul__ __imul__",
    "div": "div itruediv truediv true_divide divide __truediv__ __itruediv__",  # not __rtruediv__
    "pow": "pow ipow __pow__ __ipow__",
    "abs": "abs absolute",
    "clamp": "clamp clip",
    "cast": "to _to_copy convert_element_type float half bfloat16 type type_as",
    "view": "view reshape flatten unflatten unsqueeze squeeze _unsafe_view view_as reshape_as",
    "expand": "expand expand_as broadcast_to",
    "permute": "permute transpose swapaxes swapdims",
    "matmul": "matmul __matmul__ bmm",
    "same": "contiguous clone detach alias lift_fresh lift_fresh_copy",
    "tensor": "tensor scalar_tensor",
    "zeros": "zeros zeros_like new_zeros",
    "rms_norm": "rms_norm _fused_rms_norm",
    "layer_norm": "layer_norm native_layer_norm",
    "getitem": "getitem __getitem__",
    "cat": "cat concat concatenate",
    "pieces": "split split_with_sizes chunk unbind tensor_split",
}
_OPERATION = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_UNIQUE = (
    "square mean sum amax max clamp_min clamp_max maximum minimum rsqrt sqrt reciprocal full einsum"
)
_OPERATION |= {name: name for name in f"{_UNIQUE} select slice copy dropout stack".split()}

# Operators outside the namespaces aten and prims.
_FOREIGN = {
    "_c10d_functional::wait_tensor": "wait",
    "c10d_functional::wait_tensor": "wait",
    "_c10d_functional::_wrap_tensor_autograd": "wait",
    "allnorm_compile::blocks": "blocks",
    "allnorm_compile::part": "part",
}
_PURE_HIGHER_ORDER = {"auto_functionalized", "auto_functionalized_v2"}


def operation(node: Node) -> str:
    """Returns a node's operation in this module's vocabulary; empty if it has none."""
    name = plain_name(node)
    if name in _FOREIGN:
        return _FOREIGN[name]
    if name.endswith("_") and not name.startswith("__"):
        name = name[:-1]
    return _OPERATION.get(name, "")


_MUTATING = {
    *("iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow"),
    *("irshift", "isub", "itruediv", "ixor", "setitem", "delitem"),
}


_QUESTIONS = {
    *("size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "element_size"),
    *("sym_size", "sym_numel", "_assert_tensor_metadata"),
}
_ASKED_ATTRIBUTES = {"shape", "ndim", "dtype", "device", "is_cuda"}


def asks_only(node: Node) -> bool:
    """Returns whether a call only queries its tensor's shape, dtype or device."""
    if node.target is getattr and len(node.args) > 1:
        return node.args[1] in _ASKED_ATTRIBUTES
    return len(node.all_input_nodes) == 1 and plain_name(node) in _QUESTIONS


def checks_inputs(node: Node) -> bool:
    """Returns whether a call is the input check that an exported program's `module()` adds."""
    called = module_of(node) if node.op == "call_module" else None
    kind = type(called)
    return (kind.__module__, kind.__name__) == ("torch.export._unlift", "GuardsFn")


def is_pure(node: Node) -> bool:
    """Returns whether a node has no effects, which means that it can be removed if unused."""
    if node.is_impure() or written(node):
        return False
    if node.op in ("call_function", "call_method") and operation(node):
        return True
    namespace, _, _ = qualified_name(node.target).partition("::")
    if namespace in ("aten", "prims"):
        schema = schema_of(node.target)
        return schema is not None and bool(schema.returns)
    return node.op == "get_attr" or asks_only(node)


def argument(node: Node, index: int, *names: str, default: Any = None) -> Any:
    """Returns an argument of a call, by position or by one of its names."""
    if len(node.args) > index:
        return node.args[index]
    for name in names:
        if name in node.kwargs:
            return node.kwargs[name]
    return default


def qualified_name(target: Any) -> str:
    """Returns `namespace::name` of an operator or its overload; empty for anything else."""
    if isinstance(target, OpOverload):
        return str(target._schema.name)
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name)
    return ""


def schema_of(target: Any) -> Any:
    """Returns an operator's schema; for a packet, the schema of its default or first overload."""
    if isinstance(target, OpOverloadPacket):
        overloads = target.overloads()
        target = getattr(target, "default" if "default" in overloads else overloads[0])
    return target._schema if isinstance(target, OpOverload) else None


def changed_arguments(schema: Any) -> list[str]:
    """Returns the names of the arguments that an operator changes."""
    written = (each for each in schema.arguments if each.alias_info and each.alias_info.is_write)
    return [each.name for each in written]


def whole_bases(schema: Any, kwargs: dict[str, Any]) -> dict[str, int] | None:
    """Finds the bases of the arguments that an operator in `auto_functionalized_v2` changes.

    The wrapper passes each argument as its base and, for a view, a description of the view.

    Returns:
        The index in `_all_bases`, keyed by argument name; None unless every argument is a whole
        base.
    """
    names, places = changed_arguments(schema), {}
    known = {f"_{name}_{what}" for name in names for what in ("base_index", "alias")}
    # One argument's name can be a prefix of another's: output and output_scale.
    if any(key not in known and key.startswith(f"_{name}_") for name in names for key in kwargs):
        return None
    for name in names:
        place = kwargs.get(f"_{name}_base_index")
        if not isinstance(place, int):
            return None
        places[name] = place
    return places


def written(node: Node) -> list[Node]:
    """Returns the arguments whose memory a call may change."""
    if node.op == "call_module":
        return [] if checks_inputs(node) else _written_by_module(node)
    if node.op == "call_method":
        return _named_writes(node, str(node.target))
    if node.op != "call_function":
        return []
    target = node.target
    name = plain_name(node)
    if isinstance(target, HigherOrderOperator):
        return [] if target.name() in _PURE_HIGHER_ORDER else list(node.all_input_nodes)
    if isinstance(target, OpOverloadPacket) and qualified_name(target).startswith("aten::"):
        return _named_writes(node, name)
    schema = schema_of(target)
    if schema is not None:
        places = {each.name: index for index, each in enumerate(schema.arguments)}
        return _nodes_in([argument(node, places[n], n) for n in changed_arguments(schema)])
    if getattr(target, "__module__", "") in ("builtins", "math") and target is not setattr:
        return []  # such as getattr(x, "shape") in graphs from torch.fx.symbolic_trace
    return _named_writes(node, name) if name else list(node.all_input_nodes)


def _written_by_module(node: Node) -> list[Node]:
    module = module_of(node)
    if getattr(module, "inplace", False):
        return node.all_input_nodes[:1]
    known = type(module).__module__.startswith("torch.nn.")
    return [] if known else list(node.all_input_nodes)


def state_of(node: Node) -> dict[str, Tensor]:
    """Returns the parameters and buffers of the module that a node calls, keyed by path."""
    called = module_of(node) if node.op == "call_module" else None
    state = () if called is None else (*called.named_parameters(), *called.named_buffers())
    return {f"{node.target}.{name}": tensor for name, tensor in state}


def module_of(node: Node) -> torch.nn.Module | None:
    """Returns the module that a `call_module` node calls."""
    owner = node.graph.owning_module
    try:
        return None if owner is None else owner.get_submodule(str(node.target))
    except AttributeError:
        return None


def plain_module(module: torch.nn.Module | None) -> str:
    """Returns why a module may compute something different from its class; empty if it does not."""
    every = torch.nn.modules.module
    if module is None:
        return "does not exist"
    if "forward" in vars(module) or "__call__" in vars(module):
        return "has a forward that replaces its class's"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has hooks"
    if every._global_forward_hooks or every._global_forward_pre_hooks:
        return "runs global module hooks"
    if "parametrizations" in module._modules:
        return "has parametrized weights"
    return ""


def not_plain(name: str, tensor: Tensor) -> str:
    """Returns why a fused call cannot take a DTensor; empty for plain tensors."""
    if not isinstance(tensor, DTensor):
        return ""
    remedy = "to_local()"
    if whole_local(tensor) is None:
        remedy = "full_tensor(), or fuse a graph in which the weights are gathered"
    return (
        f"{name}, a DTensor with placements {tuple(tensor.placements)}: fused calls take plain, "
        f"whole tensors. Call {name}.{remedy}"
    )


def attribute_of(node: Node) -> Any:
    """Returns the attribute that a `get_attr` node reads; None if it does not exist."""
    return attribute_at(node.graph.owning_module, str(node.target))


def attribute_at(module: Any, path: str) -> Any:
    """Returns the attribute of a module or submodule at a path; None if it does not exist."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def is_torch_function(node: Node) -> bool:
    """Returns whether a call's target is a PyTorch or Python function, operator or method."""
    if node.op == "call_method" or isinstance(node.target, OpOverload | OpOverloadPacket):
        return True
    home = getattr(node.target, "__module__", "") or ""
    return bool(plain_name(node)) or node.target is getattr or home == "math"


def _named_writes(node: Node, name: str) -> list[Node]:
    """Returns the arguments that a torch function or method writes, judging by its name."""
    targets: list[Any] = []
    is_operator = getattr(node.target, "__module__", "") == "_operator"  # operator.and_ is pure
    underscored = name.endswith("_") and not name.startswith("__") and not is_operator
    is_mutating = name.removeprefix("__").removesuffix("__") in _MUTATING
    if underscored or is_mutating or _has_inplace_argument(node):
        targets += node.args[:1]
    targets.append(node.kwargs.get("out"))
    return _nodes_in(targets)


def _has_inplace_argument(node: Node) -> bool:
    """Returns whether a call passes a true `inplace`, by keyword or by position."""
    if node.kwargs.get("inplace"):
        return True
    if not inspect.isfunction(node.target):
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return False
    return bool(bound.arguments.get("inplace"))


def _nodes_in(values: list[Any]) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(values, found.append)
    return list(dict.fromkeys(found))


def plain_name(node: Node) -> str:
    """Returns a torch function's bare name, a foreign operator's `ns::name`, or ""."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    target = node.target
    qualified = qualified_name(target)
    if qualified:
        namespace, _, name = qualified.partition("::")
        return name if namespace in ("aten", "prims") else qualified
    home = getattr(target, "__module__", None) or ""
    if not home and getattr(target, "__objclass__", None) is torch._C.TensorBase:
        home = "torch"
    of_torch = home == "_operator" or home.partition(".")[0] == "torch"
    if of_torch and not home.startswith("torch.distributed"):
        return str(getattr(target, "__name__", ""))
    return ""
