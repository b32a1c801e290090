"""A real headless Chromium, driven over its debugging pipe: two file descriptors, JSON with a zero byte after each.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt install chromium)")

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe")
DEADLINE = 60.0


class Browser:
    """One Chromium with one tab."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM
        down, self._out = os.pipe()
        self._in, up = os.pipe()

        def place() -> None:
            """The browser reads descriptor 3 and writes 4, whatever their numbers are here."""
            far = os.dup2(down, 103), os.dup2(up, 104)
            os.dup2(far[0], 3)
            os.dup2(far[1], 4)

        self._process = subprocess.Popen([CHROMIUM, *FLAGS, f"--user-data-dir={profile}"], preexec_fn=place,
                                         pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(down)
        os.close(up)
        self._buffer, self._n = b"", 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._out)  # its end of file is our goodbye
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def call(self, method: str, **params: Any) -> Any:
        self._n += 1
        message = {"id": self._n, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + DEADLINE
        while True:
            answer = self._read(end)
            if answer.get("id") == self._n:
                assert "error" not in answer, answer
                return answer["result"]
            if "method" in answer and hasattr(self, "events"):
                self.events.append(answer)

    def _read(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        raw, self._buffer = self._buffer.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(raw)
        return answer

    # --- what a test asks ---

    def open(self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        self.size(width, height)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def eval(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = DEADLINE) -> Any:
        """Until the expression holds."""
        end = time.monotonic() + seconds
        while not (value := self.eval(script)):
            assert time.monotonic() < end, f"never: {script}\n{self.eval('document.body.innerText')[:3000]}"
            time.sleep(0.05)
        return value

    def key(self, key: str, text: str = "") -> None:
        """Press a key, and let go."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=text if kind == "keyDown" else "",
                      windowsVirtualKeyCode={"Tab": 9, "Enter": 13, "Escape": 27}.get(key, 0), code=key)

    def complaints(self) -> list[str]:
        """What the console said: errors of scripts, of the content security policy, of loading."""
        self.eval("1")  # so that what has happened has been read
        return [json.dumps(e["params"])[:600] for e in self.events if e["method"] in (
            "Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Network.loadingFailed")]

    def requests(self) -> list[str]:
        self.eval("1")
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def picture(self, path: Path, *, whole: bool = False) -> Path:
        """A PNG of what is to be seen, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
        return path


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    b = Browser(profile)
    try:
        yield b
    finally:
        b.close()
