"""A group of GPUs of one machine: memory that every rank maps, and a communicator over it.

    comm = cuda_communicator(64 << 20, group=gloo_group)        # or store=..., rank=..., world=...

Allocation and exchange happen here, once. A call of the communicator is then launches on `torch.cuda.current_stream()`: nothing waits,
what is allocated are the tensors it gives, by PyTorch's allocator, so that it may be captured in a CUDA graph."""
import logging
import socket

import torch

from . import library as abi
from .comm import Communicator, native, signal_bytes
from .driver import HANDLE_BYTES, Driver
from .error import DEVICE, INVALID, PEER_FAILED, SemmoeError
from .exchange import GroupExchange, StoreExchange

logger = logging.getLogger(__name__)

# The driver exports whole blocks of this size; smaller allocations would expose others' memory to peers.
_BLOCK = 2 << 20
# Alignment of the signals that follow the buffer.
_SIGNAL_ALIGNMENT = 256


class Gpu:
    """One GPU, by PyTorch's ordinal, and the driver that shares its memory."""

    kind = abi.CUDA

    def __init__(self, ordinal, driver=None):
        self.ordinal, self.device = ordinal, torch.device("cuda", ordinal)
        if not torch.cuda.is_available():
            raise SemmoeError(DEVICE, "PyTorch finds no GPU: it was built without CUDA, or there is no driver")
        self.driver = driver or Driver(ordinal)

    def stream(self):
        """The CUstream of PyTorch's current stream."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def tensor(self, pointer, size):
        """A byte tensor over memory that PyTorch did not allocate."""
        return torch.as_tensor(_Bytes(pointer, size), device=self.device)


class _Bytes:
    def __init__(self, pointer, size):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def _host():
    """An id that is equal for processes that can share a GPU's memory, and only for them."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


class CudaMemory:
    """Symmetric buffers and signals of a group of GPUs: this rank's own, and the peers' mapped by cuIpc. All ranks make it together; it
    is made on all of them or on none."""

    def __init__(self, buffer_bytes, exchange, gpu):
        self.exchange, self.gpu, self.kind, self.device, self.ordinal = exchange, gpu, gpu.kind, gpu.device, gpu.ordinal
        self.world = exchange.world
        self.buffer_bytes = -(-max(buffer_bytes, 1) // _SIGNAL_ALIGNMENT) * _SIGNAL_ALIGNMENT
        self.signal_bytes, self._own, self._opened = 0, None, []
        error, handle = None, b""
        try:
            self.signal_bytes = signal_bytes(gpu.kind, self.world)
            size = -(-(self.buffer_bytes + self.signal_bytes) // _BLOCK) * _BLOCK
            self._own = gpu.driver.allocate(size)
            handle = gpu.driver.export(self._own)
        except SemmoeError as refused:
            error = refused
        same = {"host": _host(), "version": abi.ABI_VERSION, "buffer_bytes": self.buffer_bytes, "signal_bytes": self.signal_bytes}
        try:
            told = exchange.agree("handles", error, same, {"handle": handle.hex()})
            starts = self._map(told)
            self._buffer = gpu.tensor(self._own, self.buffer_bytes)
        except SemmoeError:
            # No peer uses it yet: one that has mapped it fails in this step, too, and unmaps it.
            self._close_peers()
            self._free()
            raise
        self.buffer_pointers = starts
        self.signal_pointers = [start + self.buffer_bytes for start in starts]

    def _map(self, told):
        """Each rank's allocation as mapped here."""
        starts, error = [], None
        try:
            for rank, answer in enumerate(told):
                if rank == self.exchange.rank:
                    starts.append(self._own)
                    continue
                handle = _handle(rank, answer.get("handle"))
                try:
                    self._opened.append(self.gpu.driver.open(handle))
                except SemmoeError as refused:
                    raise SemmoeError(refused.status, f"the memory of rank {rank} cannot be mapped: {refused}") from None
                starts.append(self._opened[-1])
        except SemmoeError as refused:
            error = refused
        self.exchange.agree("mapped", error)
        return starts

    def buffer(self, rank):
        """This rank's symmetric buffer, bytes."""
        return self._buffer

    def stream(self):
        return self.gpu.stream()

    def settle(self):
        """Waits until all launched work has ended, or its context is gone."""
        try:
            self.gpu.driver.synchronize()
        except SemmoeError as error:
            logger.warning("semmoe: the GPU's work did not end well: %s", error)

    def agree(self, step, error=None):
        """All ranks continue, or none."""
        self.exchange.agree(step, error)

    def close(self):
        """Unmaps the peers' memory, and frees its own once all ranks have done so."""
        if self._own is None:
            return
        self._close_peers()
        try:
            self.exchange.agree("closed")
            self._free()
        except SemmoeError as error:
            # Memory that a peer may still have mapped is freed when the process ends.
            logger.warning("semmoe: %d bytes of GPU memory are kept until the process ends: %s", self.buffer_bytes, error)
            self._own = None

    def _close_peers(self):
        while self._opened:
            try:
                self.gpu.driver.close(self._opened.pop())
            except SemmoeError as error:
                logger.warning("semmoe: a peer's memory could not be unmapped: %s", error)

    def _free(self):
        if self._own is not None:
            try:
                self.gpu.driver.free(self._own)
            except SemmoeError as error:
                logger.warning("semmoe: GPU memory could not be freed: %s", error)
            self._own = None


def _handle(rank, text):
    try:
        handle = bytes.fromhex(text)
    except (TypeError, ValueError):
        handle = b""
    if len(handle) != HANDLE_BYTES:
        raise SemmoeError(PEER_FAILED, f"rank {rank} sent no handle of {HANDLE_BYTES} bytes")
    return handle


def cuda_communicator(
    buffer_bytes, *, group=None, store=None, rank=None, world=None, name="semmoe", timeout_s=60.0, gpu=None, max_tokens=1 << 16,
    timeout_ms=60_000,
):
    """This rank's communicator on its GPU, made by all ranks of the group together.

    The ranks find each other through `store`, `rank`, `world` and `name` (see StoreExchange), or through `group`, a process group of
    torch.distributed (the default group without either). `gpu` is a Gpu, or the ordinal (PyTorch's current device without it).
    `timeout_ms` is what a kernel waits for a peer.

    Raises SemmoeError on all ranks if any cannot: no GPU, a library without CUDA, another host, peers that cannot be mapped."""
    if store is not None:
        if rank is None or world is None:
            raise SemmoeError(INVALID, "with a store, rank and world must be given")
        exchange = StoreExchange(store, rank, world, name, timeout_s)
    else:
        exchange = GroupExchange(group)
    error = None
    try:
        if not isinstance(gpu, Gpu):
            gpu = Gpu(torch.cuda.current_device() if gpu is None and torch.cuda.is_available() else gpu or 0)
        if not native().semmoe_has_cuda():
            # The library reports whether the driver or the kernels are missing.
            signal_bytes(abi.CUDA, exchange.world)
            raise SemmoeError(DEVICE, "libsemmoe_kernels.so finds no CUDA driver")
    except SemmoeError as refused:
        error = refused
    exchange.agree("started", error, {"max_tokens": max_tokens})
    memory = CudaMemory(buffer_bytes, exchange, gpu)
    comm = None
    try:
        comm = Communicator(exchange.rank, memory, max_tokens, timeout_ms)
    except SemmoeError as refused:
        error = refused
    try:
        exchange.agree("joined", error)
    except SemmoeError:
        if comm is not None:
            comm.abandon()
        memory.close()
        raise
    return comm
