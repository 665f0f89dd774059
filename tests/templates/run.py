#!/usr/bin/env python3
"""Compares chat templates as semmoe and as Jinja2 render them, byte by byte: run.py [RENDERER] [--templates FOLDER] [--semmoe SEMMOE].

RENDERER is the example `render` of semmoe-text. The templates are those that llama.cpp keeps, from the source distribution of
llama-cpp-python; nothing of it is copied into the repository. Jinja2 and they are installed from PyPI into the target folder. Each template is
rendered on the chats of chats.py, and each snippet of snippets.py and each template of generated.py on its own one. Where Jinja2 refuses, semmoe must refuse as well. With --semmoe
its worker answers 60 chats with each of three templates."""
import argparse, hashlib, json, os, pathlib, re, shutil, subprocess, sys, tarfile, tempfile, urllib.request, venv

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
FILES = re.compile(r"[^/]+/vendor/llama\.cpp/models/templates/([^/]+\.jinja)$")
TEMPLATES = 70
# Tokens with the usual names, and others that models add.
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "image_token": "<image>", "audio_token": "<audio>", "video_token": "<video>"}
# Known differences: how the name of a template or snippet begins, and why.
EXCEPTIONS = {}
# A printed generator or function is different text each time, so semmoe refuses it.
ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}>")
REFUSED_ADDRESS = "prints as a memory address"
# 30,000 were compared manually.
GENERATED = 2000
SECONDS = 100
# The worker must answer every chat with them.
SERVED = ["Qwen3-Coder", "openai-gpt-oss-120b", "LFM2.5-8B-A1B"]


