"""NVIDIA's compilers from PyPI, pinned, in their own cache folder outside the repository."""
import os, pathlib, subprocess, sys, tempfile, zipfile


def fetched(wheels, name, variable, marker):
    """The folder with the unpacked wheels, fetched if `marker` is missing; None and the reason if they cannot be fetched.

    It is the environment's `variable`, else ~/.cache/semmoe/`name`."""
    cache = pathlib.Path(os.environ.get(variable) or pathlib.Path.home() / ".cache/semmoe" / name)
    if list(cache.rglob(marker)):
        return cache, None
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *wheels]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        files = list(pathlib.Path(folder).glob("*.whl"))
        if done.returncode != 0 or len(files) != len(wheels):
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            return None, f"{', '.join(wheels)} could not be fetched: {reason}"
        cache.mkdir(parents=True, exist_ok=True)
        for file in files:
            zipfile.ZipFile(file).extractall(cache)
    return cache, None
