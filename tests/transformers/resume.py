#!/usr/bin/env python3
"""A killed recording of the hook resumes where it stopped, and yields the trace of an uninterrupted one: resume.py SEMMOE FOLDER."""
import contextlib, io, pathlib, re, subprocess, sys, time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "profiler/python/record_routing.py"
sys.path.insert(0, str(SCRIPT.parent))
import record_routing as hook

FOLDER = pathlib.Path(sys.argv[2])
PROMPTS = FOLDER / "resume.jsonl"
whole, resumed = FOLDER / "whole.trace.safetensors", FOLDER / "resumed.trace.safetensors"
partial = pathlib.Path(f"{resumed}.partial")
OPTIONS = [SCRIPT, "--model", ROOT / "assets/tiny-qwen3moe-15m", "--prompts", PROMPTS, "--max-bad", "0.1", "--out"]


def run(out, *more):
    """What the hook said, in this process: importing torch takes its time."""
    sys.argv = [str(word) for word in (*OPTIONS, out, *more)]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            hook.main()
        except SystemExit as refused:
            return str(refused)
    return said.getvalue()


lined = (ROOT / "tests/data/reference.prompts.jsonl").read_text().splitlines()[:40]
PROMPTS.write_text("\n".join([*lined[:30], "not a prompt", *lined[30:]]) + "\n")
said = run(whole)
assert "line 31: not JSON" in said and "41 of 41 prompts" in said, said
process = subprocess.Popen([sys.executable, *OPTIONS, resumed], stderr=subprocess.DEVNULL)
while not partial.exists() or partial.read_bytes().count(b"\n") < 5:
    assert process.poll() is None, "the recording ended before it could be killed"
    time.sleep(0.01)
process.kill()
process.wait()
kept = partial.read_bytes().count(b"\n") - 1
assert not resumed.exists() and 4 <= kept < 41, kept
# As if the end of the process had cut the last line short.
with partial.open("ab") as file:
    file.write(b'{"line":99,"tok')
said = run(resumed, "--max-tokens", "2")
assert "another max_tokens; --fresh starts over" in said, said
said = run(resumed)
assert f"{kept} prompts are recorded" in said and "41 of 41 prompts" in said, said
assert not partial.exists(), "the journal stays behind"
created = re.compile(rb'"created":"[^"]*"')
assert created.sub(b"", whole.read_bytes()) == created.sub(b"", resumed.read_bytes()), "another trace"
partial.write_text("nothing of the kind\n")
said = run(resumed)
assert "--fresh starts over" in said, said
run(resumed, "--fresh")
assert not partial.exists(), "--fresh did not start over"
print(f"resume: ok (killed after {kept} of 41 prompts)")
