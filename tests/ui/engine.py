#!/usr/bin/env python3
"""A mock of SGLang that is a process of its own, so that it can be killed: engine.py RANKS LAYERS EXPERTS TOP_K VOCABULARY.

Prints its URL. Tokens come every 10 ms. Pins are honoured; routed experts are random ones, so that about 1/n of them are local."""
import base64, json, random, struct, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

RANKS, LAYERS, EXPERTS, TOP_K, VOCABULARY = map(int, sys.argv[1:])
INFO = {"model_path": "/models/tiny", "version": "0.5.23", "dp_size": 1, "attn_dp_size": RANKS, "vocab_size": VOCABULARY, "enable_return_routed_experts": True,
        "init_expert_location": "trivial"}


def routed_experts(rows):
    ids = [expert for _ in range(rows * LAYERS) for expert in random.sample(range(EXPERTS), TOP_K)]
    return base64.b64encode(struct.pack(f"<{len(ids)}i", *ids)).decode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send_json(self, document, status=200):
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        known = {"/server_info": INFO, "/get_server_info": INFO, "/health": {}, "/ping": {}, "/v1/models": {"data": [{"id": "tiny"}]}}
        self.send_json(known.get(self.path, {}), 200 if self.path in known else 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = int((body.get("sampling_params") or {}).get("max_new_tokens") or body.get("max_tokens") or 8)
        if body.get("stream"):
            self.stream(tokens)
            return
        time.sleep(tokens / 100)
        if self.path != "/generate":
            usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}
            self.send_json({"choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}], "usage": usage})
            return
        rank = body.get("routed_dp_rank", body.get("data_parallel_rank", self.headers.get("X-Data-Parallel-Rank", 0)))
        prompt = len(body.get("input_ids") or [0])
        meta = {"id": "x", "prompt_tokens": prompt, "completion_tokens": tokens, "dp_rank": int(rank or 0), "finish_reason": {"type": "length"}}
        if body.get("return_routed_experts"):
            meta["routed_experts"] = routed_experts(prompt + tokens - 1)
        self.send_json({"text": "a", "output_ids": [1] * tokens, "meta_info": meta})

    def stream(self, tokens):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        deltas = [{"role": "assistant", "content": ""}, *({"content": " a"} for _ in range(tokens))]
        events = [json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}) for delta in deltas]
        for event in [*events, "[DONE]"]:
            time.sleep(0.01)
            data = f"data: {event}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
