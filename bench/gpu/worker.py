"""`semmoe worker --device cuda`: logits beside the CPU's, tokens per second beside Transformers.

    worker.py make FOLDER SEED SIZE:DTYPE...        checkpoints of Qwen3-MoE's shape, and the bandwidth of a copy
    worker.py transformers FOLDER PROMPT NEW B...   tokens per second of eager Transformers at these batches

bench/gpu/run calls the steps; the two commands are processes of their own, as only they use PyTorch. Without it `make` takes Python's
generator, which does for the dry run."""
import array, concurrent.futures, contextlib, ctypes, http.client, json, lzma, os, pathlib, random, re, shutil, signal, struct, subprocess, sys, threading, time

COMMON = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
    "use_sliding_window": False, "sliding_window": None, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "intermediate_size": 256, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None, "initializer_range": 0.02,
}
NAMES = ("hidden_size", "num_hidden_layers", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_attention_heads",
         "num_key_value_heads", "head_dim", "vocab_size")
SIZES = {
    # Qwen3-30B-A3B's, with 8 of its 48 layers.
    "large": (2048, 8, 128, 8, 768, 32, 4, 128, 151936),
    "small": (256, 4, 16, 4, 96, 8, 4, 32, 2048),
    "dry": (64, 2, 8, 2, 32, 8, 4, 16, 512),
}
BATCHES = (1, 16, 64)
LAYOUTS = tuple((world, attention) for world in (1, 2, 4) for attention in ("dp", "tp"))
# Sampling of the requests. Drawn answers may differ where a random number falls between two tokens: one in ten at most.
GREEDY = {"temperature": 0}
DRAWS = ({"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.9, "top_k": 20}, {"temperature": 1.0})
LEAST_EQUAL_DRAWS = 0.9
# Time limit of a step in seconds.
LIMITS_S = {"checkpoints": 120, "logits": 100, "switch": 30, "speed": 75, "transformers": 75, "tp": 30, "processes": 45}
# Limits: logits and log probabilities in f32; the gap below which either of the two best tokens is accepted.
MOST_DIFFERENCE = 1e-4
TOOLS = pathlib.Path(__file__).resolve()


def config(size, dtype):
    return {**COMMON, **dict(zip(NAMES, SIZES[size])), "torch_dtype": {"f32": "float32", "bf16": "bfloat16"}[dtype]}


def tensors(model):
    """Name, shape and standard deviation of each tensor; norms are ones."""
    hidden, experts, width = model["hidden_size"], model["num_experts"], model["moe_intermediate_size"]
    head, heads, kv_heads = model["head_dim"], model["num_attention_heads"], model["num_key_value_heads"]
    matrix = lambda name, rows, columns: (name, (rows, columns), columns**-0.5)
    ones = lambda name, width: (name, (width,), None)
    yield "model.embed_tokens.weight", (model["vocab_size"], hidden), 1.0
    for layer in range(model["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield ones(f"{at}.input_layernorm.weight", hidden)
        yield ones(f"{at}.post_attention_layernorm.weight", hidden)
        for part, rows in (("q", heads * head), ("k", kv_heads * head), ("v", kv_heads * head)):
            yield matrix(f"{at}.self_attn.{part}_proj.weight", rows, hidden)
        yield matrix(f"{at}.self_attn.o_proj.weight", hidden, heads * head)
        yield ones(f"{at}.self_attn.q_norm.weight", head)
        yield ones(f"{at}.self_attn.k_norm.weight", head)
        yield matrix(f"{at}.mlp.gate.weight", experts, hidden)
        for expert in range(experts):
            yield matrix(f"{at}.mlp.experts.{expert}.gate_proj.weight", width, hidden)
            yield matrix(f"{at}.mlp.experts.{expert}.up_proj.weight", width, hidden)
            yield matrix(f"{at}.mlp.experts.{expert}.down_proj.weight", hidden, width)
    yield ones("model.norm.weight", hidden)
    yield matrix("lm_head.weight", model["vocab_size"], hidden)


def by_torch(torch, seed, dtype):
    where = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(where).manual_seed(seed)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]

    def write(file, shape, deviation):
        tensor = torch.empty(shape, dtype=kind, device=where)
        tensor = (tensor.fill_(1.0) if deviation is None else tensor.normal_(0.0, deviation, generator=generator)).cpu()
        file.write((ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr()))

    return write


def by_python(seed, dtype):
    generator = random.Random(seed)

    def write(file, shape, deviation):
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = array.array("f", (1.0 if deviation is None else generator.gauss(0.0, deviation) for _ in range(count)))
        # bf16 is the upper half.
        file.write(values if dtype == "f32" else array.array("H", (bits >> 16 for bits in array.array("I", values.tobytes()))))

    return write


def byte_tokens():
    """A tokenizer whose ids are bytes, plus one token that ends a text."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    end = {"id": 256, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
             "byte_fallback": False, "ignore_merges": False, "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None, "pre_tokenizer": bytes_of,
            "post_processor": None, "decoder": bytes_of, "model": model}


def make(folder, seed, wanted):
    """Writes a checkpoint to FOLDER/DTYPE for each SIZE:DTYPE, and prints a line when it is complete."""
    try:
        import torch
    except ImportError:
        torch = None
    if torch and torch.cuda.is_available():
        print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_gb_per_s": round(copy_gb_per_s(torch), 1)}), flush=True)
    for size, dtype in (each.split(":") for each in wanted):
        begun = time.monotonic()
        count = write_checkpoint(pathlib.Path(folder) / dtype, config(size, dtype), by_torch(torch, seed, dtype) if torch else by_python(seed, dtype), dtype)
        print(json.dumps({"dtype": dtype, "size": size, "bytes": count, "seconds": round(time.monotonic() - begun, 1)}), flush=True)


def write_checkpoint(folder, model, write, dtype):
    """Writes tensor by tensor: a large one is ten gigabytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model, indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokens()))
    header, end, width = {"__metadata__": {"format": "pt"}}, 0, {"f32": 4, "bf16": 2}[dtype]
    for name, shape, _ in tensors(model):
        begin, end = end, end + width * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": dtype.upper(), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, shape, deviation in tensors(model):
            write(file, shape, deviation)
    return end


def copy_gb_per_s(torch):
    """Bytes read and written by copies of 1 GiB on the device."""
    ours, theirs = (torch.zeros(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = []
    for _ in range(8):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        theirs.copy_(ours)
        marks[1].record()
        torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]))
    return 2 * (1 << 30) / min(times) / 1e6


