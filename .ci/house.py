#!/usr/bin/env python3
"""House rules that no compiler checks: `house.py [lines | callers | check | update]`.

lines    counts lines of Rust that are neither blank nor comments, outside tests, benchmarks and examples, by crate;
         fails if they are more than the last number in .ci/budget.txt
callers  lists public items of shipped crates that no shipped code names, and the benchmarks and tests that do. It goes by names: an
         item that shares its name with something in use is not found
check    compares what it counts by crate with .ci/house.json: repeated code, words that CONTRIBUTING.md replaces, long comment
         lines, paths in ARCHITECTURE.md and the READMEs that lead to no file, strangers at the root, links of documents, pages of docs/ that are too
         many or too large, commands on pages that CI does not run and that do not say why, wide traits,
         parameters without a name, comments that need their neighbours, the items of `callers`
update   lowers the allowances in .ci/house.json to what is counted; none is ever raised

Repeated code is a run of 30 or more equal tokens, outside tests, that occurs elsewhere too. Signatures, attributes, imports and
comments do not count: an implementation has the signature of its trait.

A trait is wide if it has more than six methods. A parameter is unnamed if its type is a tuple of different types."""
import collections
import itertools
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
ALLOWED = ROOT / ".ci/house.json"
BUDGET = ROOT / ".ci/budget.txt"
ROOT_FILE = re.compile(r"\.\w+|[A-Z]+(\.md)?|Cargo\.\w+|build\.rs|justfile|\w+\.toml")
RUN = 30
COLUMNS = 120
METHODS = 6
# One more page of at most 20,000 bytes for the papers' rows (docs/papers.md).
PAGES, PAGE_BYTES, DOCS_BYTES = 15, 20_000, 220_000
APART = re.compile(r"(^|/)(tests?|benches|examples)(/|\.rs$)|(^|/)\w*_tests?\.rs$|^bench/|^build\.rs$")
TOKEN = re.compile(
    r"""(//[^\n]*|/\*.*?\*/)|b?r(\#*)".*?"\2|b?"(?:\\.|[^"\\])*"|b?'(?:\\(?:x..|u\{[^}]*\}|.)|[^'\\\n])'|'\w+|\w+|[^\w\s]""",
    re.S,
)
COMMENT = re.compile(r"^\s*(//[/!]?)( ?)(.*)$")
FN = r"\bfn (\w+)"
TRAIT = re.compile(r"^( *)(?:pub(?:\([^)]*\))? )?(?:unsafe )?trait (\w+)[^{;]*\{\n(.*?)^\1\}", re.M | re.S)
# A parameter's pattern and its type, which is a tuple, borrowed or optional.
TUPLE = re.compile(r"[(,]\s*(?:mut )?(?:\w+|\([\w, ]*\)): (?:Option<)?&?(?:'\w+ )?(?:mut )?\(([^()]+,[^()]+)\)>?\s*[,)]")
# A public item. Of C's the callers are elsewhere.
ITEM = re.compile(r"^ *pub (?:const |unsafe |async )*(?:fn|struct|enum|trait|type|const|static|union) (\w+)", re.M)
# Definitions, imports and comments name an item without a use of it.
NO_USE = re.compile(r"//[^\n]*|\b(?:pub(?:\([^)]*\))? )?use [^;]*;|\b(?:fn|struct|enum|trait|type|const|static|union) \w+")
# What the table in CONTRIBUTING.md replaces. In comments and documents; names are changed as code is.
WORDS = [
    r"\bnobody\b",
    r"\bwhoever\b",
    r"\b(is|are|was|were|be) told\b",
    r"\btells?\b",
    r"\blets? go of\b",
    r"\bin the mean\b",
    r"\bof an ill\b",
    r"\bhas its turn\b",
    r"\basks for ahead\b",
    r"\basked for\b",
    r"\bgreatest\b",
    r"\bof no use\b",
]
WORD = re.compile("|".join(WORDS), re.I)
# A comment that begins like this depends on its neighbour.
OPENING = re.compile(r"The same\b|As \[|That it\b")
# On a page: a second-level heading, a mark, a block of commands.
BLOCK = re.compile(r"^## [^\n]*$|^<!-- (?:run by ([^ ]+)|not run: )[^\n]*-->$|^ *```sh\n(.*?)^ *```", re.M | re.S)
# The heading of the file map in a README.
MAP = "\n## Where things are\n"
NAME = re.compile(r"\b(MOST|LONGEST)_[A-Z]")


