"""GuideLLM, unchanged, against a worker and against the gateway in front of it."""
import contextlib, json, os, re, subprocess

import worker

REQUESTS = 100


@contextlib.contextmanager
def gateway(semmoe, url, folder):
    """The base URL of a gateway in front of a worker."""
    path = folder / "guidellm.toml"
    path.write_text(f"""
[server]
listen = "127.0.0.1:0"
admin = "127.0.0.1:0"
[[models]]
name = "{worker.MODEL.name}"
policy = "round_robin"
[[models.backends]]
name = "pod-a"
engine = "semmoe"
url = "{url}"
""")
    process = subprocess.Popen([semmoe, "serve", "--config", path], stdout=subprocess.PIPE, text=True)
    try:
        yield next(match[1] for line in process.stdout if (match := re.match(r"ready: (\S+)", line)))
    finally:
        process.terminate()
        process.wait(timeout=60)


def benchmark(python, base, folder):
    """100 of 100 streamed chats, after GuideLLM's own checks of `GET /health` and `/v1/models`."""
    report = folder / "guidellm.json"
    command = [python.parent / "guidellm", "run", "--disable-console-interactive", "--backend", f"kind=openai_http,target={base}"]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=hf_auto,model={worker.MODEL}", "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    command += ["--output", f"kind=json,path={report}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert totals == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}, totals


def run(python, semmoe, folder):
    with worker.start(semmoe) as url:
        benchmark(python, url, folder)
        print(f"GuideLLM against a worker: {REQUESTS} of {REQUESTS}")
        with gateway(semmoe, url, folder) as base:
            benchmark(python, base, folder)
            print(f"GuideLLM against the gateway: {REQUESTS} of {REQUESTS}")
