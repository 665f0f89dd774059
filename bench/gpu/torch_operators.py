"""The C library and its PyTorch operators on one GPU: two processes that map one another's memory by cuIpc, against PyTorch's own
arithmetic; prints JSON. The library is SEMMOE_KERNELS_LIBRARY, the package semmoe_kernels on PYTHONPATH."""
import json, os, subprocess, sys, tempfile

try:
    import torch
except ImportError as error:
    sys.exit(f"error: PyTorch is missing on this machine: {error}")
if not torch.cuda.is_available():
    sys.exit("error: this PyTorch sees no GPU")

WORLD, TOKENS, HIDDEN, EXPERTS, TOP_K = 2, 129, 256, 8, 2


def equal(what, found, expected):
    assert torch.equal(found, expected), f"{what}: {(found != expected).sum().item()} of {expected.numel()} elements differ"


def rows(seed, dtype, count=TOKENS):
    """Small multiples of 1/8, so that sums are exact in every type and order."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-8, 8, (count, HIDDEN), generator=generator) / 8).to("cuda", dtype)


def collectives(comm, rank, seed, dtype):
    parts = [rows(seed + r, dtype) for r in range(WORLD)]
    destinations = torch.randint(0, WORLD, (TOKENS,), generator=torch.Generator().manual_seed(seed)).to("cuda", torch.int32)
    permutation, inverse, offsets = comm.argsort(destinations)
    equal("argsort", permutation.long(), torch.argsort(destinations, stable=True))
    equal("its inverse", inverse[permutation.long()].long(), torch.arange(TOKENS, device="cuda"))
    begin, end = (int(edge) for edge in offsets[rank:rank + 2])
    mine = permutation[begin:end].long()
    total = parts[0] + parts[1]
    scattered, _ = comm.reduce_scatter(parts[rank], permutation, offsets, end - begin)
    equal("SRS", scattered, total[mine])
    equal("SAG", comm.allgather(scattered, permutation, offsets), total)
    equal("all-reduce", comm.all_reduce(parts[rank]), total)
    residual, weight = rows(seed + 7, dtype), rows(seed + 8, dtype, 1)[0]
    normed, kept = comm.reduce_scatter(parts[rank], permutation, offsets, end - begin, residual, weight, 1e-6)
    h = (total.float() + residual.float())[mine]
    equal("residual", kept, h.to(dtype))
    norm = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    torch.testing.assert_close(normed.float(), norm, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)


def exchange(comm, rank, seed, dtype):
    generator = torch.Generator().manual_seed(seed + rank)
    experts = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)]).to("cuda", torch.int32)
    weights = torch.ones(TOKENS, TOP_K, device="cuda")
    hosts = torch.arange(EXPERTS, device="cuda", dtype=torch.int32) % WORLD
    x = rows(seed + rank, dtype)
    got, _, _, _, offsets, sent = comm.dispatch(x, experts, weights, hosts, WORLD * TOKENS)
    back = comm.combine(got, sent)
    ranks = torch.stack([(hosts[experts.long()] == r).any(-1) for r in range(WORLD)]).sum(0)
    equal("dispatch and combine", back, x * ranks[:, None].to(dtype))
    assert int(offsets[-1]) <= WORLD * TOKENS


def graph(comm, rank, seed):
    """A call captured in a graph and replayed with other rows."""
    part, order = comm.symmetric((TOKENS, HIDDEN), torch.bfloat16), torch.arange(TOKENS, device="cuda", dtype=torch.int32)
    offsets = torch.tensor([0, 65, TOKENS], device="cuda", dtype=torch.int32)
    count = int(offsets[rank + 1] - offsets[rank])
    # The first call allocates, which a capture may not.
    comm.reduce_scatter(part, order, offsets, count)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out, _ = comm.reduce_scatter(part, order, offsets, count)
    for again in range(3):
        part.copy_(rows(seed + again + rank, torch.bfloat16))
        captured.replay()
        total = rows(seed + again, torch.bfloat16) + rows(seed + again + 1, torch.bfloat16)
        equal("a replayed SRS", out, total[int(offsets[rank]):int(offsets[rank + 1])])


def one(rank, store, seed):
    from semmoe_kernels import cuda_communicator
    store = torch.distributed.FileStore(store, WORLD)
    comm = cuda_communicator(16 << 20, store=store, rank=rank, world=WORLD, max_tokens=1024, timeout_ms=20_000)
    comm.self_check()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        collectives(comm, rank, seed, dtype)
        exchange(comm, rank, seed, dtype)
    graph(comm, rank, seed)
    torch.cuda.synchronize()
    comm.check()
    comm.close()


def main(seed):
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen([sys.executable, __file__, seed, str(rank), folder + "/store"], stderr=subprocess.PIPE, text=True)
                 for rank in range(WORLD)]
        for rank, process in enumerate(ranks):
            said = process.communicate()[1]
            if process.returncode != 0:
                for other in ranks:
                    other.kill()
                sys.exit(f"error: rank {rank}: {(said.strip().splitlines() or ['no reason given'])[-1]}")
    print(json.dumps({"torch": torch.__version__, "ranks": WORLD, "dtypes": ["float32", "float16", "bfloat16"], "graph": True}))


if len(sys.argv) == 4:
    one(int(sys.argv[2]), sys.argv[3], int(sys.argv[1]))
else:
    main(sys.argv[1] if len(sys.argv) > 1 else "1")
