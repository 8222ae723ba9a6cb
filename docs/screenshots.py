"""Makes the pictures of README and docs from a real run: docs/images/terminal.png and tensorboard.png.

    python docs/screenshots.py

It needs tmux (a terminal whose screen can be read) and chromium, both Debian's packages, and rich. The program is the
README's.
"""

import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import browser  # noqa: E402

IMAGES = ROOT / "docs" / "images"
BIN = Path(sys.executable).parent
COLUMNS, ROWS = 84, 44


def main() -> None:
    """Train, and take both pictures."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_program(Path(folder))
        terminal(Path(folder))
        for setting in ("task.lr=3e-3", "task.hidden=16"):
            command = [BIN / "legato", "fit", "spirals.yaml", setting]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
        tensorboard(Path(folder))
    for path in sorted(IMAGES.glob("*.png")):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def write_program(folder: Path) -> None:
    """Write the files of the README's program."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, body in re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', text, re.DOTALL):
        (folder / name).write_text(body, encoding="utf-8")


def terminal(folder: Path) -> None:
    """Run `legato fit` in a terminal, and draw its last screen."""
    tmux = ["tmux", "-L", f"legato-{folder.name}"]
    size = ["-x", str(COLUMNS), "-y", str(ROWS)]
    subprocess.run([*tmux, "-f", "/dev/null", "new-session", "-d", *size, "-c", folder, "bash --norc"], check=True)
    try:
        for line in (f"PATH={BIN}:$PATH PS1='$ ' TERM=xterm-256color", "clear", "legato fit spirals.yaml; touch done"):
            subprocess.run([*tmux, "send-keys", line, "Enter"], check=True)
            time.sleep(0.5)
        wait_for(lambda: (folder / "done").exists(), 300)
        time.sleep(0.5)
        screen = subprocess.run([*tmux, "capture-pane", "-e", "-p"], capture_output=True, text=True, check=True).stdout
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    screen = screen.replace("; touch done", "").replace(str(folder), "~/spirals").rstrip()
    screen = re.sub(r"\x1b\[[34]9m", "\x1b[0m", screen.removesuffix("\n$").rstrip())  # rich takes the default for white
    console = Console(width=COLUMNS, record=True, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text.from_ansi(screen), soft_wrap=True)
    page = folder / "terminal.html"
    page.write_text(
        "<!doctype html><meta charset=utf-8><style>body{margin:0;background:#1e1e2e}"
        "pre{font:14px/1.35 'DejaVu Sans Mono',monospace;color:#cdd6f4;padding:14px 18px;margin:0}</style>"
        + console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    )
    lines = len(screen.splitlines())
    photograph(page.as_uri(), IMAGES / "terminal.png", (COLUMNS * 8.45 + 40, lines * 19 + 32))


def tensorboard(folder: Path) -> None:
    """Show the runs in TensorBoard by `legato board`, and photograph it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [BIN / "legato", "board", "runs", "--port", str(port)]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        browser.wait_for(f"{address}/data/runs")
        time.sleep(8)  # it reads the runs
        with browser.opened(folder / "chromium") as page:
            page.open(f"{address}/?darkMode=false&smoothing=0.3#timeseries")
            page.texts("card-view", lambda texts: any("/acc" in text for text in texts))
            time.sleep(5)  # its charts are drawn one by one
            page.picture(IMAGES / "tensorboard.png")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def photograph(address: str, path: Path, size: tuple[float, float], seconds: int = 2) -> None:
    """Write what chromium shows after so many seconds of its own clock."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            *(shutil.which("chromium") or "chromium", "--headless=new", "--no-sandbox", "--hide-scrollbars"),
            *("--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"),
            *(f"--virtual-time-budget={1000 * seconds}", f"--window-size={size[0]:.0f},{size[1]:.0f}"),
            *(f"--screenshot={path}", address),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=180)


def wait_for(condition: object, seconds: float) -> None:
    """Wait until the condition holds. Raises TimeoutError after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.2)


if __name__ == "__main__":
    main()
