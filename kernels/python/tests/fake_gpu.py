"""GPUs for a machine without one: memory of this process, and calls for CUDA that tests/capi-shim runs on the CPU. Ranks are threads."""
import ctypes
import threading

import torch
from semmoe_kernels import SemmoeError, cuda_communicator
from semmoe_kernels.cuda import Gpu

# The stream handle of a fake GPU.
STREAM = 0x5EED00


class FakeDriver:
    """Imitates semmoe_kernels.driver.Driver. A handle names an allocation of any fake driver; open handles and waits are counted."""

    _all, _lock = {}, threading.Lock()

    def __init__(self, memory_bytes=1 << 24):
        self.left, self.own, self.opened, self.waits = memory_bytes, {}, [], 0

    def allocate(self, size):
        if size > self.left:
            raise SemmoeError(9, "cuMemAlloc_v2 refused with status 2: out of memory")
        raw = torch.zeros(size + 256, dtype=torch.uint8)
        pointer = -(-raw.data_ptr() // 256) * 256
        self.left -= size
        self.own[pointer] = raw
        return pointer

    def free(self, pointer):
        self.left += self.own.pop(pointer).numel() - 256

    def export(self, pointer):
        handle = pointer.to_bytes(8, "little") * 8
        with self._lock:
            self._all[handle] = pointer
        return handle

    def open(self, handle):
        with self._lock:
            if handle not in self._all:
                raise SemmoeError(9, "cuIpcOpenMemHandle_v2 refused with status 1: invalid argument")
            self.opened.append(self._all[handle])
        return self.opened[-1]

    def close(self, pointer):
        self.opened.remove(pointer)

    def synchronize(self):
        self.waits += 1


class FakeGpu(Gpu):
    """Its tensors are on the CPU."""

    def __init__(self, driver=None):
        self.ordinal, self.device, self.driver = 0, torch.device("cpu"), driver or FakeDriver()

    def stream(self):
        return STREAM

    def tensor(self, pointer, size):
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(pointer), dtype=torch.uint8)


def on_threads(world, run):
    """Runs `run(rank)` on each rank; returns the results, or raises the first error."""
    answers, errors = [None] * world, []

    def one(rank):
        try:
            answers[rank] = run(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world)]
    [thread.start() for thread in threads]
    [thread.join(240) for thread in threads]
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return answers


def on_fake_gpus(world, run, buffer_bytes=1 << 18, **options):
    """Runs `run(comm, rank)` on each rank of a group of fake GPUs, which all close at the end; nothing may be left of them."""
    store = torch.distributed.HashStore()

    def one(rank):
        gpu = FakeGpu()
        comm = cuda_communicator(buffer_bytes, store=store, rank=rank, world=world, gpu=gpu, max_tokens=1024, **options)
        answer = run(comm, rank)
        comm.close()
        assert not gpu.driver.own and not gpu.driver.opened
        return answer

    return on_threads(world, one)
