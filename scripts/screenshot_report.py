#!/usr/bin/env python3
"""Take the picture of a run's report that the README shows.

    python scripts/screenshot_report.py results/demo docs/images/report.png

Needs Chromium (`scripts/install_system.sh chromium`). The page is opened from its file, headless,
with a browser profile of its own that is thrown away.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from shakedown.core.errors import CannotJudgeError, ShakedownError, UsageError
from shakedown.core.paths import RunPaths

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
SCHEMES = {"dark": "0", "light": "1"}  # Chromium's own numbers of the colour schemes


def main() -> int:
    """Return an exit code as `shakedown` does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("run_dir", type=Path, help="results/<run>, with report/index.html in it")
    parser.add_argument("out", type=Path, help="PNG file to write")
    parser.add_argument("--width", type=int, default=1280, help="pixels")
    parser.add_argument("--height", type=int, default=1400, help="pixels")
    parser.add_argument("--scheme", choices=SCHEMES, default="light")
    args = parser.parse_args()
    try:
        take(RunPaths(args.run_dir).report, args.out, (args.width, args.height), args.scheme)
    except ShakedownError as error:
        print(f"screenshot_report: {error}", file=sys.stderr)
        return int(error.exit_code)
    print(args.out)
    return 0


def take(page: Path, out: Path, size: tuple[int, int], scheme: str) -> None:
    """Write a PNG of the page's top.

    Raises:
        UsageError: there is no page.
        CannotJudgeError: there is no browser, or it took no picture.
    """
    if not page.is_file():
        raise UsageError(f"{page} does not exist", hint=f"shakedown report {page.parents[1]}")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise CannotJudgeError(
            f"no browser: none of {', '.join(BROWSERS)} is on the PATH",
            hint="scripts/install_system.sh chromium",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        picture = Path(profile) / "page.png"
        command = [
            browser,
            *FLAGS,
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # root has no sandbox in Chromium
            f"--user-data-dir={profile}",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            f"--window-size={size[0]},{size[1]}",
            f"--screenshot={picture}",
            page.resolve().as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if not picture.is_file():
            raise CannotJudgeError(f"{browser} took no picture: {done.stderr[-500:]}")
        shutil.copyfile(picture, out)


if __name__ == "__main__":
    sys.exit(main())
