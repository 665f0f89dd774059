#!/usr/bin/env python3
"""Uses the admin plane's page in a headless browser, as an operator would: run.py [SEMMOE] [KEEP].

A gateway with two mock engines of four ranks, tables and requests; drain, rollback, reload and the token by mouse and keyboard; an engine
that is killed under load, one that is killed while nothing runs, and a rank of a real unit under load, must turn red within two seconds
with the default settings; from two to four there is a notice. The console must stay silent, nothing may be loaded from elsewhere, every text must have
the contrast of WCAG's AA in light and dark, and a phone must need no sideways scrolling. KEEP is a folder for screenshots. Without a
Chromium or Chrome that works this says so and checks nothing."""
import contextlib, hashlib, json, pathlib, random, re, shutil, subprocess, sys, tempfile, threading, time, urllib.error, urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/page"))
import browser

SEMMOE = sys.argv[1] if len(sys.argv) > 1 else "target/release/semmoe"
KEEP = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
# Built by the tests.
MOCK = ROOT / "target/debug/semmoe-mock-engine"
MODEL = ROOT / "assets/tiny-qwen3moe-15m"
CONFIG = json.loads((MODEL / "config.json").read_text())
RANKS, TOKEN = 4, "a token of the test"
LONGEST_PAGE_BYTES = 150_000
# Above the bar there is a notice, as machines are shared. Above the other only the next probe by the clock, after five
# seconds, can have seen it.
RED_WITHIN_SECONDS, RED_BY_CLOCK_SECONDS = 2.0, 4.0
# Text below 18.66 px bold or 24 px needs 4.5 to 1, larger 3 to 1 (WCAG 2.2, 1.4.3).
CONTRAST = (pathlib.Path(__file__).parent / "contrast.js").read_text()


def semmoe(*arguments):
    subprocess.run([SEMMOE, *map(str, arguments)], check=True, capture_output=True, text=True)


def tables(folder):
    """Two tables of one placement; the second has what only traces know."""
    profile, trace = folder / "p.profile.safetensors", ROOT / "tests/data/reference.trace.safetensors"
    semmoe("profile", "build", trace, "--out", profile)
    made = [folder / f"{name}.tables.safetensors" for name in ("first", "second")]
    for path, more in zip(made, ([], ["--trace", trace, "--hold-out", "0.3"])):
        semmoe("solve", "--profile", profile, "--groups", RANKS, "--placement", "linear", "--out", path, *more)
    return made


def engine(processes):
    """A mock whose tokens take 10 ms."""
    command = [MOCK, "sglang", "0", MODEL, str(RANKS), "10"]
    process = processes.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    processes.callback(process.kill)
    return process, process.stdout.readline().split()[-1]


def configuration(urls, tables, extra=""):
    backends = "".join(f'[[models.backends]]\nname = "pod-{name}"\nengine = "sglang"\nurl = "{url}"\ntables = "{tables}"\n' for name, url in zip("ab", urls))
    return (f'[server]\nlisten = "127.0.0.1:0"\nadmin = "127.0.0.1:0"\ntables_root = "{tables.parent}"\n{extra}[sampling]\nshare = 1.0\n'
            f'[[models]]\nname = "tiny"\ntokenizer = "{MODEL}/tokenizer.json"\npolicy = "affinity"\nbaseline = "least_load"\ncanary = 80\n{backends}')


def serve(path, processes):
    process = processes.enter_context(subprocess.Popen([SEMMOE, "serve", "--config", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
    processes.callback(process.terminate)
    found = {}
    for line in process.stdout:
        if match := re.match(r"(ready|admin): (\S+)", line):
            found[match[1]] = match[2]
        if len(found) == 2:
            return found["ready"], found["admin"]
    sys.exit(f"the gateway did not start (exit code {process.wait()})")


def post(url, body, limit=30):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=limit) as answer:
        return answer.read()


def ask_on(base, model, stopped):
    """Sequential requests; those that reach the killed engine may fail."""
    chance = random.Random(threading.get_ident())
    while not stopped.is_set():
        tokens = chance.randrange(4, 20)
        prompt = [chance.randrange(1000, CONFIG["vocab_size"]) for _ in range(chance.randrange(8, 60))]
        chat = {"model": model, "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": "Which rivers?"}]}
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            if chance.random() < 0.5:
                post(base + "/v1/chat/completions", chat)
            else:
                post(base + "/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": tokens}})


