"""The communicator for GPUs, on fake ones: its memory, its exchange, its launches. The kernels are the CUDA sources, run on the CPU by
tests/capi-shim (SEMMOE_KERNELS_LIBRARY). What no test here sees is a real driver, PyTorch's streams and cuIpc between GPUs."""
import datetime
import os
import pathlib
import subprocess
import tempfile
import threading

import gloo
import torch
from fake_gpu import STREAM, FakeDriver, FakeGpu, on_fake_gpus, on_threads
from semmoe_kernels import Communicator, SemmoeError, SharedMemory, comm as comm_module, cuda, cuda_communicator, library, ops
from semmoe_kernels.driver import Driver
from semmoe_kernels.exchange import GroupExchange, StoreExchange

HIDDEN, TOP_K, EXPERTS, CAPACITY = 40, 3, 7, 64


def raises(run, status, *parts):
    try:
        run()
    except SemmoeError as error:
        assert error.status == status and all(part in str(error) for part in parts), (error.status, error)
    else:
        raise AssertionError(f"not refused: {parts}")


def every_call(comm, rank, n, dtype):
    """All operators on inputs that depend only on rank and world."""
    world, generator = comm.world, torch.Generator().manual_seed(1)
    parts = [torch.randn(n, HIDDEN, generator=generator).to(dtype) for _ in range(world)]
    destinations = torch.randint(0, world, (n,), generator=generator, dtype=torch.int32)
    residual, weight = torch.randn(n, HIDDEN, generator=generator).to(dtype), torch.rand(HIDDEN, generator=generator).to(dtype)
    hosts = torch.randint(0, world, (EXPERTS,), generator=generator, dtype=torch.int32)
    permutation, inverse, offsets = ops.argsort(destinations, world, comm.id)
    mine = int(offsets[rank + 1] - offsets[rank])
    rows = ops.shuffled_reduce_scatter(parts[rank], permutation, offsets, mine, comm.id)
    normed = ops.shuffled_reduce_scatter_norm(parts[rank], residual, weight, 1e-6, permutation, offsets, mine, comm.id)
    whole = ops.shuffled_allgather(rows, permutation, offsets, comm.id)
    total = ops.all_reduce(parts[rank], comm.id)
    own = torch.Generator().manual_seed(100 + rank)
    m = 0 if rank == 1 else 3 + rank
    x = torch.randn(m, HIDDEN, generator=own).to(dtype)
    routes = torch.rand(m, EXPERTS, generator=own).argsort(1)[:, :TOP_K].int()
    weights = torch.rand(m, TOP_K, generator=own)
    got, tokens, experts, shares, sources, sent = ops.dispatch(x, routes, weights, hosts, CAPACITY, world, comm.id)
    used = int(sources[-1])
    home = ops.combine(got, sent, comm.id)
    comm.check()
    return [permutation, inverse, offsets, rows, *normed, whole, total, got[:used], tokens[:used], experts[:used], shares[:used],
            sources, sent, home]


def values():
    """Fake GPUs and the CPU's ranks give bitwise equal results."""
    for world, dtype in ((1, torch.float32), (2, torch.bfloat16), (4, torch.float16), (8, torch.bfloat16)):
        for n in (0, 13):
            memory = SharedMemory(world, 1 << 18)
            expected = on_threads(world, lambda rank: every_call(Communicator(rank, memory, max_tokens=1024), rank, n, dtype))
            found = on_fake_gpus(world, lambda comm, rank: every_call(comm, rank, n, dtype))
            for rank in range(world):
                for index, (a, b) in enumerate(zip(found[rank], expected[rank], strict=True)):
                    assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), (world, n, rank, index)


def launches_only():
    """Every call launches on PyTorch's stream, and none waits for the GPU; rows already in the symmetric buffer are not copied."""
    calls, lock, plain = [], threading.Lock(), comm_module.native()

    class Recorded:
        def __getattr__(self, name):
            function = getattr(plain, name)
            if name not in library.OPERATIONS:
                return function

            def call(handle, args, stream):
                with lock:
                    calls.append((name, stream, getattr(args._obj, "part_offset", None)))
                return function(handle, args, stream)

            return call

    def run(comm, rank):
        waits = comm.memory.gpu.driver.waits
        every_call(comm, rank, 9, torch.float32)
        part = comm.symmetric((4, HIDDEN), torch.float32, offset=4096)
        part.fill_(rank + 1)
        order, offsets = torch.arange(4, dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)
        rows = ops.shuffled_reduce_scatter(part, order, offsets, (1, 3)[rank], comm.id)
        assert torch.equal(rows, torch.full((1 + 2 * rank, HIDDEN), 3.0))
        assert torch.equal(part, torch.full((4, HIDDEN), rank + 1.0)), "the part is where it was"
        assert torch.equal(ops.all_reduce(part, comm.id), torch.full((4, HIDDEN), 3.0))
        assert comm.memory.gpu.driver.waits == waits
        comm.self_check()

    comm_module.native = Recorded
    try:
        on_fake_gpus(2, run)
    finally:
        comm_module.native = lambda: plain
    assert {name for name, _, _ in calls} == set(library.OPERATIONS)
    assert {stream for _, stream, _ in calls} == {STREAM}
    assert sum(offset == 4096 for _, _, offset in calls) == 4, "two calls of two ranks took the part where it is"


