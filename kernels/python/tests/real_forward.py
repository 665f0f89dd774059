"""One batch through Qwen3-MoE of a real SGLang (0.5.21 to 0.5.23) on two CPU ranks, first as SGLang is, then with the
plug-in.

What is SGLang's own: parallel groups over gloo, the model with its layers, stage boundaries with their collectives,
norms, the batch and its count of padded tokens. What is not: attention and experts, which are matrices here, and the
communicator, which is over the CPU's shared memory. The all-to-all backend is `deepep`, of which boundaries only take
that tokens come scattered."""
import json
import os
import pathlib
import socket
import sys
import traceback

import torch
from safetensors.torch import save_file
from semmoe_kernels import Communicator, SharedMemory
from semmoe_kernels import sglang as plug
from semmoe_kernels.exchange import GroupExchange
from semmoe_kernels.groups import Groups

WORLD, TOKENS, REAL = 2, 24, 17
# Shape of the bundled model, whose first layer the tables omit.
LAYERS, HIDDEN, VOCABULARY = 7, 256, 10240


def tables(path):
    """Random tables without layer 0."""
    generator = torch.Generator().manual_seed(3)

    def table(name, *shape):
        group = torch.randint(0, WORLD, (*shape, 1), generator=generator).to(torch.uint16)
        return {f"{name}_group": group, f"{name}_prob": torch.rand(*shape, 1, generator=generator).half()}

    tensors = table("T", LAYERS - 1, VOCABULARY) | table("A", LAYERS - 1, WORLD, WORLD)
    metadata = {"attention": "tp", "groups": str(WORLD), "layer_ids": json.dumps(list(range(1, LAYERS))), "vocab_size": str(VOCABULARY)}
    save_file(tensors, path, metadata)
    return path


def start_sglang(rank, model, port):
    """SGLang's configuration and groups, in the order of its scheduler."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=model, device="cpu", tp_size=WORLD, ep_size=WORLD, moe_a2a_backend="deepep", disable_cuda_graph=True,
        attention_backend="torch_native", sampling_backend="pytorch", dtype="float32", disable_custom_all_reduce=True)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    initialize_moe_config()
    init_distributed_environment(backend="gloo", world_size=WORLD, rank=rank, local_rank=0, distributed_init_method=f"tcp://127.0.0.1:{port}")
    initialize_model_parallel()
    initialize_dp_attention(server_args=arguments)
    init_dp_gathered_buffer(Runner.model_config)


def matrices(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN ** 0.5 for _ in range(count)]


class Attention(torch.nn.Module):
    """In place of Qwen3MoeAttention: each token sees those before it; what a rank gives is its part of a sum, as of
    its heads."""

    def __init__(self, layer_id, **_):
        super().__init__()
        self.matrix = matrices(layer_id, WORLD)[torch.distributed.get_rank()]

    def forward(self, positions, hidden_states, forward_batch):
        return (hidden_states.cumsum(0) / (positions + 1)[:, None]) @ self.matrix


class Experts(torch.nn.Module):
    """Replaces Qwen3MoeSparseMoeBlock: two experts, both on every rank, each row separately."""

    def __init__(self, layer_id, **_):
        super().__init__()
        self.matrices, self.seen = matrices(100 + layer_id, 2), None

    def forward(self, hidden_states, forward_batch):
        self.seen = hidden_states.clone()
        ids, bound = (hidden_states[:, :1] > 0).int(), forward_batch.moe_num_token_non_padded()
        if bound is not None:
            # Mirrors SGLang's top-k, whose kernels need a GPU in 0.5.21 and 0.5.22.
            ids[torch.arange(len(ids)) >= bound] = -1
        return sum((ids == expert) * (hidden_states @ matrix).tanh() for expert, matrix in enumerate(self.matrices))


def model(config):
    """Qwen3MoeModel as `model.layers`, with this module's attention and experts."""
    from sglang.srt.models import qwen3_moe

    qwen3_moe.Qwen3MoeAttention, qwen3_moe.Qwen3MoeSparseMoeBlock = Attention, Experts
    whole = torch.nn.Module()
    whole.model = qwen3_moe.Qwen3MoeModel(config)
    assert len(whole.model.layers) == LAYERS
    for layer in whole.model.layers:
        with torch.no_grad():
            layer.post_attention_layernorm.weight.copy_(torch.linspace(0.9, 1.1, HIDDEN))
    return whole


def forward(whole):
    """One padded batch."""
    from sglang.srt.layers.dp_attention import set_dp_buffer_len
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, compute_local_num_token_non_padded

    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    tokens[REAL:] = 0
    embedded = torch.randn(TOKENS, HIDDEN, generator=generator)
    batch = ForwardBatch(forward_mode=ForwardMode.EXTEND, batch_size=1, input_ids=tokens, req_pool_indices=None, seq_lens=None,
                         out_cache_loc=None, seq_lens_sum=TOKENS)
    batch.num_token_non_padded = real = compute_local_num_token_non_padded(torch.tensor(REAL), TOKENS, sharded=True)
    set_dp_buffer_len(TOKENS, TOKENS, True, [TOKENS])
    with torch.no_grad():
        hidden = whole.model(tokens, torch.arange(TOKENS), batch, input_embeds=embedded)
    assert batch.num_token_non_padded is real, "the count of padded tokens was not put back"
    return tokens, hidden


