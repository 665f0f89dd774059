"""Our own gateway, with tables of realistic size, and the mock engine behind all contestants."""

import gzip
import os
import shutil
import subprocess

from processes import Process, free_port

CONFIG = """
[server]
listen = "127.0.0.1:{port}"
admin = "127.0.0.1:{admin}"
tables_root = "{folder}"
{more}
[[models]]
name = "bench"
tokenizer = "{folder}/tokenizer/tokenizer.json"
policy = "{policy}"
[[models.backends]]
name = "engine"
engine = "sglang"
url = "http://{engine}"
tables = "{folder}/1.tables.safetensors"
"""


def prepare(settings, folder, say):
    """Writes tokenizer and tables to `folder`."""
    own = os.path.join(folder, "tokenizer")
    os.makedirs(own, exist_ok=True)
    source = settings.tokenizer
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = os.path.join(source, name)
        target = os.path.join(own, name)
        if os.path.exists(path):
            shutil.copyfile(path, target)
        else:
            with gzip.open(path + ".gz") as packed, open(target, "wb") as plain:
                shutil.copyfileobj(packed, plain)
    say("writing tables")
    for seed in (1, 2):
        out = os.path.join(folder, f"{seed}.tables.safetensors")
        command = [settings.tool, "tables", "--tokenizer", f"{own}/tokenizer.json", "--seed", str(seed), "--out", out]
        subprocess.run(command, check=True)


def start(binary, name, policy, engine, folder, more="", under=(), seconds=60, **options):
    """Starts one, under another program where `under` names one; returns the process and its addresses for requests and
    administration."""
    port, admin = free_port(), free_port()
    config = os.path.join(folder, f"{name}.toml")
    with open(config, "w") as file:
        file.write(CONFIG.format(port=port, admin=admin, folder=folder, policy=policy, engine=engine, more=more))
    process = Process(name, [*under, binary, "serve", "--config", config], os.path.join(folder, f"{name}.log"), **options)
    process.wait_for(f"http://127.0.0.1:{admin}/readyz", seconds)
    return process, f"127.0.0.1:{port}", f"127.0.0.1:{admin}"


def start_mock(settings, folder):
    process = Process("mock", [settings.tool, "mock"], os.path.join(folder, "mock.log"), stdout=subprocess.PIPE, text=True)
    return process, process.child.stdout.readline().strip()
