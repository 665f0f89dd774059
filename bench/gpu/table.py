"""One table of a document that bench/gpu/run left."""

# Requirements on the figures: name, how to read it, whether it holds.
BARS = (
    ("SRS over plain reduce-scatter, P = 8, at most 1.05", lambda row: row["srs_over_plain"], lambda value: value <= 1.05),
    ("SRS, share of the copy bound, P = 8, at least 0.85", lambda row: row["srs_share_of_copy_bound"], lambda value: value >= 0.85),
    ("unfused shuffle + reduce-scatter over SRS, P = 8, at least 1.25", lambda row: row["unfused_over_srs"], lambda value: value >= 1.25),
)
OTHERS = ("srs_norm", "all_reduce", "dispatch", "combine")


def argsorts(document):
    """Our argsort beside PyTorch's and cub's, for each size."""
    torch = {(row["items"], row["ranks"]): row for row in document.get("torch", {}).get("argsort", [])}
    cub = {(row["items"], row["ranks"]): row for row in document.get("cub", {}).get("sorts", [])}
    for row in document.get("times", {}).get("argsort", []):
        key = row["items"], row["ranks"]
        yield row, torch.get(key), cub.get(key)


def collectives(times):
    print(f"{'':18}{'us':>8}{'plain':>8}{'unfused':>9}{'over plain':>12}{'unfused over':>14}{'of copy bound':>15}{'blocks':>8}")
    for row in times.get("collectives", []):
        ranks = f"P={row['ranks']}"
        for name, plain in (("srs", "reduce_scatter"), ("sag", "allgather")):
            print(f"{name + ' ' + ranks:18}{row[f'{name}_us']:>8.1f}{row[f'{plain}_us']:>8.1f}{row[f'unfused_{plain}_us']:>9.1f}"
                  f"{row[f'{name}_over_plain']:>12.3f}{row[f'unfused_over_{name}']:>14.2f}{row[f'{name}_share_of_copy_bound']:>15.0%}"
                  f"{row[f'{name}_blocks']:>8}")
        print(f"{'pair ' + ranks:43}{row['pair_over_plain']:>12.3f}{row['unfused_over_pair']:>14.2f}")
        for name in OTHERS:
            print(f"{name + ' ' + ranks:18}{row[f'{name}_us']:>8.1f}{row[f'{name}_share_of_copy_bound']:>58.0%}{row[f'{name}_blocks']:>8}")


def lines(document):
    times = document.get("times", {})
    print(f"\n{times.get('machine', document.get('gpu', 'no GPU'))}: copy {times.get('copy_gb_per_s', 0):.0f} GB/s, "
          f"{times.get('tokens')} x {times.get('hidden')} {times.get('dtype')}")
    for how in sorted({row["how"] for row in times.get("collectives", []) + times.get("argsort", [])}):
        print(f"timed by: {how}")
    if times.get("collectives"):
        collectives(times)
    for row in times.get("reshard", []):
        print(f"reshard P={row['ranks']}, a layer of {row['experts']} experts of 3 x {row['intermediate']} x {row['hidden']} {row['dtype']}, EP to TP: "
              f"{row['us']:.0f} us, {row['share_of_copy_bound']:.0%} of the copy bound, {row['blocks']} blocks")
    for row in times.get("products", []):
        print(f"{row['product']:>24} {row['inputs']} -> {row['outputs']}, {row['tokens']:>4} tokens: {row['us']:>7.1f} us, "
              f"{row['share_of_weight_bound']:.0%} of the time for its {row['weight_bytes'] / 2**20:.1f} MiB of weights, {row['tflops']:.1f} TFLOP/s")
    for row in times.get("attention", []):
        beside = f" of {row['keys']} keys{' (a prompt)' if row['prompt'] else ''}, {row['share_of_read_bound']:.0%} of the time for its keys and values" if "keys" in row else ""
        print(f"{row['kernel']:>24} {row['rows']:>4} rows: {row['us']:>7.1f} us{beside}")
    for row, torch, cub in argsorts(document):
        print(f"argsort {row['items']} over {row['ranks']}: {row['us']:.2f} us"
              + (f"; torch.argsort {torch['argsort_us']:.2f} us ({torch['argsort_us'] / row['us']:.1f}x), the fastest of its key types "
                 f"{torch['best_us']:.2f} us ({torch['best_us'] / row['us']:.1f}x)" if torch else "; no torch.argsort")
              + (f"; cub {cub['us']:.2f} us ({cub['us'] / row['us']:.1f}x)" if cub else "; no cub"))
    for step in ("checks", "processes", "descriptors", "unit", "operators", "sanitizer", "times", "torch", "cub"):
        said = document.get(step)
        state = "not run" if said is None else "passed" if said.get("passed") else f"FAILED: {said.get('reason', '')}"
        not_run = sorted({check["not_run"] for check in (said or {}).get("checks", []) if check.get("not_run")})
        print(f"{step}: {state}" + "".join(f"; not run: {reason}" for reason in not_run))
        for check in [check for check in (said or {}).get("checks", []) if check["equal"] is False][:10]:
            print("  differs:", check)
    bars(document)


def bars(document):
    rows = {row["ranks"]: row for row in document.get("times", {}).get("collectives", [])}
    for name, read, holds in BARS:
        value = read(rows[8]) if 8 in rows else None
        print(f"bar: {name}: " + ("not measured" if value is None else f"{value:.3f}, {'holds' if holds(value) else 'MISSED'}"))
    reshards = [row["share_of_copy_bound"] for row in document.get("times", {}).get("reshard", [])]
    print("bar: reshard, share of the copy bound, at least 0.85: "
          + (f"{min(reshards):.3f}, {'holds' if min(reshards) >= 0.85 else 'MISSED'}" if reshards else "not measured"))
    sort = next(((row, torch) for row, torch, _ in argsorts(document) if (row["items"], row["ranks"]) == (8192, 8)), None)
    if sort and sort[1]:
        value = sort[1]["argsort_us"] / sort[0]["us"]
        print(f"bar: torch.argsort over argsort at 8,192, at least 3: {value:.2f}, {'holds' if value >= 3 else 'MISSED'}")
    else:
        print("bar: torch.argsort over argsort at 8,192, at least 3: not measured")
    sanitizer = document.get("sanitizer")
    print("bar: sanitizer reports, none: " + ("not measured" if "planted" not in (sanitizer or {}) else "holds" if sanitizer["passed"] else "MISSED"))


def predictions(document):
    print(document["what"])
    print(f"{document['tokens']} x {document['hidden']} {document['dtype']}; dispatch: {document['top_k']} of {document['experts']} experts, "
          f"tokens spread over the ranks; microseconds")
    columns = ("srs", "sag", "srs_norm", "all_reduce", "shuffle", "srs_nvls", "sag_nvls", "dispatch", "combine")
    print(f"{'':26}" + "".join(f"{name:>11}" for name in columns) + f"{'unfused/pair':>14}")
    for row in document["predictions"]:
        print(f"{row['machine'] + ' P=' + str(row['ranks']):26}" + "".join(f"{row[name + '_us']:>11.1f}" for name in columns)
              + f"{row['unfused_over_pair']:>14.2f}")
    return 0
