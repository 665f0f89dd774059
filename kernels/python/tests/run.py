#!/usr/bin/env python3
"""Builds the library and tests the Python package with the pinned PyTorch, on the CPU: operators over libsemmoe_kernels.so, the parts for
GPUs over tests/capi-shim, whose calls for CUDA run the CUDA sources on the CPU; the plug-in's expectations against SGLang's own sources.

Needs torch: tests/python/environment.py. Without it nothing is tested, and that is said."""
import os, pathlib, shutil, subprocess, sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))
from environment import TARGET, interpreter

PLAIN, SHIM = TARGET / "release/libsemmoe_kernels.so", TARGET / "debug/libsemmoe_kernels_capi_shim.so"


def cargo(*arguments):
    subprocess.run(["cargo", "build", "--locked", *arguments], cwd=ROOT, check=True)


def test(python, name, library):
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "SEMMOE_KERNELS_LIBRARY": str(library)}
    subprocess.run([python, HERE / name], env=environment, check=True, timeout=600)


if python := interpreter("the PyTorch operators were"):
    cargo("--release", "--package", "semmoe-kernels-capi")
    test(python, "test_ops.py", PLAIN)
    test(python, "test_wheel.py", PLAIN)
    # Built in the other profile: this build has one more feature, and Cargo gives both one name.
    compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    if compiler:
        cargo("--package", "semmoe-kernels-capi-shim")
        test(python, "test_cuda.py", SHIM)
    else:
        print("NOTICE: no C++ compiler, so the CUDA kernels were not run and the parts for GPUs not tested")
    test(python, "test_sglang.py", SHIM if compiler else PLAIN)
    test(python, "sglang_source.py", PLAIN)
