#!/usr/bin/env python3
"""Writes or checks the table of request/engines/FIELDS.md: fields.py SGLANG VLLM [--write].

SGLANG and VLLM are folders with the sources of both (an unpacked wheel is enough: pip download --no-deps, unzip). The fields are read from
the request classes without importing anything; what the gateway does with each is in request/engines/src/fields.rs, with which
request/engines/tests/fields.rs compares the page. Without --write, fields that the page lacks are errors: decide about each."""
import ast, pathlib, re, sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "request/engines/FIELDS.md"
TABLE = ROOT / "request/engines/src/fields.rs"
ENGINES = {
    "SGLang": {
        "sglang/srt/entrypoints/openai/protocol.py": {
            "ChatCompletionRequest": "chat", "CompletionRequest": "completions", "ResponsesRequest": "responses",
            "EmbeddingRequest": "embeddings", "TokenizeRequest": "tokenize", "DetokenizeRequest": "detokenize",
            "ScoringRequest": "others", "ClassifyRequest": "others", "V1RerankReqInput": "others"},
        "sglang/srt/entrypoints/anthropic/protocol.py": {
            "AnthropicMessagesRequest": "messages", "AnthropicCountTokensRequest": "count_tokens"},
        "sglang/srt/managers/io_struct.py": {"GenerateReqInput": "generate", "EmbeddingReqInput": "others"},
    },
    "vLLM": {
        "vllm/entrypoints/openai/chat_completion/protocol.py": {"ChatCompletionRequest": "chat"},
        "vllm/entrypoints/openai/completion/protocol.py": {"CompletionRequest": "completions"},
        "vllm/entrypoints/openai/responses/protocol.py": {"ResponsesRequest": "responses"},
        "vllm/entrypoints/pooling/base/protocol.py": {
            "PoolingBasicRequestMixin": "embeddings", "CompletionRequestMixin": "embeddings", "ChatRequestMixin": "embeddings",
            "EmbedRequestMixin": "embeddings"},
        "vllm/entrypoints/pooling/scoring/protocol.py": None,
        "vllm/entrypoints/scale_out/token_in_token_out/protocol.py": {"GenerateRequest": "others"},
        "vllm/entrypoints/serve/tokenize/protocol.py": {
            "TokenizeCompletionRequest": "tokenize", "TokenizeChatRequest": "tokenize", "DetokenizeRequest": "detokenize"},
        "vllm/entrypoints/anthropic/protocol.py": {
            "AnthropicMessagesRequest": "messages", "AnthropicCountTokensRequest": "count_tokens"},
    },
}
WORDS = {"removed": "removed", "Refused": "refused", "Adapters": "adapters", "Arguments": "arguments", "ids": "ids",
         "ids_or_text": "ids or text",
         "Ids(Form::IdsOrPrompt)": "ids or prompt"}
READ = {"model": "read", "stream": "read", "priority": "read", "messages": "read", "text": "read", "tools": "read",
        "chat_template_kwargs": "read", "add_generation_prompt": "read"}


def own_and_inherited(classes, name):
    cls = classes[name]
    fields = [field for base in cls.bases if getattr(base, "id", None) in classes for field in own_and_inherited(classes, base.id)]
    for line in cls.body:
        if isinstance(line, ast.AnnAssign) and not line.target.id.startswith("_") and "ClassVar" not in ast.unparse(line.annotation):
            fields.append(line.target.id)
    return fields


def fields_of(root, files):
    found = {}
    for path, wanted in files.items():
        tree = ast.parse((root / path).read_text())
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        if wanted is None:
            wanted = {name: "others" for name in classes if name.endswith("Request")}
        missing = [name for name in wanted if name not in classes]
        if missing:
            sys.exit(f"{path} has no class {missing[0]} any more: look where its fields are now, and change ENGINES")
        for name, route in wanted.items():
            for field in own_and_inherited(classes, name):
                routes = found.setdefault(field, [])
                if route not in routes:
                    routes.append(route)
    return found


def treatments():
    text = TABLE.read_text()
    text = text[text.index("pub const FIELDS") : text.index("/// By the first letter")]
    text = text.replace("ROUTED_DP_RANK", '"routed_dp_rank"').replace("DATA_PARALLEL_RANK", '"data_parallel_rank"')
    named = {name: WORDS[how] for how, name in re.findall(r'\b(removed|ids|ids_or_text)\(\s*"(\w+)"', text)}
    named |= {name: WORDS[how] for name, how in re.findall(r'\bfield\(\s*"(\w+)",\s*Treatment::(\w+(?:\(\w+::\w+\))?)', text)}
    return READ | named


def rows():
    """The page's rows, by field."""
    lines = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in lines}


def main():
    sources = dict(zip(ENGINES, (pathlib.Path(word) for word in sys.argv[1:3])))
    found = {engine: fields_of(root, ENGINES[engine]) for engine, root in sources.items()}
    named = treatments()
    names = sorted(set(named) | set(found["SGLang"]) | set(found["vLLM"]))
    new = {}
    for name in names:
        cells = [" ".join(found[engine].get(name, ["-"])) for engine in ENGINES]
        new[name] = cells + [named.get(name, "passed")]
    if "--write" in sys.argv:
        page = PAGE.read_text()
        start = page.index("| field |")
        head = page[start:].split("\n")[:2]
        table = [f"| `{name}` | {' | '.join(cells)} |" for name, cells in new.items()]
        PAGE.write_text(page[:start] + "\n".join(head + table) + "\n")
        return
    old = rows()
    unknown = [name for name in new if name not in old]
    gone = [name for name in old if name not in new]
    moved = [name for name in new if name in old and new[name] != old[name]]
    for what, some in (("new", unknown), ("gone", gone), ("on other routes, or treated otherwise", moved)):
        for name in some:
            print(f"{what}: {name} {new.get(name, old.get(name))}")
    sys.exit(1 if unknown or gone or moved else 0)


main()