def transformers(folder, prompt, new, batches):
    """Prints a line per batch: with the library's own choice of kernels for experts, then with its plain loop."""
    import torch
    import transformers as library
    begun, where = time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu"
    kind = library.AutoModelForCausalLM
    try:
        model, loaded = kind.from_pretrained(folder, dtype=torch.bfloat16, device_map=where), "checkpoint"
    except Exception as error:  # noqa: BLE001 - any failure of a library that is only compared with
        print(f"without device_map: {error}", file=sys.stderr)
        model, loaded = kind.from_pretrained(folder, dtype=torch.bfloat16).to(where), "checkpoint"
    model.eval()
    model.generation_config.eos_token_id = None
    how = {name: getattr(model.config, f"_{name}_implementation", None) for name in ("attn", "experts")}
    print(json.dumps({"version": library.__version__, "weights": loaded, **how, "load_s": round(time.monotonic() - begun, 1)}), flush=True)

    def seconds(ids, count):
        at = time.monotonic()
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        assert found.shape[1] == ids.shape[1] + count, found.shape
        return time.monotonic() - at

    def measure(**more):
        for batch in batches:
            ids = torch.randint(0, 256, (batch, prompt), device=where)
            seconds(ids, 3)
            first, all_of_them = min(seconds(ids, 1) for _ in range(2)), seconds(ids, new)
            print(json.dumps({"batch": batch, **more, **decode(batch, new, first, all_of_them)}), flush=True)

    measure()
    if how["experts"] not in (None, "eager") and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
        measure(experts="eager")


def decode(batch, new, first_s, all_s):
    """Tokens per second after the first of each sequence, and milliseconds for each step."""
    steps_s = max(all_s - first_s, 1e-9)
    return {"decode_tokens_per_s": round(batch * (new - 1) / steps_s, 1), "step_ms": round(1000 * steps_s / (new - 1), 3),
            "first_s": round(first_s, 4), "all_s": round(all_s, 4)}


