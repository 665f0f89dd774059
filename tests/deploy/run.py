#!/usr/bin/env python3
"""Checks deploy/ with the tools that will read it: run.py [SEMMOE].

Alerts and board by promtool (Debian's, unpacked into a temporary folder where it is not installed), the unit by systemd-analyze, the chart by Helm's
own library and Kubernetes' schemas (from PyPI, pinned), and what the chart renders by `semmoe serve --check`. What cannot be had is left out,
and that is said; the rest must pass."""
import json, os, pathlib, re, shutil, subprocess, sys, tempfile, venv

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEPLOY = ROOT / "deploy"
SEMMOE = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "target/release/semmoe").resolve()


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def promtool(folder):
    """The installed one, else that of Debian's package; None where neither can be had."""
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
        print("NOTICE: there is no systemd-analyze, so the unit was not checked")
        return
    # The binary's place differs here; nothing else does. Manual pages need not be installed.
    text = (DEPLOY / "systemd/semmoe.service").read_text().replace("/usr/bin/semmoe", str(SEMMOE))
    path = folder / "semmoe.service"
    path.write_text(text)
    said = run(tool, "verify", "--man=no", path)
    assert "semmoe.service" not in said, said
    said = run(tool, "security", "--offline=true", path)
    level = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
    assert level and float(level[1]) <= 2.0, said
    print(f"systemd-analyze: ok, exposure {level[1]}")


FULL = {
    "models": [
        {
            "name": "m",
            "policy": "prefix",
            "tokenizer": "/files/model/tokenizer.json",
            "aliases": ["small"],
            "engines": [
                {"name": "a", "engine": "sglang", "url": "http://127.0.0.1:1"},
                {"name": "pods", "engine": "vllm", "service": {"name": "engines", "namespace": "prod", "port": "http"}},
            ],
        }
    ],
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
    """In the environment that has Helm's library: renders, and judges what came out."""
    import helm_python, kubernetes_validate, yaml

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
            text = of_kind["ConfigMap"]["data"]["semmoe.toml"].replace("/files/model", str(ROOT / "assets/tiny-qwen3moe-15m"))
            (folder / "semmoe.toml").write_text(text)
            run(SEMMOE, "serve", "--check", "--config", folder / "semmoe.toml")
        for wrong in ({"models": []}, {"models": [{"name": "m", "engines": [{"name": "a", "engine": "sglang"}]}]}, {"replica": 2}):
            try:
                chart.render(wrong, name="gw", namespace="serving")
            except helm_python.HelmError:
                continue
            sys.exit(f"the chart takes {wrong}")
    print(f"chart: ok, rendered by Helm {helm_python.helm_sdk_version()}")
    for name in ("docker/compose.yml", "docker/prometheus.yml", "docker/grafana-datasource.yml", "docker/grafana-dashboards.yml"):
        assert yaml.safe_load((DEPLOY / name).read_text()), name
    print("compose: parsed")


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
    assert all(rule["annotations"]["runbook_url"].startswith("https://docs.example.org/semmoe/docs/alerts.md#") for rule in alerts), alerts[0]
    assert of_kind["Role"]["metadata"]["namespace"] == "prod" and of_kind["RoleBinding"]["subjects"][0]["namespace"] == "serving"
    assert "replicas" not in of_kind["Deployment"]["spec"], "the autoscaler decides"


def with_pypi(folder):
    home = folder / "python"
    venv.create(home, with_pip=True)
    install = [home / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-compile", "--no-deps"]
    if subprocess.run([*install, "--only-binary", ":all:", "--requirement", HERE / "requirements.txt"]).returncode:
        print("NOTICE: PyPI cannot be reached, so the chart was not rendered")
        return
    inside = f"import sys, pathlib; sys.path.insert(0, {str(HERE)!r}); sys.argv = ['run', {str(SEMMOE)!r}]; import run; run.chart(pathlib.Path({str(folder)!r}))"
    done = subprocess.run([home / "bin/python", "-c", inside], stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    if done.returncode:
        sys.exit(done.stderr)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        prometheus(pathlib.Path(name))
        unit(pathlib.Path(name))
        with_pypi(pathlib.Path(name))