def tracked(*patterns):
    command = ["git", "ls-files", "-z", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]


CRATES = sorted((str(pathlib.Path(name).parent) for name in tracked("*Cargo.toml")), key=len, reverse=True)


def crate_of(name):
    return next(crate for crate in CRATES if crate == "." or name.startswith(crate + "/"))


def without_tests(text):
    """The text with the items after `#[cfg(test)]` blanked."""
    kept, until, pending = [], None, False
    for line in text.split("\n"):
        bare = line.strip()
        if until is not None:
            until = None if line.rstrip() == until else until
            line = ""
        elif bare.startswith(("#[cfg(test)]", "#[cfg(all(test")):
            pending, line = True, ""
        elif pending:
            if not bare.startswith("#["):
                pending = False
                if bare.endswith("{"):
                    until = line[: len(line) - len(line.lstrip())] + "}"
            line = ""
        kept.append(line)
    return "\n".join(kept)


def code_lines(text):
    bare = (line.strip() for line in without_tests(text).split("\n"))
    return sum(1 for line in bare if line and not line.startswith("//"))


def skip(tokens, at, ends, opens="([{", closes=")]}"):
    """The index of the first of `ends` outside brackets."""
    depth = 0
    while at < len(tokens) and not (depth == 0 and tokens[at][0] in ends):
        depth += (tokens[at][0] in opens) - (tokens[at][0] in closes)
        at += 1
    return at


def code_tokens(text):
    """Tokens with their lines; tokens that do not count are replaced by one that equals nothing."""
    text = without_tests(text)
    tokens, line, before = [], 1, 0
    for match in TOKEN.finditer(text):
        line, before = line + text.count("\n", before, match.start()), match.start()
        if not match[1]:
            tokens.append((match[0], line))
    kept, at = [], 0
    while at < len(tokens):
        word, line = tokens[at]
        if word in ("use", "mod"):
            end = skip(tokens, at, (";", "{") if word == "mod" else (";",))
        elif word == "fn":
            end = skip(tokens, at, ("{", ";"))
        elif word == "#" and at + 1 < len(tokens) and tokens[at + 1][0] == "[":
            end = skip(tokens, at + 2, ("]",)) + 1
        else:
            kept.append((word, line))
            at += 1
            continue
        kept.append((object(), line))
        at = max(end, at + 1)
    return kept


def repeats():
    """For each repeated run: its tokens and both places."""
    files = [(name, code_tokens((ROOT / name).read_text())) for name in tracked("*.rs") if not APART.search(name)]
    seen, found = {}, []
    for here, (name, tokens) in enumerate(files):
        at = 0
        while at + RUN <= len(tokens):
            key = tuple(word for word, _ in tokens[at : at + RUN])
            there, first = seen.setdefault(key, (here, at))
            if (there, first) == (here, at) or (there == here and first + RUN > at):
                at += 1
                continue
            other, length = files[there][1], RUN
            while (
                at + length < len(tokens)
                and first + length < len(other)
                and tokens[at + length][0] == other[first + length][0]
                and not (there == here and first + length >= at)
            ):
                length += 1
            found.append((length, f"{name}:{tokens[at][1]}", f"{files[there][0]}:{other[first][1]}"))
            at += length
    return found


def lost_paths():
    """Paths in backticks in ARCHITECTURE.md and the file maps of READMEs, complete or without their first folders, that do not exist."""
    known = {"/" + name for name in tracked("*")}
    known |= {str(folder) for name in known for folder in pathlib.PurePosixPath(name).parents}
    for document in ("ARCHITECTURE.md", *tracked("*README.md")):
        text = (ROOT / document).read_text()
        if document != "ARCHITECTURE.md":
            text = text.partition(MAP)[2].partition("\n## ")[0]
        for quoted in re.findall(r"`([\w./{},-]+)`", text):
            before, *braces = re.split(r"[{}]", quoted)
            paths = [before + name + braces[1] for name in braces[0].split(",")] if braces else [quoted]
            for path in paths:
                wanted = "/" + path.strip("/")
                is_path = re.search(r"\w/\w|\w/$|\.(rs|md|py|cu|h|html|toml)$", path) and not quoted.startswith("/")
                if is_path and not any(name.endswith((wanted, wanted + ".rs")) for name in known):
                    yield f"{document}: {path}"


