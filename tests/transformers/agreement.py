#!/usr/bin/env python3
"""`profile record` against the worker, and the hook, on the same prompts and model: agreement.py SEMMOE FOLDER [PROMPTS]."""
import json, pathlib, struct, subprocess, sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "profiler/python"))
import record_routing as hook
import numpy, torch

SEMMOE, FOLDER = sys.argv[1], pathlib.Path(sys.argv[2])
PROMPTS = pathlib.Path(sys.argv[3]) if len(sys.argv) > 3 else ROOT / "tests/data/reference.prompts.jsonl"
MODEL = ROOT / "assets/tiny-qwen3moe-15m"
GAP, MOST = 1e-4, 0.001


def semmoe(*arguments):
    return subprocess.run([SEMMOE, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def record(out):
    worker = [SEMMOE, "worker", "--model", MODEL, "--rank", "0", "--world", "1", "--rendezvous", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--exit-on-stdin-eof"]
    process = subprocess.Popen(worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        events = (json.loads(line) for line in process.stdout)
        url = next("http://" + event["http"] for event in events if event.get("event") == "ready")
        semmoe("profile", "record", "--engine", "semmoe", "--url", url, "--prompts", PROMPTS, "--tokenizer", MODEL, "--max-prompt-tokens", 512, "--out", out)
    finally:
        process.stdin.close()
        process.wait(timeout=60)


def read(path):
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:end])
    kinds = {"U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8"}
    cut = lambda t: numpy.frombuffer(raw[end + t["data_offsets"][0] : end + t["data_offsets"][1]], kinds[t["dtype"]]).reshape(t["shape"])
    return raw, header.pop("__metadata__"), {name: cut(tensor) for name, tensor in header.items()}


def gaps():
    """Between the k-th and the next router logit, of every token in every layer."""
    model = hook.load(type("Arguments", (), dict(model=str(MODEL), device="cpu", dtype="float32")))
    tokenizer = hook.transformers.AutoTokenizer.from_pretrained(MODEL)
    recorder, all_gaps = hook.Recorder(model), []
    for line in PROMPTS.open("rb"):
        recorder.record(hook.encode(tokenizer, line)[:512], 1)
        layers = []
        for layer in recorder.shape.layer_ids:
            _, logits = hook.read(recorder.seen[layer][0], recorder.shape.num_experts, recorder.shape.top_k)
            top = logits.topk(recorder.shape.top_k + 1).values
            layers.append((top[:, -2] - top[:, -1]).numpy())
        all_gaps.append(numpy.stack(layers, axis=1))
    return numpy.concatenate(all_gaps)


recorded, hooked = FOLDER / "recorded.trace.safetensors", FOLDER / "hooked.trace.safetensors"
record(recorded)
script = ROOT / "profiler/python/record_routing.py"
subprocess.run([sys.executable, script, "--model", MODEL, "--prompts", PROMPTS, "--max-prompt-tokens", "512", "--dtype", "float32", "--out", hooked], check=True)
(raw, ours, a), (hooked_raw, theirs, b) = read(recorded), read(hooked)

# The same form, byte for byte: the recorded trace written again by the hook's writer is the same file.
assert hook.container(a, ours) == raw, "the hook's writer and semmoe's have other bytes for the same content"
shown = json.loads(semmoe("profile", "show", "--json", hooked))
assert shown["summary"]["digest"] == hook.digest(hooked_raw), "the digest is semmoe's"
differ = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
assert differ <= {"source", "created", "digest"}, f"metadata differs in {differ}: {ours} {theirs}"
# A near-tie may be routed otherwise, as torch rounds differently on other processors; the digest then differs, too.
assert ("digest" in differ) == (not all(numpy.array_equal(a[name], b[name]) for name in a)), "the digest does not follow from the tensors"
for name in ("token_ids", "request_offsets", "prompt_lengths"):
    assert (a[name] == b[name]).all(), f"{name} differ"

# Routes as sets, token by token; then counts, without the near-ties on both sides.
same = (numpy.sort(a["experts"], axis=-1) == numpy.sort(b["experts"], axis=-1)).all(axis=-1)
clear = gaps() > GAP
wrong, routes = int((~same & clear).sum()), same.size
tokens = numpy.broadcast_to(a["token_ids"][:, None], same.shape)
layers = numpy.broadcast_to(numpy.arange(same.shape[1])[None, :], same.shape)
count = lambda experts: numpy.unique(numpy.stack([numpy.repeat(x[clear], experts.shape[-1]) for x in (layers, tokens)] + [experts[clear].ravel()]), axis=1, return_counts=True)
(keys_a, counts_a), (keys_b, counts_b) = count(a["experts"].astype(numpy.int64)), count(b["experts"].astype(numpy.int64))
assert wrong == 0, f"{wrong} routes differ although the gap exceeds {GAP}"
assert keys_a.shape == keys_b.shape and (keys_a == keys_b).all() and (counts_a == counts_b).all(), "counts differ"
exceptions = routes - int(clear.sum())
assert exceptions < MOST * routes, f"{exceptions} of {routes} routes are near-ties, more than {MOST:.1%}"
built = {}
for name in (recorded, hooked):
    semmoe("profile", "build", name, "--out", FOLDER / "profile")
    built[name] = semmoe("profile", "show", FOLDER / "profile")
print(f"agreement: ok ({a['token_ids'].size} tokens, {routes} routes, {keys_a.shape[1]} counts equal; {exceptions} near-ties ({exceptions / routes:.4%}), {int((~same).sum())} of them routed otherwise)")
