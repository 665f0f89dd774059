#!/usr/bin/env python3
"""Checks deploy/ with the tools that will read it: run.py [SEMMOE].

Alerts and board by promtool (Debian's, unpacked into a temporary folder where it is not installed), the unit by systemd-analyze, the chart by Helm's
own library and Kubernetes' schemas (from PyPI, pinned), what the chart renders by `semmoe serve --check`, and the demo's commands by running them. What cannot be had is left out,
and that is said; the rest must pass."""
import json, os, pathlib, re, shutil, socket, subprocess, sys, tempfile, urllib.request, venv

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEPLOY = ROOT / "deploy"
MODEL = ROOT / "assets/tiny-qwen3moe-15m"
SEMMOE = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "target/release/semmoe").resolve()


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def promtool(folder):
    """The installed promtool, or Debian's package; None if neither is available."""
    if found := shutil.which("promtool"):
        return found
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return None
    download = ["apt-get", "download", "-q", "prometheus"]
    quiet = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if subprocess.run(download, **quiet).returncode and (subprocess.run(["apt-get", "update", "-q"], **quiet).returncode or subprocess.run(download, **quiet).returncode):
        return None
    run("dpkg-deb", "-x", next(folder.glob("prometheus_*.deb")), folder / "debian")
    return folder / "debian/usr/bin/promtool"


