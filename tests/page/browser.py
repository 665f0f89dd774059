"""A headless Chromium or Chrome: found, started quietly, and driven over pipes by its DevTools protocol."""
import base64, fcntl, json, os, queue, shutil, subprocess, tempfile, threading, time

FOUND = next((path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None)
# Nothing is looked up, updated or asked at the first start: on a machine without a network each of those may stall the browser.
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr"]
PATIENCE = 60


class Page:
    """One tab. What it logs, loads and throws is kept in `events`."""

    def __init__(self, url, width=1280, height=900):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # The browser reads commands from descriptor 3 and writes to 4; ours must not be these numbers before they are moved there.
        ends = [end for pair in (os.pipe(), os.pipe()) for end in pair]
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends]
        for end in ends:
            os.close(end)
        commands, self.out, self.answers, events = high

        def wire():
            os.dup2(commands, 3)
            os.dup2(events, 4)

        command = [FOUND, *QUIET, "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}", f"--window-size={width},{height}", "about:blank"]
        # Files that it would leave behind when killed are removed with the profile.
        environment = {**os.environ, "TMPDIR": self.profile.name}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=wire
        )
        os.close(commands)
        os.close(events)
        self.events, self.waiting, self.last, self.session = [], {}, 0, None
        threading.Thread(target=self._read, daemon=True).start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)

    def _read(self):
        rest = b""
        while piece := os.read(self.answers, 1 << 16):
            *whole, rest = (rest + piece).split(b"\0")
            for message in map(json.loads, whole):
                if "id" in message:
                    self.waiting.pop(message["id"]).put(message)
                else:
                    self.events.append(message)

    def call(self, method, **parameters):
        self.last += 1
        answer = self.waiting[self.last] = queue.Queue()
        message = {"id": self.last, "method": method, "params": parameters, **({"sessionId": self.session} if self.session else {})}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.out, data):]
        answer = answer.get(timeout=PATIENCE)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def eval(self, expression):
        """The value of a JavaScript expression, with promises awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression, limit=PATIENCE):
        """Waits until the expression is true; returns the elapsed seconds."""
        began = time.monotonic()
        while not self.eval(expression):
            if time.monotonic() - began > limit:
                raise AssertionError(f"not within {limit} s: {expression}")
            time.sleep(0.03)
        return time.monotonic() - began

    def click(self, expression):
        """Clicks the middle of the element that the expression returns."""
        x, y = self.eval(f"(() => {{ const it = {expression}; it.scrollIntoView({{block: 'center'}}); const box = it.getBoundingClientRect();"
                         " return [box.x + box.width / 2, box.y + box.height / 2]; })()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, key, code=None, text=None):
        for kind in ("keyDown", "keyUp"):
            given = {"text": text} if text and kind == "keyDown" else {}
            numbers = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code or key, windowsVirtualKeyCode=numbers.get(key, 0), **given)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def dress(self, scheme, width, height, phone=False):
        """Sets the colour scheme and the size of the screen."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def shoot(self, path):
        png = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"]
        path.write_bytes(base64.b64decode(png))

    def complaints(self):
        """Errors and warnings of the console, exceptions, and refusals of the security policy."""
        found = []
        for event in self.events:
            method, given = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(given["exceptionDetails"].get("exception", {}).get("description") or given["exceptionDetails"]["text"])
            elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
                found.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
            elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
                found.append(str([argument.get("value") for argument in given["args"]]))
        return found

    def loaded(self):
        """Every address that the page requested."""
        return [event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"]

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.profile.cleanup()
