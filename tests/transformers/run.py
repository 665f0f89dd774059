#!/usr/bin/env python3
"""Compares `semmoe profile record` against semmoe's worker with the Transformers hook, count for count: run.py [SEMMOE] [PROMPTS].

Both with the Transformers of tests/python/requirements.txt and with version 5. Needs torch: tests/python/environment.py. Without it, it is left
out, and that is said."""
import os, pathlib, subprocess, sys, tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))
from environment import interpreter, overlay

SEMMOE = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "target/release/semmoe").resolve()


def check(python, *first):
    path = os.pathsep.join([*map(str, first), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        for script in ("families.py", "resume.py", "agreement.py"):
            subprocess.run([python, HERE / script, SEMMOE, folder, *sys.argv[2:]], env={**os.environ, "PYTHONPATH": path}, check=True, timeout=900)


if python := interpreter("torch and Transformers were"):
    check(python)
    if newer := overlay(python, "transformers-5", "Transformers 5 was"):
        check(python, newer)
