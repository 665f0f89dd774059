"""The few functions of CUDA's driver that a group needs to share memory, through ctypes. PyTorch's own allocator is not asked, as what
it gives cannot always be exported (expandable segments)."""
import contextlib
import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

from .error import DEVICE, SemmoeError

HANDLE_BYTES = 64
# CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_PEER_ACCESS = 1


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", c_ubyte * HANDLE_BYTES)]


_FUNCTIONS = {
    "cuInit": [c_uint],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuDevicePrimaryCtxRelease_v2": [c_int],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuCtxSynchronize": [],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemsetD8_v2": [c_uint64, c_ubyte, c_size_t],
    "cuIpcGetMemHandle": [POINTER(IpcHandle), c_uint64],
    "cuIpcOpenMemHandle_v2": [POINTER(c_uint64), IpcHandle, c_uint],
    "cuIpcCloseMemHandle": [c_uint64],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
}


class Driver:
    """libcuda, for one GPU."""

    def __init__(self, ordinal, path="libcuda.so.1"):
        try:
            self._cuda = ctypes.CDLL(path)
        except OSError as error:
            raise SemmoeError(DEVICE, f"there is no CUDA driver on this machine: {error}") from None
        for name, arguments in _FUNCTIONS.items():
            try:
                function = getattr(self._cuda, name)
            except AttributeError:
                raise SemmoeError(DEVICE, f"the CUDA driver has no {name}") from None
            function.argtypes, function.restype = arguments, c_int
        self._call("cuInit", 0)
        count, device, context = c_int(), c_int(), c_void_p()
        self._call("cuDeviceGetCount", byref(count))
        if not 0 <= ordinal < count.value:
            raise SemmoeError(DEVICE, f"there is no GPU {ordinal}: this process sees {count.value}")
        self._call("cuDeviceGet", byref(device), ordinal)
        # Kept until the process ends, as PyTorch does.
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        self._context = context

    def _call(self, name, *arguments):
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            text = c_char_p()
            known = self._cuda.cuGetErrorString(status, byref(text)) == 0 and text.value is not None
            sentence = text.value.decode(errors="replace") if known else "unknown"
            raise SemmoeError(DEVICE, f"{name} refused with status {status}: {sentence}")

    @contextlib.contextmanager
    def _bound(self):
        """Binds the GPU's primary context, which PyTorch uses too, to this thread; restores the previous one."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def allocate(self, size):
        """Zeroed memory in a separate allocation, ready on return. Returns its address."""
        pointer = c_uint64()
        with self._bound():
            self._call("cuMemAlloc_v2", byref(pointer), size)
            try:
                self._call("cuMemsetD8_v2", pointer, 0, size)
                self._call("cuCtxSynchronize")
            except SemmoeError:
                self._cuda.cuMemFree_v2(pointer)
                raise
        return pointer.value

    def free(self, pointer):
        with self._bound():
            self._call("cuMemFree_v2", pointer)

    def export(self, pointer):
        """The handle by which another process on this machine maps an allocation."""
        handle = IpcHandle()
        with self._bound():
            self._call("cuIpcGetMemHandle", byref(handle), pointer)
        return bytes(handle.reserved)

    def open(self, handle):
        """Maps another process's allocation; returns its address here."""
        pointer = c_uint64()
        with self._bound():
            self._call("cuIpcOpenMemHandle_v2", byref(pointer), IpcHandle((c_ubyte * HANDLE_BYTES)(*handle)), _PEER_ACCESS)
        return pointer.value

    def close(self, pointer):
        with self._bound():
            self._call("cuIpcCloseMemHandle", pointer)

    def synchronize(self):
        """Waits for all work of the GPU."""
        with self._bound():
            self._call("cuCtxSynchronize")
