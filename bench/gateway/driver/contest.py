"""Rounds that measure every contestant in sequence, so that all see the machine in one state."""

import json
import statistics
import subprocess

from peers import ROUTERS


class Contest:
    def __init__(self, settings, contestants, say):
        self.settings = settings
        self.contestants = contestants
        self.say = say

    def client(self, address, arrivals, options=(), seconds=None):
        """One measurement; any wrong answer ends the benchmark."""
        command = [self.settings.tool, "client", "--target", address]
        for prompts in self.settings.prompts:
            command += ["--prompts", prompts]
        command += ["--seconds", str(seconds or self.settings.seconds), *options, *arrivals]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def measure(self, contestant, arrivals, options):
        process = contestant.process
        before = process.cpu_seconds()
        figures = self.client(contestant.address, arrivals, options)
        figures["cpu_us_per_request"] = (process.cpu_seconds() - before) / figures["requests"] * 1e6
        figures["rss_mb"] = process.rss_mb()
        return figures

    def rounds(self, arrivals, options=()):
        """{name: [figures of each round]}"""
        results = {contestant.name: [] for contestant in self.contestants}
        for number in range(self.settings.rounds):
            for contestant in self.contestants:
                figures = self.measure(contestant, arrivals, options)
                results[contestant.name].append(figures)
                self.say(
                    f"  round {number + 1} {contestant.name}: {figures['requests_per_second']:.0f}/s, "
                    f"p99 {figures['p99_us']:.0f} us, {figures['cpu_us_per_request']:.0f} us CPU"
                )
        return results


def median(rounds, key):
    return statistics.median(figures[key] for figures in rounds)


def best_router(results, key="requests_per_second"):
    """The best router by the median; nothing if there is none."""
    routers = [name for name in results if name in ROUTERS]
    return max(routers, key=lambda name: median(results[name], key), default=None)


def ratios(results, name, other, key):
    """Median, minimum and maximum ratio over the rounds."""
    pairs = zip(results[name], results[other])
    found = [ours[key] / theirs[key] for ours, theirs in pairs if theirs[key]]
    return statistics.median(found), min(found), max(found)


def spread(found):
    return "{:.2f} ({:.2f} to {:.2f})".format(*found)


def table(title, results, key="requests_per_second", unit="requests/s", digits=0, router=None):
    """Markdown: each contestant's figures, compared with the best router and with nginx."""
    router, nginx = router or best_router(results), "nginx" if "nginx" in results else None
    head = ["", unit, "over the best router" + (f" ({router})" if router else ""), "over nginx", "CPU us/request", "RSS MB"]
    lines = [f"### {title}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, rounds in results.items():
        cells = [name, f"{median(rounds, key):.{digits}f}"]
        cells += [spread(ratios(results, name, other, key)) if other else "" for other in (router, nginx)]
        cells += [f"{median(rounds, 'cpu_us_per_request'):.0f}", f"{median(rounds, 'rss_mb'):.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def against_earlier(results):
    """Markdown: this semmoe over the earlier one, within rounds."""
    head = ["semmoe over the earlier one", "requests/s", "CPU per request", "RSS"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for policy in ("round_robin", "affinity"):
        if (name := f"semmoe {policy}") in results:
            keys = ("requests_per_second", "cpu_us_per_request", "rss_mb")
            cells = [spread(ratios(results, name, f"earlier {policy}", key)) for key in keys]
            lines.append("| " + " | ".join([policy, *cells]) + " |")
    return "\n".join(lines) + "\n"
