"""Starts and stops real engines on CPU, as ./install put them into a cache folder. Python's standard library only."""
import os, pathlib, random, shutil, signal, socket, subprocess, time, urllib.error, urllib.request

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
MODEL = REPOSITORY / "assets/tiny-qwen3moe-15m"
NAME = "tiny"
VERSIONS = {"vllm": ["0.30.0", "0.32.0"], "sglang": ["0.5.23", "0.5.16"]}
# Arguments for data-parallel attention over two ranks, and expert parallelism.
TWO_RANKS = {
    "vllm": ["--data-parallel-size", "2", "--enable-expert-parallel"],
    "sglang": ["--tp-size", "2", "--attn-dp-size", "2", "--ep-size", "2"],
}
# vLLM records on CPU only up to 0.30: from 0.31 the flag needs a model runner that needs Triton.
RECORDING = {
    ("vllm", "0.30.0"): ["--enable-return-routed-experts"],
    ("vllm", "0.32.0"): [],
    ("sglang", "0.5.23"): ["--enable-return-routed-experts"],
    ("sglang", "0.5.16"): ["--enable-return-routed-experts"],
}
OLDER_SPELLING = ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2"]


def two_ranks(engine, version):
    """`--attn-dp-size` exists since SGLang 0.5.22."""
    return OLDER_SPELLING if version == "0.5.16" else TWO_RANKS[engine]



def default_cache():
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "semmoe-engines"


def folder(engine, version, cache):
    """All versions of vLLM share one folder; each version of SGLang has its own, the newest one `sglang`."""
    name = engine if engine == "vllm" or version == VERSIONS["sglang"][0] else f"{engine}-{version}"
    return pathlib.Path(cache).resolve() / name


def install(engine, version, cache):
    """Raises CalledProcessError when it fails."""
    subprocess.run([HERE / "install", engine, "--version", version, "--cache", cache], check=True)


def free_port():
    """Below the system's ephemeral ports: SGLang uses further ports at some distance from its own."""
    while True:
        port = random.randrange(20_000, 31_000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass


class Server:
    """One engine process with all its children, in a process group of its own."""

    def __init__(self, engine, version, cache, arguments, port=None, model=None, log=None):
        self.engine, self.version, self.port = engine, version, port or free_port()
        self.folder = folder(engine, version, cache)
        self.model = pathlib.Path(model or (MODEL if engine == "vllm" else untied(self.folder)))
        self.arguments = [*arguments, "--served-model-name", NAME]
        self.url = f"http://127.0.0.1:{self.port}"
        command, environment = (vllm if engine == "vllm" else sglang)(self)
        self.command = command
        self.log = open(log or self.folder / f"{engine}-{self.port}.log", "wb")
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
            start_new_session=True, cwd=self.folder)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def wait(self, seconds=420):
        """Waits until it is healthy. Returns the seconds since its start."""
        while time.monotonic() - self.started < seconds:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.engine} ended with {self.process.returncode}:\n{self.tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    return time.monotonic() - self.started
            except (OSError, urllib.error.URLError):
                time.sleep(1)
        raise RuntimeError(f"{self.engine} was not healthy within {seconds} s:\n{self.tail()}")

    def tail(self, bytes_=3000):
        return pathlib.Path(self.log.name).read_bytes()[-bytes_:].decode(errors="replace")

    def children(self, name):
        """Ids of this server's processes whose title contains `name`."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                group = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[2])
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if group == self.process.pid and name in title:
                found.append(int(entry.name))
        return sorted(found)

    def signal(self, which):
        try:
            os.killpg(self.process.pid, which)
        except ProcessLookupError:
            pass

    def kill(self):
        """Kills all of its processes at once, as if the machine were gone."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                pass
        self.kill()
        self.log.close()


def vllm(server):
    venv = server.folder / "venv"
    environment = base_environment(venv) | {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if server.version == "0.30.0":
        environment["PYTHONPATH"] = str(server.folder / "v030")
    return [
        "vllm", "serve", str(server.model), "--host", "127.0.0.1", "--port", str(server.port), "--enforce-eager",
        "--max-model-len", "2048", "--dtype", "float32", "--max-num-seqs", "32", *server.arguments,
    ], environment


def sglang(server):
    venv = server.folder / "venv"
    models = next(venv.glob("lib/python3.*/site-packages/sglang/srt/models"))
    # Modules of other architectures are not imported, for a faster start.
    others = sorted(m.stem for m in models.glob("*.py") if not m.stem.startswith(("qwen", "__")))
    environment = base_environment(venv) | {
        "PYTHONPATH": str(HERE / "sglang/shim"),
        "SGLANG_USE_CPU_ENGINE": "1",
        # One entry per rank; 0.5.23 wants two per rank.
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1" if server.version == "0.5.16" else "0|1|0|1",
        "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(others),
    }
    return [
        "python", "-m", "sglang.launch_server", "--model-path", str(server.model), "--host", "127.0.0.1",
        "--port", str(server.port), "--device", "cpu", "--attention-backend", "torch_native",
        "--sampling-backend", "pytorch", "--disable-cuda-graph", "--max-total-tokens", "20000", "--dtype", "float32",
        *server.arguments,
    ], environment


def base_environment(venv):
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PATH": f"{venv}/bin:{kept.get('PATH', '')}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def untied(folder):
    """The model with an explicit output matrix, made once."""
    out = folder / "model"
    if not (out / "config.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        subprocess.run([folder / "venv/bin/python", HERE / "sglang/untie.py", MODEL, out], check=True)
    return out
