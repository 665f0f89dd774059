"""The wheel: built from this package and the library, installed elsewhere, loaded as SGLang loads plug-ins. Its build needs setuptools from
PyPI; without it nothing is built, and that is said."""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = """
import importlib.metadata, pathlib, sys
import torch, semmoe_kernels
from semmoe_kernels import Communicator, SharedMemory
assert pathlib.Path(semmoe_kernels.__file__).is_relative_to(sys.argv[1]), semmoe_kernels.__file__
Communicator(0, SharedMemory(1, 4096)).self_check()
entry, = importlib.metadata.entry_points(group="sglang.srt.plugins", name="semmoe")
assert entry.load()() is None, "without tables nothing is hooked"
"""


def main():
    with tempfile.TemporaryDirectory() as folder:
        source, installed, tools = (pathlib.Path(folder, name) for name in ("source", "installed", "tools"))
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*pip, "download", "--no-deps", "--dest", tools, "setuptools==84.2.1"]).returncode != 0:
            print("NOTICE: setuptools cannot be had from PyPI, so the wheel was not built")
            return
        shutil.copytree(HERE.parent, source, ignore=shutil.ignore_patterns("tests", "__pycache__", "build", "*.egg-info", "*.so"))
        shutil.copy(os.environ["SEMMOE_KERNELS_LIBRARY"], source / "semmoe_kernels/libsemmoe_kernels.so")
        subprocess.run([*pip, "install", "--no-deps", "--no-index", "--find-links", tools, "--target", installed, source], check=True)
        plain = {name: value for name, value in os.environ.items() if not name.startswith("SEMMOE_")}
        subprocess.run([sys.executable, "-c", PROGRAM, installed], check=True, cwd=folder, env={**plain, "PYTHONPATH": str(installed)})
    print("wheel: ok")


if __name__ == "__main__":
    main()
