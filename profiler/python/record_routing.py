#!/usr/bin/env python3
"""Records which experts each token of your prompts activates in a Hugging Face Transformers model, as a semmoe trace.

    record_routing.py --model DIR_OR_NAME --prompts prompts.jsonl --out run.trace.safetensors

Needs torch, transformers (4.51 or later, 5 too) and safetensors. Any `*ForCausalLM` with routed experts works whose routers are modules
named `gate` or `router` with one row of weights for each expert: Qwen2-MoE, Qwen3-MoE, Mixtral, OLMoE, DeepSeek-V2 and V3, GPT-OSS and
others. The model itself is not changed: forward hooks look at what its routers return. What is recorded is kept in OUT.partial until all of
it is: run the same command to resume."""
import argparse, base64, datetime, hashlib, json, os, pathlib, re, struct, sys, tempfile, time

import safetensors.numpy
import numpy
import torch
import transformers

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "top_k", "moe_k", "moe_top_k")
ROUTERS = ("gate", "router", "wg")


class Refused(Exception):
    """A message for people, without a traceback."""


def main():
    arguments = parse()
    try:
        run(arguments)
    except (Refused, OSError) as error:
        sys.exit(f"record_routing: {error}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="a checkpoint's folder, or its name on the hub")
    add("--prompts", required=True, type=pathlib.Path, help='JSON Lines with "prompt", "messages" or "input_ids"')
    add("--out", required=True, type=pathlib.Path, help="the trace to write")
    add("--model-name", help="what engines call the model [default: the last part of --model]")
    add("--max-tokens", type=int, default=1, help="tokens to generate per prompt, greedily; with 1 only the prompt's routing is recorded")
    add("--max-prompt-tokens", type=int, help="cut prompts to this many tokens")
    add("--device", default="cpu", help="cpu, cuda, ... or auto, which spreads the model over what there is [default: cpu]")
    add("--dtype", default="auto", help="float32, bfloat16, ... [default: the checkpoint's]")
    add("--fresh", action="store_true", help="start over where a recording ended early, in place of going on with OUT.partial")
    add("--max-bad", type=float, default=0.01, help="share of prompts that may be unusable before nothing is written")
    arguments = parser.parse_args()
    if arguments.max_tokens < 1 or not 0 <= arguments.max_bad <= 1:
        parser.error("--max-tokens is at least 1, --max-bad between 0 and 1")
    return arguments


def run(arguments):
    lines = [(number, text) for number, text in enumerate(arguments.prompts.open("rb"), 1) if text.strip()]
    if not lines:
        raise Refused(f"{arguments.prompts} holds no prompt")
    say(f"loading {arguments.model}")
    model = load(arguments)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    name = arguments.model_name or pathlib.Path(arguments.model.rstrip("/")).name
    recorder = Recorder(model)
    trace, bad = Trace(recorder.shape), []
    journal = Journal(arguments, model, recorder.shape)
    progress = Progress(len(lines), len(journal.entries))
    for line, text in lines:
        entry = journal.entries.get(line)
        if not entry:
            journal.add(line, entry := one(recorder, tokenizer, text, arguments))
        if "bad" in entry:
            bad.append(f"{arguments.prompts} line {line}: {entry['bad']}")
        else:
            experts = numpy.frombuffer(base64.b64decode(entry["experts"]), trace.kind).reshape(-1, len(recorder.shape.layer_ids), recorder.shape.top_k)
            trace.push(entry["tokens"], entry["prompt"], experts)
        progress.show(trace.requests() + len(bad), trace.tokens())
    progress.end()
    for message in bad[:10]:
        say(f"left out: {message}")
    if len(bad) > arguments.max_bad * len(lines):
        raise Refused(f"{len(bad)} of {len(lines)} prompts were bad, and nothing was written; first, {bad[0]}")
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    source = f"Transformers {transformers.__version__}, {dtype_of(model)}"
    digest = trace.write(arguments.out, model=name, tokenizer_sha256=tokenizer_hash(tokenizer), source=source, created=now)
    journal.remove()
    print(f"{arguments.out}: {trace.requests()} requests, {trace.tokens()} tokens, {len(bad)} left out, digest {digest}")


def one(recorder, tokenizer, text, arguments):
    """A prompt's result, as recorded in the journal."""
    try:
        ids = encode(tokenizer, text)[: arguments.max_prompt_tokens]
        tokens, experts = recorder.record(ids, arguments.max_tokens)
    except Refused as error:
        return {"bad": str(error)}
    return {"prompt": len(ids), "tokens": tokens, "experts": base64.b64encode(experts.astype(recorder.shape.kind()).tobytes()).decode()}


class Journal:
    """OUT.partial: the recording so far, one line per prompt, so that an interrupted recording can be resumed."""

    def __init__(self, arguments, model, shape):
        self.path, self.entries = pathlib.Path(f"{arguments.out}.partial"), {}
        config = model.config.to_json_string().encode()
        head = {"semmoe_journal": 1, "model": arguments.model, "config_sha256": sha256(config), "prompts_sha256": sha256(arguments.prompts.read_bytes()),
                "dtype": dtype_of(model), "transformers": transformers.__version__, "layers": shape.layer_ids,
                "max_tokens": arguments.max_tokens, "max_prompt_tokens": arguments.max_prompt_tokens}
        if self.path.exists() and not arguments.fresh:
            self.read(head)
        else:
            self.file = self.path.open("wb")
            self.write(head)

    def read(self, head):
        """Reads complete lines; a line cut short by the end of the process is recorded again."""
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        try:
            found, *entries = [json.loads(line) for line in whole.splitlines()] or [{}]
            self.entries = {entry.pop("line"): entry for entry in entries}
        except (ValueError, KeyError, AttributeError):
            raise Refused(f"{self.path} is no recording that can go on; --fresh starts over") from None
        if differ := [key for key in head if found.get(key) != head[key]]:
            raise Refused(f"{self.path} was recorded with another {' and '.join(differ)}; --fresh starts over")
        self.file = self.path.open("r+b")
        self.file.truncate(len(whole))
        self.file.seek(len(whole))
        say(f"going on with {self.path}: {len(self.entries)} prompts are recorded")

    def add(self, line, entry):
        self.write({"line": line, **entry})

    def write(self, entry):
        self.file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
        self.file.flush()

    def remove(self):
        self.file.close()
        self.path.unlink()


def sha256(raw):
    return hashlib.sha256(raw).hexdigest()


def dtype_of(model):
    return str(next(model.parameters()).dtype).replace("torch.", "")


def say(text):
    print(text, file=sys.stderr, flush=True)


class Progress:
    """One line that is overwritten on a terminal; elsewhere a line every ten seconds."""

    def __init__(self, prompts, known):
        self.prompts, self.known, self.began, self.shown, self.terminal = prompts, known, time.monotonic(), 0.0, sys.stderr.isatty()

    def show(self, done, tokens):
        now = time.monotonic()
        if done < self.prompts and now - self.shown < (0.2 if self.terminal else 10) or done <= self.known:
            return
        self.shown = now
        left = (now - self.began) * (self.prompts - done) / (done - self.known)
        begin, end = ("\r", " ") if self.terminal else ("", "\n")
        print(f"{begin}{done} of {self.prompts} prompts, {tokens} tokens, {left:.0f} s left", end=end, file=sys.stderr, flush=True)

    def end(self):
        if self.terminal:
            say("")


def load(arguments):
    version = tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:2])
    dtype = arguments.dtype if arguments.dtype == "auto" else getattr(torch, arguments.dtype, None)
    if dtype is None:
        raise Refused(f"--dtype is {arguments.dtype}, expected a type of torch such as bfloat16")
    options = {"dtype" if version >= (4, 56) else "torch_dtype": dtype}
    if arguments.device == "auto":
        return transformers.AutoModelForCausalLM.from_pretrained(arguments.model, device_map="auto", **options).eval()
    return transformers.AutoModelForCausalLM.from_pretrained(arguments.model, **options).to(arguments.device).eval()


