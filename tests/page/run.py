#!/usr/bin/env python3
"""Looks at the pages of `profile show`, `tables show` and `evaluate` in a headless browser: run.py [SEMMOE] [KEEP].

Every kind of picture must be drawn (many colours, not blank), nothing may be loaded, the console must stay silent, every text must have the contrast of
WCAG's AA in light and dark, and one layer at a time is shown, chosen by mouse or keyboard. The browser is Chromium or Chrome; without one that
works the pages are made all the same, and a notice says that they were not looked at. KEEP is a folder for the screenshots."""
import contextlib, pathlib, re, struct, subprocess, sys, tempfile, time, zlib

from browser import FOUND as BROWSER, QUIET, Page

ROOT = pathlib.Path(__file__).resolve().parents[2]
SEMMOE = sys.argv[1] if len(sys.argv) > 1 else "target/release/semmoe"
KEEP = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
CONTRAST = (ROOT / "tests/ui/contrast.js").read_text()
LAYERS, LONGEST_PAGE_BYTES = 7, 3_000_000
TRACE, PROMPTS, MODEL = ROOT / "tests/data/reference.trace.safetensors", ROOT / "tests/data/reference.prompts.jsonl", ROOT / "assets/tiny-qwen3moe-15m"


def semmoe(*arguments):
    return subprocess.run([SEMMOE, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def pages(folder):
    """A page with everything, one of a profile alone, and those of tables: each with the number of its pictures."""
    profile, tables = folder / "p.profile.safetensors", folder / "t.tables.safetensors"
    semmoe("profile", "build", TRACE, "--out", profile)
    semmoe("solve", "--profile", profile, "--groups", 4, "--out", tables)
    whole, part, of_tables, judged = (folder / f"{name}.html" for name in ("whole", "part", "tables", "evaluation"))
    text = semmoe("profile", "show", TRACE, "--html", whole, "--tables", tables, "--groups", "2,8", "--tokenizer", MODEL, "--topics", PROMPTS)
    assert "hottest top-k" in text and "kurtosis" in text and "\nverdict: " in text, text
    semmoe("profile", "show", profile, "--html", part)
    semmoe("tables", "show", tables, "--html", of_tables)
    semmoe("evaluate", "--tables", tables, "--trace", TRACE, "--html", judged)
    # Two maps per layer; loads of experts and groups, topics, rates.
    return [(whole, 2 * LAYERS + 4), (part, 2 * LAYERS + 1), (of_tables, 3), (judged, 5)]


def look(page, png, height):
    """A screenshot, and what the console said. A browser that hangs at its start is started once more, with a new profile."""
    for trial in (1, 2):
        png.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as profile:
            command = [BROWSER, *QUIET, f"--user-data-dir={profile}", f"--window-size=1100,{height}", f"--screenshot={png}", page.as_uri()]
            try:
                done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
            except subprocess.TimeoutExpired as error:
                print(f"the browser hung on {page.name}, trial {trial}: {(error.stderr or b'')[-500:]}", file=sys.stderr)
                continue
        assert png.exists(), f"no screenshot: {done.stderr[-2000:]}"
        return [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    sys.exit(f"the browser hung twice on {page.name}")


def use(page):
    """In both schemes: contrast, console, one layer at a time, values under the pointer."""
    tab = Page(page.as_uri())
    with contextlib.closing(tab):
        tab.until("document.readyState === 'complete' && Boolean(document.querySelector('svg'))")
        for scheme, width, phone in [("light", 1280, False), ("dark", 1280, False), ("dark", 390, True)]:
            tab.dress(scheme, width, 900, phone)
            time.sleep(0.3)
            poor, looked_at = tab.eval(CONTRAST)
            assert not poor and looked_at > 20, f"{page.name}, {scheme}: {looked_at} texts, poor contrast: {poor[:5]}"
            assert tab.eval("document.documentElement.scrollWidth <= innerWidth"), f"{page.name} is wider than {width} px"
            if KEEP:
                tab.shoot(KEEP / f"{page.stem}-{scheme}-{width}.png")
        tab.dress("light", 1280, 900)
        assert tab.eval("document.querySelectorAll('svg title').length") > 3, page.name
        shown = "[...document.querySelectorAll('.of')].filter(it => it.checkVisibility()).map(it => it.className)"
        if layers := tab.eval("document.querySelectorAll('input[name=layer]').length"):
            assert layers == LAYERS and len(tab.eval(shown)) == 2, (layers, tab.eval(shown))
            tab.click("document.querySelector('input[name=layer]')")
            first = tab.eval("'of ' + document.querySelector('input[name=layer]').id")
            assert tab.eval(shown) == [first] * 2, (tab.eval(shown), first)
            tab.key("ArrowRight")
            tab.until(f"JSON.stringify({shown}) !== JSON.stringify(['{first}', '{first}'])", 5)
            assert len(tab.eval(shown)) == 2, tab.eval(shown)
        assert not (said := tab.complaints()), said
        elsewhere = [url for url in tab.loaded() if not url.startswith((page.as_uri(), "data:", "about:"))]
        assert not elsewhere, elsewhere


def works(folder):
    """Whether the browser can draw even an empty page here; one that cannot is useless."""
    page = folder / "empty.html"
    page.write_text("<!doctype html><title>empty</title>")
    try:
        look(page, folder / "empty.png", 100)
    except (SystemExit, AssertionError, OSError) as error:
        print(f"NOTICE: {BROWSER} does not work here: {error}")
        return False
    return True


def pixels(png):
    """Width, height, and rows of pixels of an 8-bit PNG without interlacing, as browsers write it."""
    raw, at, data = png.read_bytes(), 8, b""
    while at < len(raw):
        length, kind = struct.unpack(">I4s", raw[at : at + 8])
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", raw[at + 8 : at + 21])
        if kind == b"IDAT":
            data += raw[at + 8 : at + 8 + length]
        at += length + 12
    assert (depth, interlaced) == (8, 0) and colour in (2, 6), (depth, colour, interlaced)
    step = 3 if colour == 2 else 4
    data, rows, before = zlib.decompress(data), [], bytes(width * step)
    for row in range(height):
        line = bytearray(data[row * (width * step + 1) :][: width * step + 1])
        how, line = line[0], line[1:]
        for x in range(len(line)):
            left, up, corner = line[x - step] if x >= step else 0, before[x], before[x - step] if x >= step else 0
            if how == 1: line[x] = (line[x] + left) & 255
            elif how == 2: line[x] = (line[x] + up) & 255
            elif how == 3: line[x] = (line[x] + (left + up) // 2) & 255
            elif how == 4:
                guess = left + up - corner
                line[x] = (line[x] + min((left, up, corner), key=lambda value: abs(guess - value))) & 255
        rows.append([tuple(line[x : x + 3]) for x in range(0, len(line), step)])
        before = line
    return rows


def check_picture(number, rows, page):
    flat = [pixel for row in rows for pixel in row]
    painted = sum(pixel != (255, 255, 255) for pixel in flat) / len(flat)
    colours = len(set(flat))
    assert painted > 0.005 and colours > 20, f"{page.name}, picture {number}: {painted:.2%} painted, {colours} colours"


with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    looks = bool(BROWSER) and works(folder)
    for page, pictures in pages(folder):
        text = page.read_text()
        found = re.findall(r"<svg.*?</svg>", text, re.S)
        assert len(found) == pictures, f"{page.name} has {len(found)} pictures"
        assert not re.search(r"<script|https?:|src=|url\(|@import", text), page.name
        assert len(text) < LONGEST_PAGE_BYTES, f"{page.name} has {len(text)} bytes"
        if not looks:
            continue
        use(page)
        style = re.search(r"<style>.*?</style>", text, re.S)[0]
        kinds = {re.sub(r"\d+", "", re.search(r'aria-label="([^"]*)"', svg)[1]): svg for svg in found}
        for number, svg in enumerate(kinds.values()):
            alone, shot = folder / "alone.html", folder / f"{number}.png"
            alone.write_text(f"<!doctype html><meta charset=\"utf-8\">{style}{svg}")
            assert not (said := look(alone, shot, 600)), said
            check_picture(number, pixels(shot), page)
print("page: ok" if looks else "NOTICE: no working Chromium or Chrome was found, so only the text of the page was checked")
