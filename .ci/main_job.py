#!/usr/bin/env python3
"""Runs the README's main job from a release build: first start, a request, Ctrl-C, second start, every example of --help, the check."""
import json, re, signal, subprocess, sys, tempfile, threading, time, urllib.request

import examples

# The packaged features: everything that needs no further build tools.
subprocess.run(["cargo", "build", "--release", "--locked", "--features", "kube,cuda"], check=True)
SEMMOE, MOCK = "target/release/semmoe", "target/debug/semmoe-mock-engine"
# The tests have built these already: with examples, dependencies get the features of the tests.
subprocess.run(["cargo", "build", "--workspace", "--bins", "--examples", "--locked"], check=True)


def start_up(data, limit_s):
    """Starts `up`, waits for its ready line, returns (process, url, seconds)."""
    began = time.monotonic()
    process = subprocess.Popen(
        [SEMMOE, "up", "--port", "0", "--data", data], stdout=subprocess.PIPE, text=True
    )
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    url = None
    for line in process.stdout:
        print("  up |", line, end="")
        if match := re.match(r"ready: (http://\S+)", line):
            url = match[1]
            break
    timer.cancel()
    if url is None:
        sys.exit(f"`up` was not ready within {limit_s} s (exit code {process.wait()})")
    # The pipe is drained so that `up` never blocks on it.
    threading.Thread(target=process.stdout.read, daemon=True).start()
    return process, url, time.monotonic() - began


def ask(url):
    body = json.dumps({"model": "tiny-qwen3moe-15m", "messages": [{"role": "user", "content": "What is Rust?"}], "max_tokens": 8})
    request = urllib.request.Request(url + "/v1/chat/completions", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        document = json.load(answer)
        assert answer.headers["x-semmoe-rank"] is not None, dict(answer.headers)
        assert document["usage"]["completion_tokens"] >= 1, document


def stop(process):
    process.send_signal(signal.SIGINT)
    code = process.wait(timeout=60)
    if code != 0:
        sys.exit(f"`up` left with exit code {code} after Ctrl-C")


with tempfile.TemporaryDirectory() as data:
    for run in ("first", "second"):
        process, url, seconds = start_up(data, 300)
        try:
            print(f"{run} start: ready after {seconds:.1f} s")
            ask(url)
            if run == "second":
                with tempfile.TemporaryDirectory() as folder:
                    examples.run(SEMMOE, folder, url, MOCK)
        finally:
            stop(process)
    output = subprocess.run([SEMMOE, "up", "--check", "--json", "--data", data], check=True, stdout=subprocess.PIPE, timeout=600)
    report = json.loads(output.stdout)
    print(json.dumps(report, indent=2))
    assert report["affinity"]["lar"] > report["baseline"]["lar"], "affinity must raise the local activation rate"