def encode(tokenizer, line):
    """Token ids of a line of the prompts file; `messages` win over `input_ids`, and these over `prompt`, as in `semmoe profile record`."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise Refused(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise Refused("not a JSON object")
    if (messages := record.get("messages")) is not None:
        try:
            text = tokenizer.apply_chat_template(messages, tools=record.get("tools"), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # Templates raise whatever they like.
            raise Refused(f"the chat template: {error}") from None
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    elif (ids := record.get("input_ids")) is not None:
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise Refused("input_ids is not a list of token ids")
    elif isinstance(text := record.get("prompt"), str):
        ids = tokenizer(text)["input_ids"]
    else:
        raise Refused("none of messages, input_ids and prompt")
    if not ids:
        raise Refused("the prompt has no tokens")
    return ids


class Shape:
    """The model's shape, as recorded in a trace."""

    def __init__(self, model):
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        self.num_experts = first(config, EXPERTS)
        self.top_k = first(config, TOP_K)
        self.vocab_size = config.vocab_size
        self.num_hidden_layers = config.num_hidden_layers
        self.context = getattr(config, "max_position_embeddings", None)

    def kind(self):
        """The integer type of expert ids in traces."""
        return numpy.dtype(numpy.uint8 if self.num_experts <= 255 else "<u2")


