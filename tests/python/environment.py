"""The one environment with torch and Transformers, for all tests of Python parts.

PyPI's torch brings the libraries of CUDA along (about 7 GB in all; it runs on CPU), so it is installed once, into the target folder, and made
anew when requirements.txt changes. `SEMMOE_PYTHON=PYTHON` uses an interpreter that has the packages."""
import hashlib, os, pathlib, shutil, subprocess, sys, venv

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
NEEDED_BYTES = 12 << 30
UNREACHABLE = "the pinned packages cannot be had from PyPI"


def interpreter(what):
    """The path of a Python with the packages, or None, with a notice that `what` was not tried."""
    if given := os.environ.get("SEMMOE_PYTHON"):
        return given
    requirements = HERE / "requirements.txt"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    home = TARGET / "python" / f"{version}-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"
    python = home / "bin/python"
    complete = home / "complete"
    if complete.exists():
        return python
    shutil.rmtree(home.parent, ignore_errors=True)
    home.mkdir(parents=True)
    if shutil.disk_usage(home).free < NEEDED_BYTES:
        return left_out(f"less than {NEEDED_BYTES >> 30} GiB are free", what)
    venv.create(home, with_pip=True)
    if not installed(python, requirements):
        return left_out(UNREACHABLE, what)
    complete.touch()
    return python


def overlay(python, name, what):
    """A folder for PYTHONPATH with the packages of NAME.txt, which go before those of `python`, an `interpreter`; None as there."""
    requirements = HERE / f"{name}.txt"
    folder = TARGET / "python-overlays" / f"{name}-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"
    complete = folder / "complete"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        if not installed(python, requirements, "--target", folder):
            return left_out(UNREACHABLE, what)
        complete.touch()
    return folder


def installed(python, requirements, *options):
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--requirement", requirements]
    return subprocess.run([*pip, *options]).returncode == 0


def left_out(why, what):
    print(f"NOTICE: {why}, so {what} not tried")
    return None
