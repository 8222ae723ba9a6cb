"""A headless Chromium, driven by ChromeDriver over HTTP."""

import base64
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waiting import free_port

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1400,1000"),
)
TEXTS = r"""
const wanted = arguments[0], found = [];
const text = (node) => node.nodeType === 3 ? node.textContent : ['STYLE', 'SCRIPT'].includes(node.tagName) ? '' :
  [...(node.shadowRoot ? [node.shadowRoot] : []), ...node.childNodes].map(text).join(' ');
const walk = (node) => {
  if (node.matches && node.matches(wanted)) found.push(text(node).split(/\s+/).join(' ').trim());
  if (node.shadowRoot) walk(node.shadowRoot);
  if (node.tagName === 'IFRAME' && node.contentDocument) walk(node.contentDocument);
  for (const child of node.children || []) walk(child);
};
walk(document);
return found;
"""
"""Script that returns the texts of all elements of a selector, also within shadow trees."""


class Browser:
    """A page in a headless Chromium."""

    def __init__(self, port, folder):
        self.at = f"http://127.0.0.1:{port}"
        options = {"args": [*FLAGS, f"--user-data-dir={folder}"]}
        wanted = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
        self.at += f"/session/{self.call('/session', wanted)['sessionId']}"

    def call(self, path, body=None, method="POST"):
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.at + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, url):
        self.call("/url", {"url": "about:blank"})
        self.call("/url", {"url": url})

    def texts(self, selector, until=lambda texts: texts):
        """Return the texts of the elements of a selector, once `until` is true of them."""
        end = time.monotonic() + 60
        while True:
            shown = self.call("/execute/sync", {"script": TEXTS, "args": [selector]})
            if until(shown):
                return shown
            assert time.monotonic() < end, (selector, shown, self.texts("body", lambda texts: True))
            time.sleep(0.2)

    def picture(self, path):
        Path(path).write_bytes(base64.b64decode(self.call("/screenshot", method="GET")))


def wait_for(url):
    end = time.monotonic() + 60
    while True:
        try:
            return urllib.request.urlopen(url, timeout=10).read()
        except OSError:
            assert time.monotonic() < end, url
            time.sleep(0.1)


@contextmanager
def opened(folder: Path) -> Iterator[Browser]:
    """Start a browser with a profile in a folder; close it at the end."""
    port = free_port()
    process = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}/status")
        page = Browser(port, folder)
        try:
            yield page
        finally:
            page.call("", method="DELETE")
    finally:
        process.kill()
        process.wait()
