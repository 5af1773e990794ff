"""What the plug-in uses of vLLM, looked up in vLLM's source: a version that renames one of them fails here by name.

Read are the files of the installed package, which is not imported, or of the folder that IRIS_VLLM_SOURCE names.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
import os
from pathlib import Path

import pytest


def _folder() -> Path | None:
    if given := os.environ.get("IRIS_VLLM_SOURCE"):
        return Path(given)
    spec = find_spec("vllm")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


FOLDER = _folder()
pytestmark = pytest.mark.skipif(FOLDER is None, reason="needs vLLM's source, installed or in IRIS_VLLM_SOURCE")

# (file, name, for a function its first parameters, for a class what its body or constructor must define)
FUNCTIONS = [
    ("model_executor/custom_op.py", "register_oot", ["cls", "_decorated_layer_cls"]),
    ("config/vllm.py", "get_current_vllm_config", []),
    ("config/model.py", "get_hidden_size", ["self"]),
    ("config/model.py", "get_head_size", ["self"]),
    ("config/model.py", "get_num_attention_heads", ["self", "parallel_config"]),
    ("config/model.py", "get_num_kv_heads", ["self", "parallel_config"]),
    ("distributed/parallel_state.py", "get_tp_group", []),
    ("distributed/parallel_state.py", "in_the_same_node_as", ["pg", "source_rank"]),
    ("distributed/parallel_state.py", "all_reduce", ["tensor", "group_name"]),
    ("ir/ops/layernorm.py", "fused_add_rms_norm", ["x", "x_residual", "weight", "epsilon", "variance_size"]),
    ("compilation/passes/inductor_pass.py", "get_pass_context", []),
    ("compilation/passes/inductor_pass.py", "is_applicable_for_range", ["self", "compile_range"]),
    ("logger.py", "init_logger", ["name"]),
]
FUSED = "call_trtllm_fused_allreduce_norm"
FUSED_ARGUMENTS = {"allreduce_in", "residual", "norm_out", "rms_gamma", "rms_eps", "pattern_code"}
CLASSES = [
    ("model_executor/layers/linear.py", "RowParallelLinear", {"reduce_results", "tp_size"}),
    ("model_executor/layers/linear.py", "LinearBase", {"skip_bias_add"}),
    ("compilation/passes/inductor_pass.py", "InductorPass", {"uuid", "hash_source", "is_applicable_for_range"}),
    ("compilation/passes/inductor_pass.py", "PassContext", {"compile_range"}),
    ("config/compilation.py", "CompilationMode", {"VLLM_COMPILE"}),
    ("config/compilation.py", "CUDAGraphMode", {"NONE"}),
    (
        "config/compilation.py",
        "CompilationConfig",
        {
            "mode",
            "cudagraph_mode",
            "max_cudagraph_capture_size",
            "cudagraph_capture_sizes",
            "inductor_compile_config",
            "compile_ranges_endpoints",
        },
    ),
    ("config/parallel.py", "ParallelConfig", {"tensor_parallel_size", "enable_dbo"}),
    ("config/model.py", "ModelConfig", {"enable_sleep_mode", "dtype"}),
    ("config/utils.py", "Range", {"end"}),
    (
        "distributed/parallel_state.py",
        "GroupCoordinator",
        {"unique_name", "world_size", "cpu_group", "device_group"},
    ),
]
# of mixtures, where a `FusedMoE` is a class; later versions keep their own
MIXTURES = "model_executor/layers/fused_moe"
MIXTURE_FUNCTIONS = [
    ("runner/moe_runner.py", "get_layer_from_name", ["layer_name"]),
    ("router/base_router.py", "select_experts", ["self", "hidden_states", "router_logits"]),
    (
        "runner/moe_runner.py",
        "_moe_forward",
        ["hidden_states", "router_logits", "shared_experts_input", "input_ids", "layer_name"],
    ),
]
MIXTURE_CLASSES = [
    (
        "layer.py",
        "FusedMoE",
        {"runner", "router", "quant_method", "moe_config", "eplb_state", "apply_router_weight_on_input", "top_k"},
    ),
    ("runner/moe_runner.py", "MoERunner", {"gate", "router", "shared_experts", "shared_expert_gate"}),
    ("unquantized_fused_moe_method.py", "UnquantizedFusedMoEMethod", {"unquantized_backend"}),
    ("oracle/unquantized.py", "UnquantizedMoeBackend", {"TRITON"}),
    ("activation.py", "MoEActivation", {"SILU"}),
    (
        "config.py",
        "FusedMoEConfig",
        {
            "activation",
            "is_act_and_mul",
            "swiglu_limit",
            "has_bias",
            "is_lora_enabled",
            "ep_size",
            "dp_size",
            "pcp_size",
            "is_sequence_parallel",
        },
    ),
]
WORDS = [
    ("plugins/__init__.py", '"vllm.general_plugins"'),
    ("model_executor/custom_op.py", "op_registry_oot"),
    ("compilation/backends.py", "self.inductor_config[self.pass_key] = self.pass_manager"),
    ("platforms/interface.py", '"post_grad_custom_post_pass"'),
    ("envs.py", "VLLM_BATCH_INVARIANT"),
    ("compilation/passes/fusion/allreduce_rms_fusion.py", '"flashinfer_trtllm_fused_allreduce_norm"'),
    ("compilation/passes/fusion/allreduce_rms_fusion.py", "AllReduceFusionPattern.kARResidualRMSNorm,"),
]


def parsed(file: str) -> ast.Module:
    assert FOLDER is not None
    return ast.parse((FOLDER / file).read_text())


def functions(tree: ast.AST, name: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]


def arguments(function: ast.FunctionDef) -> list[str]:
    return [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def defined(body: ast.ClassDef) -> set[str]:
    """What a class's body defines, and what its methods set of `self`."""
    matches = set()
    for node in ast.walk(body):
        match node:
            case ast.FunctionDef(name=name) | ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                matches.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Store()):
                matches.add(name)
    return matches


