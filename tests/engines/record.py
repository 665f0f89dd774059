#!/usr/bin/env python3
"""record.py vllm|sglang --version V [--cache DIR] [--dp-attention]: asks a freshly started engine every route that
semmoe uses, and writes requests and answers to recordings/{engine}-{version}.json. Python's standard library only.

What is changed in an answer: paths of this machine become /models/NAME and /engines, and of /metrics and the server's
information only what semmoe reads is kept (see `cut_metrics` and `cut_info`); of long streams the first and last events."""
import argparse, datetime, http.client, json, os, pathlib, re, signal, threading, time

import launch

# What semmoe reads of vLLM's metrics (request/engines/src/vllm.rs), and what SGLang has in their place.
FAMILIES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prompt_tokens", "vllm:generation_tokens",
    "vllm:request_success", "vllm:request_prompt_tokens", "vllm:request_params_max_tokens", "vllm:engine_sleep_state", "vllm:cache_config_info",
    "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:prompt_tokens", "sglang:generation_tokens",
    "sglang:num_requests",
}
# Of SGLang's server information: what semmoe reads, and what else says how the engine is laid out.
INFO = {
    "model_path", "tokenizer_path", "served_model_name", "version", "tp_size", "dp_size", "attn_dp_size", "ep_size",
    "pp_size", "nnodes", "node_rank", "enable_dp_attention", "enable_dp_lm_head", "enable_eplb", "disable_radix_cache",
    "init_expert_location", "enable_return_routed_experts", "ep_dispatch_algorithm", "ep_num_redundant_experts",
    "moe_a2a_backend", "load_balance_method", "max_total_num_tokens", "context_length", "weight_version", "status",
    "chunked_prefill_size", "max_running_requests", "disaggregation_mode", "enable_metrics", "stream_interval",
}
HEADERS = {"content-type", "content-length", "transfer-encoding", "retry-after", "x-request-id", "allow", "connection"}
PIN = "X-data-parallel-rank"
TEXT = "Jonathan ran 7.5 kilometers."
IDS = [5, 17, 260, 1024, 77]
MESSAGES = [{"role": "user", "content": "please find me a car rental"}]


