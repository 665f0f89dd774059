#!/usr/bin/env python3
"""Compiles all CUDA kernels with NVRTC for every target, without a GPU, and fails on register spills.

NVRTC comes from PyPI into a cache folder ($SEMMOE_NVRTC, else ~/.cache/semmoe/nvrtc-VERSION); nothing of it is kept in the repository.
Where it cannot be had a notice is printed and the step passes. With --out DIR the images are kept, for a build with
SEMMOE_KERNEL_IMAGES=DIR."""
import os, pathlib, subprocess, sys

import wheels

VERSION = "13.0.88"


def libraries():
    """The folder with libnvrtc.so.13, fetched if necessary; None if that fails."""
    folder, refused = wheels.fetched([f"nvidia-cuda-nvrtc=={VERSION}"], f"nvrtc-{VERSION}", "SEMMOE_NVRTC", "libnvrtc.so.13")
    if folder is None:
        print(f"notice: the CUDA kernels are not compiled: {refused}")
        return None
    return next(folder.rglob("libnvrtc.so.13")).parent


def main():
    folder = libraries()
    if folder is None:
        return 0
    build = ["cargo", "build", "--locked", "-p", "semmoe-kernels-cuda", "--features", "nvrtc", "--bin", "semmoe-kernels-compile"]
    subprocess.run(build, check=True)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", "target"))
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(path for path in paths if path)}
    return subprocess.run([target / "debug/semmoe-kernels-compile", *sys.argv[1:]], env=environment).returncode


sys.exit(main())
