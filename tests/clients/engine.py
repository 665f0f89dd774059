"""A mock of an engine with the OpenAI routes, sufficient to show that clients and gateway understand each other."""
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "qwen3-30b"
KEY = "key-of-the-engine"
WORDS = ["Rust", " is", " a", " language", "."]


def usage(body):
    return {"prompt_tokens": len(json.dumps(body["messages"]).split()), "completion_tokens": len(WORDS), "total_tokens": 0}


def choice(body):
    """A tool call if tools were given, otherwise text."""
    if body.get("tools"):
        call = {"name": body["tools"][0]["function"]["name"], "arguments": "{\"city\": \"Bern\"}"}
        message = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": call}]}
        return {"index": 0, "message": message, "finish_reason": "tool_calls"}
    return {"index": 0, "message": {"role": "assistant", "content": "".join(WORDS)}, "finish_reason": "stop"}


def deltas(body):
    """That choice as stream deltas."""
    if body.get("tools"):
        call = choice(body)["message"]["tool_calls"][0]
        yield {"role": "assistant", "tool_calls": [{"index": 0, **call, "function": {**call["function"], "arguments": ""}}]}
        for piece in ("{\"city\":", " \"Bern\"}"):
            yield {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
        return
    yield {"role": "assistant", "content": ""}
    for word in WORDS:
        yield {"content": word}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send_json(self, status, document):
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refused(self):
        """Engines started with --api-key accept only the gateway's key."""
        if self.headers.get("Authorization") == f"Bearer {KEY}":
            return False
        self.send_json(401, {"error": {"message": "the engine's key is wrong", "type": "invalid_request_error", "code": None}})
        return True

    def do_GET(self):
        if not self.refused():
            self.send_json(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        answer = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
        if body.get("temperature", 0) > 2:
            error = {"message": "temperature is out of range", "type": "BadRequestError", "param": "temperature", "code": 400}
            return self.send_json(400, {"error": error})
        if self.path == "/v1/embeddings":
            vectors = [{"object": "embedding", "index": at, "embedding": [0.5, -0.5]} for at in range(len(body["input"]))]
            return self.send_json(200, {**answer, "object": "list", "data": vectors, "usage": {"prompt_tokens": 1, "total_tokens": 1}})
        if not body.get("stream"):
            return self.send_json(200, {**answer, "object": "chat.completion", "choices": [choice(body)], "usage": usage(body)})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        answer["object"] = "chat.completion.chunk"
        for delta in deltas(body):
            self.event({**answer, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        self.event({**answer, "choices": [{"index": 0, "delta": {}, "finish_reason": choice(body)["finish_reason"]}]})
        if body.get("stream_options", {}).get("include_usage"):
            self.event({**answer, "choices": [], "usage": usage(body)})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, document):
        self.chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    # The listen backlog: the default of five is too small for thirty concurrent clients on a busy machine.
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """The gateway closes its connection when a client leaves; a traceback would look like a failure."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def start():
    """Returns its URL; it ends with the process."""
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"
