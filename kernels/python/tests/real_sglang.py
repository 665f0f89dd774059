#!/usr/bin/env python3
"""The plug-in inside a real SGLang: real_sglang.py, run by the interpreter that SGLang is installed for.

Loads the plug-in as SGLang's processes do, by its entry point, and prints one JSON line: SGLang's version, whether
the plug-in supports it, the functions that are hooked, and what the plug-in logged. With `--forward MODEL` (0.5.21
and later; MODEL is assets/tiny-qwen3moe-15m, of which only the configuration is read) two CPU ranks then compute a
batch with and without the plug-in: real_forward.py.

Exit code 0 where a supported version has every hook applied and computes the same, or where any other version is
refused by name and has none. Needs no GPU; a supported version needs libsemmoe_kernels.so (SEMMOE_KERNELS_LIBRARY
names it)."""
import argparse
import importlib
import importlib.metadata
import json
import logging
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import real_forward


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def tables(path):
    """The minimum that the plug-in reads of a tables file on loading."""
    import torch
    from safetensors.torch import save_file

    save_file({"none": torch.zeros(1)}, path, metadata={"attention": "tp", "groups": "2"})
    return path


def applied(hooked):
    """The places whose function is now the hook's instead of SGLang's."""
    found = []
    for module, name, _ in hooked.values():
        owner = importlib.import_module(module)
        for part in name.split("."):
            owner = vars(owner)[part]
        if hasattr(getattr(owner, "__func__", owner), "__wrapped__"):
            found.append(f"{module}.{name}")
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--forward", metavar="MODEL")
    given = parser.parse_args()
    import sglang
    from semmoe_kernels import sglang as plug
    from sglang.srt.plugins.hook_registry import HookRegistry

    messages = Messages()
    plug.logger.addHandler(messages)
    plug.logger.setLevel(logging.INFO)
    supported = sglang.__version__ in plug.VERSIONS
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SEMMOE_SGLANG_TABLES"] = tables(f"{folder}/tables.safetensors")
        plugin = plug.activate()
        registered = sorted(target for target, hooks in HookRegistry._hooks.items() if hooks)
        HookRegistry.apply_hooks()
        hooks = plug.generation_of(sglang.__version__).hooked(sglang.__version__) if supported else {}
        hooked = applied(hooks)
        if supported:
            passed = plugin is not None and len(registered) == len(hooked) == len(hooks)
        else:
            passed = plugin is None and not registered and any(sglang.__version__ in text for text in messages.texts)
        line = {"check": "plug-in", "sglang": sglang.__version__, "supported": supported, "registered": registered, "hooked": hooked,
                "messages": messages.texts}
        if passed and given.forward and sglang.__version__ in plug.sglang_boundary.VERSIONS:
            try:
                line["forward"] = real_forward.compare(folder, given.forward)
            except RuntimeError as error:
                line["messages"].append(str(error))
                passed = False
    print(json.dumps(line | {"passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
