"""The collection benchmark on two processes: four rows, each side reads every stack whole."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "hang_collect.py"


def test_both_sides_read_every_process_whole() -> None:
    command = [sys.executable, str(SCRIPT), "--processes", "2", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    sides = [("2, any", side) for side in ("guides' loop", "hang collect")]
    sides += [("2, with our hook", side) for _, side in sides]
    assert [(row[0], row[1]) for row in rows[2:]] == sides
    assert {row[4] for row in rows[2:]} == {"2 of 2"}
