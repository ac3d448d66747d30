"""Tokens a second of SFT: `shakedown train` against TRL's SFTTrainer, turn by turn.

Both append a row to a file after each step; how the file grows is watched from outside, so the
time of a step is everything between two rows, for both alike.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from training import workload
from training.workload import Workload, Written

TRL_RANK = Path(__file__).with_name("trl_rank.py")
POLL_SECONDS = 0.005  # a step takes some hundred milliseconds
# Losses of the two sides on the same batch may differ by so much, in nats: rounding in float32.
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Run:
    """One measured run.

    `tokens_per_cpu_s`: by the CPU time of all its processes, which other work on the machine
    disturbs less than the wall time. `first_loss` and `mean_loss` (nats): of the first step, and
    the mean over all others. `fault` is empty when the run trained what it should.
    """

    tool: str
    ranks: int
    tokens_per_s: float
    tokens_per_cpu_s: float
    step_ms: float
    first_loss: float
    mean_loss: float
    seconds: float
    fault: str


@dataclass(frozen=True)
class Watched:
    """A command's exit code and wall seconds.

    `times`, `cpu`: when each row of its file appeared, and the CPU time of its processes then (s).
    """

    code: int
    seconds: float
    times: Sequence[float]
    cpu: Sequence[float]


def measure(
    folder: Path, load: Workload, *, ranks: Sequence[int], repeats: int, peer: Path | None
) -> tuple[list[Run], int]:
    """ABAB for each number of ranks; stops after a run that went wrong.

    Args:
        peer: the folder that TRL is imported from; None: it is installed.

    Returns:
        The runs, and the number of parameters.
    """
    written = workload.write(folder, load)
    runs: list[Run] = []
    for count in ranks:
        for repeat in range(repeats):
            for tool in ("ours", "TRL"):
                place = folder / f"{tool}-{count}-{repeat}"
                place.mkdir()
                run = one_run(tool, place, load, written, ranks=count, peer=peer)
                runs.append(run)
                said = run.fault or f"{run.tokens_per_s:.0f} tokens/s"
                print(f"{tool}, {count} rank(s): {said}", file=sys.stderr, flush=True)
                if run.fault:
                    return runs, written.parameters
    return runs, written.parameters


def one_run(
    tool: str, folder: Path, load: Workload, written: Written, *, ranks: int, peer: Path | None
) -> Run:
    """Train once from the random weights."""
    prepare = ours if tool == "ours" else theirs
    command, rows = prepare(folder, load, written, ranks=ranks)
    log = folder / "out.txt"
    watched = watch(command, rows, log, environment(peer if tool == "TRL" else None))
    if watched.code:
        said = f"exit code {watched.code}, see {log}"
        return Run(tool, ranks, 0.0, 0.0, 0.0, 0.0, 0.0, round(watched.seconds, 1), said)
    read = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    first, mean, tokens = our_losses(read) if tool == "ours" else their_losses(read)
    speed, step_ms = rate(of_steps(read, watched.times), written.tokens, load.warmup)
    by_cpu, _ = rate(of_steps(read, watched.cpu), written.tokens, load.warmup)
    return Run(
        tool,
        ranks,
        round(speed, 1),
        round(by_cpu, 1),
        round(step_ms, 2),
        first,
        mean,
        round(watched.seconds, 1),
        fault="" if tokens == sum(written.tokens) else f"trained {tokens:.0f} tokens",
    )


def ours(folder: Path, load: Workload, written: Written, *, ranks: int) -> tuple[list[str], Path]:
    """As a user starts it: supervisor, worker ranks, heartbeats, metrics, Flight Recorder."""
    config = folder / "config.yaml"
    body = workload.stage_config(folder, load, ranks=ranks)
    config.write_text(json.dumps(body), encoding="utf-8")
    command = [sys.executable, "-m", "shakedown.cli", "train", "sft", "--config", str(config)]
    command += ["--assets", str(written.assets)]
    return command, folder / "bench" / "stages" / "sft" / "metrics.jsonl"


def theirs(folder: Path, load: Workload, written: Written, *, ranks: int) -> tuple[list[str], Path]:
    """One process, or torchrun: accelerate then wraps the model in DDP."""
    plan = {
        "trainer": "sft",
        "model": str(written.model),
        "encoded": str(written.encoded),
        "steps": load.steps,
        "batch_size": load.batch_size // ranks,
        "micro_batch_size": load.micro_batch_size,
        "optimizer": workload.OPTIMIZER,
    }
    return trl_command(folder, plan, ranks=ranks)


def trl_command(folder: Path, plan: Mapping[str, object], *, ranks: int) -> tuple[list[str], Path]:
    """TRL_RANK with a plan, its output in `folder`; and the file of its rows."""
    rows, path = folder / "rows.jsonl", folder / "plan.json"
    path.write_text(json.dumps({**plan, "out": str(folder / "out"), "rows": str(rows)}), "utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    torchrun += ["--nproc-per-node", str(ranks)]
    launcher = torchrun if ranks > 1 else []
    return [sys.executable, *launcher, str(TRL_RANK), str(path)], rows


def environment(first: Path | None) -> dict[str, str]:
    """The same for both: one thread a rank, the loopback device, no network.

    Args:
        first: where Python looks for packages before its own.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if first is not None:
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, [os.fspath(first), variables.get("PYTHONPATH", "")])
        )
    return variables


