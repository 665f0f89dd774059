"""Starts, watches and ends the benchmark's own processes; no others."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process:
    """A child in its own session, with all its descendants."""

    def __init__(self, name, command, log, **options):
        self.name = name
        self.log = log
        with open(log, "wb") as output:
            options.setdefault("stdout", output)
            self.child = subprocess.Popen(command, stderr=output, stdin=subprocess.PIPE, start_new_session=True, **options)

    def pids(self):
        """The child and its descendants."""
        found, to_look_at = [], [self.child.pid]
        while to_look_at:
            pid = to_look_at.pop()
            found.append(pid)
            try:
                for task in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{task}/children") as children:
                        to_look_at += [int(child) for child in children.read().split()]
            except (FileNotFoundError, ProcessLookupError):
                pass
        return found

    def cpu_seconds(self):
        """Their user and system time, including ended threads."""
        ticks = 0
        for pid in self.pids():
            try:
                with open(f"/proc/{pid}/stat") as stat:
                    fields = stat.read().rsplit(")", 1)[1].split()
                ticks += int(fields[11]) + int(fields[12])
            except (FileNotFoundError, ProcessLookupError):
                pass
        return ticks / TICKS_PER_SECOND

    def rss_mb(self):
        """Their resident memory; shared pages count once per process."""
        total = 0
        for pid in self.pids():
            try:
                with open(f"/proc/{pid}/status") as status:
                    total += sum(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
            except (FileNotFoundError, ProcessLookupError):
                pass
        return total / 1024

    def wait_for(self, url, seconds=60):
        """Waits until `url` answers 2xx."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.child.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.child.returncode}; see {self.log}")
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError(f"{self.name} does not answer at {url}; see {self.log}")

    def stop(self):
        if self.child.poll() is None:
            for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
                try:
                    os.killpg(self.child.pid, number)
                    self.child.wait(seconds)
                    break
                except (subprocess.TimeoutExpired, ProcessLookupError):
                    continue
        if self.child.stdin:
            self.child.stdin.close()
