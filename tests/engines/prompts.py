#!/usr/bin/env python3
"""Compares the token ids of prompts, as a real engine and as semmoe read them: prompts.py ENGINE [--version V] [--tokenizer DIR]...

The engine runs a one-layer model with random weights, once for each template and tokenizer, and tokenizes 185 chats and
completions of all shapes. semmoe's ids are those of `semmoe template check --engine ENGINE@V --ids`. The templates are those of
tests/templates/run.py, which installs them, and one that writes BOS for a tokenizer that adds one. The bundled tokenizer takes part in any case."""
import argparse, gzip, importlib.util, json, pathlib, random, shutil, subprocess, sys, tempfile, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor

import launch

sys.path.insert(0, str(launch.REPOSITORY / "tests/templates"))
from chats import BARE_TOOL, PARTS, PLAIN_TOOL, SYSTEM, WEATHER, assistant, call, result, user

spec = importlib.util.spec_from_file_location("corpus", launch.REPOSITORY / "tests/templates/run.py")
corpus = importlib.util.module_from_spec(spec)
spec.loader.exec_module(corpus)

TEMPLATES = ["Qwen3-Coder", "openai-gpt-oss-120b", "LFM2.5-8B-A1B"]
BOS = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Chats with a template of their own: loops over parts, prints everything it receives.
LOOPS = "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
SHOWS = "{% for m in messages %}{{ m }}{% endfor %}{{ tools }}{{ documents }}{{ reasoning_effort }}{{ enable_thinking }}{{ thinking }}{{ site }}{{ add_generation_prompt }}"
DEFAULTS = {"site": "Ulm", "enable_thinking": True}
CONTEXT = 8192
CHATS = 100


def as_text(arguments=None, **more):
    one = call(**more)
    one["function"]["arguments"] = json.dumps(one["function"]["arguments"]) if arguments is None else arguments
    return one


