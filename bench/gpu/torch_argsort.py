"""Times torch.argsort and the stable torch.sort on keys like those of the argsort kernel; prints JSON.

Calls are captured in a CUDA graph and timed together, as the kernel is: Python and launches are not in the times. `argsort_us` is for
int32 keys, which the kernel takes; `best_us` is the fastest of PyTorch's key types, stable or not."""
import json, sys

try:
    import torch
except ImportError as error:
    sys.exit(f"error: PyTorch is missing on this machine: {error}")
if not torch.cuda.is_available():
    sys.exit("error: this PyTorch sees no GPU")

AT_ONCE, WARM_UP, RUNS = 20, 5, 50


def microseconds(call):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(AT_ONCE):
            call()
    times = []
    for _ in range(WARM_UP + RUNS):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) * 1000 / AT_ONCE)
    return sorted(times[WARM_UP:])[RUNS // 2]


torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
rows = []
for items, ranks in ((1024, 8), (4096, 8), (8192, 8), (8192, 64)):
    keys = torch.randint(0, ranks, (items,), device="cuda", dtype=torch.int32)
    times = {}
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        cast = keys.to(dtype)
        name = str(dtype).removeprefix("torch.")
        times[f"argsort_{name}"] = microseconds(lambda: torch.argsort(cast))
        times[f"stable_{name}"] = microseconds(lambda: torch.argsort(cast, stable=True))
    rows.append({"items": items, "ranks": ranks, "argsort_us": times["argsort_int32"], "best_us": min(times.values()), "all_us": times})
print(json.dumps({"torch": torch.__version__, "argsort": rows}))
