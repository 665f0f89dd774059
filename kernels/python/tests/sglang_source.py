"""What the plug-in hooks, against SGLang's own sources: the wheel of each version that it was written for, fetched
from PyPI and read, not run. Without PyPI nothing is compared, and that is said."""
import ast
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from semmoe_kernels import sglang as plug
from semmoe_kernels.sglang_join import PARALLEL, SETTINGS

_MODEL = {
    "sglang/srt/configs/model_config.py": {"ModelConfig": ["hidden_size", "vocab_size", "num_hidden_layers", "dtype"]},
    "sglang/srt/model_executor/forward_batch_info.py": {"ForwardBatch": ["input_ids", "num_token_non_padded"]},
    "sglang/srt/layers/layernorm.py": {"RMSNorm": ["weight", "variance_epsilon", "variance_size_override", "x_pad_to_multiple"]},
    "sglang/srt/distributed/parallel_state.py": {"GroupCoordinator": ["cpu_group"]},
    "sglang/srt/plugins/hook_registry.py": {"HookType": ["AROUND"]},
}
_COMMUNICATOR = {
    "sglang/srt/distributed/parallel_state_wrapper.py": {"ParallelState": PARALLEL},
    "sglang/srt/server_args.py": {"ServerArgs": SETTINGS},
    "sglang/srt/model_executor/model_runner.py": {
        "ModelRunner": ["ps", "server_args", "model_config", "attention_tp_group", "device", "gpu_id", "is_draft_worker"]},
    "sglang/srt/layers/communicator.py": {
        "LayerScatterModes": ["layer_input_mode", "mlp_mode", "layer_output_mode"],
        "LayerCommunicator": ["layer_scatter_modes", "post_attention_layernorm", "_context"],
        "CommunicateContext": ["attn_tp_size"], "ScatterMode": ["SCATTERED", "TP_ATTN_FULL"]},
}
_STAGES = "sglang/srt/layers/layer_boundary"
_CONFIGURED = "sglang/srt/arg_groups/fields"


def boundary(rows, paths, path, update, is_plain_add, read, is_plain_norm, more):
    """Fields of the second generation, under the names that 0.5.22 changed."""
    return {
        f"{_CONFIGURED}/parallel.py": {"Parallel": [*PARALLEL, "attn_tp_group"]},
        f"{_CONFIGURED}/schedule.py": {"Schedule": ["chunked_prefill_size", "max_prefill_tokens"]},
        f"{_CONFIGURED}/spec.py": {"Spec": ["speculative_algorithm"]},
        f"{_CONFIGURED}/lora.py": {"Lora": ["enable_lora"]},
        f"{_CONFIGURED}/exec_.py": {
            "ExecOverlap": ["enable_two_batch_overlap"], "ExecFeatures": ["enable_return_routed_experts"],
            "ExecMoe": ["expert_distribution_recorder_mode"]},
        "sglang/srt/model_executor/model_runner.py": {"ModelRunner": ["model", "model_config", "device", "gpu_id", "is_draft_worker"]},
        f"{_STAGES}/contracts.py": {
            rows: ["ATTENTION"], "BatchVariant": ["ORDINARY"], "StageKind": ["FFN"], path: ["output_move"]},
        f"{_STAGES}/construction.py": {"StagePlan": [paths, "fusions", "norm"]},
        f"{_STAGES}/stage.py": {"StageBoundary": ["plan", "declaration"]},
        f"{_STAGES}/factories.py": {"StageDeclaration": ["kind", "sparse", "output_transform", *more]},
        f"{_STAGES}/residual/add_norm.py": {update: [is_plain_add], read: [is_plain_norm]},
    }


_SECOND = ["ExitRows", "paths", "StagePath", "PlainAdd", "is_plain_add", "NormReadout", "is_plain_norm"]
# Fields that the plug-in reads, by version, file and class; a method may assign a field.
_FIELDS = {
    "0.5.16": _COMMUNICATOR,
    "0.5.21": boundary("HandoffRows", "_paths", "StageSteps", "Add", "adds_plainly", "NormRead", "norms_plainly", []),
    "0.5.22": boundary(*_SECOND, []),
    "0.5.23": boundary(*_SECOND, ["row_transport"]),
}
# Functions that the plug-in calls, by file.
_CALLED = {
    "sglang/srt/runtime_context.py": ["get_parallel", "get_schedule", "get_spec", "get_lora", "get_exec"],
    "sglang/srt/layers/layernorm_sp.py": ["layernorm_sp_enabled"],
    "sglang/srt/layers/moe/utils.py": ["is_moe_input_scattered_across_dp_ranks"],
}


def fetch(version, folder):
    """The wheel, or None."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:",
           "--dest", folder, f"sglang=={version}"]
    if subprocess.run(pip).returncode != 0:
        return None
    return zipfile.ZipFile(next(pathlib.Path(folder).glob("*.whl")))


def classes(wheel, path):
    found = ast.parse(wheel.read(path))
    return {node.name: node for node in found.body if isinstance(node, ast.ClassDef)}


def fields(node):
    """Names that a class declares, and those that its methods assign to self."""
    names = set()
    for part in ast.walk(node):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            names.add(part.target.id)
        if isinstance(part, ast.Assign):
            targets = [leaf for target in part.targets for leaf in ast.walk(target)]
            names |= {leaf.id for leaf in targets if isinstance(leaf, ast.Name)}
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and getattr(part.value, "id", "") == "self":
            names.add(part.attr)
    return names


def parameters(node):
    arguments = node.args.args + node.args.kwonlyargs + ([node.args.kwarg] if node.args.kwarg else [])
    return [argument.arg for argument in arguments if argument.arg != "cls"]


def compare(wheel, version):
    for module, name, expected in plug.generation_of(version).hooked(version).values():
        *owner, function = name.split(".")
        path = module.replace(".", "/") + ".py"
        body = classes(wheel, path)[owner[0]].body if owner else ast.parse(wheel.read(path)).body
        found = parameters(next(part for part in body if isinstance(part, ast.FunctionDef) and part.name == function))
        assert found == expected, f"{name} has the parameters {found}, expected {expected}"
    for path, owners in (_MODEL | _FIELDS[version]).items():
        there = classes(wheel, path)
        for owner, names in owners.items():
            missing = set(names) - fields(there[owner])
            assert not missing, f"{owner} of {path} has no {', '.join(sorted(missing))}"
    for path, names in _CALLED.items() if version != "0.5.16" else ():
        there = {part.name for part in ast.parse(wheel.read(path)).body if isinstance(part, ast.FunctionDef)}
        assert not set(names) - there, f"{path} has no {', '.join(sorted(set(names) - there))}"


if __name__ == "__main__":
    for version in plug.VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            wheel = fetch(version, folder)
            if wheel is None:
                print(f"NOTICE: SGLang {version} cannot be had from PyPI, so its sources were not compared")
                continue
            compare(wheel, version)
            print(f"sources of SGLang {version}: ok")
