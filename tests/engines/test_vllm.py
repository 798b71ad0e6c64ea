"""Tests the plugin in the real vLLM, without GPUs: `make test-engines` installs it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from limits import HANG_SECONDS

from allnorm.integrations.vllm import quants, seams
from allnorm.testing import run_ranks

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines")
pytestmark = pytest.mark.timeout(3000)


def run(name: str, world_size: int, *args: Any, of: Any = None) -> list[Any]:
    """Runs a function of vllm_ranks, or of the module `of`, in new processes."""
    import vllm_ranks

    return run_ranks(getattr(of or vllm_ranks, name), world_size, args=args, timeout=HANG_SECONDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    import vllm_ranks

    return vllm_ranks.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def decisions(model: str) -> dict[str, Any]:
    return run("decide", 1, model)[0]


def test_no_seam_is_missing() -> None:
    assert seams.missing() == []
    # Each version has one of the two modules with the plain helper.
    assert [len(option.present()) for option in seams.OPTIONAL] == [1, 1, 1]


def test_the_entry_point_can_be_loaded_twice() -> None:
    (found,) = run("load_the_entry_point", 1)
    assert found["choice"] == "allnorm.integrations.vllm.fusion_pass"
    assert found["stock"] == "vllm.compilation.passes.fusion.allreduce_rms_fusion"
    assert found["the same"]
    assert found["hash is wrapped once"]
    assert found["source"], "vLLM cannot read the source of the module, as it does for its passes"


def test_vllm_plugins_selects_the_plugin() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import vllm_without_cuda;"
        "from vllm.plugins import load_general_plugins as load; load();"
        "sys.exit('allnorm.integrations.vllm.install' in sys.modules)"
    )
    here = str(pathlib.Path(__file__).parent)
    for plugins, loaded in ((None, 1), ("allnorm", 1), ("other", 0), ("", 0)):
        environment = {} if plugins is None else {"VLLM_PLUGINS": plugins}
        command = [sys.executable, "-c", code, here]
        done = subprocess.run(
            command, env={**os.environ, **environment}, timeout=HANG_SECONDS, check=False
        )
        assert done.returncode == loaded, plugins


# ---- the switch ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "on", "eager", "words"),
    [
        ("default", True, None, ""),
        ("of the user", True, None, None),
        ("off", False, False, None),
        ("on", True, None, None),
        # Without compilation, only the helpers of eager models are fused.
        ("level 1", False, True, None),
        ("eager", None, True, None),
        ("tp1", False, False, "tensor_parallel_size is 1"),
        ("ALLNORM_DISABLE=1", False, False, "switched off by ALLNORM_DISABLE=1"),
        ("ALLNORM_DISABLE=yes", False, False, "ALLNORM_DISABLE='yes': expected 0 or 1"),
        ("no CUDA", False, None, None),
    ],
)
def test_the_switch(
    decisions: dict[str, Any], name: str, on: bool | None, eager: bool | None, words: str | None
) -> None:
    """Tests whether graphs and eager models are fused, and the log; None skips a check."""
    decision = decisions[name]
    assert on is None or bool(decision["on"]) is on
    assert eager is None or bool(decision["eager"]) is eager
    if words:
        ((level, text),) = decision["said"]
        assert level == "INFO"
        assert words in text
    elif words is not None:
        assert not decision["said"]


def test_compile_ranges(decisions: dict[str, Any]) -> None:
    """Tests that allnorm needs no second compilation; vLLM's own fusion does, for its threshold."""
    assert decisions["default"]["ranges"] == decisions["off"]["ranges"]


def test_the_key_of_the_compile_cache(decisions: dict[str, Any]) -> None:
    hashes = {decisions[name]["hash"] for name in ("default", "off", "on")}
    assert len(hashes) == 3


# ---- graphs -------------------------------------------------------------------------------------


def test_a_compiled_block_is_fused(model: str) -> None:
    first, second = run("fuse_a_block", 2, model, "")
    # These modes match Inductor. Without a residual, "rounded" and "unrounded" are the same.
    assert first["numerics"] == ["rounded", "unrounded", "unrounded", "unrounded"]
    assert second["numerics"] == first["numerics"]
    assert not first["missed"]
    # A few elements of a norm can differ by one ulp, because squares are added in a different
    # order. A wrong rounding mode changes a quarter of the elements.
    assert max(first["different"]) < 0.005
    assert "AllnormFusionPass" in first["passes"]
    ((level, text),) = first["said"]
    assert level == "INFO"
    assert "4 of 4 reductions fused over 2 ranks" in text
    assert not second["said"], "only rank 0 logs"
    # vLLM's cache has a folder per rank. Ranks must not share code in Inductor's cache.
    assert first["hash"] == second["hash"]
    assert first["uuid"] != second["uuid"]