class Recorder:
    def __init__(self, server):
        self.server, self.exchanges = server, []
        self.model = server.model

    def ask(self, name, method, path, body=None, headers=None, raw=None, content_type="application/json", cut=None):
        """`raw` is sent unchanged. Returns the answer's body."""
        headers = dict(headers or {})
        payload = raw if raw is not None or body is None else json.dumps(body, separators=(",", ":"))
        if payload is not None and content_type:
            headers["Content-Type"] = content_type
        answer, text = self.send(method, path, payload, headers)
        if text is not None:
            answer["body"] = self.scrub(cut(text) if cut and answer["status"] == 200 else text)
            if cut:
                answer["cut"] = True
        request = {"method": method, "path": path, "headers": {k.lower(): v for k, v in headers.items()}}
        if payload is not None:
            request["body"] = payload
        self.exchanges.append({"name": name, "request": request, "answer": answer})
        return text

    def send(self, method, path, payload, headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        try:
            connection.request(method, path, payload.encode() if payload is not None else None, headers)
            response = connection.getresponse()
            kept = {k.lower(): v for k, v in response.getheaders() if k.lower() in HEADERS}
            kept.pop("content-length", None) if "transfer-encoding" in kept else None
            return {"status": response.status, "headers": kept}, response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return {"closed": type(error).__name__}, None
        finally:
            connection.close()

    def scrub(self, text):
        for path, name in [(self.model, f"/models/{launch.NAME}"), (launch.REPOSITORY, "/semmoe"), (self.server.folder, "/engines")]:
            text = text.replace(str(path), name)
        return text

    def leave_in_the_middle(self, path, body):
        """A client that leaves after the first bytes of a stream."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        connection.getresponse().read(1)
        connection.close()
        time.sleep(1)


def cut_metrics(text):
    """The lines of FAMILIES; of each other family a comment with its name and its number of samples."""
    kept, others = [], {}
    for line in text.splitlines():
        name = line.split()[2] if line.startswith("# ") else re.split(r"[{ ]", line)[0]
        family = re.sub(r"_(total|created|bucket|count|sum)$", "", name)
        if name in FAMILIES or family in FAMILIES:
            kept.append(line)
        elif not line.startswith("#"):
            others[name] = others.get(name, 0) + 1
    return "\n".join(kept + [f"# not kept: {name} ({count})" for name, count in sorted(others.items())]) + "\n"


def cut_info(text):
    """The members in INFO; the number of all others in "not_kept"."""
    info = json.loads(text)
    kept = {name: value for name, value in info.items() if name in INFO}
    states = info.get("internal_states")
    if isinstance(states, list):
        kept["internal_states"] = [{n: v for n, v in state.items() if n in INFO} for state in states]
    kept["not_kept"] = len(info) - len(kept)
    return json.dumps(kept, separators=(",", ":"))


def common_before(r):
    """Exchanges before the first request that runs the model."""
    r.ask("fresh metrics", "GET", "/metrics", cut=cut_metrics)
    for name, path in [("health", "/health"), ("ping", "/ping"), ("models", "/v1/models"), ("version", "/version"), ("model info", "/model_info")]:
        r.ask(name, "GET", path)
    for name, path in [("server info", "/server_info"), ("server info, old name", "/get_server_info")]:
        r.ask(name, "GET", path, cut=cut_info)
    r.ask("fresh loads", "GET", "/v1/loads")


def openai(r, switches, extra_routes):
    """Chat and completions: plain, pinned, with token ids and routed experts, in streams. `switches` ask for ids and experts."""
    few = {"model": launch.NAME, "max_tokens": 4, "temperature": 0}
    chat, text = {**few, "messages": MESSAGES}, {**few, "prompt": TEXT}
    ids = {**few, "prompt": IDS}
    stream = {"stream": True}
    usage = {"stream_options": {"include_usage": True}}
    for route, path, bodies in [
        ("chat", "/v1/chat/completions", {"": chat}),
        ("completions", "/v1/completions", {"": text, " by ids": ids}),
    ]:
        for form, body in bodies.items():
            r.ask(f"{route}{form}", "POST", path, body)
            r.ask(f"{route}{form}, everything recorded", "POST", path, {**body, **switches})
        body = bodies[""]
        for pin in ["0", "1"]:
            r.ask(f"{route}, pinned to {pin}", "POST", path, body, {PIN: pin})
        for what, pin in [("out of range", "7"), ("no number", "x"), ("negative", "-1")]:
            r.ask(f"{route}, pin {what}", "POST", path, body, {PIN: pin})
        r.ask(f"{route}, pinned by field", "POST", path, {**body, "routed_dp_rank": 1})
        r.ask(f"{route}, pinned by old field", "POST", path, {**body, "data_parallel_rank": 1})
        r.ask(f"{route}, two choices", "POST", path, {**body, "n": 2, "temperature": 0.7, "seed": 1})
        r.ask(f"{route} stream", "POST", path, {**body, **stream})
        r.ask(f"{route} stream with usage", "POST", path, {**body, **stream, **usage})
        r.ask(f"{route} stream, everything recorded", "POST", path, {**body, **stream, **usage, **switches})
    r.ask("chat with logprobs", "POST", "/v1/chat/completions", {**chat, "max_tokens": 2, "logprobs": True, "top_logprobs": 1})
    if "responses" in extra_routes:
        r.ask("responses", "POST", "/v1/responses", {"model": launch.NAME, "input": "Hello", "max_output_tokens": 4})
    r.ask("embeddings", "POST", "/v1/embeddings", {"model": launch.NAME, "input": "Hello"})
    r.ask("messages", "POST", "/v1/messages", {"model": launch.NAME, "max_tokens": 4, "messages": MESSAGES})
    r.ask("tokenize", "POST", "/tokenize", {"model": launch.NAME, "prompt": TEXT})
    r.ask("tokenize a chat", "POST", "/tokenize", {"messages": MESSAGES})
    r.ask("render a chat", "POST", "/v1/chat/completions/render", {"messages": MESSAGES})
    r.ask("detokenize", "POST", "/detokenize", {"model": launch.NAME, "tokens": IDS})


def openai_errors(r):
    few = {"model": launch.NAME, "max_tokens": 4, "temperature": 0}
    for route, path, prompt in [
        ("chat", "/v1/chat/completions", {"messages": MESSAGES}),
        ("completions", "/v1/completions", {"prompt": TEXT}),
    ]:
        body = {**few, **prompt}
        r.ask(f"{route}, unknown model", "POST", path, {**body, "model": "another"})
        r.ask(f"{route}, unknown field", "POST", path, {**body, "no_such_field": 1})
        r.ask(f"{route}, wrong type", "POST", path, {**body, "max_tokens": "many"})
        r.ask(f"{route}, more tokens than fit", "POST", path, {**body, "max_tokens": 5000})
        r.ask(f"{route}, no prompt", "POST", path, few)
        r.ask(f"{route}, not JSON", "POST", path, raw='{"model":')
        r.ask(f"{route}, no content type", "POST", path, body, content_type=None)
        r.ask(f"{route}, content type of a form", "POST", path, body, content_type="application/x-www-form-urlencoded")
        r.ask(f"{route}, wrong method", "GET", path)
    r.ask("completions, prompt too long", "POST", "/v1/completions", {**few, "prompt": [7] * 2100})
    r.ask("completions, empty prompt", "POST", "/v1/completions", {**few, "prompt": []})
    r.ask("completions stream, prompt too long", "POST", "/v1/completions", {**few, "prompt": [7] * 2100, "stream": True})
    r.ask("unknown path", "GET", "/nothing_here")


def vllm(r):
    common_before(r)
    openai(r, {"return_token_ids": True}, {"responses"})
    r.ask("generate", "POST", "/generate", {"text": TEXT, "sampling_params": {"max_new_tokens": 4}})
    openai_errors(r)
    r.leave_in_the_middle("/v1/completions", {"model": launch.NAME, "prompt": TEXT, "max_tokens": 1500, "stream": True, "ignore_eos": True})
    r.ask("metrics after a client left", "GET", "/metrics", cut=cut_metrics)


def generate(r):
    path, few = "/generate", {"sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    everything = {"return_routed_experts": True, "return_prompt_token_ids": True}
    text, ids = {"text": TEXT, **few}, {"input_ids": IDS, **few}
    for form, body in [("", text), (" by ids", ids)]:
        r.ask(f"generate{form}", "POST", path, body)
        r.ask(f"generate{form}, everything recorded", "POST", path, {**body, **everything})
    pins(r)
    r.ask("generate, several prompts", "POST", path, {"text": [TEXT, "Hello"], **few, "return_routed_experts": True})
    r.ask("generate stream", "POST", path, {**text, "stream": True})
    r.ask("generate stream, everything recorded", "POST", path, {**text, "stream": True, **everything})
    r.ask("generate, routed experts from the fifth token", "POST", path, {**text, **everything, "routed_experts_start_len": 4})


def pins(r):
    path, ids = "/generate", {"input_ids": IDS, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    for pin in [0, 1]:
        r.ask(f"generate, pinned to {pin}", "POST", path, {**ids, "routed_dp_rank": pin})
        r.ask(f"generate, pinned to {pin} by old field", "POST", path, {**ids, "data_parallel_rank": pin})
        r.ask(f"generate, pinned to {pin} by header", "POST", path, ids, {PIN: str(pin)})
    for what, pin in [("out of range", 7), ("no number", "x"), ("negative", -1)]:
        r.ask(f"generate, pin {what}", "POST", path, {**ids, "routed_dp_rank": pin})


def generate_errors(r):
    path, few = "/generate", {"sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    r.ask("generate, not JSON", "POST", path, raw='{"text":')
    r.ask("generate, no content type", "POST", path, {"text": TEXT, **few}, content_type=None)
    r.ask("generate, unknown field", "POST", path, {"text": TEXT, **few, "no_such_field": 1})
    r.ask("generate, unknown sampling field", "POST", path, {"text": TEXT, "sampling_params": {"no_such_field": 1}})
    r.ask("generate, no prompt", "POST", path, few)
    r.ask("generate, prompt too long", "POST", path, {"input_ids": [7] * 2100, **few})
    r.ask("generate, prompt and answer too long", "POST", path, {"input_ids": [7] * 9, "sampling_params": {"max_new_tokens": 5000}})
    r.ask("generate stream, prompt too long", "POST", path, {"input_ids": [7] * 2100, **few, "stream": True})


def aborted(r):
    """SGLang ends a stream when another request names it."""
    body = {"text": TEXT, "rid": "aborted-by-another", "stream": True,
            "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
    abort = threading.Timer(1.5, r.send, ["POST", "/abort_request", json.dumps({"rid": "aborted-by-another"}), {"Content-Type": "application/json"}])
    abort.start()
    r.ask("generate stream, aborted", "POST", "/generate", body, cut=last_events)
    abort.join()


def last_events(text):
    """The first and the last two events."""
    events = text.split("\n\n")
    return "\n\n".join(events[:1] + events[-3:])


def sglang(r):
    common_before(r)
    generate(r)
    switches = {"return_routed_experts": True, "return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True,
                "return_prompt_token_ids": True, "return_token_ids": True}
    openai(r, switches, {"responses"})
    few = {"model": launch.NAME, "max_tokens": 4, "temperature": 0}
    only = {"return_routed_experts": True}
    for path, prompt in [("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": TEXT})]:
        name = path.split("/")[0]
        r.ask(f"{name}, routed experts alone", "POST", f"/v1/{path}", {**few, **prompt, **only})
        r.ask(f"{name}, ids in sglext", "POST", f"/v1/{path}", {**few, **prompt, **only, "return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True})
        r.ask(f"{name} stream, routed experts alone", "POST", f"/v1/{path}", {**few, **prompt, **only, "stream": True})
    generate_errors(r)
    openai_errors(r)
    aborted(r)
    r.leave_in_the_middle("/generate", {"text": TEXT, "stream": True, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}})
    r.ask("loads after a client left", "GET", "/v1/loads")
    r.ask("metrics after a client left", "GET", "/metrics", cut=cut_metrics)


def out_of_vocabulary(r):
    """Runs last: it kills SGLang 0.5.23."""
    body = {"model": launch.NAME, "prompt": [99999999], "max_tokens": 4}
    if r.server.engine == "sglang":
        body = {"input_ids": [99999999], "sampling_params": {"max_new_tokens": 4}}
    r.ask("token out of the vocabulary", "POST", "/generate" if "input_ids" in body else "/v1/completions", body)
    time.sleep(3)
    r.ask("health after a token out of the vocabulary", "GET", "/health")


def dead_core(r):
    """vLLM: an engine core is killed while its API servers stay alive."""
    os.kill(r.server.children("EngineCore")[-1], signal.SIGKILL)
    time.sleep(2)
    few = {"model": launch.NAME, "max_tokens": 4, "temperature": 0}
    for pin in ["0", "1"]:
        r.ask(f"dead core, completions, pinned to {pin}", "POST", "/v1/completions", {**few, "prompt": TEXT}, {PIN: pin})
        r.ask(f"dead core, chat, pinned to {pin}", "POST", "/v1/chat/completions", {**few, "messages": MESSAGES}, {PIN: pin})
        r.ask(f"dead core, chat stream, pinned to {pin}", "POST", "/v1/chat/completions", {**few, "messages": MESSAGES, "stream": True}, {PIN: pin})
    for path in ["/health", "/ping", "/v1/models"]:
        r.ask(f"dead core, {path}", "GET", path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=launch.VERSIONS)
    parser.add_argument("--version", required=True)
    parser.add_argument("--cache", type=pathlib.Path, default=launch.default_cache())
    parser.add_argument("--dp-attention", action="store_true", help="SGLang: --dp-size 2 --enable-dp-attention, the older spelling")
    parser.add_argument("--out", type=pathlib.Path, default=launch.HERE / "recordings")
    given = parser.parse_args()
    launch.install(given.engine, given.version, given.cache)
    ranks = launch.OLDER_SPELLING if given.dp_attention else launch.two_ranks(given.engine, given.version)
    arguments = [*ranks, *launch.RECORDING[given.engine, given.version]]
    if given.engine == "sglang":
        arguments.append("--enable-metrics")
    with launch.Server(given.engine, given.version, given.cache, arguments) as server:
        print(f"healthy after {server.wait():.0f} s", flush=True)
        recorder = Recorder(server)
        if given.dp_attention:
            common_before(recorder)
            pins(recorder)
        else:
            {"vllm": vllm, "sglang": sglang}[given.engine](recorder)
            out_of_vocabulary(recorder)
            if given.engine == "vllm":
                dead_core(recorder)
    head = {
        "engine": given.engine,
        "version": given.version,
        "recorded": datetime.date.today().isoformat(),
        "model": launch.MODEL.name,
        "command": recorder.scrub(" ".join(server.command)).replace(str(server.port), "PORT"),
    }
    name = f"{given.engine}-{given.version}{'-dp-attention' if given.dp_attention else ''}.json"
    text = document(head, recorder.exchanges)
    (given.out / name).write_text(text, encoding="utf-8")
    print(f"{name}: {len(recorder.exchanges)} exchanges, {len(text.encode())} bytes")


def document(head, exchanges):
    """JSON with one exchange per line."""
    lines = ",\n".join(json.dumps(exchange, ensure_ascii=False, separators=(",", ":")) for exchange in exchanges)
    return json.dumps(head, indent=1)[:-2] + f',\n "exchanges": [\n{lines}\n]\n}}\n'


if __name__ == "__main__":
    main()
