# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""report_page.py <opd-train> <work folder>: report.html of a small run in a headless browser (OPD_BROWSER, or a
Chromium on the PATH; SKIPPED where none is): nothing on the console, no request but the page's, and every heading,
table and plot in view and in the picture, which stays in the work folder. Then pages with one fault each, which must be
refused."""
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import time

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
SETTINGS = {
    "task": {"max_operand": 20, "max_steps": 5},
    "teacher_model": {"width": 8, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 12},
    "student_model": {"width": 8, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 4, "ffn": 8},
    "teacher": {"steps": 14, "batch": 4},
    "student": {"max_steps": 12, "batch": 4, "check_every": 5, "check_prompts": 8},
    "run": {"threads": 2, "log_every": 2},
    "distill": {"steps": 13, "prompts": 4},
    "evaluation": {"prompts": 12, "samples": 1, "every": 6, "every_prompts": 6},
    "schedule": {"kind": "async", "driver": "virtual"}}  # which has all plots but those of drafts
SECTIONS = ["Result", "Plots", "Settings", "What to try next"]
WIDTH, HEIGHT = 1000, 800

# Of each heading, block of text and plot: what it is, whether it is visible, where it lies.
BOXES = """[...document.querySelectorAll('h1, h2, pre, dl, table, figure > svg, figcaption')]
    .filter(e => !e.closest('details')).map(e => {
        const r = e.getBoundingClientRect();
        return {tag: e.tagName.toLowerCase(), text: e.tagName === 'svg' ? '' : e.innerText, visible: e.checkVisibility({
            visibilityProperty: true, opacityProperty: true}), x: r.x + scrollX, y: r.y + scrollY, w: r.width, h: r.height};
    })"""
# Of the same places in the picture: how many colours, and how many pixels of a strong one left of a plot's legend.
PIXELS = """(async () => {
    const picture = new Image();
    picture.src = 'data:image/png;base64,%s';
    await picture.decode();
    const canvas = new OffscreenCanvas(picture.width, picture.height), drawn = canvas.getContext('2d');
    drawn.drawImage(picture, 0, 0);
    return %s.map(b => {
        const p = drawn.getImageData(b.x, b.y, b.w, b.h).data, colours = new Set();
        let strong = 0;
        for (let i = 0; i < p.length; i += 4) {
            colours.add(p[i] << 16 | p[i + 1] << 8 | p[i + 2]);
            strong += i / 4 %% b.w < b.w * .6 && Math.max(p[i], p[i + 1], p[i + 2]) - Math.min(p[i], p[i + 1], p[i + 2]) > 80;
        }
        return {colours: colours.size, strong};
    });
})()"""


def browser():
    for name in filter(None, (os.environ.get("OPD_BROWSER"), *BROWSERS)):
        path = shutil.which(name)
        # A distribution may have a script of this name that installs the browser.
        if path and subprocess.run([path, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0:
            return path
    print("SKIPPED: no browser; OPD_BROWSER may name one (Debian: chromium-headless-shell)")
    sys.exit(0)


class Page:
    """A page of a headless browser, by the DevTools protocol over a pipe."""

    def __init__(self, program, folder):
        to_read, self.to = os.pipe()
        self.read, to_write = os.pipe()
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                   "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe", "about:blank"]
        self.log = open(folder / "browser.log", "w+")
        self.process = subprocess.Popen(["sh", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "sh", *command], stdout=self.log,
                                        stderr=self.log, pass_fds=(to_read, to_write))
        os.close(to_read)
        os.close(to_write)
        self.bytes, self.number, self.session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")
        self.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False)

    def message(self, until):
        while b"\0" not in self.bytes:
            if not select.select([self.read], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser says nothing")
            more = os.read(self.read, 1 << 20)
            if not more:
                self.log.seek(0)
                raise EOFError("the browser has ended: " + self.log.read()[-2000:])
            self.bytes += more
        first, _, self.bytes = self.bytes.partition(b"\0")
        return json.loads(first)

    def call(self, method, **parameters):
        self.number += 1
        call = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            call["sessionId"] = self.session
        left = json.dumps(call).encode() + b"\0"
        while left:
            left = left[os.write(self.to, left):]
        until = time.monotonic() + 120
        while True:
            m = self.message(until)
            if m.get("id") == self.number:
                assert "result" in m, m
                return m["result"]
            self.events.append(m)

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"]["value"]

    def open(self, url):
        """What the page does until it is loaded."""
        self.events = []
        self.call("Page.navigate", url=url)
        until = time.monotonic() + 120
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self.message(until))
        self.evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")
        events, self.events = self.events, []
        return events

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.read)
        self.log.close()


def faults(page, file, plots, picture):
    """What is wrong with the page of this file, which has so many plots."""
    url, wrong = file.as_uri(), []
    for e in page.open(url):
        method, what = e.get("method"), e.get("params", {})
        if method == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            wrong.append("console: " + what["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            wrong.append(f"console: {what['type']} {what['args']}")
        elif method == "Runtime.exceptionThrown":
            wrong.append(f"exception: {what['exceptionDetails']}")
        elif method == "Network.requestWillBeSent" and what["request"]["url"] != url:
            wrong.append("request: " + what["request"]["url"])
    boxes = page.evaluate(BOXES)
    size = page.call("Page.getLayoutMetrics")["cssContentSize"]
    shot = page.call("Page.captureScreenshot", captureBeyondViewport=True, clip=dict(size, x=0, y=0, scale=1))["data"]
    page.open("about:blank")
    if size["width"] > WIDTH:
        wrong.append(f"the page is {size['width']} wide, the window {WIDTH}")
    headings = [b["text"] for b in boxes if b["tag"] == "h2"]
    if headings != SECTIONS:
        wrong.append(f"sections: {headings}")
    for tag, least in (("h1", 1), ("pre", 3), ("dl", 1), ("table", 1), ("svg", plots), ("figcaption", plots)):
        if sum(b["tag"] == tag for b in boxes) < least:
            wrong.append(f"fewer than {least} of <{tag}>")
    seen = []
    for b in boxes:
        inside = b["x"] >= 0 and b["y"] >= 0 and b["x"] + b["w"] <= size["width"] and b["y"] + b["h"] <= size["height"]
        if b["visible"] and b["w"] >= 1 and b["h"] >= 1 and inside:
            seen.append(b)
        else:
            wrong.append(f"not in view: <{b['tag']}> {b['text'][:40]!r} {b}")
    rounded = [{k: int(b[k]) for k in "xywh"} for b in seen]
    for b, p in zip(seen, page.evaluate(PIXELS % (shot, json.dumps(rounded)))):
        if p["colours"] < 2:
            wrong.append(f"blank: <{b['tag']}> {b['text'][:40]!r}")
        elif b["tag"] == "svg" and p["strong"] < 20:
            wrong.append("a plot without a line")
    if picture:
        import base64
        picture.write_bytes(base64.b64decode(shot))
    return wrong


def main():
    program, work = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    found = browser()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / "settings.json").write_text(json.dumps(SETTINGS))
    subprocess.run([program, "--quiet", "--config", "settings.json", "--run-dir", "run"], cwd=work, check=True,
                   stdout=subprocess.DEVNULL)
    report, plots = work / "run/report.html", len(list((work / "run/plots").glob("*.svg")))
    if shutil.which("gnuplot"):
        assert plots >= 4, f"{plots} plots"
    page = Page(found, work)
    try:
        wrong = faults(page, report, plots, work / "report.png")
        assert not wrong, "\n".join(wrong)
        print(f"{report}: {plots} plots, nothing is wrong")

        whole = report.read_text()
        broken = [("console: ", "</body>", "<script>console.error('a')</script></body>"),
                  ("exception: ", "</body>", "<script>nowhere()</script></body>"),
                  ("request: ", "</body>", "<img src='nowhere.png' alt=''></body>"),
                  ("sections: ", "<h2>Settings</h2>", ""),
                  ("not in view: <h2>", "</style>", "h2 { position: absolute; left: -9000px }</style>"),
                  ("not in view: <pre>", "</style>", "pre { visibility: hidden }</style>"),
                  ("not in view: <table>", "</style>", "table { display: none }</style>"),
                  ("the page is ", "</style>", "dl { width: 3000px }</style>"),
                  ("blank: <h1>", "</style>", "body { color: white }</style>"),
                  ("blank: <dl>", "</style>", "body { position: relative } body::after { content: ''; position: absolute; inset: 0; "
                                              "background: white }</style>")]
        if plots:
            broken += [("not in view: <svg>", "</style>", "svg { width: 0 }</style>"),
                       ("a plot without a line", "</style>", "svg { filter: grayscale(1) }</style>"),
                       ("blank: <svg>", "</style>", "svg * { fill: white !important; stroke: white !important }</style>"),
                       ("fewer than ", "<figcaption>", "<p>")]
        for fault, old, new in broken:
            assert old in whole, old
            (work / "broken.html").write_text(whole.replace(old, new))
            wrong = faults(page, work / "broken.html", plots, None)
            assert any(w.startswith(fault) for w in wrong), f"{new} is let pass: {wrong}"
        print(f"{len(broken)} faults are found")
    finally:
        page.close()


main()