def board_as_rules(folder):
    """Every expression of the board as a recording rule, so that promtool parses it."""
    board = json.loads((DEPLOY / "grafana/semmoe.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(expressions) > 20 and len({panel["id"] for panel in board["panels"]}) == len(board["panels"]), "panels"
    rules = []
    for at, expression in enumerate(expressions):
        expression = expression.replace("$__rate_interval", "5m").replace("$job", ".*").replace("$instance", ".*")
        assert "$" not in expression, f"a variable that the board does not define: {expression}"
        rules.append({"record": f"board:{at}", "expr": expression})
    path = folder / "board.yml"
    path.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    return path


def prometheus(folder):
    tool = promtool(folder)
    if not tool:
        print("NOTICE: promtool cannot be had, so alerts and board were not checked by it")
        return
    rules = DEPLOY / "prometheus/semmoe.rules.yml"
    run(tool, "check", "rules", rules)
    run(tool, "test", "rules", "semmoe.tests.yml", cwd=DEPLOY / "prometheus")
    run(tool, "check", "rules", board_as_rules(folder))
    shutil.copy(rules, folder)
    shutil.copy(DEPLOY / "docker/prometheus.yml", folder)
    run(tool, "check", "config", "prometheus.yml", cwd=folder)
    print("promtool: ok")


def unit(folder):
    tool = shutil.which("systemd-analyze")
    if not tool:
        print("NOTICE: systemd-analyze is missing, so the unit was not checked")
        return
    # Only the binary's path differs here. Manual pages need not be installed.
    text = (DEPLOY / "systemd/semmoe.service").read_text().replace("/usr/bin/semmoe", str(SEMMOE))
    path = folder / "semmoe.service"
    path.write_text(text)
    said = run(tool, "verify", "--man=no", path)
    assert "semmoe.service" not in said, said
    said = run(tool, "security", "--offline=true", path)
    level = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
    assert level and float(level[1]) <= 2.0, said
    print(f"systemd-analyze: ok, exposure {level[1]}")


FULL_PLACEMENT = "ab" * 32
FULL = {
    "models": [
        {
            "name": "m",
            "policy": "affinity",
            "baseline": "least_load",
            "canary": 10,
            "tokenizer": "/files/model",
            "aliases": ["small"],
            "adapters": [],
            "engines": [
                {"name": "a", "engine": "sglang", "url": "https://127.0.0.1:1", "tables": "/files/made/m.tables.safetensors", "placement_digest": FULL_PLACEMENT,
                 "ranks": 4, "served_name": "<m> & \"co\"", "api_key_file": "/files/made/key", "tls": {"ca": "/files/made/ca.pem", "server_name": "engine.example"}},
                {"name": "b", "engine": "vllm", "urls": ["http://127.0.0.1:2", "http://127.0.0.1:3"], "tables": "/files/made/m.tables.safetensors", "rank_base": "global", "http2": True},
                {"name": "pods", "engine": "vllm", "tables": "/files/made/m.tables.safetensors", "leave_after": 5, "service": {"name": "engines", "namespace": "prod", "port": "http"}},
                {"name": "named", "engine": "sglang", "tables": "/files/made/m.tables.safetensors", "dns": "engines.example:30000", "interval_seconds": 2.5},
            ],
        }
    ],
    "server": {"extra_routes": ["/v1/score"], "credentials_interval_seconds": 30},
    "volumes": {"model": {"persistentVolumeClaim": {"claimName": "models"}}, "tables": {"image": {"reference": "example.org/tables:v7"}}},
    "extraConfig": "[limits]\nbody_bytes = 1000000\n",
    "env": [{"name": "SEMMOE_LOG__FORMAT", "value": "json"}],
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "rules": {"enabled": True, "runbookBase": "https://docs.example.org/semmoe/"},
    "dashboard": {"enabled": True},
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "serving"},
    "imagePullSecrets": [{"name": "pull"}],
}
OF_OPERATORS = {"ServiceMonitor", "PrometheusRule"}


def chart(folder):
    """Renders in the environment with Helm's library, and checks the result."""
    import helm_python, kubernetes_validate, yaml

    placement = files(folder)
    path = DEPLOY / "helm/semmoe"
    found = helm_python.lint(str(path))
    assert not found["errors"], found
    with helm_python.Chart.load(str(path)) as chart:
        for values, kinds, versions in (({}, 5, ("1.27", "1.37")), (FULL, 11, ("1.35", "1.37"))):
            rendered = chart.render(values, name="gw", namespace="serving")
            documents = [it for name, text in rendered.items() if not name.endswith(".txt") for it in yaml.safe_load_all(text) if it]
            assert len(documents) == kinds, [it["kind"] for it in documents]
            for document in documents:
                if document["kind"] not in OF_OPERATORS:
                    for version in versions:
                        kubernetes_validate.validate(document, version, strict=True)
            of_kind = {it["kind"]: it for it in documents if it["metadata"]["name"] == "gw-semmoe"}
            judge(of_kind, values)
            text = of_kind["ConfigMap"]["data"]["semmoe.toml"].replace("/files/model", str(MODEL)).replace("/files/made", str(folder)).replace(FULL_PLACEMENT, placement)
            (folder / "semmoe.toml").write_text(text)
            run(SEMMOE, "serve", "--check", "--config", folder / "semmoe.toml")
        replaced(chart)
        refused(chart, helm_python.HelmError)
    print(f"chart: ok, rendered by Helm {helm_python.helm_sdk_version()}")
class Demo:
    """The semmoe services of compose.yml as processes on loopback, with tables that were solved here."""

    def __init__(self, services, folder):
        self.services, self.processes, self.addresses = services, [], {}
        trace, profile, tables = ROOT / "tests/data/reference.trace.safetensors", folder / "m.profile.safetensors", folder / "2.tables.safetensors"
        run(SEMMOE, "solve", "--profile", profile, "--trace", trace, "--groups", 2, "--out", tables)
        self.files = {"/usr/share/semmoe/tiny-qwen3moe-15m": MODEL, "/usr/share/semmoe/2-ranks.tables.safetensors": tables}

    def address(self, match):
        """One free loopback port for each address of the file."""
        if match[0] not in self.addresses:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.addresses[match[0]] = "127.0.0.1:%d" % probe.getsockname()[1]
        return self.addresses[match[0]]

    def here(self, word):
        return re.sub(r"\b(172\.30\.77\.\d+|0\.0\.0\.0):\d+", self.address, str(self.files.get(word, word)))

    def start(self, name):
        """Waits until it reports that it is ready; returns at once for a rank that another one waits for."""
        service = self.services[name]
        environment = {key: self.here(value) for key, value in service["environment"].items()}
        command = [str(SEMMOE), *map(self.here, service["command"])]
        self.processes.append(subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        return self.processes[-1].stdout

    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()


def compose(folder):
    """The demo serves, and routes by affinity."""
    import yaml

    for name in ("docker/prometheus.yml", "docker/grafana-datasource.yml", "docker/grafana-dashboards.yml"):
        assert yaml.safe_load((DEPLOY / name).read_text()), name
    demo = Demo(yaml.safe_load((DEPLOY / "docker/compose.yml").read_text())["services"], folder)
    try:
        front = demo.start("rank0")
        front.readline()
        demo.start("rank1")
        assert "ready" in front.readline()
        url = demo.start("gateway").readline().split()[-1]
        chat = {"model": "tiny-qwen3moe-15m", "max_tokens": 4, "messages": [{"role": "user", "content": "I would like to order a cappuccino."}]}
        for _ in range(4):
            request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(chat).encode(), {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.headers["x-semmoe-rank"] in ("0", "1"), answer.headers
        with urllib.request.urlopen(f"http://{demo.addresses['0.0.0.0:9090']}/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
    finally:
        demo.stop()
    for sample in (r'semmoe_predicted_lar_count\{.*\} 4$', r'semmoe_observed_lar_count\{.*\} [1-4]$'):
        assert re.search(sample, metrics, re.M), f"no {sample} in the demo's metrics"
    print("compose: ok, its commands serve by affinity")


def files(folder):
    """The files that FULL's configuration names; returns the digest of the tables' placement."""
    from pip._vendor import certifi

    trace, profile = ROOT / "tests/data/reference.trace.safetensors", folder / "m.profile.safetensors"
    run(SEMMOE, "profile", "build", trace, "--out", profile)
    run(SEMMOE, "solve", "--profile", profile, "--groups", 4, "--placement", "linear", "--out", folder / "m.tables.safetensors")
    shown = run(SEMMOE, "tables", "show", "--json", folder / "m.tables.safetensors")
    (folder / "key").write_text("a-key\n")
    (folder / "key").chmod(0o600)
    shutil.copy(certifi.where(), folder / "ca.pem")
    return json.loads(shown)["placement_digest"]


def replaced(chart):
    """A change of the configuration alone leaves the pods, whose gateways read it again; one of a listener replaces them."""
    def pods(values):
        rendered = chart.render(values, name="gw", namespace="serving")
        return next(text for name, text in rendered.items() if name.endswith("deployment.yaml"))

    other = {"models": [{**FULL["models"][0], "canary": 50}], "extraConfig": "[limits]\nbody_bytes = 1\n"}
    assert "--watch" in pods(FULL) and pods(FULL) == pods({**FULL, **other}), "a new configuration replaces the pods"
    tls = {"tls": {"cert": "/files/tls/tls.crt", "key": "/files/tls/tls.key"}}
    assert pods(FULL) != pods({**FULL, "server": {**FULL["server"], **tls}}), "a new listener needs new pods"


def refused(chart, error):
    """Invalid values are refused, and no valid ones block the drain of a node."""
    engine = {"name": "a", "engine": "sglang", "url": "http://127.0.0.1:1"}
    model = {"name": "m", "engines": [engine]}
    models = [[], [{**model, "engines": [{"name": "a", "engine": "sglang"}]}], [{**model, "policy": "afinity"}], [{**model, "baseline": "shadows"}]]
    models += [[{**model, "engines": [{**engine, wrong: value}]}] for wrong, value in (("urls", ["http://127.0.0.1:2"]), ("rank", 2), ("ranks", 0), ("engine", "trt"), ("tls", {"cafile": "x"}))]
    wrong = [{"models": found} for found in models]
    wrong += [{"replica": 2}, {"server": {"listen": "0.0.0.0:1"}}, {"pdb": {"maxUnavailable": 0}}, {"pdb": {"maxUnavailable": "0%"}}, {"pdb": {"minAvailable": 1}}]
    for values in wrong:
        try:
            chart.render(values, name="gw", namespace="serving")
        except error:
            continue
        sys.exit(f"the chart takes {values}")


def judge(of_kind, values):
    pod = of_kind["Deployment"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsUser"] == 65532 and container["securityContext"]["readOnlyRootFilesystem"], pod
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}, mounted
    ports = {port["name"] for port in container["ports"]}
    assert ports == {port["targetPort"] for port in of_kind["Service"]["spec"]["ports"]}, ports
    if not values:
        return
    alerts = [rule for group in of_kind["PrometheusRule"]["spec"]["groups"] for rule in group["rules"]]
    assert all(rule["annotations"]["runbook_url"].startswith("https://docs.example.org/semmoe/docs/troubleshooting.md#") for rule in alerts), alerts[0]
    assert of_kind["Role"]["metadata"]["namespace"] == "prod" and of_kind["RoleBinding"]["subjects"][0]["namespace"] == "serving"
    assert "replicas" not in of_kind["Deployment"]["spec"], "the autoscaler decides"


def with_pypi(folder):
    home = folder / "python"
    venv.create(home, with_pip=True)
    install = [home / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-compile", "--no-deps"]
    if subprocess.run([*install, "--only-binary", ":all:", "--requirement", HERE / "requirements.txt"]).returncode:
        print("NOTICE: PyPI cannot be reached, so the chart was not rendered")
        return
    inside = f"import sys, pathlib; sys.path.insert(0, {str(HERE)!r}); sys.argv = ['run', {str(SEMMOE)!r}]; import run; run.chart(pathlib.Path({str(folder)!r})); run.compose(pathlib.Path({str(folder)!r}))"
    done = subprocess.run([home / "bin/python", "-c", inside], stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    if done.returncode:
        sys.exit(done.stderr)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        prometheus(pathlib.Path(name))
        unit(pathlib.Path(name))
        with_pypi(pathlib.Path(name))