def first(config, names):
    for name in names:
        if isinstance(value := getattr(config, name, None), int):
            return value
    raise Refused(f"the model's configuration has none of {', '.join(names)}: has it routed experts?")


class Recorder:
    """Hooks on all routers of a model."""

    def __init__(self, model):
        self.model, self.shape = model, Shape(model)
        self.routers = find_routers(model, self.shape.num_experts)
        self.shape.layer_ids = sorted(self.routers)
        self.seen = {}
        for layer, router in self.routers.items():
            router.register_forward_hook(lambda module, inputs, output, layer=layer: self.seen.setdefault(layer, []).append(output))

    @torch.no_grad()
    def record(self, ids, max_tokens):
        """Tokens and their experts [n, L, k], strongest first. The last token generated is not run, so it has none and is left out."""
        if max(ids) >= self.shape.vocab_size:
            raise Refused(f"the token id {max(ids)}, expected ids below {self.shape.vocab_size}")
        if self.shape.context and len(ids) + max_tokens - 1 > self.shape.context:
            raise Refused(f"{len(ids)} tokens and {max_tokens} more, expected at most the context's {self.shape.context}")
        device = next(self.model.parameters()).device
        tokens = torch.tensor([ids], device=device)
        if max_tokens > 1:
            mask = torch.ones_like(tokens)
            tokens = self.model.generate(tokens, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
            if tokens.shape[1] > len(ids) + 1:
                tokens = tokens[:, :-1]
            else:
                tokens = tokens[:, : len(ids)]
        self.seen = {}
        # One pass over everything: its routes equal those of single steps, except for the order of sums.
        self.model(tokens, use_cache=False)
        count = tokens.shape[1]
        layers = [self.layer(layer, count) for layer in self.shape.layer_ids]
        return tokens[0].tolist(), numpy.stack(layers, axis=1)

    def layer(self, layer, count):
        outputs = self.seen.get(layer, [])
        if len(outputs) != 1:
            raise Refused(f"the router of layer {layer} ran {len(outputs)} times in one pass, expected once")
        chosen, _ = read(outputs[0], self.shape.num_experts, self.shape.top_k)
        chosen = chosen.reshape(-1, self.shape.top_k).cpu().numpy()
        if chosen.shape[0] != count:
            raise Refused(f"the router of layer {layer} returned {chosen.shape[0]} rows, expected {count}")
        if chosen.min() < 0 or chosen.max() >= self.shape.num_experts:
            raise Refused(f"the router of layer {layer} chose experts outside 0 to {self.shape.num_experts - 1}")
        return chosen


def find_routers(model, experts):
    """The router of each layer: a module of the right name with one row of weights for each expert."""
    found = {}
    for name, module in model.named_modules():
        match = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(?:.*\.)?(\w+?)(?:\.layer)?$", name)
        weight = getattr(module, "weight", None)
        if match and match[2] in ROUTERS and isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.shape[0] == experts:
            layer = int(match[1])
            if layer in found:
                raise Refused(f"layer {layer} has two routers, the second is {name}")
            found[layer] = module
    if not found:
        raise Refused(f"no module named {' or '.join(ROUTERS)} has weights for {experts} experts")
    return found


def read(output, experts, k):
    """Chosen experts [n, k], strongest first, and the router's logits [n, N] where it returns them. Routers return logits; or, in some
    order, logits or scores, weights of the chosen, and the chosen."""
    parts = [part for part in (output if isinstance(output, (tuple, list)) else [output]) if isinstance(part, torch.Tensor)]
    whole = [part.reshape(-1, experts) for part in parts if part.is_floating_point() and part.shape[-1] == experts]
    chosen = [part.reshape(-1, k) for part in parts if not part.is_floating_point() and part.shape[-1] == k]
    if not chosen:
        if len(whole) != 1:
            raise Refused(f"a router returned {len(parts)} tensors, none of them {k} experts or {experts} logits")
        return whole[0].topk(k, dim=-1).indices, whole[0]
    weights = [part.reshape(-1, k) for part in parts if part.is_floating_point() and part.shape[-1] == k and part.shape[-1] != experts]
    weights = weights[0] if weights else (whole[0].gather(1, chosen[0]) if whole else None)
    chosen = chosen[0] if weights is None else chosen[0].gather(1, weights.argsort(dim=-1, descending=True, stable=True))
    return chosen, whole[0] if whole else None


class Trace:
    """A semmoe trace, version 1."""

    def __init__(self, shape):
        self.shape, self.kind, self.token_ids, self.offsets, self.prompts, self.experts = shape, shape.kind(), [], [0], [], []

    def requests(self):
        return len(self.prompts)

    def tokens(self):
        return self.offsets[-1]

    def push(self, tokens, prompt, experts):
        self.token_ids.append(numpy.array(tokens, dtype=numpy.uint32))
        self.offsets.append(self.offsets[-1] + len(tokens))
        self.prompts.append(min(prompt, len(tokens)))
        self.experts.append(experts.astype(self.kind))

    def write(self, path, **metadata):
        """Writes to a temporary file, flushes it and renames it; returns the digest."""
        tensors = {
            "token_ids": numpy.concatenate(self.token_ids or [numpy.zeros(0, numpy.uint32)]),
            "request_offsets": numpy.array(self.offsets, dtype=numpy.uint64),
            "prompt_lengths": numpy.array(self.prompts, dtype=numpy.uint32),
            "experts": numpy.concatenate(self.experts or [numpy.zeros((0, len(self.shape.layer_ids), self.shape.top_k), numpy.uint8)]),
        }
        numbers = {name: str(getattr(self.shape, name)) for name in ("num_experts", "top_k", "vocab_size", "num_hidden_layers")}
        layers = "[" + ",".join(map(str, self.shape.layer_ids)) + "]"
        metadata = {"format": "semmoe.trace", "version": "1", "layer_ids": layers, **numbers, **metadata}
        stated = digest(container(tensors, metadata))
        raw = container(tensors, {**metadata, "digest": stated})
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".semmoe-", suffix=".tmp", delete=False) as file:
            try:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o666 & ~umask())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        return stated


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def container(tensors, metadata):
    """A safetensors file with the keys of its header sorted, so that equal content has equal bytes."""
    raw = safetensors.numpy.save(tensors, metadata)
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:end])
    metadata = {"__metadata__": dict(sorted(header.pop("__metadata__").items()))}
    text = json.dumps(metadata | dict(sorted(header.items())), separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + raw[end:]


def digest(raw):
    """SHA-256 over the tensors, as tables/README.md says."""
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:end])
    hash, u64 = hashlib.sha256(), lambda number: struct.pack("<Q", number)
    for name, tensor in sorted((name, tensor) for name, tensor in header.items() if name != "__metadata__"):
        for part in (name.encode(), tensor["dtype"].encode()):
            hash.update(u64(len(part)) + part)
        hash.update(u64(len(tensor["shape"])) + b"".join(u64(size) for size in tensor["shape"]))
        data = raw[end + tensor["data_offsets"][0] : end + tensor["data_offsets"][1]]
        hash.update(u64(len(data)) + data)
    return hash.hexdigest()


