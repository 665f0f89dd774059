"""Operators against PyTorch on the CPU: values with 1 to 4 ranks as threads, opcheck, torch.compile, processes, and refusals."""
import ctypes
import re
import pathlib
import threading

import torch
from semmoe_kernels import Communicator, SemmoeError, SharedMemory, library, ops

HIDDEN = 40


def on_ranks(world, run, buffer_bytes=1 << 18):
    memory, answers, errors = SharedMemory(world, buffer_bytes), [None] * world, []

    def one(rank):
        try:
            answers[rank] = run(Communicator(rank, memory, max_tokens=1024), rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    [thread.start() for thread in threads]
    [thread.join(120) for thread in threads]
    if errors:
        raise errors[0]
    return answers


def inputs(world, n, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, HIDDEN, generator=generator).to(dtype) for _ in range(world)]
    destinations = torch.randint(0, world, (n,), generator=generator, dtype=torch.int32)
    return parts, destinations


def summed(parts):
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def shuffles():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for world in (1, 2, 3, 4):
            for n in (0, 1, 37):
                parts, destinations = inputs(world, n, dtype)
                total = summed(parts)
                residual, weight = parts[0] * 0.5, torch.linspace(0.5, 2, HIDDEN).to(dtype)

                def run(comm, rank):
                    permutation, inverse, offsets = ops.argsort(destinations, world, comm.id)
                    expected = torch.argsort(destinations, stable=True).int()
                    assert torch.equal(permutation, expected) and torch.equal(inverse, torch.argsort(expected).int())
                    assert offsets.diff().tolist() == torch.bincount(destinations, minlength=world).tolist()
                    mine = permutation[offsets[rank]:offsets[rank + 1]].long()
                    rows = ops.shuffled_reduce_scatter(parts[rank], permutation, offsets, len(mine), comm.id)
                    assert torch.equal(rows, total[mine].to(dtype))
                    assert torch.equal(ops.shuffled_allgather(rows, permutation, offsets, comm.id), total.to(dtype))
                    assert torch.equal(ops.all_reduce(parts[rank], comm.id), total.to(dtype))
                    normed, new_residual = ops.shuffled_reduce_scatter_norm(
                        parts[rank], residual, weight, 1e-6, permutation, offsets, len(mine), comm.id)
                    h = total[mine] + residual[mine].float()
                    assert torch.equal(new_residual, h.to(dtype))
                    expected = torch.nn.functional.rms_norm(h, (HIDDEN,), weight.float(), 1e-6)
                    torch.testing.assert_close(normed.float(), expected, atol=2e-2, rtol=2e-2)
                    return True

                assert on_ranks(world, run) == [True] * world


def experts():
    """Expert e multiplies by e + 1: the combined result is the dense sum."""
    world, top_k, total = 3, 3, 7
    hosts = torch.tensor([2, 0, 1, 1, 0, 2, 2], dtype=torch.int32)

    def run(comm, rank):
        generator = torch.Generator().manual_seed(rank)
        n = [5, 0, 11][rank]
        x = torch.randint(-8, 8, (n, HIDDEN), generator=generator).float()
        ids = torch.stack([torch.randperm(total, generator=generator)[:top_k] for _ in range(n)] or [torch.empty(0, dtype=torch.int64)])
        ids = ids.reshape(n, top_k).int()
        weights = torch.randint(1, 5, (n, top_k), generator=generator).float()
        rows, _, got, got_weights, offsets, sent = ops.dispatch(x, ids, weights, hosts, 64, world, comm.id)
        used = int(offsets[-1])
        assert int((sent[:, :] != library.NONE).sum()) == sum(len({int(hosts[e]) for e in token}) for token in ids)
        factor = torch.where(got >= 0, got_weights * (got + 1), 0).sum(1, keepdim=True)
        sums = torch.zeros_like(rows)
        sums[:used] = rows[:used] * factor[:used]
        dense = x * (weights * (ids + 1)).sum(1, keepdim=True)
        assert torch.equal(ops.combine(sums, sent, comm.id), dense)
        return True

    assert on_ranks(world, run) == [True] * world


