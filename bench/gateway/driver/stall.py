"""Whether a huge prompt delays other requests: a text of one word takes longest to tokenize."""

import contest
import json
import threading
import time
import urllib.error
import urllib.request

# Just below the tokenization limit, and a body beyond it.
SIZES_MB = (3.9, 10.0)
RATE = 200


class Bully(threading.Thread):
    """Sends huge prompts in sequence until it is stopped; every answer must succeed."""

    def __init__(self, address, megabytes):
        super().__init__(daemon=True)
        body = {"model": "bench", "messages": [{"role": "user", "content": "x" * int(megabytes * 1e6)}]}
        self.request = urllib.request.Request(
            f"http://{address}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        self.stopped = threading.Event()
        self.answers, self.error = 0, None

    def run(self):
        while not self.stopped.is_set() and not self.error:
            try:
                with urllib.request.urlopen(self.request, timeout=60) as answer:
                    answer.read()
                self.answers += 1
            except (urllib.error.URLError, OSError) as error:
                self.error = error

    def stop(self):
        self.stopped.set()
        self.join()
        if self.error:
            raise RuntimeError(f"a huge prompt failed: {self.error}")


def measure(everyone, ours, rounds):
    """Rows of (what, requests' latencies by percentile), in turns: nothing beside them, then each size."""
    found = {"nothing": []}
    for _ in range(rounds):
        found["nothing"].append(everyone.client(ours.address, ["open", str(RATE)]))
        for megabytes in SIZES_MB:
            bully = Bully(ours.address, megabytes)
            bully.start()
            time.sleep(0.2)
            figures = everyone.client(ours.address, ["open", str(RATE)])
            bully.stop()
            figures["huge"] = bully.answers
            found.setdefault(f"{megabytes:g} MB of one word", []).append(figures)
    return found


def table(found):
    lines = [
        f"### {RATE} requests/s beside huge prompts, semmoe affinity", "",
        "| beside them | huge prompts answered | p50, us | p99, us | greatest, us |", "|---|---|---|---|---|",
    ]
    for name, rounds in found.items():
        cells = [name, str(sum(figures.get("huge", 0) for figures in rounds))]
        cells += [f"{contest.median(rounds, key):.0f}" for key in ("p50_us", "p99_us", "max_us")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
