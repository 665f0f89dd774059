"""semmoe's collectives for PyTorch: a communicator, and operators that torch.compile knows.

`libsemmoe_kernels.so` is looked for in SEMMOE_KERNELS_LIBRARY (a path), else beside this file."""
from .comm import Communicator, SharedMemory
from .cuda import cuda_communicator
from .error import SemmoeError
from . import ops

__all__ = ["Communicator", "SemmoeError", "SharedMemory", "cuda_communicator", "ops"]
