"""The C interface of kernels/include/semmoe_kernels.h through ctypes, field by field."""
import ctypes
import os
import pathlib
from ctypes import POINTER, c_char_p, c_float, c_int32, c_uint32, c_uint64, c_void_p

ABI_VERSION = 1
MAX_WORLD = 64
ALIGNMENT = 16
NONE = -1
CPU, CUDA = 0, 1
F32, F16, BF16 = 0, 1, 2

u64, u32, pointer = c_uint64, c_uint32, c_void_p


def structure(name, *fields):
    """A structure that begins with its size."""
    return type(name, (ctypes.Structure,), {"_fields_": [("struct_bytes", u64), *fields]})


InitArgs = structure(
    "semmoe_init_args", ("device", u32), ("ordinal", c_int32), ("rank", u32), ("world", u32), ("buffer_bytes", u64),
    ("signal_bytes", u64), ("buffers", POINTER(c_void_p)), ("signals", POINTER(c_void_p)), ("max_tokens", u64),
    ("timeout_ms", u64))
ArgsortArgs = structure(
    "semmoe_argsort_args", ("n", u64), ("destinations", pointer), ("permutation", pointer), ("inverse", pointer),
    ("offsets", pointer))
ReduceScatterArgs = structure(
    "semmoe_reduce_scatter_args", ("tokens", u64), ("hidden", u64), ("dtype", u32), ("epsilon", c_float),
    ("part_offset", u64), ("permutation", pointer), ("offsets", pointer), ("capacity", u64), ("out", pointer),
    ("residual", pointer), ("norm_weight", pointer), ("residual_out", pointer))
AllgatherArgs = structure(
    "semmoe_allgather_args", ("tokens", u64), ("hidden", u64), ("dtype", u32), ("reserved", u32), ("out_offset", u64),
    ("permutation", pointer), ("offsets", pointer), ("capacity", u64), ("rows", pointer))
AllReduceArgs = structure(
    "semmoe_all_reduce_args", ("tokens", u64), ("hidden", u64), ("dtype", u32), ("reserved", u32), ("part_offset", u64),
    ("out_offset", u64))
DispatchArgs = structure(
    "semmoe_dispatch_args", ("tokens", u64), ("hidden", u64), ("dtype", u32), ("top_k", u32), ("experts_total", u64),
    ("capacity", u64), ("rank_of_expert", pointer), ("x", pointer), ("experts", pointer), ("weights", pointer),
    ("rows_offset", u64), ("tokens_offset", u64), ("experts_offset", u64), ("weights_offset", u64),
    ("source_offsets", pointer), ("sent_rows", pointer))
CombineArgs = structure(
    "semmoe_combine_args", ("tokens", u64), ("hidden", u64), ("dtype", u32), ("reserved", u32), ("capacity", u64),
    ("sums_offset", u64), ("sent_rows", pointer), ("out", pointer))

OPERATIONS = {
    "semmoe_argsort": ArgsortArgs, "semmoe_reduce_scatter": ReduceScatterArgs, "semmoe_allgather": AllgatherArgs,
    "semmoe_all_reduce": AllReduceArgs, "semmoe_dispatch": DispatchArgs, "semmoe_combine": CombineArgs,
}


def load():
    """The library, with the types of its functions; refused if its version differs."""
    beside = pathlib.Path(__file__).with_name("libsemmoe_kernels.so")
    path = os.environ.get("SEMMOE_KERNELS_LIBRARY", str(beside))
    library = ctypes.CDLL(path)
    library.semmoe_abi_version.restype = u32
    if (found := library.semmoe_abi_version()) != ABI_VERSION:
        raise ImportError(f"{path} has version {found} of the interface, expected {ABI_VERSION}")
    library.semmoe_last_error.restype = c_char_p
    library.semmoe_has_cuda.restype = c_int32
    library.semmoe_signal_bytes.argtypes = [u32, u32, POINTER(u64)]
    library.semmoe_init.argtypes = [POINTER(InitArgs), POINTER(c_void_p)]
    library.semmoe_free.argtypes = [c_void_p]
    library.semmoe_free.restype = None
    library.semmoe_check.argtypes = [c_void_p]
    for name, args in OPERATIONS.items():
        getattr(library, name).argtypes = [c_void_p, POINTER(args), c_void_p]
    return library
