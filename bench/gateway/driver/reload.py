"""Swaps of tables through the admin plane while requests are sent as fast as they are answered."""

import json
import re
import threading
import time
import urllib.request

SWAPS = 1000


class Load(threading.Thread):
    """The client, round after round; the first wrong answer, or one that names another rank than the engine received, ends it."""

    def __init__(self, everyone, contestant, closed):
        super().__init__(daemon=True)
        self.everyone, self.contestant, self.closed = everyone, contestant, closed
        self.stopped = threading.Event()
        self.requests, self.error = 0, None

    def run(self):
        while not self.stopped.is_set() and not self.error:
            try:
                self.requests += self.everyone.client(self.contestant.address, self.closed)["requests"]
            except RuntimeError as error:
                self.error = error


def swap(admin, number):
    body = json.dumps({"backend": "engine", "path": f"{1 + number % 2}.tables.safetensors"}).encode()
    request = urllib.request.Request(f"http://{admin}/admin/tables", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["generation"]


def times(admin, histogram, label=""):
    """Upper bounds in seconds of the buckets that hold half, 99% and all of what the gateway measured under a label."""
    with urllib.request.urlopen(f"http://{admin}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    lines = re.findall(re.escape(histogram) + r"_bucket\{(.*)\} (\d+)", text)
    buckets = [(re.search(r'le="([^"]+)"', labels)[1], count) for labels, count in lines if label in labels]
    total = int(buckets[-1][1])
    bounds = [next(bound for bound, count in buckets if int(count) >= share * total) for share in (0.5, 0.99, 1.0)]
    return {"times": total, "p50": bounds[0], "p99": bounds[1], "max": bounds[2]}


def measure(everyone, ours, closed):
    load = Load(everyone, ours, closed)
    load.start()
    began, last = time.monotonic(), 0
    for number in range(1, SWAPS + 1):
        generation = swap(ours.admin, number)
        if generation <= last:
            raise RuntimeError(f"swap {number} gave generation {generation} after {last}")
        last = generation
        if load.error:
            break
    seconds = time.monotonic() - began
    load.stopped.set()
    load.join()
    if load.error:
        raise RuntimeError(f"a request failed beside the swaps: {load.error}")
    return {
        "swaps": SWAPS, "seconds": seconds, "requests": load.requests, "failed": 0, "misrouted": 0,
        "pause_seconds": times(ours.admin, 'semmoe_swap_wait_seconds', 'clock="cpu"'),
        "pause_wall_seconds": times(ours.admin, 'semmoe_swap_wait_seconds', 'clock="wall"'),
        "swap_seconds": times(ours.admin, "semmoe_tables_swap_seconds"),
    }


def table(found):
    pause, wall, swap_itself = found["pause_seconds"], found["pause_wall_seconds"], found["swap_seconds"]
    return (
        f"### {found['swaps']} swaps of tables under full load\n\n"
        f"{found['seconds']:.1f} s, {found['requests']} requests: {found['failed']} failed, {found['misrouted']} on another rank than "
        f"the gateway names. To get the state took requests, measured inside, {pause['times']} times while tables were loaded and "
        f"swapped in: half at most {pause['p50']} s, 99% at most {pause['p99']} s, all at most {pause['max']} s of their threads' time "
        f"(nobody sleeps for it: there is no lock), and {wall['p50']} s, {wall['p99']} s, {wall['max']} s as time went by, when others "
        f"had the core, too. The swap itself, for which none waits: {swap_itself['p50']} s, {swap_itself['p99']} s, {swap_itself['max']} s.\n"
    )