def load(base, model, processes):
    """Sends requests until the end."""
    stopped = threading.Event()
    processes.callback(stopped.set)
    for _ in range(6):
        threading.Thread(target=ask_on, args=(base, model, stopped), daemon=True).start()


def button(text, within="document"):
    return f"[...{within}.querySelectorAll('button')].find(it => !it.closest('[hidden]') && it.checkVisibility() && it.textContent === {json.dumps(text)})"


def tile(name):
    return f"[...document.querySelectorAll('.backend')].find(it => it.querySelector('h3').textContent === {json.dumps(name)})"


def looks(page, name):
    """Contrast and width in both schemes, and screenshots."""
    for scheme, width, height, phone in [("light", 1280, 900, False), ("dark", 1280, 900, False), ("light", 390, 844, True), ("dark", 390, 844, True)]:
        page.dress(scheme, width, height, phone)
        time.sleep(0.6)
        poor, looked_at = page.eval(CONTRAST)
        assert not poor and looked_at > 60, f"{name}, {scheme}: {looked_at} texts, poor contrast: {poor}"
        assert page.eval("document.documentElement.scrollWidth <= innerWidth"), f"{name}: the page is wider than {width} px"
        if KEEP:
            page.shoot(KEEP / f"{name}-{scheme}-{width}.png")
    page.dress("light", 1280, 900)


def names(page):
    """Every button, field and picture has a name for those who do not see it, and the keyboard gets to each button."""
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    nameless = [node["role"]["value"] for node in tree if node.get("role", {}).get("value") in ("button", "textbox", "combobox", "img", "dialog", "table", "region")
                and not node["ignored"] and not node.get("name", {}).get("value")]
    assert set(nameless) <= {"table"}, nameless
    wanted = page.eval("[...document.querySelectorAll('button')].filter(it => it.checkVisibility({visibilityProperty: true})).length")
    page.eval("document.activeElement.blur()")
    reached = set()
    for _ in range(4 * wanted + 20):
        page.key("Tab")
        reached.add(page.eval("document.activeElement.tagName === 'BUTTON' ? [...document.querySelectorAll('button')].indexOf(document.activeElement) : -1"))
    assert len(reached - {-1}) == wanted, f"{len(reached - {-1})} of {wanted} buttons are reached by Tab"


def figures(page):
    """The page shows the running state."""
    page.until("document.querySelectorAll('.rank').length === 8 && document.querySelectorAll('.backend.good').length === 2")
    for name in ("First token", "Between tokens", "Predicted LAR", "Observed LAR", "Remote activations"):
        page.until(f"[...document.querySelectorAll('#figures > div')].some(it => it.textContent.startsWith({json.dumps(name)}) && /\\d/.test(it.querySelector('span').textContent))")
    for name in ("Requests", "Output tokens", "Predicted LAR"):
        page.until(f"[...document.querySelectorAll('#figures > div')].some(it => it.textContent.startsWith({json.dumps(name)}) && /since the start: [1-9]|[1-9][^;]* since the start/.test(it.querySelector('small').textContent))")
    page.until("/Observed: \\d/.test(document.querySelector('#lar').textContent) && /1\\/n: 25.0 %/.test(document.querySelector('#lar').textContent)")
    page.until("/80 % by affinity, the rest by least_load/.test(document.querySelector('#routing').textContent)")
    page.until("document.querySelectorAll('#answers tbody tr').length >= 4")
    page.until("document.querySelector('#tables').textContent.includes('Promised LAR') && document.querySelector('#tables').textContent.split('not held out').length === 3")