def device_errors():
    """check() and later calls report what only the kernels detect."""
    def run(comm, rank):
        comm.argsort(torch.tensor([0, 7], dtype=torch.int32))
        raises(comm.check, 2, "destination or expert 1 is out of range")
        raises(lambda: comm.all_reduce(torch.zeros(2, 8)), 2, "destination or expert 1")

    on_fake_gpus(1, run)

    store, left = torch.distributed.HashStore(), threading.Barrier(2)

    def alone(rank):
        comm = cuda_communicator(4096, store=store, rank=rank, world=2, gpu=FakeGpu(), timeout_ms=1)
        comm.all_reduce(torch.ones(2, 8))
        if rank == 1:
            comm.abandon()
            left.wait()
            return
        left.wait()
        comm.all_reduce(torch.ones(2, 8))
        raises(comm.check, 6, "rank 0 timed out waiting for rank 1 to start call 2")
        comm.abandon()

    on_threads(2, alone)


def refused():
    def run(comm, rank):
        good, order = torch.zeros(4, 8), torch.arange(4, dtype=torch.int32)
        offsets = torch.tensor([0, 4], dtype=torch.int32)
        elsewhere = torch.zeros(4, 8, device="meta")
        for call, status, message in [
            (lambda: comm.all_reduce(elsewhere), 1, "part is (4, 8) torch.float32 on meta, expected a matrix"),
            (lambda: comm.reduce_scatter(good, order, offsets, 4, good, elsewhere[0]), 1, "weight is (8,) torch.float32 on meta"),
            (lambda: comm.reduce_scatter(good, order.to("meta"), offsets, 4), 1, "permutation is (4,) torch.int32 on meta"),
            (lambda: comm.dispatch(good, order[:, None], elsewhere[:, :1], order, 4), 1, "x, experts and weights (float32 on cpu)"),
            (lambda: comm.all_reduce(torch.zeros(4000, 8)), 4, "the symmetric buffer, which has 4096"),
            (lambda: comm.argsort(torch.zeros(2000, dtype=torch.int32)), 4, "n is 2000, expected at most 1024"),
            (lambda: comm.symmetric((4, 8), torch.float32, 8), 3, "the offset is 8, expected a multiple of 16"),
            (lambda: comm.symmetric((4, 8), torch.float32, 4096), 4, "which has 4096"),
            (lambda: ops.argsort(order, 2, comm.id), 1, "world is 2, the communicator has 1 ranks"),
        ]:
            raises(call, status, message)
        assert torch.equal(comm.all_reduce(good + 1), good + 1), "nothing was launched, so it can continue"

    on_fake_gpus(1, run, buffer_bytes=4096)


