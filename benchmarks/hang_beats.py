"""What a heartbeat costs: in the thread that beats, and in the process that writes it.

    python benchmarks/hang_beats.py [--beats 2000] [--pause 0.005]

Beats are `--pause` seconds apart, as micro-batches are: caches are cold and the writer asleep.
The peer writes the same record itself, by one pwrite. Rows of a markdown table are printed.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from shakedown.hang.heartbeat import Beat, Heartbeat, encode, read_heartbeats, read_live


def times(beat: Callable[[int], None], count: int, pause: float) -> tuple[float, float]:
    """Microseconds of a call, `pause` seconds apart: (median, mean of this thread's CPU)."""
    wall, used = [], 0.0
    for step in range(count):
        begin, before = time.perf_counter(), time.thread_time()
        beat(step)
        used += time.thread_time() - before
        wall.append(time.perf_counter() - begin)
        time.sleep(pause)
    return statistics.median(wall) * 1e6, used / count * 1e6


def row(name: str, found: tuple[float, float], rest: str) -> None:
    print(f"| {name} | {found[0]:.0f} | {found[1]:.0f} | {rest} |")


def direct(folder: Path) -> Callable[[int], None]:
    """The peer: encode and pwrite in the calling thread."""
    descriptor = os.open(folder / "direct", os.O_WRONLY | os.O_CREAT, 0o644)

    def beat(step: int) -> None:
        now, moment = time.time(), time.monotonic()
        record = Beat("trainer", 1, os.getpid(), "n", "train", step, 0, 8, step, now, moment)
        os.pwrite(descriptor, encode(record), 0)

    return beat


def main() -> None:
    """Measure both, and the writer by what it used when it has ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beats", type=int, default=2000)
    parser.add_argument("--pause", type=float, default=0.005, help="seconds between beats")
    args = parser.parse_args()
    print("| way | us in the thread, median | its CPU, mean | writer |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        row("pwrite in the thread", times(direct(folder), args.beats, args.pause), "none")
        beats = Heartbeat(folder, 0)
        begin = time.perf_counter()
        beats.beat(phase="init")
        started = (time.perf_counter() - begin) * 1e3
        while not read_heartbeats(folder):
            time.sleep(0.001)
        ready = (time.perf_counter() - begin) * 1e3
        found = times(
            lambda step: beats.beat(phase="train", step=step, batch_size=8), args.beats, args.pause
        )
        live = read_live(os.getpid())
        writer = live.writer if live else 0
        status = Path(f"/proc/{writer}/smaps_rollup").read_text().split()
        private = int(status[status.index("Private_Dirty:") + 1]) / 1024
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        beats.close()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        row("handed over", found, f"{used / args.beats * 1e6:.0f} us a beat, start included")
    print(
        f"\nfirst beat {started:.1f} ms, in its file after {ready:.0f} ms; the writer has "
        f"{private:.1f} MB of its own"
    )


if __name__ == "__main__":
    main()