def operate(page, admin, config, second):
    """Drain by mouse, its end by keyboard, rollback, reload, and a reload that fails."""
    page.click(button("Drain", tile("pod-a")))
    page.until("document.querySelector('#ask').open && document.activeElement.id === 'ask-no'")
    page.key("Escape")
    page.until("!document.querySelector('#ask').open")
    assert page.eval(f"{tile('pod-a')}.classList.contains('good')"), "Escape drains nothing"
    page.click(button("Drain", tile("pod-a")))
    page.until("document.querySelector('#ask').open")
    page.click("document.querySelector('#ask-yes')")
    page.until(f"/Drain/.test({tile('pod-a')}.querySelector('.badge').textContent)", 10)
    page.eval(f"{button('End drain', tile('pod-a'))}.focus()")
    page.key("Enter", text="\r")
    page.until(f"{tile('pod-a')}.classList.contains('good')", 10)
    post(admin + "/admin/tables", {"backend": "pod-a", "path": second.name})
    page.until(f"Boolean({button('Roll tables back', tile('pod-a'))}) && /second/.test(document.querySelector('#tables').textContent)", 10)
    page.until("document.querySelector('#tables').textContent.split('not held out').length === 2")
    page.click(button("Roll tables back", tile("pod-a")))
    page.until("document.querySelector('#ask').open && document.querySelector('#ask select').options.length === 1")
    page.click("document.querySelector('#ask-yes')")
    page.until("!/second/.test(document.querySelector('#tables').textContent) && /again/.test(document.querySelector('#said').textContent)", 10)
    good = config.read_text()
    config.write_text(good.replace("canary = 80", "canary = 60"))
    page.click("document.querySelector('#reload')")
    page.until("/60 % by affinity/.test(document.querySelector('#routing').textContent) && /was reloaded/.test(document.querySelector('#said').textContent)", 20)
    config.write_text(good.replace('policy = "affinity"', 'policy = "<img src=x onerror=alert(1)>"'))
    page.click("document.querySelector('#reload')")
    page.until("/<img src=x/.test(document.querySelector('#config .cause')?.textContent) && document.querySelector('#said').className === 'bad'", 20)
    assert page.eval("document.images.length") == 0, "an error became markup"
    page.click("document.querySelector('#hush')")
    page.until("document.querySelector('#said').textContent === ''", 10)
    config.write_text(good)


def with_token(page, admin, config):
    """After a reload the listener requires a token, which only the tab keeps."""
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    config.write_text(config.read_text().replace("[sampling]", f'admin_token_sha256 = "{digest}"\n[sampling]'))
    page.click("document.querySelector('#reload')")
    page.until("document.querySelector('#login').open && document.activeElement.id === 'token'", 20)
    for token in ("wrong", TOKEN):
        page.until("document.querySelector('#login').open")
        page.eval("document.querySelector('#token').focus()")
        page.type(token)
        page.key("Enter", text="\r")
        if token == "wrong":
            page.until("/wrong/.test(document.querySelector('#login-cause').textContent)")
    page.until("!document.querySelector('#login').open && document.querySelector('#lost').textContent === ''")
    kept = page.eval("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]")
    assert TOKEN in kept[0] and kept[1:] == ["{}", ""], kept


def silent(page, status, path):
    """The console contains only the browsers' own messages about intended refusals."""
    meant = re.compile(rf"Failed to load resource: the server responded with a status of {status} .*{path}$")
    said = [line for line in page.complaints() if not meant.fullmatch(line)]
    assert not said, said


def use(page, folder, admin, config, second, first_engine):
    figures(page)
    looks(page, "healthy")
    names(page)
    lint(admin)
    operate(page, admin, config, second)
    silent(page, "422", "/admin/reload")
    took = red(page, "pod-a", RANKS, first_engine)
    colour = page.eval(f"getComputedStyle({tile('pod-a')}.querySelector('.rank')).borderColor")
    assert colour == "rgb(207, 34, 46)", colour
    looks(page, "dead")
    silent(page, "422", "/admin/reload")
    elsewhere = [url for url in page.loaded() if not url.startswith((admin + "/", "data:", "about:"))]
    assert not elsewhere, elsewhere
    page.events.clear()
    with_token(page, admin, config)
    silent(page, "401", "")
    return took


def red(page, name, ranks, process):
    """Kills a process; returns the seconds until its backend and ranks are red."""
    process.kill()
    killed = time.monotonic()
    page.until(f"{tile(name)}.classList.contains('bad') && {tile(name)}.querySelectorAll('.rank.bad').length === {ranks}", 20)
    took = time.monotonic() - killed
    assert took <= RED_BY_CLOCK_SECONDS, f"{name} turned red after {took:.1f} s"
    if took > RED_WITHIN_SECONDS:
        print(f"NOTICE: {name} turned red after {took:.1f} s, not within {RED_WITHIN_SECONDS:.0f} s")
    return took