def test_a_block_is_fused_over_two_hosts(model: str) -> None:
    for found in run("fuse_a_block_over_two_hosts", 2, model):
        assert set(found["islands"]) == {((0,), (1,))}
        assert not found["missed"]
        assert max(found["different"]) < 0.005


def test_norms_of_q_and_k_over_the_ranks(model: str) -> None:
    first, second = run("norm_q_and_k", 2, model)
    for found in (first, second):
        assert found["sites"] == [("rounded", "rows over ranks of 2 tensors", None)]
        assert found["furthest"] <= 1, "ulps between vLLM's own results and the fused ones"
        assert found["same"] == [True, True], "the bits of the reference"
    assert "1 of 1 reductions fused over 2 ranks" in first["said"][-1][1]


def test_norms_of_the_c_extension_are_rounded(model: str) -> None:
    first, _ = run("fuse_a_block", 2, model, "vllm_c")
    assert set(first["numerics"]) == {"rounded"}


def test_norms_of_an_unknown_kernel_are_not_fused(model: str) -> None:
    first, _ = run("fuse_a_block", 2, model, "mystery")
    assert first["numerics"] == [None] * 4
    assert all("computed by 'mystery'" in reason for reason in first["missed"])
    ((level, text),) = first["said"]
    assert level == "WARNING"
    assert "0 of 4 reductions fused" in text
    assert max(first["different"]) == 0.0


def test_no_rank_fuses_if_one_refuses(model: str) -> None:
    first, second = run("refuse_on_one_rank", 2, model)
    assert first["reason"] == second["reason"]
    assert "ALLNORM_DISABLE=1" in first["reason"]
    assert first["reports"] == second["reports"] == 0
    assert first["close"]
    assert second["close"]
    ((level, text),) = first["said"]
    assert level == "WARNING"
    assert first["reason"] in text
    assert not second["said"]
    assert first["hash"] == second["hash"]


@pytest.mark.parametrize("failing", [[0, 1], [1]], ids=["everywhere", "on one rank"])
def test_a_failing_pass_does_not_change_the_graph(model: str, failing: list[int]) -> None:
    first, second = run("break_the_pass", 2, model, failing)
    assert first["close"]
    assert second["close"]
    assert first["reductions"] == 8  # four in the compiled block, four in the eager one
    assert [level for level, _ in first["said"]] == ["WARNING"]
    assert "half way" in first["said"][0][1]
    assert not second["said"]


def test_helpers_of_eager_models_are_fused(model: str) -> None:
    first, second = run("eager_helpers", 2, model)
    assert first["before"], "the communicator was made before a model called a helper"
    assert first["communicator"]
    for found in (first, second):
        assert found["plain"] == {"same": [True, True], "by itself": "vllm_c"}
        assert found["gemma"] == {"same": [True, True], "by itself": "native"}
        assert found["reductions"] == 0
        assert found["stock"] == 1
        assert found["with gradients"] == 2


# ---- other boundaries between layers -----------------------------------------------------------

# Maps a family to its boundaries after attention and after the MLP, and to the rounding modes if
# Inductor or PyTorch computes the unfused norms.
POST = ["post norm", "post norm"]
ADDS_ITSELF = ["post norm, no second norm", "post norm, no second norm"]
BOUNDARIES = {
    "gemma2": (POST, "unrounded", "unrounded"),
    "gemma3_text": (POST, "unrounded", "unrounded"),
    "gemma4_text": (["post norm", "post norm, no second norm"], "rounded", "transformers"),
    "glm4": (POST, "unrounded", "vllm"),
    "exaone4": (["post norm, no second norm", "post norm"], "rounded", "transformers"),
    "olmo3": (["post norm, no second norm", "post norm"], "rounded", "transformers"),
    "granite": (["scale 0.22", "scale 0.22"], "rounded", "transformers"),
    "minicpm": (["scale 0.989949", "scale 0.989949"], "rounded", "transformers"),
}


