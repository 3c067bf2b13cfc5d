"""A headless Chromium driven over the DevTools protocol by a small WebSocket client: real clicks, keys, pictures.

Only what the report's tests need, on the standard library. RFC 6455 for the frames; the protocol's own pages for the
methods. The browser gets a fresh profile, no network of its own, and is ended by its process group.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--remote-debugging-port=0", "--remote-allow-origins=*", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """A browser with one page. Use as a context manager."""

    def __init__(self, seconds: float = 40.0) -> None:
        self.seconds = seconds
        self.requests: list[str] = []
        "Every address that the page asked for."
        self.problems: list[str] = []
        "Exceptions and errors that the page logged."
        self.counter = 0

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        self.profile = tempfile.mkdtemp(prefix="pipefit-chromium-")
        self.process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self.socket = self._connect()
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
            self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # else the page may lose it to another one
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        shutil.rmtree(self.profile, ignore_errors=True)

    def open(self, path: Path) -> None:
        """Load a file and wait until its scripts say that they are ready."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.until("document.documentElement?.dataset.ready === 'yes'")

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """The window, and the system's theme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression is true. TimeoutError after this browser's seconds."""
        end = time.monotonic() + self.seconds
        while not self.evaluate(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"never true in {self.seconds} s: {condition}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Wait for two frames, so that what was asked for has been drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def click(self, selector: str, x: float | None = None, y: float | None = None) -> None:
        """Press and release the mouse on an element: at its centre, or x, y pixels from its corner."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )
        at = {
            "x": box[0] + (box[2] / 2 if x is None else x),
            "y": box[1] + (box[3] / 2 if y is None else y),
            "button": "left",
            "clickCount": 1,
        }
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at["x"], y=at["y"])
        self.call("Input.dispatchMouseEvent", type="mousePressed", **at)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **at)
        self.settle()

    def key(self, key: str, code: int = 0) -> None:
        """Press and release a key; `code` is its Windows key code where it is not a letter."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)
        self.settle()

    def picture(self, path: Path, selector: str = "") -> None:
        """Save a picture of the window, or of the whole of one element."""
        options: dict[str, Any] = {}
        if selector:
            box = self.evaluate(
                f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                "return [b.left + scrollX, b.top + scrollY, b.width, b.height]; })()"
            )
            options = {
                "clip": dict(zip(("x", "y", "width", "height"), box, strict=True), scale=1),
                "captureBeyondViewport": True,
            }
        answer = self.call("Page.captureScreenshot", format="png", **options)
        path.write_bytes(base64.b64decode(answer["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One call of the protocol; events that come meanwhile are looked at and dropped."""
        self.counter += 1
        self._send(json.dumps({"id": self.counter, "method": method, "params": parameters}).encode())
        while True:
            message = json.loads(self._receive())
            if message.get("id") == self.counter:
                assert "error" not in message, (method, message["error"])
                return dict(message["result"])
            self._event(message)

    def _event(self, message: dict[str, Any]) -> None:
        method, facts = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(facts["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and facts["entry"]["level"] == "error":
            self.problems.append(facts["entry"]["text"])

    def _connect(self) -> socket.socket:
        port = self._port()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{port}/json", timeout=self.seconds) as answer:
            page = next(entry for entry in json.load(answer) if entry["type"] == "page")
        address = page["webSocketDebuggerUrl"].split(str(port), 1)[1]
        link = socket.create_connection(("127.0.0.1", port), timeout=self.seconds)
        key = base64.b64encode(os.urandom(16)).decode()
        link.sendall(
            f"GET {address} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += link.recv(1)
        assert b" 101 " in head.split(b"\r\n")[0], head
        return link

    def _port(self) -> int:
        """The port that the browser wrote into its profile."""
        file, end = Path(self.profile) / "DevToolsActivePort", time.monotonic() + self.seconds
        while not (file.exists() and file.read_text().strip()):
            assert self.process.poll() is None, "the browser ended at once"
            if time.monotonic() > end:
                raise TimeoutError(f"the browser did not start within {self.seconds} s")
            time.sleep(0.05)
        return int(file.read_text().split()[0])

    def _send(self, payload: bytes) -> None:
        mask, size = os.urandom(4), len(payload)
        head = struct.pack("!BB", 0x81, 0x80 | size) if size < 126 else (
            struct.pack("!BBH", 0x81, 0xFE, size) if size < 65536 else struct.pack("!BBQ", 0x81, 0xFF, size)
        )  # fmt: skip
        self.socket.sendall(head + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload)))

    def _receive(self) -> bytes:
        whole = b""
        while True:
            first, second = self._exactly(2)
            size = second & 127
            if size == 126:
                (size,) = struct.unpack("!H", self._exactly(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self._exactly(8))
            part = self._exactly(size)
            if first & 15 in (0, 1):
                whole += part
                if first & 128:
                    return whole
            assert first & 15 != 8, "the browser closed the connection"

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self.socket.recv(min(1 << 20, size - len(parts)))
            assert part, "the browser went away"
            parts += part
        return bytes(parts)
