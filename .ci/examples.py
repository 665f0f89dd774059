"""Runs every example of every `--help` verbatim, in a folder with small files of the names they use.

Engines are mocks or a running `up`; only addresses and load sizes are replaced. Servers are stopped once they are ready."""
import pathlib, re, shlex, shutil, signal, subprocess, sys, threading, time

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL, TRACE = ROOT / "assets/tiny-qwen3moe-15m", ROOT / "tests/data/reference.trace.safetensors"
DUMP, CONVERT = ROOT / "profiler/tests/data/import", ROOT / "profiler/python/semmoe_convert.py"
CLUSTER = 'gpu = "H100"\nusd_per_gpu_hour = 2\n[[levels]]\nname = "nvlink"\ncount = 4\nbandwidth_gb_per_second = 450\nlatency_us = 3\n'
WORKLOAD = "requests_per_second = 1\ninput_tokens = 1024\noutput_tokens = 256\n"
# Loads are shortened; files that an example writes elsewhere go to the folder.
SHORTER = {"60s": "1s", "2000": "20", "500": "8", "32": "4"}
ELSEWHERE = {"/etc/bash_completion.d/semmoe", "~/.zfunc/_semmoe", "~/.config/fish/completions/semmoe.fish", "/usr/local/share/man/man1", "/var/cache/semmoe"}
# From a worker with two ranks.
METRICS = """semmoe_steps_total{rank="0"} 10
semmoe_steps_total{rank="1"} 10
semmoe_step_seconds_total{rank="0"} 1.0
semmoe_step_seconds_total{rank="1"} 1.0
semmoe_collective_seconds_total{rank="0",layer="0",kind="dispatch"} 0.8
semmoe_activations_total{rank="0",layer="0",phase="decode",where="local"} 25
semmoe_activations_total{rank="0",layer="0",phase="decode",where="remote"} 75
"""
# main_job.py runs these.
ELSEWHERE_RUN = {"semmoe up --check"}
# Ranks of the engines, and groups of the tables.
GROUPS = "4"
LIMIT_S, LIMIT_ALL_S = 90, 300


def helps(semmoe, words=()):
    """The help text of this command and all its subcommands."""
    text = subprocess.run([semmoe, *words, "--help"], check=True, capture_output=True, text=True).stdout
    found = [text]
    inner = re.search(r"^Commands:\n((?:  .*\n|\n)*)", text, re.M)
    for name in re.findall(r"^  ([a-z]+)\b", inner[1], re.M) if inner else ():
        if name != "help":
            found += helps(semmoe, (*words, name))
    return found


def examples(semmoe):
    """Each example once, in the order of the help texts."""
    found = {}
    for text in helps(semmoe):
        text = re.sub(r"\\\n\s+", "", text)
        for line in re.findall(r"^  (semmoe .*)$", text, re.M):
            found[re.split(r" {3,}", line.strip())[0]] = None
    return list(found)