def die_idle(folder, processes):
    """No request before or after: only a closed idle connection shows it. At three phases of the health interval."""
    took = []
    for phase in range(3):
        process, url = engine(processes)
        config = folder / f"idle-{phase}.toml"
        config.write_text('[server]\nlisten = "127.0.0.1:0"\nadmin = "127.0.0.1:0"\n[[models]]\nname = "tiny"\npolicy = "least_load"\n'
                          f'[[models.backends]]\nname = "pod-idle"\nengine = "sglang"\nurl = "{url}"\n')
        _, admin = serve(config, processes)
        page = browser.Page(admin + "/ui")
        processes.callback(page.close)
        page.until(f"{tile('pod-idle')}?.classList.contains('good')")
        time.sleep(5 + 1.7 * phase)
        took.append(red(page, "pod-idle", RANKS, process))
        assert not (said := page.complaints()), said
    return max(took)


def unit(processes):
    """Two ranks of the bundled model: their processes and the URL of rank 0."""
    def rank(number, rendezvous):
        command = [SEMMOE, "worker", "--model", MODEL, "--world", "2", "--rank", str(number), "--rendezvous", rendezvous]
        command += ["--exit-on-stdin-eof", *(["--listen", "127.0.0.1:0"] if number == 0 else [])]
        process = processes.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        processes.callback(process.kill)
        return process

    front = rank(0, "127.0.0.1:0")
    other = rank(1, json.loads(front.stdout.readline())["rendezvous"])
    ready = json.loads(front.stdout.readline())
    assert ready["event"] == "ready", ready
    return other, ready["http"]


def lose_a_rank(folder, processes):
    other, url = unit(processes)
    config = folder / "unit.toml"
    config.write_text('[server]\nlisten = "127.0.0.1:0"\nadmin = "127.0.0.1:0"\n[[models]]\nname = "tiny-qwen3moe-15m"\npolicy = "least_load"\n'
                      f'[[models.backends]]\nname = "unit"\nengine = "semmoe"\nurl = "http://{url}"\n')
    base, admin = serve(config, processes)
    load(base, "tiny-qwen3moe-15m", processes)
    page = browser.Page(admin + "/ui")
    processes.callback(page.close)
    page.until(f"{tile('unit')}?.classList.contains('good') && {tile('unit')}.querySelectorAll('.rank').length === 2")
    page.until("document.querySelectorAll('#answers tbody tr').length === 2")
    took = red(page, "unit", 2, other)
    cause = page.eval(f"{tile('unit')}.querySelector('.cause').textContent")
    assert "rank 1 was lost" in cause, cause
    assert not (said := page.complaints()), said
    return took


def lint(admin):
    """Prometheus' own linter on what was counted."""
    promtool = shutil.which("promtool")
    if not promtool:
        print("NOTICE: promtool is missing, so /metrics was not checked")
        return
    with urllib.request.urlopen(admin + "/metrics", timeout=30) as answer:
        text = answer.read()
    found = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    assert found.returncode == 0 and not found.stderr.strip(), found.stderr.decode()


def works():
    """Whether the browser starts and draws here; one that does not is useless."""
    if not browser.FOUND:
        return False
    page = None
    try:
        page = browser.Page("data:text/html,<p>empty")
        page.until("document.body && document.body.textContent === 'empty'", 30)
        return True
    except Exception as error:  # noqa: BLE001: whatever it is, the browser is of no use
        print(f"NOTICE: {browser.FOUND} does not work here: {error!r}")
        return False
    finally:
        if page:
            page.close()


def main():
    if not works():
        print("NOTICE: no working Chromium or Chrome was found, so the admin plane's page was not used")
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as processes:
        folder = pathlib.Path(folder)
        first, second = tables(folder)
        engines = [engine(processes) for _ in "ab"]
        config = folder / "semmoe.toml"
        config.write_text(configuration([url for _, url in engines], first))
        base, admin = serve(config, processes)
        with urllib.request.urlopen(admin + "/ui", timeout=30) as answer:
            size = len(answer.read())
        assert size < LONGEST_PAGE_BYTES, f"{size} bytes"
        load(base, "tiny", processes)
        page = browser.Page(admin + "/")
        processes.callback(page.close)
        engine_took = use(page, folder, admin, config, second, engines[0][0])
        rank_took = lose_a_rank(folder, processes)
        idle_took = die_idle(folder, processes)
    print(f"ui: ok ({size} bytes; red after {engine_took:.1f} s for a dead engine, {idle_took:.1f} s for an idle one, {rank_took:.1f} s for a dead rank)")


main()
