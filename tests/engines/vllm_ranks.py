"""Functions that the vLLM plugin's tests run in new processes, with the real vLLM."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import pathlib
import pickle
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
import vllm_without_cuda  # must come before vLLM: it prepares the import of vLLM
from two_hosts import on_its_own_host
from vllm.config import CompilationConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed import tensor_model_parallel_all_reduce as all_reduce
from vllm.engine.arg_utils import EngineArgs

import allnorm
import allnorm.integrations.vllm as plugin
from allnorm import reference
from allnorm.integrations.vllm import engine, switch
from allnorm.testing import rank_input, shared_input, ulp_distance

HIDDEN = 256
bf16 = torch.bfloat16


def write_model(place: pathlib.Path) -> str:
    """Creates a folder with the configuration of a small dense model; returns its path."""
    place.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "vocab_size": 1024,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def make_config(model: str, **changes: Any) -> Any:
    """Returns the configuration that vLLM creates for an engine, with two ranks by default."""
    if "pass_config" in changes:
        changes["compilation_config"] = CompilationConfig(pass_config=changes.pop("pass_config"))
    arguments = {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "tensor_parallel_size": 2,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "distributed_executor_backend": "mp",
    }
    return EngineArgs(**(arguments | changes)).create_engine_config()


class Said(logging.Filter):
    """Records the plugin's log messages; a filter, because vLLM 0.33 removes handlers."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        logger = logging.getLogger(plugin.LOGGER)
        logger.addFilter(self)
        logger.setLevel(logging.INFO)

    def filter(self, record: logging.LogRecord) -> bool:
        self.lines.append((record.levelname, record.getMessage()))
        return True


def start(model: str) -> tuple[Said, Any]:
    """Registers the plugin; returns its log and the configuration of an engine."""
    plugin.register()
    return Said(), make_config(model)


# ---- one process: the entry point and the switch -------------------------------------------------


def load_the_entry_point(rank: int, world_size: int) -> dict[str, Any]:
    """Loads the plugin twice with vLLM's own loader; returns the changes that it made."""
    from vllm import plugins

    plugins.load_general_plugins()
    from vllm.compilation.passes import pass_manager

    choice = pass_manager.AllReduceFusionPass
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
    plugin._registered = False
    plugin.register()
    hashed = pass_manager.VllmConfig  # this attribute of the module is not changed
    from vllm.config import PassConfig

    return {
        "choice": type(choice).__module__,
        "the same": pass_manager.AllReduceFusionPass is choice,
        "stock": choice.stock.__module__,
        "hash is wrapped once": not hasattr(PassConfig.compute_hash.allnorm_stock, "allnorm_stock"),
        "untouched": hashed.__module__,
        "source": bool(pass_manager.__loader__.get_source(pass_manager.__name__)),
    }


def decide(rank: int, world_size: int, model: str) -> dict[str, Any]:
    """Returns for each configuration whether compiled and eager models are fused, and the log."""
    plugin.register()
    said = Said()
    found: dict[str, Any] = {}

    def note(name: str, **changes: Any) -> Any:
        del said.lines[:]
        switch._announcer._said.clear()
        config = make_config(model, **changes)
        passes = config.compilation_config.pass_config
        found[name] = {
            "on": passes.fuse_allreduce_rms,
            "eager": switch.is_on_for_eager(config),
            "ranges": config.compilation_config.compile_ranges_endpoints,
            "said": list(said.lines),
            "hash": config.compute_hash(),
        }
        return config

    note("default")
    note("off", pass_config={"fuse_allreduce_rms": False})
    note("on", pass_config={"fuse_allreduce_rms": True})
    note("tp1", tensor_parallel_size=1)
    note("eager", enforce_eager=True)
    note("level 1", optimization_level=1)
    note("of the user", additional_config={"mine": 1})
    for value in ("1", "yes"):
        os.environ["ALLNORM_DISABLE"] = value
        note(f"ALLNORM_DISABLE={value}")
        del os.environ["ALLNORM_DISABLE"]
    platform = vllm_without_cuda.Platform
    platform.is_cuda = lambda self: False
    config = make_config(model)
    found["no CUDA"] = {"on": config.compilation_config.pass_config.fuse_allreduce_rms}
    return found


# ---- two ranks: graphs --------------------------------------------------------------------------