def starts_on_all_or_none():
    """One rank fails: every rank learns which and why, and nothing is left."""
    def start(rank, gpu, store, buffer_bytes=4096, timeout_s=60, world=2):
        return cuda_communicator(buffer_bytes, store=store, rank=rank, world=world, gpu=gpu, timeout_s=timeout_s)

    class NoExport(FakeDriver):
        def export(self, pointer):
            return b"short"

    class NoOpen(FakeDriver):
        def open(self, handle):
            raise SemmoeError(9, "cuIpcOpenMemHandle_v2 refused with status 217: peer access is not supported")

    for drivers, own, other, message in [
        ([FakeDriver(), FakeDriver(1 << 10)], 9, 7, "rank 1: cuMemAlloc_v2 refused with status 2: out of memory"),
        ([FakeDriver(), NoExport()], 7, 7, "rank 0: rank 1 sent no handle of 64 bytes"),
        ([FakeDriver(), NoOpen()], 9, 7, "rank 1: the memory of rank 0 cannot be mapped: cuIpcOpenMemHandle_v2"),
    ]:
        store = torch.distributed.HashStore()
        guilty = int(message[5])
        on_threads(2, lambda rank: raises(
            lambda: start(rank, FakeGpu(drivers[rank]), store), own if rank == guilty else other, message))
        assert not any(driver.own or driver.opened for driver in drivers)

    store = torch.distributed.HashStore()
    on_threads(2, lambda rank: raises(lambda: start(rank, FakeGpu(), store, 4096 << rank), 5, "has buffer_bytes"))
    raises(lambda: start(0, FakeGpu(), torch.distributed.HashStore(), timeout_s=0.05), 6, "rank 1 did not reach step 'started'")
    raises(lambda: start(2, FakeGpu(), torch.distributed.HashStore()), 2, "rank is 2, expected below 2")
    store = torch.distributed.HashStore()
    store.set("semmoe/1/started/1", b"[1]")
    raises(lambda: start(0, FakeGpu(), store), 7, "rank 1 sent an invalid message")
    # A peer that exits at the end may still have the memory mapped.
    store, driver = torch.distributed.HashStore(), FakeDriver()
    comms = on_threads(2, lambda rank: start(rank, FakeGpu(driver if rank == 0 else None), store))
    comms[0].memory.exchange.timeout = datetime.timedelta(milliseconds=50)
    comms[0].close()
    assert driver.own, "kept"


def without_a_gpu():
    """A machine without a GPU reports it on all ranks; fakes of the operators are equal for both devices."""
    if not torch.cuda.is_available():
        raises(lambda: cuda_communicator(4096, store=torch.distributed.HashStore(), rank=0, world=1), 9, "rank 0: PyTorch finds no GPU")
        raises(lambda: cuda.Gpu(0), 9, "PyTorch finds no GPU")
    raises(lambda: Driver(0, "libcuda-of-nowhere.so"), 9, "there is no CUDA driver on this machine")
    with torch._subclasses.FakeTensorMode():
        destinations, part = torch.empty(9, dtype=torch.int32, device="cuda"), torch.empty(9, HIDDEN, device="cuda")
        permutation, _, offsets = ops.argsort(destinations, 4, 1)
        rows = ops.shuffled_reduce_scatter(part, permutation, offsets, 2, 1)
        whole = ops.shuffled_allgather(rows, permutation, offsets, 1)
        assert [(tuple(t.shape), t.device.type) for t in (permutation, offsets, rows, whole)] == [
            ((9,), "cuda"), ((5,), "cuda"), ((2, HIDDEN), "cuda"), ((9, HIDDEN), "cuda")]


class StubGpu(FakeGpu):
    def __init__(self, library_path):
        super().__init__(Driver(0, library_path))


def process(rank, folder):
    """Real ctypes calls to a stub of libcuda, whose memory other processes map."""
    os.environ["STUB_CUDA_FOLDER"] = f"{folder}/memory"
    gpu = StubGpu(f"{folder}/libstub.so")
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    for exchange in (GroupExchange(), StoreExchange(store, rank, 2, timeout_s=60), StoreExchange(store, rank, 2, timeout_s=60)):
        memory = cuda.CudaMemory(5000, exchange, gpu)
        assert memory.buffer_bytes == 5120 and not memory.buffer(rank).any()
        memory.buffer(rank).fill_(rank + 1)
        exchange.agree("written")
        for peer, pointer in enumerate(memory.buffer_pointers):
            assert bool((gpu.tensor(pointer, 5120) == peer + 1).all())
        assert [pointer % 64 for pointer in memory.signal_pointers] == [0, 0]
        exchange.agree("read")
        memory.close()
    exchange = GroupExchange()
    steps = lambda: exchange.agree("one" if rank == 0 else "two")
    raises(steps, 5, f"rank {1 - rank} is in step")
    raises(lambda: gpu.driver.open(b"\1" * 64), 9, "cuIpcOpenMemHandle_v2 refused with status 1: stub")
    raises(lambda: gpu.driver.allocate(1 << 40), 9, "cuMemAlloc_v2 refused with status 2: stub")
    raises(lambda: Driver(3, f"{folder}/libstub.so"), 9, "there is no GPU 3: this process sees 1")


def processes():
    here = pathlib.Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/memory")
        subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", f"{folder}/libstub.so", here / "stub_cuda.c"],
                       check=True)
        gloo.processes(2, folder, process)
        assert not os.listdir(f"{folder}/memory"), "all memory was freed"


if __name__ == "__main__":
    for test in (without_a_gpu, values, launches_only, device_errors, refused, starts_on_all_or_none, processes):
        test()
        print(f"{test.__name__}: ok")
