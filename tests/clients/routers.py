"""SGLang's and vLLM's own routers, unchanged, in front of two workers."""
import concurrent.futures, json, re, socket, subprocess, sys, time, urllib.error, urllib.request

import worker

REQUESTS = 100
ROUTERS = {
    "sglang-router": ["-m", "sglang_router.launch_router"],
    "vllm-router": ["-m", "vllm_router.launch_router"],
}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(python, name, workers, log):
    """The router's process and base URL, once it has both workers."""
    for _ in range(5):
        port, other = free_port(), free_port()
        command = [python, *ROUTERS[name], "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(other), "--worker-urls", *workers]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        base = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(base + "/health", timeout=10).read()
                return process, base
            except (OSError, urllib.error.URLError):
                time.sleep(0.1)
        # Another program may have taken the port meanwhile.
        process.kill()
        process.wait()
    sys.exit(f"{name} did not start")


def chat(base, stream, number):
    """Whether one chat was answered completely."""
    message = {"role": "user", "content": f"Tell me about the number {number}."}
    body = {"model": worker.MODEL.name, "messages": [message], "max_tokens": 8, "ignore_eos": True, "stream": stream}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(base + "/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read().decode()}"
    except OSError as error:
        return str(error)
    if not stream:
        answer = json.loads(text)
        whole = answer["usage"]["completion_tokens"] == 8 and answer["choices"][0]["finish_reason"] == "length"
        return None if whole else text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    whole = events[-1] == "[DONE]" and choices[-1]["finish_reason"] == "length"
    return None if whole and any(choice["delta"].get("content") for choice in choices) else text


def finished(base):
    """Prompt and output tokens that a worker has computed or reused."""
    page = urllib.request.urlopen(base + "/metrics", timeout=30).read().decode()
    return sum(int(value) for value in re.findall(r"^semmoe_tokens_total\{.*\} (\d+)$", page, re.M))


def run(python, semmoe, folder):
    """100 of 100 chats through each router, streaming and not, over both workers."""
    for name in ROUTERS:
        with worker.start(semmoe) as one, worker.start(semmoe) as other, open(folder / f"{name}.log", "w") as log:
            process, base = start(python, name, [one, other], log)
            try:
                # It adds its workers in the background.
                deadline = time.monotonic() + 120
                while chat(base, False, 0) is not None or min(finished(one), finished(other)) == 0:
                    assert time.monotonic() < deadline, f"{name} does not use both workers: {chat(base, False, 0)}"
                    time.sleep(0.1)
                for stream in (False, True):
                    with concurrent.futures.ThreadPoolExecutor(8) as pool:
                        answers = list(pool.map(lambda number: chat(base, stream, number), range(REQUESTS)))
                    failed = [answer for answer in answers if answer is not None]
                    assert not failed, f"{name}, stream {stream}: {len(failed)} of {REQUESTS} failed: {failed[0]}"
            finally:
                process.terminate()
                process.wait(timeout=60)
        print(f"{name}: {REQUESTS} of {REQUESTS} chats whole, {REQUESTS} of {REQUESTS} streams")
