#!/usr/bin/env python3
"""Installs the wheel and the tarball as a user would, and runs `semmoe up` until it answers: run.py [SEMMOE].

Both are made from the binary by deploy/package. The wheel goes into an empty virtual environment, without a registry; the tarball is unpacked.
Neither sees the source tree: working directory, home and cache are empty folders. A binary on its own must say where its assets can be had."""
import json, os, pathlib, re, shutil, signal, subprocess, sys, tempfile, threading, time, urllib.request, venv

ROOT = pathlib.Path(__file__).resolve().parents[2]
SEMMOE = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "target/release/semmoe").resolve()
# From the start of the command to its first answer, recording and solving included.
LONGEST_SECONDS = float(os.environ.get("SEMMOE_TEST_UP_SECONDS", "60"))


def environment(folder):
    """Nothing of the caller's but where programs are."""
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder)}


def answered(semmoe, folder):
    """Seconds until a request to `up` is answered; its assets are those of the installation."""
    began = time.monotonic()
    process = subprocess.Popen([semmoe, "up", "--port", "0"], cwd=folder, env=environment(folder), stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(300, process.kill)
    timer.start()
    try:
        url = next((match[1] for line in process.stdout if (match := re.match(r"ready: (http://\S+)", line))), None)
        assert url, f"`up` ended with exit code {process.wait()}"
        prompts = next(line for line in process.stdout if "--prompts " in line)
        assert f"--prompts {folder.resolve()}/" in prompts, f"assets of elsewhere: {prompts}"
        threading.Thread(target=process.stdout.read, daemon=True).start()
        body = {"model": "tiny-qwen3moe-15m", "messages": [{"role": "user", "content": "Tell me about a river."}], "max_tokens": 8}
        request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] >= 1
        seconds = time.monotonic() - began
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0, process.returncode
        return seconds
    finally:
        timer.cancel()
        process.kill()


def installed(wheel, folder):
    home = folder / "environment"
    venv.create(home, with_pip=True)
    began = time.monotonic()
    subprocess.run([home / "bin/pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", wheel], check=True)
    print(f"pip install: {time.monotonic() - began:.1f} s")
    assert "kube" in subprocess.run([home / "bin/semmoe", "--version"], check=True, capture_output=True, text=True).stdout
    return home / "bin/semmoe"


def unpacked(tarball, folder):
    shutil.unpack_archive(tarball, folder)
    return next(folder.glob("semmoe-*/bin/semmoe"))


def converted(program, folder):
    """The script beside the command converts a dump, and the command imports it."""
    data = ROOT / "profiler/tests/data/import"
    run = lambda *words: subprocess.run([str(word) for word in words], check=True, cwd=folder, env=environment(folder), capture_output=True)
    run(program.with_name("semmoe-convert"), data / "stat.pt", "--out", ".")
    run(program, "profile", "import", "stat.pt.safetensors", "--format", "sglang", "--model-config", data / "config.json", "--model", "m", "--out", "loads.json")
    assert json.loads((folder / "loads.json").read_text())["format"] == "semmoe.loads"


def lost(folder):
    """A binary that was copied away from everything: one sentence with the way out, unless it knows the tree it was built in."""
    alone = folder / "alone"
    alone.mkdir()
    shutil.copy(SEMMOE, alone)
    named = {**environment(folder), "SEMMOE_ASSETS": str(alone)}
    done = subprocess.run([alone / "semmoe", "up"], cwd=alone, env=named, capture_output=True, text=True)
    assert done.returncode == 2 and "SEMMOE_ASSETS" in done.stderr and done.stderr.count("\n") == 1, done
    named["SEMMOE_ASSETS"] = str(ROOT / "assets")
    # It finds them, and fails later, at a port that cannot be.
    done = subprocess.run([alone / "semmoe", "up", "--port", "65535"], cwd=alone, env=named, capture_output=True, text=True)
    assert done.returncode == 2 and "65535" in done.stderr, done


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    print(subprocess.run([ROOT / "deploy/package", SEMMOE, folder / "dist"], check=True, capture_output=True, text=True).stdout.strip())
    lost(folder)
    for kind, install, pattern in (("wheel", installed, "*.whl"), ("tarball", unpacked, "*.tar.gz")):
        place = folder / kind
        place.mkdir()
        # The second one starts from the first one's cache: the assets are the same, which the cache's key proves.
        cache = folder / "wheel/cache"
        if kind == "tarball":
            shutil.copytree(cache, place / "cache")
        program = install(next((folder / "dist").glob(pattern)), place)
        converted(program, place)
        seconds = answered(program, place)
        print(f"{kind}: answered after {seconds:.1f} s{' (from the cache)' if kind == 'tarball' else ''}")
        assert seconds < LONGEST_SECONDS, f"{kind}: longer than {LONGEST_SECONDS:.0f} s"