def compiled():
    """One rank, so that a single thread can capture and run a graph."""
    comm = Communicator(0, SharedMemory(1, 1 << 18))
    part, destinations = torch.randn(9, HIDDEN), torch.zeros(9, dtype=torch.int32)
    permutation, _, offsets = ops.argsort(destinations, 1, comm.id)
    ids, weights = torch.zeros(9, 1, dtype=torch.int32), torch.ones(9, 1)
    sent = torch.arange(9, dtype=torch.int32).reshape(9, 1)
    for op, arguments in [
        (ops.argsort, (destinations, 1, comm.id)),
        (ops.shuffled_reduce_scatter, (part, permutation, offsets, 9, comm.id)),
        (ops.shuffled_reduce_scatter_norm, (part, part, part[0].clone(), 1e-6, permutation, offsets, 9, comm.id)),
        (ops.shuffled_allgather, (part, permutation, offsets, comm.id)),
        (ops.all_reduce, (part, comm.id)),
        (ops.dispatch, (part, ids, weights, torch.zeros(1, dtype=torch.int32), 9, 1, comm.id)),
        (ops.combine, (part, sent, comm.id)),
    ]:
        torch.library.opcheck(op, arguments)

    def layer(part, destinations):
        permutation, _, offsets = torch.ops.semmoe.argsort(destinations, 1, comm.id)
        rows = torch.ops.semmoe.shuffled_reduce_scatter(part * 2, permutation, offsets, part.shape[0], comm.id)
        return torch.ops.semmoe.shuffled_allgather(rows + 1, permutation, offsets, comm.id)

    for backend in ("aot_eager", "eager"):
        answer = torch.compile(layer, fullgraph=True, backend=backend)(part, destinations)
        assert torch.equal(answer, part * 2 + 1)


def child(rank, memory, parts, destinations):
    comm = Communicator(rank, memory, max_tokens=64)
    permutation, _, offsets = ops.argsort(destinations, comm.world, comm.id)
    rows = ops.shuffled_reduce_scatter(parts[rank], permutation, offsets, int(offsets[rank + 1] - offsets[rank]), comm.id)
    assert torch.equal(ops.shuffled_allgather(rows, permutation, offsets, comm.id), summed(parts).bfloat16())


def processes():
    parts, destinations = inputs(2, 21, torch.bfloat16)
    torch.multiprocessing.spawn(child, (SharedMemory(2, 1 << 16), parts, destinations), nprocs=2)


def refused():
    comm = Communicator(0, SharedMemory(2, 4096), timeout_ms=50)
    good = torch.zeros(4, 8)
    order, offsets = torch.arange(4, dtype=torch.int32), torch.tensor([0, 2, 4], dtype=torch.int32)
    for run, status, message in [
        (lambda: comm.argsort(torch.tensor([0, 2], dtype=torch.int32)), 2, "destination 1 is 2, expected below 2"),
        (lambda: comm.argsort(torch.tensor([0.0])), 1, "expected int32"),
        (lambda: comm.reduce_scatter(good, order, offsets, 1), 4, "this rank has 2 rows, but the capacity is 1"),
        (lambda: comm.reduce_scatter(good, order[:3], offsets, 2), 1, "permutation: 3 elements"),
        (lambda: comm.reduce_scatter(torch.zeros(400, 8), order, offsets, 2), 1, "permutation: 4 elements"),
        (lambda: comm.all_reduce(torch.zeros(400, 8)), 4, "the symmetric buffer, which has 4096"),
        (lambda: comm.all_reduce(good.double()), 1, "expected a matrix of float32"),
        (lambda: ops.all_reduce(good, 10_000), 1, "there is no communicator 10000"),
        (lambda: Communicator(2, comm.memory), 2, "rank is 2, expected below 2"),
        (lambda: Communicator(0, comm.memory), 1, "rank 0 has already joined"),
        (lambda: comm.all_reduce(good), 6, "rank 1 did not arrive at epoch 1 within 50 ms"),
    ]:
        try:
            run()
        except SemmoeError as error:
            assert error.status == status and message in str(error), error
        else:
            raise AssertionError(f"not refused: {message}")
    comm.close()


def header():
    """The structures here and in the header have equal fields in equal order."""
    text = (pathlib.Path(__file__).resolve().parents[2] / "include/semmoe_kernels.h").read_text()
    for args in (library.InitArgs, *library.OPERATIONS.values()):
        body = re.search(r"typedef struct %s \{(.*?)\} %s;" % (args.__name__, args.__name__), text, re.S)[1]
        body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
        names = [re.split(r"[\s*]+", line.strip())[-1] for line in body.split(";") if line.strip()]
        assert names == [name for name, _ in args._fields_], args.__name__
        widths = {"uint64_t": 8, "uint32_t": 4, "int32_t": 4, "float": 4}
        for line, (name, type_) in zip([line.strip() for line in body.split(";") if line.strip()], args._fields_):
            expected = 8 if "*" in line else widths[line.split()[0]]
            assert ctypes.sizeof(type_) == expected, (args.__name__, name)


if __name__ == "__main__":
    for test in (header, shuffles, experts, compiled, processes, refused):
        test()
        print(f"{test.__name__}: ok")
