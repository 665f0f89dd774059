#!/usr/bin/env python3
"""The hook on small random models of every family: routers found, and the experts those that the model's own logits say."""
import pathlib, sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "profiler/python"))
import record_routing as hook
import torch, transformers

COMMON = dict(vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64)
DEEPSEEK = dict(moe_intermediate_size=16, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=3, first_k_dense_replace=1, q_lora_rank=None,
                kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
# Configuration, layers with experts, whether the model returns its routers' logits.
FAMILIES = {
    "Qwen2Moe": (dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, shared_expert_intermediate_size=16, decoder_sparse_step=2), [1, 3], True),
    "Qwen3Moe": (dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, head_dim=8, mlp_only_layers=[2]), [0, 1, 3], True),
    "Mixtral": (dict(num_local_experts=8, num_experts_per_tok=2), [0, 1, 2, 3], True),
    "Olmoe": (dict(num_experts=8, num_experts_per_tok=3), [0, 1, 2, 3], True),
    "DeepseekV2": (dict(**DEEPSEEK, n_group=None, topk_group=None, topk_method="greedy"), [1, 2, 3], False),
    "DeepseekV3": (dict(**DEEPSEEK, n_group=2, topk_group=1, head_dim=8), [1, 2, 3], False),
    "GptOss": (dict(num_local_experts=8, num_experts_per_tok=3, head_dim=8, layer_types=["full_attention"] * 4), [0, 1, 2, 3], True),
}


def check(family, settings, layers, has_logits):
    torch.manual_seed(1)
    config = getattr(transformers, family + "Config")(**{**COMMON, **settings})
    model = getattr(transformers, family + "ForCausalLM")(config).eval()
    for layer in hook.find_routers(model, 8).values():
        torch.nn.init.normal_(layer.weight)
    recorder = hook.Recorder(model)
    assert recorder.shape.layer_ids == layers, (family, recorder.shape.layer_ids)
    k, ids = recorder.shape.top_k, list(range(5, 45))
    tokens, experts = recorder.record(ids, 1)
    assert tokens == ids and experts.shape == (40, len(layers), k), (family, experts.shape)
    assert all(len(set(row)) == k for row in experts.reshape(-1, k).tolist()), family
    assert len({tuple(row) for row in experts.reshape(-1, k).tolist()}) > 10, f"{family}: routes differ"
    if has_logits:
        with torch.no_grad():
            logits = model(torch.tensor([ids]), output_router_logits=True, use_cache=False).router_logits
        for at, layer in enumerate(logits):
            layer = layer[0] if isinstance(layer, tuple) else layer
            expected = layer.reshape(40, -1)
            # GPT-OSS returns scores, zero for unchosen experts.
            assert (expected.topk(k).indices.sort().values.numpy() == numpy_sorted(experts[:, at])).all(), (family, at)
    tokens, experts = recorder.record(ids, 4)
    assert tokens[:40] == ids and 40 <= len(tokens) <= 43 and len(experts) == len(tokens), family
    for wrong, said in ((ids + [500], "the token id 500"), (list(range(100)), "the context's 64")):
        try:
            recorder.record(wrong, 1)
        except hook.Refused as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"{family}: {said}")


def numpy_sorted(rows):
    rows = rows.copy()
    rows.sort(axis=-1)
    return rows


for family, (settings, layers, has_logits) in FAMILIES.items():
    check(family, settings, layers, has_logits)
try:
    dense = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**COMMON))
    hook.Recorder(dense)
except hook.Refused as error:
    assert "has it routed experts?" in str(error), error
else:
    raise AssertionError("a dense model is refused")
print(f"families: ok ({', '.join(FAMILIES)}; Transformers {transformers.__version__})")