def tokenizer_hash(tokenizer):
    """What tells tokenizers apart in semmoe's files; empty (unknown) for those that are not of the `tokenizers` library."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ""
    file = json.loads(backend.to_str())
    hash, u64 = hashlib.sha256(b"semmoe.tokenizer.1\n"), lambda number: struct.pack("<Q", number)
    def text(part):
        hash.update(u64(len(part.encode())) + part.encode())
    def section(name, count):
        hash.update(name.encode() + u64(count))
    vocabulary = sorted((token.encode(), number) for token, number in backend.get_vocab(True).items())
    section("vocab", len(vocabulary))
    for token, number in vocabulary:
        hash.update(u64(len(token)) + token + struct.pack("<I", number))
    merges = file["model"].get("merges", [])
    section("merges", len(merges))
    for merge in merges:
        left, _, right = merge.partition(" ") if isinstance(merge, str) else (merge[0], "", merge[1])
        text(left)
        text(right)
    added = sorted(file.get("added_tokens", []), key=lambda token: (token["id"], token["content"].encode()))
    section("added", len(added))
    for token in added:
        hash.update(struct.pack("<I", token["id"]))
        text(token["content"])
        hash.update(bytes(int(token.get(flag, False)) for flag in ("single_word", "lstrip", "rstrip", "normalized")))
    return hash.hexdigest()


if __name__ == "__main__":
    main()