@pytest.mark.parametrize("file, name, first", FUNCTIONS, ids=lambda each: each if isinstance(each, str) else "")
def test_a_function_takes_what_the_plug_in_gives(file: str, name: str, first: list[str]) -> None:
    matches = functions(parsed(file), name)
    assert any(arguments(each)[: len(first)] == first for each in matches), [arguments(each) for each in matches]


@pytest.mark.parametrize("file, name, members", CLASSES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_class_has_what_the_plug_in_reads(file: str, name: str, members: set[str]) -> None:
    (matches,) = [n for n in ast.walk(parsed(file)) if isinstance(n, ast.ClassDef) and n.name == name]
    assert members <= defined(matches), members - defined(matches)


def test_mixtures_have_what_the_plug_in_uses() -> None:
    if not any(isinstance(n, ast.ClassDef) and n.name == "FusedMoE" for n in ast.walk(parsed(f"{MIXTURES}/layer.py"))):
        pytest.skip("FusedMoE is no class, so mixtures stay vLLM's")
    for file, name, first in MIXTURE_FUNCTIONS:
        test_a_function_takes_what_the_plug_in_gives(f"{MIXTURES}/{file}", name, first)
    for file, name, members in MIXTURE_CLASSES:
        test_a_class_has_what_the_plug_in_reads(f"{MIXTURES}/{file}", name, members)


@pytest.mark.parametrize("file, text", WORDS)
def test_a_file_has_the_name(file: str, text: str) -> None:
    assert FOLDER is not None and text in (FOLDER / file).read_text()


def test_the_fused_node_that_the_rewrite_replaces_has_its_arguments() -> None:
    (matches,) = functions(parsed("compilation/passes/fusion/allreduce_rms_fusion.py"), FUSED)
    assert set(arguments(matches)) >= FUSED_ARGUMENTS, set(arguments(matches))


def test_a_custom_pass_runs_behind_the_fusion_with_flashinfer_and_before_the_operators_are_lowered() -> None:
    assert FOLDER is not None
    text = (FOLDER / "compilation/passes/pass_manager.py").read_text()
    (call,) = functions(ast.parse(text), "__call__")
    lines = ast.get_source_segment(text, call) or ""
    assert 0 < lines.index("self.passes") < lines.index("ir_lowering"), lines
