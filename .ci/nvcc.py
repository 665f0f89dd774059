"""Compiles a CUDA program with nvcc from PyPI, for GPU machines without build tools."""
import pathlib, subprocess

import wheels

VERSION = "13.0.88"
WHEELS = [
    f"nvidia-cuda-nvcc=={VERSION}", f"nvidia-nvvm=={VERSION}", f"nvidia-cuda-crt=={VERSION}",
    "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cccl==13.0.85",
]


def compiled(source, to):
    """Writes the program with the CUDA runtime linked in; returns None, or why that failed."""
    folder, refused = wheels.fetched(WHEELS, f"nvcc-{VERSION}", "SEMMOE_NVCC", "nvcc")
    if folder is None:
        return refused
    root = next(folder.rglob("nvcc")).parent.parent
    # Wheels store no permissions.
    for name in [*(root / "bin").iterdir(), *(root / "nvvm/bin").iterdir()]:
        if name.is_file():
            name.chmod(0o755)
    # For H100 and H200; other GPUs' drivers compile the PTX.
    targets = ["-gencode", "arch=compute_90,code=sm_90", "-gencode", "arch=compute_80,code=compute_80"]
    command = [root / "bin/nvcc", "-std=c++17", "-O2", *targets, "-I", root / "include", "-I", root / "include/cccl", "-L", root / "lib",
               "-cudart", "static", source, "-o", to]
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["nvcc gave no reason"])[-1]
