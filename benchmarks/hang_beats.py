"""What heartbeats cost a training step: ours, beside records that the rank writes itself.

    python benchmarks/hang_beats.py [--ranks 1 2] [--steps 60]          about two minutes

Each run is `shakedown train` on the small Qwen3 of benchmarks/train.py, with a clock around every
beat of its ranks: caches are as the step's own work leaves them. The peer encodes the same record
and writes it by one pwrite in the rank's thread. A step's share is what its beats took, by the
wall, of its time; the share of the CPU seconds of the writer's process is listed beside it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from training import workload
from training.sft import environment
from training.workload import Workload, Written

WAYS = ("ours", "pwrite in the rank")
WARMUP = 5  # steps that are not counted

# Python runs a `sitecustomize` at its start: this one puts a clock around the beats of ranks.
PROBE = """
    import json, os, sys, time

    def follow():
        from pathlib import Path
        from shakedown.hang import heartbeat
        from shakedown.hang.beat_writer import framed

        beat, rows, used = heartbeat.Heartbeat.beat, [], {}
        folder, rank = Path(os.environ["BEATS_OUT"]), os.environ["RANK"]
        if os.environ["BEATS_WAY"] != "ours":
            file = os.open(folder / f"{rank}.beat", os.O_WRONLY | os.O_CREAT, 0o644)

            none = (0, 0, 0)

            def beat(self, *, phase, step=0, micro_batch=0, batch_size=0, given=none, run=none):
                record = heartbeat.Beat(
                    "trainer", int(rank), os.getpid(), "host", phase, step, micro_batch,
                    batch_size, len(rows), round(time.time(), 3), round(time.monotonic(), 3),
                    *given, *run,
                )
                os.pwrite(file, framed(json.dumps(vars(record)).encode()), 0)

        def timed(self, **options):
            begin = time.perf_counter()
            beat(self, **options)
            end = time.perf_counter()
            rows.append((options.get("step", 0), begin, end))
            if options["phase"] in ("finished", "data"):
                live = heartbeat.read_live(os.getpid())
                writer = live.writer if live else 0
                stat = Path(f"/proc/{writer}/schedstat")
                used[rows[-1][0]] = int(stat.read_text().split()[0]) / 1e9 if writer else 0.0
            if options["phase"] == "finished":
                (folder / f"{rank}.txt").write_text(json.dumps([list(used.items()), rows]))

        heartbeat.Heartbeat.beat = timed

    if "shakedown.training.worker" in sys.orig_argv:
        follow()
"""


@dataclass(frozen=True)
class Cost:
    """One rank: beats and milliseconds of a step, microseconds of a beat, shares of the step."""

    beats: float
    step_ms: float
    beat_us: float
    share: float
    writer_share: float


def run(folder: Path, load: Workload, written: Written, *, ranks: int, way: str) -> list[Cost]:
    """Train once.

    Raises:
        subprocess.CalledProcessError: the stage failed; its log is `folder/out.txt`.
    """
    probe = folder / "probe"
    probe.mkdir(parents=True)
    (probe / "sitecustomize.py").write_text(textwrap.dedent(PROBE), encoding="utf-8")
    config = folder / "config.json"
    body = workload.stage_config(folder, load, ranks=ranks)
    config.write_text(json.dumps(body), encoding="utf-8")
    command = [sys.executable, "-m", "shakedown.cli", "train", "sft", "--config", str(config)]
    variables = environment(probe) | {"BEATS_WAY": way, "BEATS_OUT": str(folder)}
    with (folder / "out.txt").open("wb") as log:
        subprocess.run(
            [*command, "--assets", str(written.assets)],
            env=variables,
            stdout=log,
            stderr=log,
            check=True,
        )
    return [cost(folder / f"{rank}.txt", load.steps) for rank in range(ranks)]


def cost(path: Path, steps: int) -> Cost:
    """Of the steps behind the warm-up; a step begins with its first beat."""
    used, rows = json.loads(path.read_text(encoding="utf-8"))
    first = {step: begin for step, begin, _ in reversed(rows)}
    counted = [row for row in rows if WARMUP < row[0] < steps]
    took = [end - begin for _, begin, end in counted]
    seconds, number = first[steps] - first[WARMUP + 1], steps - WARMUP - 1
    writer = dict(used)
    return Cost(
        beats=len(counted) / number,
        step_ms=1e3 * seconds / number,
        beat_us=1e6 * statistics.median(took),
        share=sum(took) / seconds,
        writer_share=(writer[steps] - writer[WARMUP + 1]) / seconds,
    )


def line(way: str, ranks: int, costs: Sequence[Cost]) -> str:
    """A row of the table: the dearest rank's shares."""
    worst = max(costs, key=lambda c: c.share)
    cells = [way, str(ranks), f"{worst.step_ms:.0f}", f"{worst.beats:.1f}", f"{worst.beat_us:.1f}"]
    writer = max(c.writer_share for c in costs)
    cells += [f"{100 * worst.share:.3f} %", f"{100 * writer:.3f} %" if writer else "none"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Both ways for each number of ranks, in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a step")
    args = parser.parse_args()
    load = Workload(steps=args.steps, batch_size=args.batch_size)
    print("| way | ranks | ms a step | beats | us a beat | of a step | writer's CPU |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = workload.write(folder, load)
        for ranks in args.ranks:
            for way in WAYS:
                place = folder / f"{way.split()[0]}-{ranks}"
                print(line(way, ranks, run(place, load, written, ranks=ranks, way=way)))


if __name__ == "__main__":
    main()
