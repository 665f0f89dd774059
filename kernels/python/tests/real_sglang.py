#!/usr/bin/env python3
"""The plug-in inside a real SGLang: real_sglang.py, run by the interpreter that SGLang is installed for.

Loads the plug-in as SGLang's processes do, by its entry point, and prints one JSON line: SGLang's version, whether the plug-in supports it, the
methods that are hooked, and what the plug-in logged. Exit code 0 where a supported version has every hook applied, or where any other version
is refused by name and has none. Needs no GPU; a supported version needs libsemmoe_kernels.so (SEMMOE_KERNELS_LIBRARY names it)."""
import importlib
import importlib.metadata
import json
import logging
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def tables(path):
    """The least that the plug-in reads of a tables file when it is loaded."""
    import torch
    from safetensors.torch import save_file

    save_file({"none": torch.zeros(1)}, path, metadata={"attention": "tp", "groups": "2"})
    return path


def applied(plug, hooks):
    """Methods whose function is the hook's, not SGLang's own any more."""
    found = []
    for module, name, _ in hooks:
        owner, method = name.split(".")
        raw = vars(getattr(importlib.import_module(module), owner))[method]
        if hasattr(getattr(raw, "__func__", raw), "__wrapped__"):
            found.append(f"{module}.{name}")
    return found


def main():
    import sglang
    from semmoe_kernels import sglang as plug
    from sglang.srt.plugins.hook_registry import HookRegistry

    messages = Messages()
    plug.logger.addHandler(messages)
    plug.logger.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SEMMOE_SGLANG_TABLES"] = tables(f"{folder}/tables.safetensors")
        plugin = plug.activate()
    registered = sorted(target for target, hooks in HookRegistry._hooks.items() if hooks)
    HookRegistry.apply_hooks()
    supported = sglang.__version__ in plug.VERSIONS
    hooked = applied(plug, plug.HOOKED.values()) if supported else []
    if supported:
        passed = plugin is not None and len(registered) == len(hooked) == len(plug.HOOKED)
    else:
        passed = plugin is None and not registered and any(sglang.__version__ in text for text in messages.texts)
    line = {"check": "plug-in", "sglang": sglang.__version__, "supported": supported, "registered": registered, "hooked": hooked,
            "messages": messages.texts, "passed": passed}
    print(json.dumps(line))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
