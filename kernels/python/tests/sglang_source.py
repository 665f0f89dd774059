"""What the plug-in hooks, against SGLang's own sources: the wheel of each version that it was written for, fetched from PyPI and read, not
run. Without PyPI nothing is compared, and that is said."""
import ast
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from semmoe_kernels import sglang as plug

# Fields that the plug-in reads, by file and class; a field may be assigned in a method.
_FIELDS = {
    "sglang/srt/distributed/parallel_state_wrapper.py": {
        "ParallelState": ["attn_tp_size", "attn_tp_rank", "attn_cp_size", "moe_ep_size", "moe_ep_rank"]},
    "sglang/srt/distributed/parallel_state.py": {"GroupCoordinator": ["cpu_group", "rank_in_group", "world_size"]},
    "sglang/srt/server_args.py": {
        "ServerArgs": ["chunked_prefill_size", "max_prefill_tokens", "speculative_algorithm", "enable_two_batch_overlap"]},
    "sglang/srt/configs/model_config.py": {"ModelConfig": ["hidden_size", "vocab_size", "num_hidden_layers", "dtype"]},
    "sglang/srt/model_executor/model_runner.py": {
        "ModelRunner": ["ps", "server_args", "model_config", "attention_tp_group", "device", "gpu_id", "is_draft_worker"]},
    "sglang/srt/layers/communicator.py": {
        "LayerScatterModes": ["layer_input_mode", "mlp_mode", "layer_output_mode"],
        "LayerCommunicator": ["layer_scatter_modes", "post_attention_layernorm", "_context"],
        "CommunicateContext": ["attn_tp_size"], "ScatterMode": ["SCATTERED", "TP_ATTN_FULL"]},
    "sglang/srt/layers/layernorm.py": {"RMSNorm": ["weight", "variance_epsilon"]},
    "sglang/srt/plugins/hook_registry.py": {"HookType": ["AROUND"]},
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
    """Names that a class declares, and those that its methods give to self."""
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


def compare(wheel):
    for module, name, expected in plug.HOOKED.values():
        owner, method = name.split(".")
        body = classes(wheel, module.replace(".", "/") + ".py")[owner].body
        node = next(part for part in body if isinstance(part, ast.FunctionDef) and part.name == method)
        given = node.args.args + ([node.args.kwarg] if node.args.kwarg else [])
        found = [argument.arg for argument in given if argument.arg != "cls"]
        assert found == expected, f"{name} has the parameters {found}, expected {expected}"
    for path, owners in _FIELDS.items():
        there = classes(wheel, path)
        for owner, names in owners.items():
            missing = set(names) - fields(there[owner])
            assert not missing, f"{owner} of {path} has no {', '.join(sorted(missing))}"


if __name__ == "__main__":
    for version in plug.VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            wheel = fetch(version, folder)
            if wheel is None:
                print(f"NOTICE: SGLang {version} cannot be had from PyPI, so its sources were not compared")
                continue
            compare(wheel)
            print(f"sources of SGLang {version}: ok")
