"""A gateway process, clients of it, and semmoe's worker as a second backend. Python's standard library only."""
import concurrent.futures, http.client, json, pathlib, re, shutil, subprocess, threading, time, urllib.parse

import launch

PROMPTS = launch.REPOSITORY / "assets/prompts/heldout.jsonl"


class Answer:
    def __init__(self, status, headers, body, error=None, first_byte=False):
        self.status, self.headers, self.body, self.error, self.first_byte = status, headers, body, error, first_byte

    @property
    def ok(self):
        """A complete answer without an error event or abort."""
        bad = ('"error"', '"abort"')
        return self.error is None and self.status == 200 and not any(word in self.body for word in bad)

    def json(self):
        return json.loads(self.body)

    def __repr__(self):
        return f"{self.status} {self.error or ''} {self.body[:300]!r}"


def ask(url, method="GET", path="/", body=None, headers=None, timeout=300):
    """One request; errors are part of the answer. A `body` that is text is sent unchanged."""
    host = urllib.parse.urlsplit(url).netloc
    connection = http.client.HTTPConnection(host, timeout=timeout)
    headers = {**({"Content-Type": "application/json"} if body is not None else {}), **(headers or {})}
    status, found, pieces = 0, {}, []
    try:
        connection.request(method, path, body if body is None or isinstance(body, str) else json.dumps(body), headers)
        response = connection.getresponse()
        status, found = response.status, {k.lower(): v for k, v in response.getheaders()}
        while piece := response.read1(65536):
            pieces.append(piece)
        error = None
    except (OSError, http.client.HTTPException) as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        connection.close()
    body = b"".join(pieces).decode(errors="replace")
    if error is None and "event-stream" in found.get("content-type", "") and "[DONE]" not in body:
        error = "the stream ended without [DONE]"
    return Answer(status, found, body, error, bool(pieces))


def conversations(count, most_characters=900):
    """Held-out prompts as conversations; they start over when they run out."""
    found = []
    for line in PROMPTS.open(encoding="utf-8"):
        record = json.loads(line)
        messages = record.get("messages") or [{"role": "user", "content": record["prompt"]}]
        if sum(len(m["content"]) for m in messages) <= most_characters and all(m["role"] != "tool" for m in messages):
            found.append(messages)
    return [found[i % len(found)] for i in range(count)]


def chats(url, count, tokens=16, streams=8, stream=True, each=None, timeout=300, fields=()):
    """Answers to `count` chats, `streams` at a time. `each` is called after every answer with the number done; `fields` go
    into the bodies."""
    def one(messages):
        body = {"model": launch.NAME, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": stream, **dict(fields)}
        answer = ask(url, "POST", "/v1/chat/completions", body, timeout=timeout)
        with lock:
            done.append(answer)
            if each:
                each(len(done))
        return answer

    lock, done = threading.Lock(), []
    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        return list(pool.map(one, conversations(count)))


class Gateway:
    """`semmoe serve` with one model and these backends."""

    def __init__(self, semmoe, folder):
        self.semmoe, self.folder, self.process = semmoe, folder, None
        self.config = folder / "semmoe.toml"

    def write(self, policy, backends, model_keys="", more=""):
        """`backends` are the lines of each backend's section."""
        sections = "".join(f"[[models.backends]]\n{lines}\n" for lines in backends)
        self.config.write_text(
            '[server]\nlisten = "127.0.0.1:0"\nadmin = "127.0.0.1:0"\n'
            f'[[models]]\nname = "{launch.NAME}"\npolicy = "{policy}"\n{model_keys}\n{sections}{more}\n')

    def check(self, *arguments):
        command = [self.semmoe, "serve", "--config", self.config, "--check", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def start(self):
        self.log = open(self.folder / "gateway.log", "ab")
        self.process = subprocess.Popen(
            [self.semmoe, "serve", "--config", self.config], stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.url = self.line("ready: ")
        self.admin = self.line("admin: ")
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        self.until(lambda: self.get("/readyz").status == 200, 60, "/readyz was not 200")

    def line(self, prefix):
        for line in self.process.stdout:
            if line.startswith(prefix):
                return line.removeprefix(prefix).strip()
        log, code = (self.folder / "gateway.log").read_text()[-1500:], self.process.wait()
        self.process = None
        raise AssertionError(f"the gateway ended with {code}: {log}")

    def until(self, is_so, seconds, otherwise):
        """Returns the seconds it took."""
        begun = time.monotonic()
        while not is_so():
            if time.monotonic() - begun > seconds:
                raise AssertionError(f"{otherwise} within {seconds} s")
            time.sleep(0.1)
        return time.monotonic() - begun

    def get(self, path):
        return ask(self.admin, path=path, timeout=30)

    def post(self, path, body=None):
        return ask(self.admin, "POST", path, body, timeout=60)

    def reload(self):
        answer = self.post("/admin/reload")
        assert answer.status == 200, f"reload: {answer}"

    def backend(self, name="pod-a"):
        found = [b for b in self.get("/admin/backends").json()["backends"] if b["name"] == name]
        assert found, f"no backend {name}"
        return found[0]

    def metric(self, name, **labels):
        """The sum of the samples with this name and these labels."""
        total = 0.0
        for line in self.get("/metrics").body.splitlines():
            if re.match(rf"{name}[ {{]", line) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None


class Worker:
    """semmoe's worker with two ranks: a second backend that costs little. Without tables its experts are in their order."""

    def __init__(self, semmoe, folder, tables):
        self.port, meet = launch.free_port(), launch.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # It is named after its folder, which must have the name of the tables' model.
        model = folder / launch.NAME
        if not model.is_dir():
            shutil.copytree(launch.MODEL, model)
        common = ["--model", model, "--world", "2", "--rendezvous", f"127.0.0.1:{meet}",
                  *(["--tables", tables] if tables else []), "--listen", f"127.0.0.1:{self.port}", "--exit-on-stdin-eof"]
        self.log = open(folder / "worker.log", "ab")
        self.ranks = [
            subprocess.Popen([semmoe, "worker", *common, "--rank", str(rank)], stdin=subprocess.PIPE, stdout=self.log, stderr=self.log)
            for rank in range(2)]
        deadline = time.monotonic() + 60
        while ask(self.url, path="/health", timeout=5).status != 200:
            assert time.monotonic() < deadline, "semmoe's worker was not healthy within 60 s"
            time.sleep(0.2)

    def stop(self):
        for rank in self.ranks:
            rank.stdin.close()
        for rank in self.ranks:
            try:
                rank.wait(20)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