@pytest.mark.parametrize("family", BOUNDARIES)
def test_both_sums_of_a_layer_are_fused(tmp_path: pathlib.Path, family: str) -> None:
    import vllm_families

    if not vllm_families.has(family):
        pytest.skip(f"this vLLM has no model file for {family}")
    boundary, by_inductor, by_pytorch = BOUNDARIES[family]
    found = run("fuse", 2, family, vllm_families.write_model(tmp_path, family), of=vllm_families)
    for each in found:
        for rounding, mode in (("default", by_inductor), ("eager rounding", by_pytorch)):
            assert not each[rounding]["missed"]
            assert not each[rounding]["notes"]
            assert each[rounding]["boundary"] == boundary
            assert each[rounding]["numerics"] == [mode, mode]
        # The results differ from vLLM's only because squares are added in a different order.
        assert max(each["eager rounding"]["different"]) < 0.005
        # By default, Inductor also omits roundings elsewhere in the layer.
        assert max(each["default"]["furthest"]) < 0.02


def test_sums_over_experts_are_in_an_operator() -> None:
    """Tests a documented limit (docs/vllm.md): one operator computes the experts and their sum."""
    layers = pathlib.Path(vllm.__file__).parent / "model_executor" / "layers" / "fused_moe"
    runner = (layers / "runner" / "moe_runner.py").read_text()
    assert 'op_name="moe_forward"' in runner
    assert 'op_name="moe_forward_shared"' in runner
    assert 'op_name="fused_experts"' in (layers / "fused_moe.py").read_text()
    # The all-reduce is outside this operator.
    assert "= tensor_model_parallel_all_reduce(states)" in runner


# ---- quantization --------------------------------------------------------------------------------

# Declarations of the C extension. They are searched for in its file: it cannot be loaded here.
SCHEMAS = (
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None)",
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, "
    "Tensor? scale_ub)",
    "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, "
    "float eps, float fp8_min, float fp8_max, bool scale_ue8m0",
    "scaled_fp4_quant.out(Tensor input,                     Tensor input_scale, bool "
    "is_sf_swizzled_layout, *, Tensor(a!) output, Tensor(b!) output_scale) -> ()",
)


@pytest.mark.parametrize(
    ("kind", "quant"),
    [
        ("static", "per_tensor"),
        ("per_token", "per_token"),
        ("block", "per_group 128"),
        ("block, columns", "per_group 128"),
    ],
)
def test_quantization_in_pytorch_is_fused(model: str, kind: str, quant: str) -> None:
    """Tests vLLM's quantization in PyTorch: its default, except for blocks (`-quant_fp8`)."""
    first, second = run("fuse_a_quantized_block", 2, model, kind, True)
    for found in (first, second):
        assert not found["enabled"], "the layers quantize by operators of the C extension"
        assert found["quant"] == [quant] * 3
        assert not found["notes"]
        # Here Inductor rounds like PyTorch. Results can differ only where a quotient is a tie,
        # because vLLM multiplies by the reciprocal.
        assert max(found["scales"]) == max(found["residual"]) == 0.0
        assert max(found["quantized"]) < 0.005
        assert found["neighbors"]
    assert f", {quant}" in first["said"][0][1]
    assert first["quantized"] == second["quantized"]


def test_inductor_does_not_round_before_it_quantizes(model: str) -> None:
    """Tests a documented effect (docs/vllm.md): some elements of unfused FP8 differ."""
    first, _ = run("fuse_a_quantized_block", 2, model, "static", False)
    assert first["quant"] == ["per_tensor"] * 3
    assert 0.005 < max(first["quantized"]) < 0.03
    assert first["neighbors"]
    assert max(first["residual"]) == 0.0


def test_operators_that_quantize_are_declared_as_expected() -> None:
    (extension,) = pathlib.Path(vllm.__file__).parent.glob("_C_stable_libtorch*.so")
    content = extension.read_bytes()
    assert [schema for schema in SCHEMAS if schema.encode() not in content] == []
    names = {f"_C::{schema.split('(')[0].split('.')[0]}" for schema in SCHEMAS}
    assert set(quants.decompositions()) == names | {"vllm::mxfp8_quantize"}


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_operators_that_quantize_blocks_are_fused(model: str, kind: str) -> None:
    """Compares MXFP8 with vLLM's PyTorch code, and NVFP4 with the reference."""
    import vllm_without_cuda

    naive = kind == "mxfp8" and vllm_without_cuda.naive_mxfp8()
    for found in run("fuse_a_quantized_block", 2, model, kind, True):
        assert found["quant"] == [kind] * 3
        assert not found["notes"]
        assert max(found["residual"]) == 0.0
        assert naive or max(found["scales"]) == max(found["quantized"]) == 0.0
