#!/usr/bin/env python3
"""Runs curl and the official `openai` package unchanged against the gateway, that, LangChain and LiteLLM against `up`, and SGLang's and
vLLM's routers in front of workers: run.py [--guidellm] [SEMMOE].

With --guidellm GuideLLM, too, which brings PyTorch along: 6 GB and some minutes. Without PyPI or curl its part is left out, and that is said;
the rest must pass."""
import gzip, hashlib, json, pathlib, re, shutil, subprocess, sys, tempfile, venv

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import engine, routers, with_guidellm

WITH_GUIDELLM = "--guidellm" in sys.argv
ARGUMENTS = [word for word in sys.argv[1:] if word != "--guidellm"]
SEMMOE = ARGUMENTS[0] if ARGUMENTS else "target/release/semmoe"
KEY = "sk-for-this-test"


def configuration(folder, url):
    (folder / "engine.key").write_text(engine.KEY)
    (folder / "engine.key").chmod(0o600)
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    path = folder / "semmoe.toml"
    path.write_text(f"""
[server]
listen = "127.0.0.1:0"
admin = "127.0.0.1:0"
[auth]
keys = [{{ name = "team-a", sha256 = "{digest}" }}]
[[models]]
name = "{engine.MODEL}"
aliases = ["small"]
policy = "round_robin"
[[models.backends]]
name = "pod-a"
engine = "openai"
url = "{url}"
api_key_file = "engine.key"
""")
    return path


def start(path):
    process = subprocess.Popen([SEMMOE, "serve", "--config", path], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if match := re.match(r"ready: (\S+)", line):
            return process, match[1]
    sys.exit(f"the gateway did not start (exit code {process.wait()})")


def curl(*arguments):
    """Status, headers in lower case, and body."""
    command = ["curl", "--silent", "--show-error", "--max-time", "30", "--include", *arguments]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    head, body = re.split(r"\r?\n\r?\n", answer, maxsplit=1)
    if " 100" in head.splitlines()[0]:
        head, body = re.split(r"\r?\n\r?\n", body, maxsplit=1)
    lines = head.splitlines()
    return int(lines[0].split()[1]), dict(line.lower().split(": ", 1) for line in lines[1:]), body


def with_curl(base):
    if not shutil.which("curl"):
        print("NOTICE: curl is missing, so it was not tried")
        return
    key = ("-H", f"Authorization: Bearer {KEY}")
    chat = {"model": engine.MODEL, "messages": [{"role": "user", "content": "What is Rust?"}]}
    data = ("-H", "Content-Type: application/json", "-d", json.dumps(chat))
    for version in ("--http1.1", "--http2-prior-knowledge"):
        status, headers, body = curl(version, base + "/v1/chat/completions", *key, *data)
        assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "Rust is a language.", body
        assert headers["x-semmoe-backend"] == "pod-a" and headers["x-request-id"], headers
        stream = json.dumps({**chat, "stream": True})
        status, headers, body = curl(version, "-N", base + "/v1/chat/completions", *key, "-H", "Content-Type: application/json", "-d", stream)
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), headers
        assert body.count("data: ") == 8 and body.endswith("data: [DONE]\n\n"), body
        status, headers, body = curl(version, base + "/v1/chat/completions", *data)
        assert status == 401 and json.loads(body)["error"]["code"] == "api_key_missing", body
        assert headers["www-authenticate"] == "bearer", headers
        status, _, body = curl(version, base + "/v1/models", "-H", f"x-api-key: {KEY}")
        assert status == 200 and json.loads(body)["data"][0]["id"] == engine.MODEL, body
        status, _, body = curl(version, base + "/flush_cache", "-X", "POST", *key)
        assert status == 404, body
    # Longer than a kilobyte: curl first asks for permission to send it ("Expect: 100-continue").
    chat["messages"][0]["content"] = "word " * 300_000
    for pack in (bytes, gzip.compress, lambda body: b"\xef\xbb\xbf" + body):
        status, _, body = long_body(base, key, pack(json.dumps(chat).encode()), pack is gzip.compress)
        assert status == 200, body
    print("curl: ok")


def long_body(base, key, body, is_gzip):
    coding = ("-H", "Content-Encoding: gzip") if is_gzip else ()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(body)
        file.flush()
        return curl("--http1.1", base + "/v1/chat/completions", *key, *coding, "-H", "Expect: 100-continue", "--data-binary", f"@{file.name}")


def python_with(requirements, folder, what):
    """A Python with these packages; None, and a notice, without PyPI."""
    home = folder / requirements
    venv.create(home, with_pip=True)
    install = [home / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps"]
    if subprocess.run([*install, "--requirement", HERE / f"{requirements}.txt"]).returncode != 0:
        print(f"NOTICE: PyPI cannot be reached, so {what} not tried")
        return None
    return home / "bin/python"


def with_openai(base, folder):
    python = python_with("requirements", folder, "the official `openai` package was")
    if python:
        subprocess.run([python, HERE / "with_openai.py", base + "/v1", KEY], check=True, timeout=120)


def with_frameworks(folder):
    python = python_with("frameworks", folder, "LangChain and LiteLLM were")
    if not python:
        return
    up = subprocess.Popen([SEMMOE, "up", "--port", "0", "--data", folder / "up"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        base = next((match[1] for line in up.stdout if (match := re.match(r"ready: (\S+)", line))), None)
        assert base, f"`up` was not ready (exit code {up.wait()})"
        subprocess.run([python, HERE / "with_frameworks.py", base + "/v1", "tiny-qwen3moe-15m"], check=True, timeout=180)
    finally:
        up.terminate()
        up.wait(timeout=60)


def with_workers(folder):
    if python := python_with("routers", folder, "sglang-router and vllm-router were"):
        routers.run(python, SEMMOE, folder)
    if not WITH_GUIDELLM:
        print("NOTICE: without --guidellm GuideLLM was not tried")
    elif python := python_with("guidellm", folder, "GuideLLM was"):
        with_guidellm.run(python, SEMMOE, folder)


with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    process, base = start(configuration(folder, engine.start()))
    try:
        with_curl(base)
        with_openai(base, folder)
    finally:
        process.terminate()
        code = process.wait(timeout=60)
    assert code == 0, f"the gateway left with exit code {code}"
    with_frameworks(folder)
    with_workers(folder)