class Runner:
    """The members of a ModelRunner that the plug-in reads; its hooked methods are SGLang's."""

    device, gpu_id, is_draft_worker = "cpu", 0, False

    class model_config:
        hidden_size, vocab_size, num_hidden_layers, dtype, hf_config = HIDDEN, VOCABULARY, LAYERS, torch.float32, None


def group_over(memory):
    """`group_of` for the plug-in: ranks find each other through SGLang's group, and move tokens through the CPU's shared
    memory."""
    class Group:
        def __init__(self, runner, layout):
            self.rank, self.exchange = layout.attn_tp_rank, GroupExchange(layout.cpu_group)

        def device(self):
            return torch.device("cpu")

        def communicator(self, buffer_bytes, max_tokens):
            return Communicator(self.rank, memory, max_tokens)

    return Group


def placed(path, tokens):
    """[layer][token]: the rank that the tables put each token on."""
    return list(Groups(path).ranks(tokens)[:LAYERS - 1])


def gathered(rows):
    parts = [None] * WORLD
    torch.distributed.all_gather_object(parts, rows)
    return parts


def rank_of(rank, memory, folder, model_path, port):
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins.hook_registry import HookRegistry
    from transformers import AutoConfig

    start_sglang(rank, model_path, port)
    config = AutoConfig.from_pretrained(model_path)
    plain = model(config)
    tokens, expected = forward(plain)
    rows = [torch.cat(gathered(layer.mlp.seen)) for layer in plain.model.layers]

    os.environ["SEMMOE_SGLANG_TABLES"] = path = f"{folder}/forward.tables.safetensors"
    plugin = plug.activate(group_over(memory))
    assert plugin is not None, "the plug-in hooked nothing"
    HookRegistry.apply_hooks()
    runner = Runner()
    ModelRunner.init_torch_distributed(runner)
    assert plugin.comm is not None, "the plug-in did not join"
    runner.model = model(config)
    plugin.load(lambda runner: None, runner)
    _, found = forward(runner.model)
    torch.testing.assert_close(found[:REAL], expected[:REAL], rtol=1e-4, atol=1e-5)
    moved = 0
    for index, ranks in enumerate(placed(path, tokens), start=1):
        mine = (ranks == rank).nonzero()[:, 0]
        seen = runner.model.model.layers[index].mlp.seen
        assert len(seen) == TOKENS // WORLD == len(mine), (index, len(seen))
        real = mine < REAL
        torch.testing.assert_close(seen[real], rows[index][mine[real]], rtol=1e-4, atol=1e-5)
        moved += int((ranks[:REAL] != torch.arange(REAL) // (TOKENS // WORLD)).sum())
    # Layer 0 is not in the tables and keeps the tokens' order.
    torch.testing.assert_close(runner.model.model.layers[0].mlp.seen, plain.model.layers[0].mlp.seen)
    assert moved > 0, "no token was on another rank than without the plug-in"
    without_all_to_all(plugin, config)
    return {"ranks": WORLD, "layers": LAYERS - 1, "tokens": REAL, "padding": TOKENS - REAL, "moved": moved,
            "largest_difference": float((found[:REAL] - expected[:REAL]).abs().max())}


def without_all_to_all(plugin, config):
    """Layers whose experts see all tokens are left alone."""
    from sglang.srt.layers.moe.utils import MoeA2ABackend
    from sglang.srt.runtime_context import get_flags

    get_flags().moe.a2a_backend = MoeA2ABackend("none")
    plain = model(config)
    plugin.find_layers(plain)
    assert not any(hasattr(layer.post_attention_layernorm, "semmoe_layer") for layer in plain.model.layers)


def process(rank, memory, folder, model_path, port):
    """Exits at once when it is done, as gloo's threads may outlive Python."""
    try:
        answer = rank_of(rank, memory, folder, model_path, port)
        torch.distributed.barrier()
    except BaseException:
        answer = {"error": traceback.format_exc()[-3000:]}
    pathlib.Path(f"{folder}/rank{rank}.json").write_text(json.dumps(answer))
    sys.stdout.flush()
    os._exit("error" in answer)


def compare(folder, model_path):
    """Returns what was compared, or raises the first rank's error."""
    tables(f"{folder}/forward.tables.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        torch.multiprocessing.spawn(process, (SharedMemory(WORLD, 1 << 18), folder, model_path, port), nprocs=WORLD)
    except torch.multiprocessing.ProcessExitedException:
        pass
    answers = [json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).glob("rank*.json"))]
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors or len(answers) != WORLD:
        raise RuntimeError(errors[0] if errors else f"{len(answers)} of {WORLD} ranks answered")
    return answers[0]