def shapes():
    """A name and a body for each thing that an engine may do before its template."""
    turns = [user(), assistant(), user("And through Köln? 日本 🦀")]
    called = [user("The weather?"), assistant(None, tool_calls=[as_text()]), result()]
    tools = [WEATHER, PLAIN_TOOL, BARE_TOOL]
    one = [user()]
    yield "plain", {"messages": one}
    yield "system", {"messages": [SYSTEM, *one]}
    yield "turns", {"messages": [SYSTEM, *turns]}
    yield "assistant last", {"messages": turns[:2]}
    yield "assistant last, parts", {"messages": [user(), assistant(PARTS)]}
    yield "content first", {"messages": [{"content": "Hi", "role": "user"}]}
    yield "empty texts", {"messages": [{"role": "system", "content": ""}, user(""), assistant(""), user(" \n ")]}
    yield "special tokens inside", {"messages": [user("<|im_start|>system\nno<|im_end|> </s>[INST] <think> <|endoftext|><|start|>x {{ x }} {% if %}")]}
    yield "two parts", {"messages": [user(PARTS)]}
    yield "one part", {"messages": [user(PARTS[:1])]}
    yield "no parts", {"messages": [user([])]}
    yield "parts everywhere", {"messages": [{"role": "system", "content": PARTS}, user(PARTS), assistant(PARTS), user(PARTS[:1])]}
    yield "part with extras", {"messages": [user([{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}])]}
    yield "strings as parts", {"messages": [user(["A", "B"])]}
    yield "input_text", {"messages": [user([{"type": "input_text", "text": "A"}, {"type": "text", "text": "B"}])]}
    yield "refusal part", {"messages": [user(), assistant([{"type": "refusal", "refusal": "No."}]), user()]}
    yield "thinking part", {"messages": [user(), assistant([{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Ah."}]), user()]}
    yield "null content", {"messages": called, "tools": tools}
    yield "missing content", {"messages": [user(), {"role": "assistant", "tool_calls": [as_text()]}, result(), user("Thanks")], "tools": tools}
    yield "null content without calls", {"messages": [user(), assistant(None), user()]}
    yield "reasoning_content", {"messages": [user(), assistant(reasoning_content="Rivers."), user()]}
    yield "reasoning", {"messages": [user(), assistant(reasoning="Rivers.", thinking="Hm."), user()]}
    yield "both reasonings", {"messages": [user(), assistant(reasoning="Rivers.", reasoning_content="Lakes."), user()]}
    yield "reasoning of a call", {"messages": [user(), assistant("", reasoning_content="I call.", tool_calls=[as_text()]), result()], "tools": tools}
    yield "keys of all kinds", {"messages": [user(name="Ada", x=[1]), assistant(name="Bot", refusal="no", audio=None, phase="commentary"), user(weight=1.5)]}
    yield "null keys", {"messages": [user(), assistant(tool_calls=None, refusal=None, name="B"), user()]}
    yield "empty calls", {"messages": [user(), assistant(tool_calls=[]), user()]}
    yield "tool result of parts", {"messages": [*called[:2], {**result(), "content": PARTS}], "tools": tools}
    yield "tool result without a name", {"messages": [*called[:2], {"role": "tool", "content": "21", "tool_call_id": "call_0a1b2c3d4"}], "tools": tools}
    yield "two calls", {"messages": [user(), assistant("I look.", tool_calls=[as_text(), as_text(name="now", arguments="{}", id="b")]), result(), result("13:05", "now", "b")], "tools": tools}
    yield "call with an index", {"messages": [user(), assistant("", tool_calls=[{**as_text(), "index": 0}]), result()], "tools": tools}
    for name, arguments in (("no JSON", "{"), ("a list", "[]"), ("empty", ""), ("null", "null"), ("numbers", '{"a": 1.0, "b": 1e5, "c": 12345678901234567890, "d": "\\u00e9"}')):
        yield f"arguments: {name}", {"messages": [user(), assistant("", tool_calls=[as_text(arguments)]), result()], "tools": tools}
    yield "developer", {"messages": [{"role": "developer", "content": "Be short."}, user()]}
    yield "system and developer", {"messages": [SYSTEM, {"role": "developer", "content": "Be short."}, user()]}
    yield "late developer", {"messages": [user(), assistant(), {"role": "developer", "content": PARTS}, user()]}
    yield "system of a client", {"messages": [{"role": "system", "content": "x-anthropic-billing-header: cch=1\nBe short."}, user()]}
    yield "another role", {"messages": [{"role": "critic", "content": "No."}, user()]}
    yield "role in capitals", {"messages": [{"role": "System", "content": "No."}, user()]}
    yield "tools", {"messages": one, "tools": tools}
    yield "no tools", {"messages": one, "tools": []}
    yield "null tools", {"messages": one, "tools": None}
    odd = {"function": {"parameters": {"type": "object", "properties": {"a": {"type": "string"}}}, "strict": True, "x": 1, "name": "odd"}, "y": 2, "type": "function"}
    yield "odd tool", {"messages": one, "tools": [odd]}
    yield "tool without a description", {"messages": [SYSTEM, user()], "tools": [{"type": "function", "function": {"name": "p", "parameters": {"type": "object", "properties": {}}}}]}
    yield "deferred tool", {"messages": one, "tools": [{**PLAIN_TOOL, "defer_loading": False}]}
    for choice in ("none", "auto", "required", {"type": "function", "function": {"name": "now"}}):
        yield f"tool_choice: {choice}", {"messages": one, "tools": [WEATHER, PLAIN_TOOL], "tool_choice": choice}
    for effort in ("none", "low", "medium", "high", "minimal", None):
        yield f"reasoning_effort: {effort}", {"messages": [SYSTEM, user()], "reasoning_effort": effort}
    yield "reasoning object", {"messages": one, "reasoning": {"effort": "low"}}
    yield "reasoning enabled", {"messages": one, "reasoning": {"enabled": True}}
    for name, value in (("enable_thinking", False), ("thinking", True), ("reasoning_effort", "high"), ("site", "Bonn"), ("site", None), ("model_identity", "You are Ulm."), ("builtin_tools", ["python"]), ("keep_past_thinking", True), ("site", "auto")):
        yield f"{name}={value}", {"messages": [SYSTEM, *turns[:2], user()], "chat_template_kwargs": {name: value}}
    yield "effort twice", {"messages": one, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high", "enable_thinking": False}}
    yield "continued", {"messages": [user(), assistant("The Dan")], "continue_final_message": True, "add_generation_prompt": False}
    yield "continued, spaces", {"messages": [user(), assistant("The Danube ")], "continue_final_message": True, "add_generation_prompt": False}
    yield "continued, parts", {"messages": [user(), assistant(PARTS)], "continue_final_message": True, "add_generation_prompt": False}
    yield "continued and opened", {"messages": [user(), assistant("The Dan")], "continue_final_message": True}
    yield "continued user", {"messages": [user("The Dan")], "continue_final_message": True, "add_generation_prompt": False}
    yield "no generation prompt", {"messages": one, "add_generation_prompt": False}
    yield "no generation prompt, as a word", {"messages": one, "add_generation_prompt": "false"}
    yield "documents", {"messages": one, "documents": [{"title": "Ulm", "text": "A town."}]}
    yield "documents among variables", {"messages": one, "chat_template_kwargs": {"documents": [{"title": "Ulm", "text": "A town."}]}}
    yield "special tokens wanted", {"messages": one, "add_special_tokens": True}
    yield "own template", {"messages": [user(PARTS)], "chat_template": LOOPS, "tools": [PLAIN_TOOL]}
    yield "own template among variables", {"messages": [user(PARTS)], "chat_template_kwargs": {"chat_template": LOOPS}}
    yield "completion", {"prompt": "Which rivers flow through Ulm?"}
    yield "completion with special tokens", {"prompt": "<|im_start|>user\nHi<|im_end|> <|endoftext|>"}
    yield "completion without special tokens", {"prompt": "Hi", "add_special_tokens": False}


def mixed():
    """Random combinations of shapes."""
    dice = random.Random(35)
    known = [body for _, body in shapes() if body.get("messages")]
    for number in range(1000):
        several = dice.sample(known, 2)
        messages = [*several[0]["messages"], *several[1]["messages"]] if dice.random() < 0.5 else several[0]["messages"]
        fields = {name: value for body in several for name, value in body.items() if name not in ("messages", "chat_template", "tool_choice") and dice.random() < 0.7}
        yield f"mixed {number}", {**fields, "messages": messages}


def prepare(home, tokenizer, adds_bos):
    """A model of one layer for a tokenizer; random weights need no file."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, home / name)
    if not (home / "tokenizer.json").exists():
        (home / "tokenizer.json").write_bytes(gzip.decompress((tokenizer / "tokenizer.json.gz").read_bytes()))
    whole = json.loads((home / "tokenizer.json").read_text())
    ids = [*whole["model"]["vocab"].values(), *(token["id"] for token in whole["added_tokens"])]
    settings = json.loads((home / "tokenizer_config.json").read_text()) if (home / "tokenizer_config.json").exists() else {}
    settings.pop("chat_template", None)
    if adds_bos:
        token = "<|endoftext|>"
        id = next(added["id"] for added in whole["added_tokens"] if added["content"] == token)
        sequence = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*sequence, {"Sequence": {"id": "B", "type_id": 1}}]
        whole["post_processor"] = {"type": "TemplateProcessing", "single": sequence, "pair": pair, "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}}}
        settings["bos_token"] = token
        (home / "tokenizer.json").write_text(json.dumps(whole))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((launch.MODEL / "config.json").read_text())
    size = (max(ids) // 256 + 1) * 256
    config |= {"vocab_size": size, "num_hidden_layers": 1, "tie_word_embeddings": False, "max_position_embeddings": CONTEXT}
    (home / "config.json").write_text(json.dumps(config))


def options(engine):
    common = ["--load-format", "dummy", "--trust-request-chat-template", "--default-chat-template-kwargs", json.dumps(DEFAULTS)]
    if engine == "vllm":
        return [*common, "--max-model-len", str(CONTEXT), "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    return [*common, "--context-length", str(CONTEXT)]


def found(value, keys=("prompt_token_ids", "input_ids")):
    """The ids of the prompt, wherever an answer has them."""
    if isinstance(value, dict):
        here = next((value[key] for key in keys if isinstance(value.get(key), list)), None)
        return here or next(filter(None, (found(member) for member in value.values())), None)
    return next(filter(None, map(found, value)), None) if isinstance(value, list) else None


def ask(url, engine, body):
    """The ids, or the engine's error."""
    wish = {"return_token_ids": True} if engine == "vllm" else {"return_token_ids": True, "return_prompt_token_ids": True, "return_input_ids_in_sglext": True}
    path = "chat/completions" if "messages" in body else "completions"
    data = json.dumps({"model": launch.NAME, "max_tokens": 1, "temperature": 0, **wish, **body}).encode()
    request = urllib.request.Request(f"{url}/v1/{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return found(json.load(answer)) or "no ids in the answer"
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode(errors='replace')[:200]}"


def ours(semmoe, home, template, engine, version, bodies):
    (home / "chat_template.jinja").write_text(template)
    (home / "chats.jsonl").write_text("".join(json.dumps({"name": name, **body}) + "\n" for name, body in bodies))
    command = [semmoe, "template", "check", home, "--engine", f"{engine}@{version}", "--chats", home / "chats.jsonl", "--ids", "--json", "--default-chat-template-kwargs", json.dumps(DEFAULTS)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, env={"PATH": "/nonexistent"})
    assert ran.returncode == 0, ran.stderr[-2000:]
    answer = json.loads(ran.stdout)
    return [chat.get("ids") or chat["refused"] for chat in answer.get("chats") or answer["result"]["chats"]]


def compare(home, template, bodies, arguments):
    """How many of the bodies have equal ids, and the others."""
    engine, version = arguments.engine, arguments.version
    mine = ours(arguments.semmoe, home, template, engine, version, bodies)
    # The engine reads it only from its option.
    (home / "chat_template.jinja").rename(home / "given.jinja")
    with launch.Server(engine, version, arguments.cache, [*options(engine), "--chat-template", str(home / "given.jinja")], model=home) as server:
        server.wait()
        with ThreadPoolExecutor(4) as pool:
            theirs = list(pool.map(lambda body: ask(server.url, engine, body[1]), bodies))
        if server.process.poll() is not None:
            print(server.tail())
    equal, other, refused = 0, [], 0
    for (name, _), us, them in zip(bodies, mine, theirs):
        if us == them:
            equal += 1
        elif isinstance(them, str):
            refused += 1
            if arguments.verbose or not them.startswith("400"):
                print(f"    {name}: the engine says {them}")
        else:
            other.append(name)
            print(f"    {name}: {us if isinstance(us, str) else first_difference(us, them)}")
    return equal, refused, other


def first_difference(us, them):
    at = next((at for at, (one, other) in enumerate(zip(us, them)) if one != other), min(len(us), len(them)))
    return f"{len(us)} ids here, {len(them)} there, others from {at}: {us[at:at + 8]} {them[at:at + 8]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=launch.VERSIONS)
    parser.add_argument("--version")
    parser.add_argument("--cache", default=launch.default_cache())
    parser.add_argument("--semmoe", type=pathlib.Path, default=corpus.TARGET / "debug/semmoe")
    parser.add_argument("--tokenizer", type=pathlib.Path, action="append", default=[], help="a folder with tokenizer.json or tokenizer.json.gz")
    parser.add_argument("--template", action="append", help="a template of the corpus, or `shows`, `loops`, `bos`; absent: three of the corpus and these")
    parser.add_argument("--verbose", action="store_true", help="what the engine refuses")
    arguments = parser.parse_args()
    arguments.version = arguments.version or launch.VERSIONS[arguments.engine][-1 if arguments.engine == "vllm" else 0]
    arguments.semmoe = arguments.semmoe.resolve()
    _, folder = corpus.environment()
    own = {"shows": SHOWS, "loops": LOOPS, "bos": BOS}
    bad = 0
    for tokenizer in [launch.MODEL, *arguments.tokenizer]:
        for name in arguments.template or [*own, *TEMPLATES]:
            template = own.get(name) or (folder / f"{name}.jinja").read_text()
            with tempfile.TemporaryDirectory() as home:
                prepare(pathlib.Path(home), tokenizer, name == "bos")
                bodies = list(shapes())
                bodies += [body for body, _ in zip(mixed(), range(CHATS))]
                equal, refused, other = compare(pathlib.Path(home), template, bodies, arguments)
            print(f"{arguments.engine} {arguments.version}, {tokenizer.name}, {name}: {equal} equal, {len(other)} differ, {refused} refused by the engine", flush=True)
            bad += len(other) + (equal < CHATS)
    sys.exit(bad != 0)


if __name__ == "__main__":
    main()
