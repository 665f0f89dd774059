"""The other gateways: their sources and how to start them, each in front of one engine, round robin."""

import os
import shutil
import subprocess
import sys

from processes import Process, free_port

ROUTERS = {"sglang-router": "0.3.2", "vllm-router": "0.1.17", "smg": "1.13.0"}

NGINX = """
daemon off; worker_processes auto; pid {folder}/nginx.pid; error_log {folder}/nginx-error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_buffer_size 1m; client_max_body_size 16m; keepalive_requests 100000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream engine {{ server {engine}; keepalive 256; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
"""


def install(cache, say):
    """Installs what is missing; returns {router: its executable} and nginx's, without those that are unavailable."""
    found = {}
    for name, version in ROUTERS.items():
        folder = os.path.join(cache, f"{name}-{version}")
        program = os.path.join(folder, "bin", name)
        if not os.path.exists(program):
            say(f"installing {name} {version} from PyPI")
            commands = [[sys.executable, "-m", "venv", folder], [f"{folder}/bin/pip", "install", "-q", f"{name}=={version}"]]
            if any(subprocess.run(command).returncode for command in commands):
                say(f"{name} {version} could not be had; going on without it")
                continue
        found[name] = program
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if not nginx and shutil.which("apt-get"):
        say("installing nginx from Debian")
        subprocess.run(["apt-get", "update", "-qq"])
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "nginx-light"])
        nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx:
        found["nginx"] = nginx
    else:
        say("nginx could not be had; going on without it")
    return found


def start(name, program, engine, folder):
    """Starts one; returns the process and its address."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    if name == "nginx":
        own = os.path.join(folder, "nginx")
        os.makedirs(own, exist_ok=True)
        config = os.path.join(own, "nginx.conf")
        with open(config, "w") as file:
            file.write(NGINX.format(folder=own, engine=engine, port=port))
        command = [program, "-p", own, "-c", config]
    else:
        level = "warning" if name == "vllm-router" else "warn"
        command = [program] if name == "vllm-router" else [program, "launch"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"http://{engine}"]
        command += ["--policy", "round_robin", "--log-level", level]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    process = Process(name, command, os.path.join(folder, f"{name}.log"), cwd=folder)
    process.wait_for(f"http://{address}/v1/models" if name == "nginx" else f"http://{address}/health")
    return process, address
