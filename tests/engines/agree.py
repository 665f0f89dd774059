"""agree.py TRACE... --model DIR: are recorded experts those of Transformers, token by token and layer by layer?

Runs in the engine's own environment, which has torch, transformers and safetensors. Near-ties of the router (a gap of its
logits below 1e-4) are left out and counted. Prints one JSON object."""
import argparse, json, pathlib, sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiler/python"))
import numpy, record_routing as hook, torch
from safetensors.numpy import load_file

GAP = 1e-4


def requests(trace):
    tensors = load_file(trace)
    starts = tensors["request_offsets"].astype(numpy.int64).tolist()
    for begin, end in zip(starts, starts[1:]):
        yield tensors["token_ids"][begin:end].astype(numpy.int64), tensors["experts"][begin:end].astype(numpy.int64)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--model", required=True)
    given = parser.parse_args()
    torch.set_num_threads(2)
    model = hook.load(argparse.Namespace(model=given.model, device="cpu", dtype="float32"))
    recorder = hook.Recorder(model)
    found = {"requests": 0, "token_layers": 0, "wrong": 0, "near_ties": 0}
    for trace in given.traces:
        for ids, experts in requests(trace):
            recorder.record(ids.tolist(), 1)
            found["requests"] += 1
            for at, layer in enumerate(recorder.shape.layer_ids):
                shape = recorder.shape
                _, logits = hook.read(recorder.seen[layer][0], shape.num_experts, shape.top_k)
                # Some versions return probabilities instead of logits.
                logits = logits.log() if float(logits.min()) >= 0 else logits
                top = logits.topk(shape.top_k + 1)
                clear = ((top.values[:, -2] - top.values[:, -1]) > GAP).numpy()
                right = numpy.sort(top.indices[:, :-1].numpy(), axis=-1)
                same = (numpy.sort(experts[:, at], axis=-1) == right).all(axis=-1)
                found["token_layers"] += same.size
                found["near_ties"] += int((~clear).sum())
                found["wrong"] += int((~same & clear).sum())
    print(json.dumps(found))


main()