@contextlib.contextmanager
def worker(config: Any) -> Any:
    """Yields the plugin's state in a vLLM worker whose tensors are on the CPU."""
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
            parallel_state.init_distributed_environment(
                world_size, rank, "env://", local_rank=rank, backend="gloo"
            )
            parallel_state.initialize_model_parallel(world_size)
            group = parallel_state.get_tp_group()
            group.device = torch.device("cpu")
            group.device_communicator.all_reduce = _out_of_place
        try:
            engine.start(config)
            yield engine.STATE
        finally:
            engine._stop()


def _out_of_place(x: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    dist.all_reduce(result, group=parallel_state.get_tp_group().device_group)
    return result


def make_norms() -> Any:
    """Returns two plain norms and a Gemma norm, with different eps and random weights."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    with torch.device("cpu"):
        torch.set_default_dtype(bf16)
        try:
            norms = [RMSNorm(HIDDEN, 1e-5), RMSNorm(HIDDEN, 3e-6), GemmaRMSNorm(HIDDEN, 1e-6)]
        finally:
            torch.set_default_dtype(torch.float32)
    for i, norm in enumerate(norms):
        weight = shared_input((HIDDEN,), bf16, f"norm {i}")
        norm.weight.data.copy_(1 + weight / 8 if i < 2 else weight / 8)
    return norms


def make_block() -> Any:
    """Returns a block with norms as in models: a first, a plain, a Gemma and a last one."""
    first, plain, gemma = make_norms()
    matrix = shared_input((HIDDEN, HIDDEN), bf16, "matrix") / 16

    def block(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        reduced = all_reduce(x)
        start = first(reduced)
        # Returns all results: Inductor would recompute any others, and then omit roundings.
        middle, sum1 = plain(all_reduce(start @ matrix), reduced)
        kept1 = sum1.clone()  # vLLM's norms overwrite their arguments
        late, sum2 = gemma(all_reduce(middle @ matrix), sum1)
        kept2 = sum2.clone()
        end, sum3 = first(all_reduce(late @ matrix), sum2)
        return start, middle, kept1, late, kept2, end, sum3

    return block


def compiled(config: Any, function: Any) -> Any:
    """Compiles a function as vLLM does, with vLLM's passes and context."""
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.compilation.passes.ir.inplace_functionalization import (
        VllmIRInplaceFunctionalizationPass,
    )
    from vllm.compilation.passes.pass_manager import PostGradPassManager
    from vllm.config.utils import Range

    manager = PostGradPassManager()
    manager.configure(config)
    torch._dynamo.reset()
    options = {
        "post_grad_custom_post_pass": manager,
        "pre_grad_custom_pass": VllmIRInplaceFunctionalizationPass(config),
        "fx_graph_cache": False,
        # As in vLLM.
        "enable_auto_functionalized_v2": config.compilation_config.inductor_compile_config[
            "enable_auto_functionalized_v2"
        ],
    }
    # dynamic=True would make even the constant 448.0 a graph input.
    fast = torch.compile(function, options=options, dynamic=False)
    without_cache = torch._functorch.config.patch(enable_autograd_cache=False)

    def call(*inputs: torch.Tensor) -> Any:
        for each in inputs:
            torch._dynamo.mark_dynamic(each, 0)
        with torch.no_grad(), pass_context(Range(1, 2048)), without_cache:
            return fast(*inputs)

    call.manager = manager  # type: ignore[attr-defined]
    return call


def run_unfused_and_fused(config: Any, block: Any, rank: int) -> tuple[Any, Any, Any]:
    """Runs a block compiled without and with fusion; returns both results and the fused block."""
    inputs = [rank_input((tokens, HIDDEN), bf16, rank) for tokens in (5, 300)]
    agreed, engine.STATE.outcome = engine.STATE.outcome, None
    unfused = compiled(config, block)
    expected = [unfused(x) for x in inputs]
    assert not engine.STATE.reports
    engine.STATE.outcome = agreed
    fast = compiled(config, block)
    actual = [fast(x) for x in inputs]
    engine.ready()
    return expected, actual, fast


def fuse_a_block(rank: int, world_size: int, model: str, provider: str) -> dict[str, Any]:
    """Compiles the block with fusion, and compares its results with those without fusion."""
    said, config = start(model)
    with worker(config), config.kernel_config.ir_op_priority.set_priority():
        block = make_block()
        if provider:
            _lower_to(provider)
        expected, actual, fast = run_unfused_and_fused(config, block, rank)
        sites = [site for report in engine.STATE.reports for site in report.sites]
        different = [
            float((mine != theirs).float().mean())
            for results in zip(actual, expected, strict=True)
            for mine, theirs in zip(*results, strict=True)
        ]
        copied = copy.deepcopy(fast.manager)
        pickle.dumps(fast.manager.passes[-1])
        return {
            "numerics": [site.numerics for site in sites],
            "missed": [site.reason for site in sites if not site.fused],
            "different": different,
            "said": said.lines,
            "passes": [type(each).__name__ for each in copied.passes],
            "hash": config.compute_hash(),
            "uuid": fast.manager.passes[-1].uuid(),
        }


def norm_q_and_k(rank: int, world_size: int, model: str) -> dict[str, Any]:
    """Compiles MiniMax-M2's norms of q and k; compares them with vLLM's own and the reference."""
    from vllm.model_executor.layers.minimax_rms_norm import MiniMaxText01RMSNormTP, rms_norm_tp

    rms_norm_tp._MINIMAX_FUSED_AR_RMS_QK = None  # the C extension is a fake
    said, config = start(model)
    sizes = (HIDDEN, 64, 64)
    with worker(config):
        torch.set_default_dtype(bf16)
        norms = [MiniMaxText01RMSNormTP(size * world_size, 1e-5) for size in sizes[:2]]
        torch.set_default_dtype(torch.float32)
        matrix = shared_input((HIDDEN, sum(sizes)), bf16, "matrix") / 16

        def weights(peer: int) -> list[torch.Tensor]:
            return [1 + rank_input((n,), bf16, peer + 10 * i) / 8 for i, n in enumerate(sizes[:2])]

        for norm, weight in zip(norms, weights(rank), strict=True):
            norm.to("cpu").weight.data = weight

        def block(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return MiniMaxText01RMSNormTP.forward_qkv(*norms, x @ matrix, *sizes[:2])

        expected, actual, _ = run_unfused_and_fused(config, block, rank)
        (report,) = engine.STATE.reports
        slices = [
            (rank_input((5, HIDDEN), bf16, peer) @ matrix).split(sizes, -1)[:2]
            for peer in range(world_size)
        ]
        wanted = reference.rms_norm_sharded(slices, [weights(r) for r in range(world_size)], 1e-5)
        results = zip(actual, expected, strict=True)
        pairs = [pair for both in results for pair in zip(*both, strict=True)]
        return {
            "sites": [(site.numerics, site.boundary, site.reason) for site in report.sites],
            "furthest": max(int(ulp_distance(*pair).max()) for pair in pairs),
            "same": [torch.equal(*pair) for pair in zip(actual[0], wanted[rank], strict=False)],
            "said": said.lines,
        }


def fuse_a_block_over_two_hosts(rank: int, world_size: int, model: str) -> dict[str, Any]:
    """Runs `fuse_a_block` as if each rank were on its own host; returns the islands."""
    with on_its_own_host(rank) as islands:
        found = fuse_a_block(rank, world_size, model, "")
    return {**found, "islands": islands}


def fuse_a_quantized_block(
    rank: int, world_size: int, model: str, kind: str, eager_rounding: bool
) -> dict[str, Any]:
    """Fuses norms with vLLM's own quantizations after them, and compares the results.

    By default, vLLM quantizes to FP8 in PyTorch, and to NVFP4 and MXFP8 with custom operators.

    With `eager_rounding`, Inductor does not omit roundings between operators.
    """
    torch._inductor.config.emulate_precision_casts = eager_rounding
    said, config = start(model)
    with worker(config), config.kernel_config.ir_op_priority.set_priority():
        block = make_quantized_block(kind)
        expected, actual, _ = run_unfused_and_fused(config, block, rank)
        (report,) = engine.STATE.reports
        found: dict[str, Any] = {
            "quant": [site.quant for site in report.sites],
            "notes": [site.note for site in report.sites if site.note],
            "enabled": config.compilation_config.is_custom_op_enabled("quant_fp8"),
            "said": said.lines,
            "neighbors": True,
            "quantized": [],
            "scales": [],
            "residual": [],
        }
        for results in zip(actual, expected, strict=True):
            for i, (mine, theirs) in enumerate(zip(*results, strict=True)):
                which = "residual" if i >= 6 else ("quantized", "scales")[i % 2]
                assert (mine.shape, mine.stride()) == (theirs.shape, theirs.stride())
                found[which].append(float((mine.float() != theirs.float()).float().mean()))
                if which == "quantized" and kind != "nvfp4":
                    apart = ulp_distance(mine.float(), theirs.float()).max()
                    found["neighbors"] &= int(apart) <= _FP8_STEP
        return found


# The distance between adjacent FP8 numbers in float32 ulps: FP8 drops 20 bits of the significand.
_FP8_STEP = 1 << 20


def make_quantized_block(kind: str) -> Any:
    """Returns a block of three norms, each quantized by a vLLM layer; no norm reads FP8."""
    first, plain, gemma = make_norms()
    matrices = [shared_input((HIDDEN, HIDDEN), bf16, f"matrix {i}") / 16 for i in range(2)]
    quantize = {"nvfp4": _nvfp4, "mxfp8": _mxfp8}.get(kind, lambda: _fp8(kind))()

    def block(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        reduced = all_reduce(x)
        q1, s1 = quantize(first(reduced))
        middle, sum1 = plain(all_reduce(x @ matrices[0]), reduced)
        kept = sum1.clone()
        q2, s2 = quantize(middle)
        late, sum2 = gemma(all_reduce(x @ matrices[1]), sum1)
        q3, s3 = quantize(late)
        return q1, s1, q2, s2, q3, s3, kept, sum2

    return block


def _fp8(kind: str) -> Any:
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    # A scalar tensor, as in Fp8LinearMethod after the weights are loaded.
    static = torch.nn.Parameter(torch.tensor(8 / 448), requires_grad=False)
    shapes = {"static": GroupShape.PER_TENSOR, "per_token": GroupShape.PER_TOKEN}
    layer = QuantFP8(
        static=kind == "static",
        group_shape=shapes.get(kind, GroupShape(1, 128)),
        column_major_scales=kind == "block, columns",
        use_ue8m0=False,  # as the block-scaled kernels require
    )
    return lambda y: layer(y, static if kind == "static" else None)


def _mxfp8() -> Any:
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import mxfp8_e4m3_quantize

    return lambda y: mxfp8_e4m3_quantize(y, is_sf_swizzled_layout=True)


# Declarations of the C extension, which cannot be loaded here. The first is never called.
NVFP4 = (
    "scaled_fp4_quant(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout) "
    "-> (Tensor, Tensor)",
    "scaled_fp4_quant.out(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout, *, "
    "Tensor(a!) output, Tensor(b!) output_scale) -> ()",
)
_libraries: list[torch.library.Library] = []


def _nvfp4() -> Any:
    def store(y: Any, given: Any, swizzled: bool, *, output: Any, output_scale: Any) -> None:
        quantized, scale = reference.quantize(y, allnorm.NvFp4(given))
        output.copy_(quantized)
        output_scale.copy_(scale.view(torch.int32).view(output_scale.shape))

    library = torch.library.Library("_C", "FRAGMENT")
    for schema in NVFP4:
        library.define(schema)
    library.impl("scaled_fp4_quant.out", store, "CPU")
    torch.library.register_fake("_C::scaled_fp4_quant.out", lambda *_, **__: None, lib=library)
    _libraries.append(library)
    from vllm._custom_ops import scaled_fp4_quant

    # Linear layers pass the reciprocal of the checkpoint's scale.
    given = torch.nn.Parameter(torch.tensor(448 * 6 / 8.0), requires_grad=False)
    return lambda y: scaled_fp4_quant(y, given, is_sf_swizzled_layout=True, backend="cutlass")


def _lower_to(provider: str) -> None:
    """Makes vLLM lower its norms to a provider without a kernel here; only compilation works."""
    from vllm.ir.op import IrOp

    for name in ("rms_norm", "fused_add_rms_norm"):
        operator = IrOp.registry[name]
        native = operator.impls["native"]
        stand_in = copy.copy(native)
        stand_in.provider = provider
        operator.dispatch = lambda *args, chosen=stand_in: chosen


def refuse_on_one_rank(rank: int, world_size: int, model: str) -> dict[str, Any]:
    """Sets ALLNORM_DISABLE on rank 1 alone: no rank fuses, and the results are vLLM's own."""
    said, config = start(model)
    if rank == 1:
        os.environ["ALLNORM_DISABLE"] = "1"
    with worker(config) as state:
        block = make_block()
        x = rank_input((5, HIDDEN), bf16, rank)
        fast = compiled(config, block)
        got = fast(x)
        with torch.no_grad():
            expected = block(x)
        return {
            "reason": state.outcome.reason,
            "reports": len(state.reports),
            "close": torch.allclose(got[0].float(), expected[0].float(), rtol=0.02, atol=0.02),
            "said": said.lines,
            "hash": config.compute_hash(),
        }


def break_the_pass(rank: int, world_size: int, model: str, failing: list[int]) -> dict[str, Any]:
    """Makes the pass raise halfway through a rewrite; all ranks must then run the graph unfused."""
    said, config = start(model)
    real = allnorm.compile.fuse

    def broken(module: Any, *args: Any, **kwargs: Any) -> Any:
        real(module, *args, **kwargs)
        raise RuntimeError("half way")

    if rank in failing:
        allnorm.compile.fuse = broken
    try:
        with worker(config):
            block = make_block()
            calls = count_reductions()
            fast = compiled(config, block)
            x = rank_input((5, HIDDEN), bf16, rank)
            got = fast(x)
            with torch.no_grad():
                expected = block(x)
            close = torch.allclose(got[0].float(), expected[0].float(), rtol=0.02, atol=0.02)
            return {"close": close, "reductions": len(calls), "said": said.lines}
    finally:
        allnorm.compile.fuse = real


def count_reductions() -> list[int]:
    """Returns a list that gains an entry for each all-reduce that vLLM runs from now on."""
    group = parallel_state.get_tp_group()
    calls: list[int] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return _out_of_place(x)

    group.device_communicator.all_reduce = counted
    return calls


def eager_helpers(rank: int, world_size: int, model: str) -> dict[str, Any]:
    """Runs eager models' helpers: a plain norm uses a kernel, and Gemma's norm uses PyTorch."""
    plugin.register()
    from vllm.ir.op import IrOp
    from vllm.model_executor.layers import fused_allreduce_gemma_rms_norm as gemma_module
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    plain_module = _plain_helper_module()
    config = make_config(model, enforce_eager=True)
    found: dict[str, Any] = {}
    with worker(config) as state, config.kernel_config.ir_op_priority.set_priority():
        found["before"] = state.outcome is None
        torch.set_default_dtype(bf16)
        norms = {"plain": RMSNorm(HIDDEN, 1e-5), "gemma": GemmaRMSNorm(HIDDEN, 1e-5)}
        torch.set_default_dtype(torch.float32)
        x, residual = rank_input((7, HIDDEN), bf16, rank), shared_input((7, HIDDEN), bf16, "r")
        xs = [rank_input((7, HIDDEN), bf16, peer) for peer in range(world_size)]
        calls = count_reductions()
        for name, norm in norms.items():
            norm.weight.data.copy_(shared_input((HIDDEN,), bf16, name) / 8)
            module = gemma_module if name == "gemma" else plain_module
            helper = getattr(module, f"fused_allreduce_{'gemma_' * (name == 'gemma')}rms_norm")
            with torch.inference_mode():
                got = helper(x, residual, norm)
            mode, bias = ("unrounded", 1.0) if name == "gemma" else ("rounded", 0.0)
            provider = IrOp.registry["fused_add_rms_norm"].dispatch(
                x, residual, norm.weight.float() + 1.0 if bias else norm.weight, 1e-5
            )
            want = allnorm.reference.all_reduce_add_rms_norm(
                xs, residual, norm.weight, 1e-5, weight_bias=bias, numerics=mode
            )
            same = [torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True)]
            found[name] = {"same": same, "by itself": provider.provider}
        found["reductions"] = len(calls)
        found["communicator"] = state.outcome is not None and state.outcome.reason == ""
        # vLLM itself computes a norm that allnorm does not support.
        norms["plain"].variance_size_override = 128
        with contextlib.suppress(Exception):  # the kernel does not exist on this machine
            plain_module.fused_allreduce_rms_norm(x, residual, norms["plain"])
        found["stock"] = len(calls)
        # vLLM itself computes a norm that needs a gradient.
        norms["plain"].variance_size_override = None
        with contextlib.suppress(Exception):
            plain_module.fused_allreduce_rms_norm(x, residual, norms["plain"])
        found["with gradients"] = len(calls)
    return found


def _plain_helper_module() -> Any:
    import importlib

    from allnorm.integrations.vllm import seams

    for name in seams.PLAIN_HELPERS:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise AssertionError("vLLM has no helper for eager models any more")
