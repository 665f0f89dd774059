"""Plug-in of SGLang (entry point `sglang.srt.plugins`): SRS and SAG around the experts. Versions that it was not
written for are refused.

Where a layer's experts take scattered tokens (an all-to-all backend), SGLang reduce-scatters in the tokens' order
before the experts and keeps tokens scattered after them. With the plug-in each token goes to the rank of its
likeliest group instead, and every layer gathers again, so that the next can shuffle again.

    SEMMOE_SGLANG=off             nothing is touched
    SEMMOE_SGLANG_TABLES=FILE     tables for attention tp; without it nothing is touched
    SEMMOE_SGLANG_TOKENS=N        the most tokens of one batch that are shuffled; larger ones go plain (default: the chunked prefill)

Routes are not known yet when tokens are shuffled: the groups of the two layers before are the likeliest ones there. No
rank gets more than its even part, rounded up (`groups.even_groups`): shapes are then known on the host, nothing waits
for the GPU, and calls can be captured in CUDA graphs."""
import importlib
import inspect
import os

from . import sglang_boundary, sglang_communicator
from .comm import Communicator, SharedMemory
from .sglang_join import GpuGroup, SelfCheckError, check_tables
from .sglang_shuffle import logger

# SGLang's two ways to move tokens between layers. Each module has VERSIONS, hooked(version) and a Plugin.
GENERATIONS = (sglang_communicator, sglang_boundary)
VERSIONS = tuple(version for generation in GENERATIONS for version in generation.VERSIONS)


def generation_of(version):
    """Runs before SGLang's modules are imported, as other versions lack some of them."""
    for generation in GENERATIONS:
        if version in generation.VERSIONS:
            return generation
    raise SelfCheckError(f"SGLang is {version}, the plug-in supports {', '.join(VERSIONS)} only")


def self_check(hooked):
    """Checks everything required before hooking.

    Raises SelfCheckError with the first thing that is not."""
    for module, name, expected in hooked.values():
        owner = importlib.import_module(module)
        for part in name.split("."):
            owner = vars(owner).get(part) if owner is not None else None
        function = getattr(owner, "__func__", owner)
        found = [p for p in inspect.signature(function).parameters if p != "cls"] if function else None
        if found != expected:
            raise SelfCheckError(f"{name} has the parameters {found}, expected {expected}")
    # One rank: the library loads and moves what it should.
    Communicator(0, SharedMemory(1, 4096)).self_check()


def activate(group_of=GpuGroup):
    """The entry point: called in every process before SGLang has groups. `group_of(runner, layout)` is called later,
    on every rank, for how the ranks of the attention-TP group meet."""
    if os.environ.get("SEMMOE_SGLANG", "on") == "off":
        return None
    path = os.environ.get("SEMMOE_SGLANG_TABLES")
    if not path:
        logger.info("semmoe: SEMMOE_SGLANG_TABLES is not set, so nothing is hooked")
        return None
    try:
        import sglang

        generation = generation_of(sglang.__version__)
        hooked = generation.hooked(sglang.__version__)
        self_check(hooked)
        check_tables(path)
        plugin = generation.Plugin(path, sglang.__version__, group_of)
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except Exception as error:
        # SGLang would only log it; the reason is one sentence, and nothing is hooked.
        logger.error("semmoe: the plug-in stays off: %s", error)
        return None
    for hook, (module, name, _) in hooked.items():
        HookRegistry.register(f"{module}.{name}", getattr(plugin, hook), HookType.AROUND)
    return plugin
