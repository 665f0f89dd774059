#!/usr/bin/env python3
"""Compares what the gateway refuses as token ids outside the vocabulary with what pydantic makes of the same bodies:

    run.py [--values N] [--seed S] [--blind CLASS] [JUDGE]

JUDGE is the program `judge_ids` (cargo build -p semmoe-engines --example judge_ids). Bodies are generated: every field that can hold ids, on every
route, with the types that SGLang 0.5.23 and vLLM 0.33.0 declare for it, in every spelling that we know of. A body from which any engine's type
gets an id outside the vocabulary must be refused; one in which all ids are inside must not be. What no engine accepts may go either way.

Each class of spellings must have hidden an id outside somewhere in the run, or it fails: a generator that has lost a class finds nothing. With
--blind CLASS the judge is taken to pass every body of that class, and the run must fail: a fault that it should find.

Without pydantic it makes an environment with it, and without PyPI it is left out, which is said."""
import argparse, json, pathlib, random, subprocess, sys, tempfile, venv

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZE = 1000
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS, GENERATE, DETOKENIZE, EXTRA = "/v1/embeddings", "/generate", "/detokenize", "/v1/score"


def in_environment():
    """Reruns this script in the environment with pydantic, and exits."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        if subprocess.run([python, "-m", "pip", "-q", "install", "pydantic>=2,<3"], capture_output=True).returncode:
            print("notice: no pydantic from PyPI, so token ids were not compared with it")
            sys.exit(0)
        sys.exit(subprocess.run([python, *sys.argv]).returncode)


try:
    import pydantic
except ImportError:
    in_environment()
from typing import Annotated, Any, Dict, List, Optional, Set, Union
from pydantic import Field, TypeAdapter, ValidationError

PROMPTS = [Union[List[int], List[List[int]], str, List[str]],
           Union[List[Annotated[int, Field(ge=0)]], List[List[Annotated[int, Field(ge=0)]]], str, List[str], None]]
INPUTS = PROMPTS[:1] + [Union[List[int], List[List[int]], str, List[str], List[Dict[str, Any]]]]
LISTS = [Optional[List[int]]]
NESTED = [Optional[Union[List[List[int]], List[int]]]]


class ByPython:
    """Validates like SGLang's SamplingParams and vLLM's logit_bias: int() of every element or key."""

    def __init__(self, only_keys):
        self.only_keys = only_keys

    def validate_python(self, value):
        if value is None or isinstance(value, (int, float, str)) or (self.only_keys and not isinstance(value, dict)):
            raise ValueError
        try:
            return [int(item) for item in value if item is not None]
        except (TypeError, OverflowError) as error:
            raise ValueError from error


IDS = [TypeAdapter(kind) for kind in LISTS]
BIAS = [ByPython(True), TypeAdapter(Dict[int, float])]
STOPS = IDS + [TypeAdapter(Optional[Set[int]])]
# Positions of ids: route, path to the member, and the declared types.
PLACES = [
    (COMPLETIONS, ["prompt"], [TypeAdapter(kind) for kind in PROMPTS]),
    (EMBEDDINGS, ["input"], [TypeAdapter(kind) for kind in INPUTS]),
    (EMBEDDINGS, ["embed_override_token_id"], [TypeAdapter(Optional[int])]),
    (CHAT, ["input_ids"], IDS),
    (GENERATE, ["input_ids"], [TypeAdapter(kind) for kind in NESTED]),
    (GENERATE, ["token_ids_logprob"], [TypeAdapter(kind) for kind in NESTED]),
    (GENERATE, ["sampling_params", "stop_token_ids"], [ByPython(False)]),
    (GENERATE, ["sampling_params", "logit_bias"], BIAS),
    (GENERATE, ["sampling_params", 0, "stop_token_ids"], [ByPython(False)]),
    (DETOKENIZE, ["tokens"], [TypeAdapter(Union[List[int], List[List[int]]])]),
    (EXTRA, ["label_token_ids"], [TypeAdapter(kind) for kind in NESTED]),
    (EXTRA, ["query"], [TypeAdapter(Optional[Union[str, List[int]]])]),
    (EXTRA, ["items"], [TypeAdapter(Optional[Union[str, List[str], List[List[int]]]])]),
    (EXTRA, ["token_ids"], IDS),
    (EXTRA, ["sampling_params", "allowed_token_ids"], IDS),
] + [(route, [name], types) for route in (CHAT, COMPLETIONS) for name, types in (
    ("stop_token_ids", STOPS), ("allowed_token_ids", IDS), ("logprob_token_ids", IDS), ("logit_bias", BIAS))] + [
    (RESPONSES, [name], types) for name, types in (("stop_token_ids", STOPS), ("logit_bias", BIAS))]

BLANKS = [" ", "\t", "\n", "\r", "\x0b", "\x0c", "\x1c", "\x1f", "\x85", "\xa0", "\u1680", "\u2003", "\u2028", "\u202f", "\u205f", "\u3000"]
DIGITS = ["٠١٢٣٤٥٦٧٨٩", "０１２３４５６７８９", "𝟎𝟏𝟐𝟑𝟒𝟓𝟔𝟕𝟖𝟗", "۰۱۲۳۴۵۶۷۸۹"]


class Generator:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def number(self):
        pick = self.random.random()
        if pick < 0.7:
            return self.random.randrange(SIZE)
        return self.random.choice([-1, -5, -(2**63), SIZE, SIZE + 1, 1024, 99999999, 2**31, 2**32 + 5, 2**53 + 1, 2**63, 2**64 + 7, 10**25])

    def escaped(self, text):
        """A JSON string of the text; some characters as escapes."""
        out = []
        for character in text:
            if self.random.random() < 0.5 and ord(character) < 0x10000:
                digits = f"{ord(character):04x}"
                out.append("\\u" + (digits.upper() if self.random.random() < 0.3 else digits))
            else:
                out.append(json.dumps(character, ensure_ascii=self.random.random() < 0.5)[1:-1])
        return '"' + "".join(out) + '"'

    def spelling(self, number, classes):
        """A number as JSON; its special properties are added to the classes."""
        kind = self.random.randrange(16)
        plain = str(number)
        if kind < 5:
            classes.add("plain")
            return plain
        if kind < 8:
            classes.add("number")
            return self.random.choice([f"{plain}.0", f"{plain}.000", f"{plain}e0", f"{plain}E+0", f"{number * 10}e-1", f"{plain}.0e0"])
        if kind == 8:
            classes.add("fraction")
            return f"{plain}.5"
        sign, digits = ("-", plain[1:]) if number < 0 else ("", plain)
        if kind == 9:
            classes.add("underscores")
            digits = digits[0] + "".join(self.random.choice(["", "_"]) + digit for digit in digits[1:])
        elif kind == 10:
            classes.add("zeros")
            digits = "0" * self.random.choice([1, 2, 40]) + digits
        elif kind == 11:
            classes.add("sign")
            sign = sign or "+"
        elif kind == 12:
            classes.add("decimal")
            digits += self.random.choice([".0", ".000", "."])
        elif kind == 13:
            classes.add("script")
            digits = "".join(self.random.choice(DIGITS)[int(digit)] for digit in digits)
        text = sign + digits
        if kind == 14:
            classes.add("blanks")
            text = self.random.choice(BLANKS) * self.random.randrange(3) + text + self.random.choice(BLANKS)
        classes.add("text")
        if kind == 15 or self.random.random() < 0.1:
            classes.add("escapes")
            return self.escaped(text)
        return json.dumps(text, ensure_ascii=self.random.random() < 0.5)

    def other(self, classes):
        classes.add("others")
        return self.random.choice(["true", "false", "null", '"abc"', '""', "1.5", "{}", '{"a":1}', "[]", "[1]", '"1e3"', '"0x5"', '"nan"'])

    def space(self):
        return self.random.choice(["", "", "", " ", "\t", "\r\\n"[:1]])

    def list(self, classes, depth):
        items = []
        for _ in range(self.random.choice([0, 1, 1, 2, 2, 3, 5])):
            if depth and self.random.random() < 0.8:
                items.append(self.list(classes, depth - 1))
            elif self.random.random() < 0.06:
                items.append(self.other(classes))
            elif self.random.random() < 0.05:
                classes.add("booleans")
                items.append(self.random.choice(["true", "false"]))
            else:
                items.append(self.spelling(self.number(), classes))
        if depth:
            classes.add("nested")
        return "[" + self.space() + ",".join(self.space() + item + self.space() for item in items) + "]"

    def keys(self, classes):
        classes.add("keys")
        members = []
        for _ in range(self.random.choice([1, 1, 2, 3])):
            key = self.spelling(self.number(), classes)
            members.append((key if key.startswith('"') else f'"{key}"') + self.space() + ":" + self.space() + self.random.choice(["1", "-5.5", "100000"]))
        return "{" + ",".join(members) + "}"

    def value(self, classes, name):
        kind = self.random.random()
        if name == "logit_bias" or kind < 0.05:
            return self.keys(classes)
        if kind < 0.1:
            return self.spelling(self.number(), classes)
        return self.list(classes, self.random.choice([0, 0, 0, 1, 1, 2]))

    def body(self):
        """Route, declared types, the whole body, its value there, and the classes of its content."""
        (route, way, types), classes = self.random.choice(PLACES), set()
        value = self.value(classes, way[-1])
        body = value
        for step in reversed(way):
            if step == 0:
                body = f'[{{"n":1}},{body}]' if self.random.random() < 0.5 else f"[{body}]"
                continue
            name = json.dumps(step)
            if self.random.random() < 0.1:
                classes.add("key escapes")
                name = self.escaped(step)
            body = "{" + self.random.choice(["", '"n":1,', '"user":"[99999999]",']) + f"{name}{self.space()}:{self.space()}{body}" + self.random.choice(["", ',"top_k":5']) + "}"
        return route, types, body, value, classes


def ids_in(value):
    """Ids of a validated value; none for text."""
    if isinstance(value, bool) or isinstance(value, int):
        return [int(value)]
    if isinstance(value, dict):
        return [int(key) for key in value if isinstance(key, int)]
    return [number for item in value for number in ids_in(item)] if isinstance(value, (list, set)) else []


def expected(types, value):
    """1: some engine gets an id outside; 0: all get ids inside or text; None: no engine accepts it."""
    taken = False
    for kind in types:
        try:
            found = ids_in(kind.validate_python(value))
        except (ValidationError, ValueError):
            continue
        if any(not 0 <= number < SIZE for number in found):
            return 1
        taken = True
    return 0 if taken else None


def main():
    words = argparse.ArgumentParser()
    words.add_argument("judge", nargs="?", default=str(ROOT / "target/debug/examples/judge_ids"))
    words.add_argument("--values", type=int, default=20_000)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--blind")
    words = words.parse_args()
    generator, wrong, seen = Generator(words.seed), [], {}
    counts = {0: 0, 1: 0, None: 0}
    for start in range(0, words.values, 50_000):
        bodies = [generator.body() for _ in range(min(50_000, words.values - start))]
        lines = "".join(f"{route} {body}\n" for route, _, body, _, _ in bodies)
        judged = subprocess.run([words.judge, str(SIZE)], input=lines, capture_output=True, text=True, check=True).stdout.split()
        assert len(judged) == len(bodies), (len(judged), len(bodies))
        for (route, types, body, value, classes), verdict in zip(bodies, judged):
            wanted = expected(types, json.loads(value))
            verdict = 0 if words.blind in classes else int(verdict)
            counts[wanted] += 1
            if wanted == 1:
                for name in classes:
                    seen[name] = seen.get(name, 0) + 1
            # Digits of other scripts are refused whatever their value: no client counts tokens in them.
            if wanted is not None and verdict != wanted and not (verdict and classes & {"script", "fraction"}):
                wrong.append((route, body, wanted, verdict))
    print(f"{words.values} bodies, pydantic {pydantic.VERSION}: {counts[1]} with ids outside, {counts[0]} without, {counts[None]} that no engine takes")
    print("classes with ids outside:", ", ".join(f"{name} {count}" for name, count in sorted(seen.items())))
    for route, body, wanted, verdict in wrong[:10]:
        print(f"{route} {body}: {'passes, and is outside' if wanted else 'refused, and is inside'}")
    missing = {"plain", "number", "underscores", "zeros", "sign", "decimal", "script", "blanks", "text", "escapes", "key escapes", "booleans",
               "nested", "keys"} - set(seen)
    if missing:
        print("no id outside was hidden by:", ", ".join(sorted(missing)))
    if wrong:
        print(f"{len(wrong)} judged otherwise than by pydantic")
    sys.exit(1 if wrong or missing else 0)


main()