def strangers():
    """Folders at the root that ARCHITECTURE.md does not name, and files there that no tool or reader looks for."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for name in sorted({name.partition("/")[0] + "/" * ("/" in name) for name in tracked("*")}):
        if not (f"`{name}" in text if name.endswith("/") else ROOT_FILE.fullmatch(name)):
            yield f"{name} is at the root, expected only folders that ARCHITECTURE.md names and files such as Cargo.toml"


def anchors(name):
    """GitHub's anchors of a document's headings."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / name).read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def lost_links():
    for document in tracked("*.md"):
        text = re.sub(r"^ *```.*?^ *```", "", (ROOT / document).read_text(), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, part = link.partition("#")
            target = (ROOT / document).parent / path if path else ROOT / document
            if "://" in link:
                continue
            if not target.exists() or part and part not in anchors(target.resolve().relative_to(ROOT)):
                yield f"{document}: {link}"


def large_pages():
    pages = {name: (ROOT / name).stat().st_size for name in tracked("docs/*")}
    yield from (f"{name}: {size} bytes" for name, size in pages.items() if size > PAGE_BYTES)
    if len(pages) > PAGES or sum(pages.values()) > DOCS_BYTES:
        yield f"docs: {len(pages)} pages, {sum(pages.values())} bytes"


def flags(command):
    """The subcommand and flags of a semmoe command line."""
    words = command.split()
    names = itertools.takewhile(re.compile(r"[a-z]+$").match, words[1:3])
    return " ".join(names), {word.split("=")[0] for word in words if word.startswith("--")}


def examples():
    """The flags in the examples of --help, all of which CI runs, by the first words of their commands."""
    found = collections.defaultdict(set)
    for name in tracked("src/args.rs", "src/args/*.rs"):
        text = re.sub(r"\\\\\n\s*", " ", (ROOT / name).read_text())
        for line in re.findall(r'(?:^|\\n)  (semmoe [^"\\\n]*)', text, re.M):
            command, known = flags(line)
            found[command] |= known
    return found


def unrun_commands():
    """Command blocks on the pages that CI does not run and that do not say why. A mark applies up to the next heading of the
    second level: <!-- run by PATH --> or <!-- not run: REASON -->."""
    known = examples()
    for document in tracked("README.md", "docs/*.md"):
        mark = None
        for block in BLOCK.finditer((ROOT / document).read_text()):
            if block[1] and not (ROOT / block[1]).exists():
                yield f"{document}: no {block[1]}"
            if block[2] is None:
                mark = block[0] if block[0].startswith("<!--") else None
            elif mark is None or "examples.py" in mark:
                for line in block[2].replace("\\\n", " ").split("\n"):
                    for command in filter(None, (part.strip() for part in re.split(r" *#.*|&&|[<>] \S+|[|&]", line))):
                        name, used_flags = flags(command)
                        of_semmoe = command.startswith("semmoe ")
                        if of_semmoe and used_flags - known[name] - {"--json", "--version"} or not of_semmoe and mark is None:
                            yield f"{document}: {command}"


def forms(name):
    """Wide traits and unnamed parameters: the rule and the place."""
    text = without_tests((ROOT / name).read_text())
    line = lambda at: f"{name}:{text.count(chr(10), 0, at) + 1}"
    for trait in TRAIT.finditer(text):
        methods = len(re.findall(r"^ *(?:async |unsafe |const )*fn ", trait[3], re.M))
        if methods > METHODS:
            yield "traits", f"{line(trait.start())}: {trait[2]} has {methods} methods"
    for function in re.finditer(FN, text):
        opening = text.index("(", function.end())
        depth, end = 0, opening
        while True:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
            if depth == 0:
                break
        for parameter in TUPLE.finditer(text[opening:end]):
            if len({part.strip() for part in parameter[1].strip(", ").split(",")}) > 1:
                yield "tuples", f"{line(opening)}: {function[1]} takes ({parameter[1]})"


def callers():
    """Public items that no shipped code names: the file, the name, and the files apart that name it."""
    items, shipped, apart = [], set(), collections.defaultdict(list)
    for name in tracked("*.rs"):
        text = (ROOT / name).read_text()
        if APART.search(name):
            for word in set(re.findall(r"\w+", text)):
                apart[word].append(name)
        else:
            text = without_tests(text)
            items += [(name, item) for item in ITEM.findall(text)]
            shipped.update(re.findall(r"\w+", NO_USE.sub("", text)))
    return [(name, item, apart[item]) for name, item in items if item not in shipped and item in apart]


def counts():
    """Places by rule and crate."""
    places = {rule: collections.defaultdict(list) for rule in json.loads(ALLOWED.read_text())}
    places["paths"]["documents"].extend([*lost_paths(), *strangers()])
    places["links"]["documents"].extend(lost_links())
    places["pages"]["documents"].extend(large_pages())
    places["commands"]["documents"].extend(unrun_commands())
    for length, here, there in repeats():
        places["repeats"][crate_of(here)].append(f"{here}: {length} tokens as at {there}")
    for name in tracked("*.rs"):
        if not APART.search(name):
            for rule, place in forms(name):
                places[rule][crate_of(name)].append(place)
    for name, item, by in callers():
        places["callers"][crate_of(name)].append(f"{name}: {item} is named by {', '.join(by)} alone")
    for name in tracked("*.rs", "*.md"):
        begins = True
        for number, line in enumerate((ROOT / name).read_text().split("\n"), 1):
            comment = COMMENT.match(line)
            prose = name.endswith(".md") and name != "CONTRIBUTING.md" or comment
            at = f"{name}:{number}: {line.strip()[:100]}"
            if prose and WORD.search(line) or name.endswith(".rs") and NAME.search(line):
                places["words"][crate_of(name)].append(at)
            if comment and comment[3].startswith("What "):
                places["what"][crate_of(name)].append(at)
            if comment and begins and OPENING.match(comment[3]):
                places["openings"][crate_of(name)].append(at)
            begins = not comment or not comment[3] or comment[3].startswith("#")
            if comment and len(line) > COLUMNS and not comment[3].startswith("|"):
                places["columns"][crate_of(name)].append(at)
    return places


def over_budget():
    """Prints the lines of each crate; returns whether there are too many."""
    by = collections.Counter()
    for name in tracked("*.rs"):
        if not APART.search(name):
            by[crate_of(name)] += code_lines((ROOT / name).read_text())
    for crate, lines in sorted(by.items()):
        print(f"{lines:7} {crate}")
    entries = [line.split(maxsplit=1) for line in BUDGET.read_text().splitlines() if line and not line.startswith("#")]
    (budget, _reason), found = entries[-1], sum(by.values())
    print(f"{found:7} in all, {budget} at most")
    return found > int(budget)


def main():
    command = sys.argv[1] if len(sys.argv) == 2 else "check"
    if command == "lines":
        return over_budget()
    if command == "callers":
        for name, item, by in callers():
            print(f"{name}: {item}: {', '.join(by)}")
        return 0
    places, allowed = counts(), json.loads(ALLOWED.read_text())
    if command == "update":
        for rule, crates in allowed.items():
            allowed[rule] = {crate: n for crate, n in ((c, min(n, len(places[rule][c]))) for c, n in crates.items()) if n}
        ALLOWED.write_text(json.dumps(allowed, indent=1) + "\n")
        return 0
    if command != "check":
        sys.exit(__doc__)
    failed = False
    for rule, crates in places.items():
        for crate, found in sorted(crates.items()):
            limit = allowed[rule].get(crate, 0)
            if len(found) > limit:
                failed = True
                print(f"{rule}: {len(found)} in {crate}, allowed {limit}:", *found, sep="\n  ")
        print(f"{rule}: {sum(map(len, crates.values()))} in all, allowed {sum(allowed[rule].values())}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