def watch(
    command: Sequence[str],
    rows: Path,
    log: Path,
    variables: Mapping[str, str],
    *,
    limit: float = 300.0,
    cwd: Path | None = None,
) -> Watched:
    """Run a command and note when each line of `rows` appears; after `limit` s it is ended."""
    began, size = time.monotonic(), 0
    times, cpu, family = list[float](), list[float](), list[psutil.Process]()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=dict(variables), cwd=cwd, stdout=out, stderr=out, start_new_session=True
        )
    try:
        while process.poll() is None and time.monotonic() - began < limit:
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            grown = rows.stat().st_size if rows.exists() else 0
            if grown > size:
                if not family:  # every process is there by the first row
                    leader = psutil.Process(process.pid)
                    family = [leader, *leader.children(recursive=True)]
                spent = sum(map(_cpu_seconds, family))
                with rows.open("rb") as stream:
                    stream.seek(size)
                    new = stream.read(grown - size).count(b"\n")
                times, cpu = times + [now] * new, cpu + [spent] * new
                size = grown
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    return Watched(process.wait(60), time.monotonic() - began, times, cpu)


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        spent = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(spent.user + spent.system)


def of_steps(rows: Sequence[Mapping[str, Any]], seen: Sequence[float]) -> list[float]:
    """What was seen at the end of each step; TRL's log rows lie between the steps'.

    Raises:
        ValueError: rows are missing.
    """
    if len(rows) != len(seen):
        raise ValueError(f"{len(rows)} rows were written, {len(seen)} seen")
    return [value for row, value in zip(rows, seen, strict=True) if "step" in row]


def rate(times: Sequence[float], tokens: Sequence[int], warmup: int) -> tuple[float, float]:
    """Tokens a second and milliseconds a step behind the first `warmup` steps.

    Args:
        times: when each step ended, wall or CPU seconds.
        tokens: of each step.

    Raises:
        ValueError: not every step is there, or none is left.
    """
    if len(times) != len(tokens) or not 1 <= warmup < len(times):
        raise ValueError(f"{len(times)} of {len(tokens)} steps, {warmup} of them warm-up")
    seconds = times[-1] - times[warmup - 1]
    return sum(tokens[warmup:]) / seconds, 1000 * seconds / (len(times) - warmup)


def our_losses(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Loss of the first step, mean of the others, tokens in all: from metrics.jsonl."""
    losses = [row["loss"] for row in rows]
    return losses[0], statistics.fmean(losses[1:]), sum(row["tokens"] for row in rows)


def their_losses(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """The same from what TRL logs: after the first step, and after the last the mean since."""
    logged = [row for row in rows if "loss" in row]
    return float(logged[0]["loss"]), float(logged[1]["loss"]), float(logged[1]["num_tokens"])


def differences(runs: Sequence[Run]) -> list[str]:
    """Where the two sides did not train the same thing; empty: they did."""
    found = []
    for ranks in sorted({run.ranks for run in runs}):
        here = [run for run in runs if run.ranks == ranks]
        for name in ("first_loss", "mean_loss"):
            values = [getattr(run, name) for run in here]
            if max(values) - min(values) > LOSS_TOLERANCE:
                said = f"{name} from {min(values):.6f} to {max(values):.6f} nats"
                found.append(f"{ranks} rank(s): {said}, more than {LOSS_TOLERANCE} apart")
    return found


def table(runs: Sequence[Run]) -> str:
    """A Markdown table of the medians."""
    head = ["ranks", "trainer", "tokens/s", "lowest to highest", "tokens/CPU s", "ms a step"]
    head += ["loss of step 1", "mean loss of the others"]
    rows = [head, ["---"] * len(head)]
    for ranks, tool in dict.fromkeys((run.ranks, run.tool) for run in runs):
        here = [run for run in runs if (run.ranks, run.tool) == (ranks, tool)]
        speeds = [run.tokens_per_s for run in here]
        rows.append(
            [
                str(ranks),
                tool,
                f"{statistics.median(speeds):.0f}",
                f"{min(speeds):.0f} to {max(speeds):.0f}",
                f"{statistics.median(run.tokens_per_cpu_s for run in here):.0f}",
                f"{statistics.median(run.step_ms for run in here):.0f}",
                f"{here[0].first_loss:.5f}",
                f"{here[0].mean_loss:.5f}",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


class Measured(Protocol):
    """What a ratio is made of."""

    @property
    def tool(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def tokens_per_s(self) -> float: ...
    @property
    def tokens_per_cpu_s(self) -> float: ...
    @property
    def fault(self) -> str: ...


def ratios(runs: Sequence[Measured], ours: str = "ours") -> list[str]:
    """Our tokens a second over TRL's, by number of ranks, where both were measured."""
    said = []
    for ranks in sorted({run.ranks for run in runs}):
        sides = [[r for r in runs if (r.ranks, r.tool) == (ranks, tool)] for tool in (ours, "TRL")]
        if all(sides) and not any(run.fault for run in runs):
            wall, cpu = (
                statistics.median(getattr(r, name) for r in sides[0])
                / statistics.median(getattr(r, name) for r in sides[1])
                for name in ("tokens_per_s", "tokens_per_cpu_s")
            )
            said.append(
                f"{ranks} rank(s): {ours} trains {wall:.2f} times TRL's tokens a second, "
                f"{cpu:.2f} times its tokens a CPU second"
            )
    return said
