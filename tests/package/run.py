#!/usr/bin/env python3
"""Installs the wheel and the tarball as a user would, and runs `semmoe up` until it answers: run.py [SEMMOE | --made DIST | --installed PROGRAM].

Both are made from the binary by deploy/package; with --made those of deploy/release are taken, as far as they are for this machine. The wheel goes
into an empty virtual environment, without a registry; the tarball is unpacked. Neither sees the source tree: working directory, home and cache are
empty folders. A binary on its own must say where its assets can be had. All but static ones can compute on a GPU, and refuse to without a driver. With
--installed a program that cargo, pip or maturin installed is run."""
import json, os, pathlib, platform, re, shutil, signal, subprocess, sys, tempfile, threading, time, urllib.request, venv

ROOT = pathlib.Path(__file__).resolve().parents[2]
# From the start of the installation to the first answer, including recording and solving.
LONGEST_SECONDS = float(os.environ.get("SEMMOE_TEST_UP_SECONDS", "60"))


def environment(folder):
    """Nothing of the caller's environment except the program path."""
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder)}


def answered(semmoe, folder, own_assets):
    """Runs `up` until it answers a request, and returns when. `own_assets`: they must be those of the installation below `folder`."""
    process = subprocess.Popen([semmoe, "up", "--port", "0"], cwd=folder, env=environment(folder), stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(300, process.kill)
    timer.start()
    try:
        url = next((match[1] for line in process.stdout if (match := re.match(r"ready: (http://\S+)", line))), None)
        assert url, f"`up` ended with exit code {process.wait()}"
        prompts = next(line for line in process.stdout if "--prompts " in line)
        assert not own_assets or f"--prompts {folder.resolve()}/" in prompts, f"assets of elsewhere: {prompts}"
        threading.Thread(target=process.stdout.read, daemon=True).start()
        body = {"model": "tiny-qwen3moe-15m", "messages": [{"role": "user", "content": "Tell me about a river."}], "max_tokens": 8}
        request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] >= 1
        at = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0, process.returncode
        return at
    finally:
        timer.cancel()
        process.kill()


def installed(wheel, folder):
    home = folder / "environment"
    venv.create(home, with_pip=True)
    subprocess.run([home / "bin/pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", wheel], check=True)
    return home / "bin/semmoe"


def unpacked(tarball, folder):
    shutil.unpack_archive(tarball, folder)
    return next(folder.glob("semmoe-*/bin/semmoe"))


def featured(program, folder):
    """`--version` names the features and the GPU kernels. A build that can open the CUDA driver says if there is none."""
    about = dict(re.findall(r"^(\w+): +(.+)$", subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout, re.MULTILINE))
    dynamic = not about["target"].endswith("musl")
    assert "kube" in about["features"] and ("cuda" in about["features"]) == dynamic == ("kernels" in about), about
    model = next((ROOT / "assets").glob("tiny-*"))
    command = [program, "worker", "--model", model, "--world", "1", "--device", "cuda", "--listen", "127.0.0.1:0"]
    done = subprocess.run(command, cwd=folder, env={**environment(folder), "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    reason = "CUDA driver|GPUs are visible" if dynamic else "needs one with the feature cuda"
    assert done.returncode == 2 and re.search(reason, done.stderr) and done.stderr.count("\n") == 1, done
    return about.get("kernels", "none: a static build")


def converted(program, folder):
    """The bundled script converts a dump, and the command imports it."""
    data = ROOT / "profiler/tests/data/import"
    run = lambda *words: subprocess.run([str(word) for word in words], check=True, cwd=folder, env=environment(folder), capture_output=True)
    run(program.with_name("semmoe-convert"), data / "stat.pt", "--out", ".")
    run(program, "profile", "import", "stat.pt.safetensors", "--format", "sglang", "--model-config", data / "config.json", "--model", "m", "--out", "loads.json")
    assert json.loads((folder / "loads.json").read_text())["format"] == "semmoe.loads"


def lost(binary, folder):
    """A binary that was copied away from everything: one sentence with the way out, unless it knows the tree it was built in."""
    alone = folder / "alone"
    alone.mkdir()
    shutil.copy(binary, alone / "semmoe")
    named = {**environment(folder), "SEMMOE_ASSETS": str(alone)}
    done = subprocess.run([alone / "semmoe", "up"], cwd=alone, env=named, capture_output=True, text=True)
    assert done.returncode == 2 and "SEMMOE_ASSETS" in done.stderr and done.stderr.count("\n") == 1, done
    named["SEMMOE_ASSETS"] = str(ROOT / "assets")
    # It finds them, and fails later, at an invalid port.
    done = subprocess.run([alone / "semmoe", "up", "--port", "65535"], cwd=alone, env=named, capture_output=True, text=True)
    assert done.returncode == 2 and "65535" in done.stderr, done


def in_time(what, install, place, own_assets=True):
    """Measures `install`, which returns the program; returns the program too."""
    began = time.monotonic()
    program = install()
    ready = time.monotonic()
    seconds = answered(program, place, own_assets) - began
    print(f"{what}: answered after {seconds:.1f} s, {ready - began:.1f} s of them to install; GPU kernels: {featured(program, place)}")
    assert seconds < LONGEST_SECONDS, f"{what}: longer than {LONGEST_SECONDS:.0f} s"
    return program


def made_from(binary, folder):
    print(subprocess.run([ROOT / "deploy/package", binary, folder / "dist"], check=True, capture_output=True, text=True).stdout.strip())
    lost(binary, folder)
    for kind, install, pattern in (("wheel", installed, "*.whl"), ("tarball", unpacked, "*.tar.gz")):
        place = folder / kind
        place.mkdir()
        # The second one starts from the first one's cache: the assets are the same, which the cache's key proves.
        if kind == "tarball":
            shutil.copytree(folder / "wheel/cache", place / "cache")
        package = next((folder / "dist").glob(pattern))
        program = in_time(f"{kind}{' (from the cache)' if kind == 'tarball' else ''}", lambda: install(package, place), place)
        converted(program, place)


def released(dist, folder):
    """Every package for this machine, each from nothing; the others cannot run here, and that is said."""
    tried = 0
    for package in sorted([*dist.glob("*.whl"), *dist.glob("*.tar.gz")]):
        if platform.machine() not in package.name:
            print(f"NOTICE: {package.name} is for another machine, so it was not run")
            continue
        place = folder / package.name
        place.mkdir()
        install = installed if package.suffix == ".whl" else unpacked
        in_time(package.name, lambda: install(package, place), place)
        tried += 1
    assert tried, f"{dist} holds no package for {platform.machine()}"


with tempfile.TemporaryDirectory() as name:
    match sys.argv[1:]:
        case ["--made", dist]:
            released(pathlib.Path(dist), pathlib.Path(name))
        case ["--installed", program]:
            in_time(program, lambda: pathlib.Path(program).resolve(), pathlib.Path(name), own_assets=False)
        case [] | [_]:
            made_from(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "target/release/semmoe").resolve(), pathlib.Path(name))
        case _:
            sys.exit(__doc__)