class Stand:
    """The folder, the mocks, and the addresses that replace those in the examples."""

    def __init__(self, semmoe, folder, up_url, mock):
        self.semmoe, self.folder = str(pathlib.Path(semmoe).resolve()), pathlib.Path(folder)
        self.processes = []
        sglang, vllm = (self.engine(mock, dialect) for dialect in ("sglang", "vllm"))
        self.addresses = {"http://127.0.0.1:30000": sglang, "http://127.0.0.1:8000": vllm, "http://10.0.0.1:8000": vllm, "http://10.0.0.2:8000": vllm,
                          "http://127.0.0.1:8080": up_url, "http://127.0.0.1:9090": up_url}
        self.files(sglang)

    def engine(self, mock, dialect):
        process = subprocess.Popen([mock, dialect, "0", MODEL, GROUPS], stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        return re.search(r"http://\S+", process.stdout.readline())[0]

    def files(self, sglang):
        at = self.folder.joinpath
        for name in ("run.trace.safetensors", "held-out.trace.safetensors", "a.trace", "b.trace", "c.trace"):
            shutil.copy(TRACE, at(name))
        for name in ("DIR", "Qwen3-30B-A3B"):
            at(name).symlink_to(MODEL)
        shutil.copy(MODEL / "config.json", at("config.json"))
        at("cluster.toml").write_text(CLUSTER)
        at("workload.toml").write_text(WORKLOAD)
        at("key.txt").write_text("sk-of-an-example\n")
        at("prompts.jsonl").write_text("".join(f'{{"prompt": "Which rivers flow through town {town}?"}}\n' for town in range(24)))
        at("chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Which rivers are long?"}]}\n')
        at("ShareGPT.json").write_text('[{"conversations": [{"from": "human", "value": "Which rivers are long?"}, {"from": "gpt", "value": "Some."}]}]')
        for number in (0, 1):
            shutil.copy(DUMP / f"per_token_{number}.pt", at(f"expert_distribution_recorder_{number}.pt"))
            subprocess.run([sys.executable, CONVERT, at(f"expert_distribution_recorder_{number}.pt")], check=True, capture_output=True)
        for name in ("run", "monday", "tuesday", "other"):
            self.run(["profile", "build", "run.trace.safetensors", "--out", f"{name}.profile.safetensors"])
        for name in ("m", "qwen3", "old"):
            # The placement that the mocks report.
            self.run(["solve", "--profile", "run.profile.safetensors", "--groups", GROUPS, "--placement", "linear", "--out", f"{name}.tables.safetensors"])
        at("metrics.txt").write_text(METRICS)
        evaluation = self.run(["evaluate", "--tables", "m.tables.safetensors", "--trace", "run.trace.safetensors", "--json"])
        at("evaluation.json").write_text(evaluation.stdout)
        at("semmoe.toml").write_text(f"""[server]\nlisten = "127.0.0.1:0"\nadmin = "127.0.0.1:0"\n[[models]]\nname = "m"\npolicy = "least_load"\n
[[models.backends]]\nname = "a"\nengine = "sglang"\nurl = "{sglang}"\n""")

    def run(self, words, **more):
        return subprocess.run([self.semmoe, *words], check=True, capture_output=True, text=True, cwd=self.folder, timeout=LIMIT_S, **more)

    def words(self, line):
        """Splits a command into its words and its redirected input and output."""
        words = [self.addresses.get(word, word) for word in shlex.split(line)[1:]]
        words = [str(self.folder / pathlib.Path(word).name) if word in ELSEWHERE else word for word in words]
        streams = {}
        for sign in "<>":
            if sign in words:
                at = words.index(sign)
                streams[sign], words = words[at + 1], words[:at] + words[at + 2 :]
        if words[:2] == ["profile", "import"]:
            # For another model than the rest: it goes to a separate file.
            words = [{"DIR": str(DUMP), "run.trace.safetensors": "imported.trace.safetensors"}.get(word, word) for word in words]
        if words[:2] == ["plan", "calibrate"]:
            words += ["--seconds", "2", "--ranks", "1,2"]
        if words[0] == "load":
            words = [SHORTER.get(word, word) for word in words]
        if words[-1:] == ["man1"] or "man" == words[0]:
            (self.folder / "man1").mkdir(exist_ok=True)
        words = [found for word in words for found in (sorted(path.name for path in self.folder.glob(word)) if "*" in word else [word])]
        return words, streams

    def example(self, line):
        words, streams = self.words(line)
        if words[0] == "worker":
            return  # both ranks at once, below
        if words[0] == "up" or (words[0] == "serve" and not {"--check", "--print-config"} & set(words)):
            self.server(words)
            return
        with open(self.folder / streams.get("<", "key.txt")) as given, open(self.folder / "printed", "w") as printed:
            subprocess.run([self.semmoe, *words], check=True, cwd=self.folder, timeout=LIMIT_S, stdin=given, stdout=printed)
        if ">" in streams:
            assert (self.folder / "printed").stat().st_size > 100, line

    def server(self, words):
        """Starts it on a free port, waits until it is ready, and stops it as Ctrl-C does."""
        if words[0] == "up":
            words = [word for at, word in enumerate(words) if "--port" not in words[max(at - 1, 0) : at + 1]] + ["--port", "0"]
            words += [] if "--data" in words else ["--data", str(self.folder / "semmoe")]
        elif "--config" not in words:
            words = [*words, "--listen", "127.0.0.1:0"]
        process = subprocess.Popen([self.semmoe, *words], stdout=subprocess.PIPE, text=True, cwd=self.folder)
        timer = threading.Timer(LIMIT_S, process.kill)
        timer.start()
        ready = any(line.startswith("ready: ") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        threading.Thread(target=process.stdout.read, daemon=True).start()
        code = process.wait(timeout=LIMIT_S)
        timer.cancel()
        assert ready and code == 0, f"{words}: ready {ready}, exit code {code}"

    def workers(self, lines):
        """Starts the ranks of one unit, which wait for each other, on free ports."""
        front, *others = [self.words(line)[0] for line in lines]
        free = {"127.0.0.1:7000": "127.0.0.1:0", "127.0.0.1:30000": "127.0.0.1:0"}
        ranks = [subprocess.Popen([self.semmoe, *(free.get(word, word) for word in front), "--exit-on-stdin-eof"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=self.folder)]
        self.processes += ranks
        rendezvous = re.search(r'"rendezvous":"([^"]+)"', ranks[0].stdout.readline())[1]
        for words in others:
            words = [rendezvous if word == "127.0.0.1:7000" else word for word in words]
            ranks.append(subprocess.Popen([self.semmoe, *words, "--exit-on-stdin-eof"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=self.folder))
            self.processes.append(ranks[-1])
        assert '"ready"' in ranks[0].stdout.readline()

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()


def run(semmoe, folder, up_url, mock):
    began, slowest = time.monotonic(), (0.0, "")
    stand = Stand(semmoe, folder, up_url, mock)
    try:
        lines = examples(semmoe)
        for line in lines:
            if line in ELSEWHERE_RUN:
                continue
            at = time.monotonic()
            try:
                stand.example(line)
            except (subprocess.SubprocessError, AssertionError, OSError) as error:
                sys.exit(f"an example of --help failed: {line}\n{error}\n{getattr(error, 'stderr', '') or ''}")
            slowest = max(slowest, (time.monotonic() - at, line))
        stand.workers([line for line in lines if line.startswith("semmoe worker ")])
    finally:
        stand.end()
    took = time.monotonic() - began
    print(f"examples: {len(lines)} of --help run in {took:.0f} s (longest: {slowest[1]}, {slowest[0]:.1f} s)")
    assert len(lines) >= 35 and took < LIMIT_ALL_S, (len(lines), took)
