"""Units of one rank of the bundled model."""
import contextlib, json, pathlib, subprocess

MODEL = pathlib.Path(__file__).resolve().parents[2] / "assets/tiny-qwen3moe-15m"


@contextlib.contextmanager
def start(semmoe, model=MODEL):
    """The base URL of a serving worker; it exits with code 0 at the end."""
    command = [semmoe, "worker", "--model", model, "--rank", "0", "--world", "1"]
    command += ["--rendezvous", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--exit-on-stdin-eof"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        events = (json.loads(line) for line in process.stdout)
        yield "http://" + next(event["http"] for event in events if event["event"] == "ready")
    finally:
        process.stdin.close()
        code = process.wait(timeout=60)
    assert code == 0, f"the worker left with exit code {code}"