def step_bytes(model, batch, width=2):
    """Bytes of weights that a decode step must read: attention, router, head, and the distinct experts of so many tokens, were each
    chosen equally often."""
    hidden, experts, chosen = model["hidden_size"], model["num_experts"], model["num_experts_per_tok"]
    heads = model["head_dim"] * (2 * model["num_attention_heads"] + 2 * model["num_key_value_heads"])
    distinct = experts * (1 - (1 - chosen / experts) ** batch)
    layer = hidden * (heads + experts + 3 * model["moe_intermediate_size"] * distinct)
    return width * (model["num_hidden_layers"] * layer + hidden * model["vocab_size"])


class Unit:
    """A unit of ranks: `here` of them in a process on a GPU (all, unless given), else a process each."""

    def __init__(self, lab, model, world=1, attention="dp", dtype="f32", device=None, more=(), here=None):
        self.lab, self.processes, self.log = lab, [], lab.folder / "worker.log"
        device = device or lab.device
        begin = [lab.program, "worker", "--model", model, "--world", str(world), "--attention", attention, *more]
        here = (here or world) if device == "cuda" else 1
        if device == "cuda":
            begin += ["--device", "cuda", "--dtype", dtype, "--ranks-here", str(here)]
        try:
            events = self.start([*begin, "--rank", "0", "--rendezvous", "127.0.0.1:0", "--listen", "127.0.0.1:0"])
            address = self.event(events, "bound")["rendezvous"]
            for rank in range(here, world, here):
                self.start([*begin, "--rank", str(rank), "--rendezvous", address])
            while not (ready := self.event(events, "ready")).get("http"):
                pass
        except BaseException:
            self.stop()
            raise
        self.host = ready["http"]

    def start(self, command):
        log = open(self.log, "ab")
        process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=log, text=True)
        log.close()
        self.processes.append(process)
        return process

    def event(self, process, wanted):
        """The next event of this kind. A rank that sends none in time is stopped."""
        late = threading.Timer(self.lab.left(45), process.kill)
        late.start()
        try:
            for line in process.stdout:
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if event.get("event") == wanted:
                        return event
        finally:
            late.cancel()
        said = self.log.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"the worker did not become {wanted}: {said[-1][:300] if said else 'it said nothing'}")

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection(self.host, timeout=self.lab.left(60))
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{path} answered {answer.status}: {text[:300]}")
        return text

    def generate(self, ids, new, sampling=GREEDY, **more):
        params = {"max_new_tokens": new, "ignore_eos": True, **sampling}
        return json.loads(self.ask("POST", "/generate", {"input_ids": ids, "sampling_params": params, **more}))

    def together(self, prompts, new, **more):
        """The answers, and how long all of them took."""
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            begun = time.monotonic()
            answers = list(pool.map(lambda ids: self.generate(ids, new, **more), prompts))
            return answers, time.monotonic() - begun

    def drawn(self, prompts, new):
        """The tokens of each prompt with each sampling."""
        return [answer["output_ids"] for way in DRAWS for answer in self.together(prompts, new, sampling={**way, "sampling_seed": 7})[0]]

    def counters(self):
        """Seconds, launches and the like, summed over ranks, layers and batches."""
        sums = {}
        for line in self.ask("GET", "/metrics").splitlines():
            found = re.match(r"(semmoe_\w*(?:second|launch|synchron|steps|gpu)\w*)(?:\{(.*)\})? ([-+.\deE]+)$", line)
            if found and "bucket" not in found[1]:
                kind = re.search(r'(?:kind|phase|stage)="(\w+)"', found[2] or "")
                name = f"{found[1]} {kind[1]}" if kind else found[1]
                sums[name] = sums.get(name, 0.0) + float(found[3])
        return sums

    def stop(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class Lab:
    """Where the steps keep what they share. `call` runs a command within the part's time, of which `part_left` seconds are left: exit code,
    output, reason."""

    def __init__(self, call, program, part_left=lambda: 600.0, device="cuda", dry=False):
        self.call, self.part_left, self.device, self.dry = call, part_left, device, dry
        self.until = float("inf")
        room = pathlib.Path("/dev/shm")
        large = room.is_dir() and shutil.disk_usage(room).free > 32 << 30
        self.folder = pathlib.Path(room if large else "/tmp") / f"semmoe-worker-{os.getpid()}"
        self.folder.mkdir()
        self.program = self.unpacked(program)
        self.device_said = {}

    def left(self, most_s):
        """Seconds to wait: the step's remaining time, at most `most_s`."""
        seconds = min(most_s, self.until - time.monotonic(), self.part_left())
        if seconds < 1:
            raise RuntimeError("the time of this step is over")
        return seconds

    def limited(self, name):
        def step(seed):
            self.until = time.monotonic() + LIMITS_S[name]
            return getattr(self, name)(seed)
        return step

    def unpacked(self, program):
        if program.suffix != ".xz":
            return program
        here = self.folder / "semmoe"
        here.write_bytes(lzma.decompress(program.read_bytes()))
        here.chmod(0o755)
        return here

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def checkpoints(self, seed):
        """Both checkpoints, and the version of the program."""
        code, printed, reason = self.call([self.program, "--version"], 20)
        if code != 0:
            return {"passed": False, "reason": reason}
        said = {"version": printed.strip().splitlines()}
        wanted = ("dry:f32", "dry:bf16") if self.dry else ("small:f32", "large:bf16")
        code, printed, reason = self.call([sys.executable, TOOLS, "make", self.folder, seed, *wanted], self.left(150))
        lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        self.device_said = next((line for line in lines if "device" in line), {})
        said |= {**self.device_said, "checkpoints": [line for line in lines if "dtype" in line]}
        return {**said, "passed": True} if code == 0 else {**said, "passed": False, "reason": reason}

    def logits(self, seed):
        """f32: greedy tokens and their log probabilities, beside those of the CPU worker."""
        generator = random.Random(int(seed))
        count, new = (6, 6) if self.dry else (24, 24)
        prompts = [[generator.randrange(256) for _ in range(generator.randrange(3, 150))] for _ in range(count)]
        asked = {"return_logprob": True, "top_logprobs_num": 2}
        with Unit(self, self.folder / "f32", device="cpu") as unit:
            expected, _ = unit.together(prompts, new, **asked)
            expected_draws = unit.drawn(prompts[:4], new)
        rows = []
        for world, attention in LAYOUTS:
            row = {"world": world, "attention": attention}
            try:
                begun = time.monotonic()
                # As many steps with few rows as with many: prompts are cut.
                with Unit(self, self.folder / "f32", world, attention, more=["--step-tokens", "256"]) as unit:
                    row["up_s"] = round(time.monotonic() - begun, 1)
                    found, seconds = unit.together(prompts, new, **asked)
                    counters = unit.counters()
                    draws = unit.drawn(prompts[:4], new)
                    # Requests with logprobs, above, read all rows.
                    rows_read = unit.counters().get("semmoe_gpu_logit_rows_total", 0) - counters.get("semmoe_gpu_logit_rows_total", 0)
                same = sum(ours == theirs for ours, theirs in zip(draws, expected_draws, strict=True))
                row |= {"drawn": len(draws), "drawn_equal": same, "logit_rows_of_drawn": rows_read}
                row |= {**compare(expected, found), "seconds": round(seconds, 2), "counters": counters}
                if row["passed"] and same < LEAST_EQUAL_DRAWS * len(draws):
                    row |= {"passed": False, "reason": f"{len(draws) - same} of {len(draws)} answers that were drawn differ"}
            except Exception as error:  # noqa: BLE001 - the other layouts are still to be seen
                row |= {"passed": False, "reason": str(error)[:300]}
            rows.append(row)
        bad = [row for row in rows if not row["passed"]]
        reasons = dict.fromkeys(f"{row['world']} ranks, {row['attention']}: {row['reason']}" for row in bad)
        return {"sequences": count, "tokens_each": new, "layouts": rows, "passed": not bad, **({"reason": "; ".join(reasons)} if bad else {})}

    def switch(self, seed):
        """f32, two ranks: they switch to and fro while requests run; greedy tokens beside those of a CPU worker that does not."""
        generator = random.Random(int(seed) + 1)
        count, new = (4, 24) if self.dry else (16, 128)
        prompts = [[generator.randrange(256) for _ in range(generator.randrange(3, 150))] for _ in range(count)]
        asked = {"return_logprob": True, "top_logprobs_num": 2}
        with Unit(self, self.folder / "f32", device="cpu") as unit:
            expected, _ = unit.together(prompts, new, **asked)
        seconds, inside = [], 0
        with Unit(self, self.folder / "f32", 2, "dp,tp", more=["--step-tokens", "256"]) as unit, concurrent.futures.ThreadPoolExecutor(1) as pool:
            requests = pool.submit(unit.together, prompts, new, **asked)
            for to in ("tp", "ep") * 4:
                seconds.append(json.loads(unit.ask("POST", "/switch", {"to": to}))["last_seconds"])
                if requests.done():
                    break
                inside += 1
            found, _ = requests.result()
        said = {"sequences": count, "tokens_each": new, "switches": len(seconds), "while_requests_ran": inside,
                "seconds": [round(each, 4) for each in seconds], **compare(expected, found)}
        return said if inside or not said["passed"] else {**said, "passed": False, "reason": "requests were over before a switch was"}

    def processes(self, seed):
        """f32, two processes of a rank each, on GPUs of their own where there are two: greedy tokens, with two switches between, beside those
        of a CPU worker. On one GPU, which runs the processes in turns, this is slow."""
        generator = random.Random(int(seed) + 2)
        prompts = [[generator.randrange(256) for _ in range(generator.randrange(3, 60))] for _ in range(4)]
        asked = {"return_logprob": True, "top_logprobs_num": 2}
        with Unit(self, self.folder / "f32", device="cpu") as unit:
            expected, _ = unit.together(prompts, 8, **asked)
        found = []
        with Unit(self, self.folder / "f32", 2, "dp,tp", more=["--step-tokens", "64"], here=1) as unit:
            for to in (None, "tp", "ep"):
                if to:
                    unit.ask("POST", "/switch", {"to": to})
                found += unit.together(prompts, 8, **asked)[0]
        return {"sequences": len(found), "switches": 2, **compare(expected * 3, found)}

    def speed(self, seed, world=1, attention="dp", batches=BATCHES):
        """bf16: tokens per second by batch, over HTTP, and what reading the weights alone would allow."""
        generator = random.Random(int(seed))
        prompt, new, chunk = (16, 6, 64) if self.dry else (128, 128, 2048)
        prompts = lambda count, length: [[generator.randrange(256) for _ in range(length)] for _ in range(count)]
        limits = ["--max-running", "64", "--step-tokens", str(chunk), "--kv-tokens", "32768", "--no-prefix-reuse"]
        model, bandwidth = config("dry" if self.dry else "large", "bf16"), self.device_said.get("copy_gb_per_s")
        rows, begun = [], time.monotonic()
        said = {"world": world, "attention": attention, "prompt": prompt, "new": new, "copy_gb_per_s": bandwidth, "batches": rows}
        try:
            with Unit(self, self.folder / "bf16", world, attention, dtype="bf16", more=limits) as unit:
                said["up_s"] = round(time.monotonic() - begun, 1)
                unit.together(prompts(2, prompt), 4)
                for batch in batches:
                    unit.together(prompts(batch, prompt), 3)
                    first = min(unit.together(prompts(batch, prompt), 1)[1] for _ in range(2))
                    before = unit.counters()
                    answers, seconds = unit.together(prompts(batch, prompt), new)
                    after = unit.counters()
                    short = sum(len(answer["output_ids"]) != new for answer in answers)
                    if short:
                        raise RuntimeError(f"{short} of {batch} answers are shorter than {new} tokens")
                    row = {"batch": batch, **decode(batch, new, first, seconds)}
                    if bandwidth:
                        row["weights_ms"] = round(step_bytes(model, batch) / bandwidth / 1e6, 3)
                        row["share_of_weight_reading"] = round(row["weights_ms"] / row["step_ms"], 3)
                    more = {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name)}
                    if steps := more.get("semmoe_layout_steps_total decode"):
                        # By the engine's own clock, without HTTP.
                        row["engine_step_ms"] = round(1000 * more.get("semmoe_layout_step_seconds_total decode", 0.0) / steps, 3)
                    row["counters"] = {name: round(value, 6) for name, value in more.items()}
                    rows.append(row)
                count, length = (2, 48) if self.dry else (8, 2048)
                _, seconds = unit.together(prompts(count, length), 1)
                said["prefill"] = {"prompts": count, "tokens_each": length, "tokens_per_s": round(count * length / seconds)}
        except Exception as error:  # noqa: BLE001 - what was measured before is kept
            return {**said, "passed": False, "reason": str(error)[:300]}
        return {**said, "passed": True}

    def tp(self, seed):
        """Tokens per second of two ranks that share heads, at one batch: SRS and SAG between them."""
        return self.speed(seed, 2, "tp", (16,))

    def transformers(self, _seed):
        prompt, new = (16, 6) if self.dry else (128, 128)
        command = [sys.executable, TOOLS, "transformers", self.folder / "bf16", prompt, new, *BATCHES]
        code, printed, reason = self.call(command, self.left(90), env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"})
        lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        rows = lines[1:]
        said = {**(lines[0] if lines else {}), "batches": [row for row in rows if "experts" not in row], "loop": [row for row in rows if "experts" in row]}
        # The plain loop is only measured if there is time for it.
        if len(said["batches"]) == len(BATCHES):
            return {**said, "passed": True}
        if self.dry and "No module named" in reason:
            return {**said, "passed": True, "notice": reason}
        return {**said, "passed": False, "reason": reason}

    def steps(self):
        return {f"worker-{name}": self.limited(name) for name in LIMITS_S}


def compare(expected, found):
    """Equal sequences; those that differ where the CPU's two best are as good as equal; the largest difference of log probabilities."""
    equal = close = 0
    most = 0.0
    for ours, theirs in zip(found, expected):
        pairs = list(zip(ours["meta_info"]["output_token_logprobs"], theirs["meta_info"]["output_token_logprobs"], strict=True))
        same = next((at for at, (a, b) in enumerate(pairs) if a[1] != b[1]), len(pairs))
        most = max([most, *(abs(a[0] - b[0]) for a, b in pairs[:same])])
        if same == len(pairs):
            equal += 1
        else:
            best, second = theirs["meta_info"]["output_top_logprobs"][same][:2]
            close += best[0] - second[0] < MOST_DIFFERENCE
    differing = len(expected) - equal - close
    said = {"equal": equal, "close": close, "differing": differing, "most_difference": most, "passed": not differing and most <= MOST_DIFFERENCE}
    reason = f"{differing} of {len(expected)} sequences differ, log probabilities by {most:.1e} at most"
    return said if said["passed"] else {**said, "reason": reason}


def lines(document):
    """The worker's part of the table."""
    for row in document.get("worker-logits", {}).get("layouts", []):
        print(f"worker f32, {row['world']} ranks, {row['attention']}: "
              + (f"{row['equal']} equal, {row['close']} undecided, {row['differing']} differ, log probabilities within {row['most_difference']:.1e}"
                 if "equal" in row else row.get("reason", "")))
    if "equal" in (row := document.get("worker-switch", {})):
        print(f"worker f32, 2 ranks, {row['switches']} switches of {max(row['seconds'])} s at most: {row['equal']} equal, {row['close']} undecided, {row['differing']} differ")
    if "equal" in (row := document.get("worker-processes", {})):
        print(f"worker f32, 2 processes, {row['switches']} switches: {row['equal']} equal, {row['close']} undecided, {row['differing']} differ")
    theirs = {row["batch"]: row for row in document.get("worker-transformers", {}).get("batches", [])}
    for step in ("worker-speed", "worker-tp"):
        for row in document.get(step, {}).get("batches", []):
            said = document[step]
            beside = theirs.get(row["batch"])
            share = row.get("share_of_weight_reading")
            print(f"worker bf16, {said['world']} ranks, {said['attention']}, batch {row['batch']}: {row['decode_tokens_per_s']:.0f} tokens/s, {row['step_ms']:.2f} ms a step"
                  + (f", {share:.0%} of reading the weights" if share else "")
                  + (f"; Transformers {beside['decode_tokens_per_s']:.0f} ({row['decode_tokens_per_s'] / beside['decode_tokens_per_s']:.1f}x)" if beside else ""))
        if prefill := document.get(step, {}).get("prefill"):
            print(f"worker bf16, {document[step]['world']} ranks, prefill of {prefill['prompts']} x {prefill['tokens_each']}: {prefill['tokens_per_s']} tokens/s")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", folder, seed, *wanted]:
            make(folder, int(seed), wanted)
        case ["transformers", folder, prompt, new, *batches]:
            transformers(folder, int(prompt), int(new), [int(batch) for batch in batches])
        case _:
            sys.exit(__doc__)