def environment():
    """A Python with Jinja2, and the folder of templates; rebuilt when the requirements change."""
    requirements = [HERE / "requirements.txt", HERE / "corpus.txt"]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in requirements)).hexdigest()[:12]
    home = TARGET / "templates" / f"{sys.version_info.major}.{sys.version_info.minor}-{digest}"
    if not (home / "complete").exists():
        home.mkdir(parents=True, exist_ok=True)
        venv.create(home, with_pip=True, clear=True)
        pip = [home / "bin/python", "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([*pip, "install", "--no-deps", "--requirement", requirements[0]], check=True, timeout=SECONDS)
            # Its build system generates its metadata; nothing is compiled.
            command = [*pip, "download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", folder, "--requirement", requirements[1]]
            subprocess.run(command, check=True, timeout=SECONDS)
            (home / "corpus").mkdir(exist_ok=True)
            with tarfile.open(next(pathlib.Path(folder).glob("*.tar.gz"))) as archive:
                for member in archive:
                    if match := FILES.match(member.name):
                        (home / "corpus" / match[1]).write_bytes(archive.extractfile(member).read())
        (home / "complete").touch()
    return home / "bin/python", home / "corpus"


def requests(folder):
    """Names and requests, template by template; the first one of each has the template."""
    from chats import chats
    from generated import generated
    from snippets import snippets

    for path in sorted(folder.glob("*.jinja")):
        # As Python reads text, with universal line ends.
        template = {"template": path.read_text(encoding="utf-8"), "special": SPECIAL}
        for name, chat in chats():
            yield f"{path.stem}: {name}", {**template, **chat}
            template = {}
            if not chat.keys() & {"tools", "variables", "add_generation_prompt"} and all(
                message.keys() == {"role", "content"} and isinstance(message["content"], str) and isinstance(message["role"], str)
                for message in chat["messages"]
            ):
                yield f"{path.stem}: {name}, as a plain chat", {**chat, "plain": True}
    for snippet, chat in snippets():
        yield f"snippet {snippet!r}", {"template": snippet, "special": SPECIAL, **chat}
    for template, chat in generated(GENERATED):
        yield f"generated {template!r}", {"template": template, "special": SPECIAL, **chat}


def rendered(renderer, asked):
    lines = "".join(json.dumps(request) + "\n" for request in asked)
    answers = subprocess.run([renderer], input=lines, capture_output=True, text=True, check=True, timeout=SECONDS).stdout
    return [json.loads(line) for line in answers.splitlines()]


def differences(names, ours, theirs):
    if not len(names) == len(ours) == len(theirs):
        return [f"{len(names)} requests, {len(ours)} answers of semmoe, {len(theirs)} of Jinja2"]
    found = []
    for name, our, their in zip(names, ours, theirs):
        is_text = "text" in their and not ADDRESS.search(their["text"])
        same = our.get("text") == their["text"] if is_text else "error" in our
        # The address may have been reused.
        same = same or REFUSED_ADDRESS in our.get("error", "")
        if not same and not any(name.startswith(known) for known in EXCEPTIONS):
            found.append(f"{name}\n  Jinja2: {their}\n  semmoe: {our}")
    return found


def compare(renderer, folder):
    from reference import answers

    named = list(requests(folder))
    names, asked = [name for name, _ in named], [request for _, request in named]
    # A template may change the lists that it is given.
    theirs = list(answers(json.loads(json.dumps(asked))))
    found = differences(names, rendered(renderer, asked), theirs)
    for difference in found[:40]:
        print(difference)
    texts = sum("text" in answer for answer in theirs)
    print(f"{len(asked)} renderings, {texts} of them texts: {len(found)} differ")
    if found:
        sys.exit(1)
    planted(renderer, asked, names, theirs)


def planted(renderer, asked, names, theirs):
    """A template with one more space at its end must be detected, and nothing else."""
    at = next(at for at, answer in enumerate(theirs) if "text" in answer and "template" in asked[at])
    asked[at] = {**asked[at], "template": asked[at]["template"] + "{{ ' ' }}"}
    end = next(at for at in range(at + 1, len(asked)) if "template" in asked[at])
    expected = sum("text" in answer for answer in theirs[at:end])
    found = differences(names, rendered(renderer, asked), theirs)
    if len(found) != expected:
        sys.exit(f"{expected} planted faults, {len(found)} found")
    print(f"{expected} planted faults found")


def serve(semmoe, folder):
    """Chats of four shapes to a worker of the bundled model, with each template in place of its own."""
    sys.path.insert(0, str(HERE.parent / "clients"))
    import worker
    from chats import PLAIN_TOOL, SYSTEM, assistant, user

    for name in SERVED:
        with tempfile.TemporaryDirectory() as home:
            for file in worker.MODEL.iterdir():
                (pathlib.Path(home) / file.name).symlink_to(file)
            shutil.copy(folder / f"{name}.jinja", pathlib.Path(home) / "chat_template.jinja")
            answered = 0
            with worker.start(semmoe, home) as url:
                for number in range(15):
                    question = user(f"Which rivers flow through town {number}?")
                    for messages, more in (([question], {}), ([SYSTEM, question], {}), ([user(), assistant(), question], {}), ([question], {"tools": [PLAIN_TOOL]})):
                        body = json.dumps({"messages": messages, "max_tokens": 1, **more}).encode()
                        request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
                        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                            answered += answer.status == 200
            print(f"a worker with the template of {name} answered {answered} chats")
            assert answered == 60, name


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("renderer", nargs="?", default=TARGET / "debug/examples/render", type=pathlib.Path)
    parser.add_argument("--templates", type=pathlib.Path, help="other templates than those of PyPI")
    parser.add_argument("--semmoe", type=pathlib.Path, help="the command, whose worker is tried")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(HERE))
    if options.inside:
        compare(options.renderer, options.templates)
        return
    try:
        python, folder = environment()
    except subprocess.SubprocessError as error:
        print(f"NOTICE: Jinja2 and the templates cannot be had from PyPI ({error}), so templates were not compared")
        return
    found = len(list(folder.glob("*.jinja")))
    if found < TEMPLATES:
        sys.exit(f"{found} templates in the source distribution, {TEMPLATES} are expected")
    subprocess.run([python, __file__, "--inside", options.renderer.resolve(), "--templates", options.templates or folder], check=True, timeout=2 * SECONDS)
    if options.semmoe:
        serve(options.semmoe.resolve(), folder)


if __name__ == "__main__":
    main()
