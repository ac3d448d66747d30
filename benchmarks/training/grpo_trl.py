"""GRPO against TRL's GRPOTrainer, turn by turn, and both on the same samples once.

Both start from the demo's model after SFT, with the demo's GRPO settings. We generate with a vLLM
server beside the trainer, TRL with transformers inside of it (its vLLM mode needs a GPU). What each
samples is its own, so the losses of a run cannot be compared; for that TRL trains once on the
samples of our first step.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training import grpo, sft

# Losses and norms of both sides on the same samples may differ by so much: our samples' weights are
# e^(trainer - vLLM), not quite 1, and sums are rounded in float32.
LOSS_TOLERANCE, NORM_TOLERANCE, ADVANTAGE_TOLERANCE = 1e-4, 1e-3, 1e-5


@dataclass(frozen=True)
class Run:
    """One measured run.

    `tokens_per_s`: trained tokens, those of the answers, by wall time behind the warm-up;
    `tokens_per_cpu_s`: by the CPU time of all processes, the server's too. `tokens`: of a step, in
    the mean. `reward_first`, `reward_last`: mean of the first and of the last three steps.
    """

    tool: str
    ranks: int
    tokens_per_s: float
    tokens_per_cpu_s: float
    step_ms: float
    tokens: float
    reward_first: float
    reward_last: float
    seconds: float
    fault: str


@dataclass(frozen=True)
class Sides:
    """A number of one step on the same samples, by both sides."""

    ours: float
    trl: float

    @property
    def apart(self) -> float:
        return abs(self.ours - self.trl)


@dataclass(frozen=True)
class Agreement:
    """One step of several updates on the same samples: loss and gradient norm (before clipping) in
    the mean over its updates, and the largest difference of an advantage.
    """

    samples: int
    loss: Sides
    grad_norm: Sides
    advantages_apart: float

    def faults(self) -> list[str]:
        """Where the two did not do the same; empty: they did."""
        found = []
        if self.loss.apart > LOSS_TOLERANCE:
            found.append(f"losses on the same samples are {self.loss.apart:.2g} apart")
        if self.grad_norm.apart > NORM_TOLERANCE * self.grad_norm.ours:
            found.append(f"gradient norms on the same samples are {self.grad_norm.apart:.2g} apart")
        if self.advantages_apart > ADVANTAGE_TOLERANCE:
            found.append(f"advantages of the same rewards are {self.advantages_apart:.2g} apart")
        return found


def measure(
    folder: Path,
    *,
    ranks: Sequence[int],
    levels: Sequence[int],
    steps: int,
    repeats: int,
    peer: Path | None,
    against: Mapping[str, Path],
) -> tuple[list[Run], Agreement | None]:
    """SFT once, then each of our levels and TRL by turns; stops after a run that went wrong.

    Args:
        against: src folders of other checkouts, each with its own demo's settings, by name.

    Raises:
        StageFailedError: the SFT stage failed.
    """
    start = grpo.train_start(folder)
    assets = json.loads(start.read_text(encoding="utf-8"))
    sides = {"ours": grpo.CHECKOUT / "src", **against}
    ours = {f"{name}, async level {k}": (src, k) for k in levels for name, src in sides.items()}
    runs: list[Run] = []
    agreement = None
    for count in ranks:
        for repeat in range(repeats):
            for tool, side in {**ours, "TRL": None}.items():
                place = folder / f"{count}-{repeat}-{tool.replace(', async level ', '-')}"
                place.mkdir()
                if side is None:
                    run = _theirs(place, assets, steps, ranks=count, peer=peer)
                else:
                    src, level = side
                    run = _ours(place, tool, start, steps, src=src, level=level, ranks=count)
                runs.append(run)
                said = run.fault or f"{run.tokens_per_s:.0f} trained tokens/s"
                print(f"{tool}, {count} rank(s): {said}", file=sys.stderr, flush=True)
                if run.fault:
                    return runs, agreement
                if side is not None and agreement is None:
                    agreement = _agree(place, assets, peer=peer)
    return runs, agreement


def samples_a_step() -> int:
    """Answers that a step trains on."""
    stage = grpo.demo()["stages"]["grpo"]
    return int(stage["batch_size"] * stage["grpo"]["group_size"])


def stage_config(
    level: int, steps: int, *, ranks: int, checkout: Path = grpo.CHECKOUT
) -> dict[str, Any]:
    """The demo's GRPO stage alone, recorded, at a learning rate without warm-up and without
    evaluations: what lies between two steps is training.
    """
    body = grpo.level_config(grpo.demo(checkout), level, steps)
    stage = body["stages"]["grpo"]
    stage |= {"allocation": f"fsdp:d{ranks}", "eval_samples": 0}
    stage["optimizer"] = {**stage["optimizer"], "warmup_steps": 0}
    stage["grpo"]["record"] = True
    return body


def trl_plan(
    assets: Mapping[str, str], prompts: Path, steps: int, *, ranks: int, rollouts: Path | None
) -> dict[str, Any]:
    """The same for TRL: each rank its share of the samples in one forward pass, as our ranks."""
    stage = stage_config(0, steps, ranks=ranks)["stages"]["grpo"]
    own = stage["grpo"]
    rows = samples_a_step() // ranks
    return {
        "trainer": "grpo",
        "model": assets["model"],
        "prompts": str(prompts),
        "rollouts": str(rollouts) if rollouts else None,
        "steps": steps,
        "batch_size": rows,
        "micro_batch_size": rows,
        "optimizer": stage["optimizer"],
        "group_size": own["group_size"],
        "epochs": own["epochs"],
        "max_tokens": own["max_tokens"],
        "clip": [own["clip_low"], own["clip_high"]],
    }


def _ours(
    folder: Path, tool: str, start: Path, steps: int, *, src: Path, level: int, ranks: int
) -> Run:
    body = stage_config(level, steps, ranks=ranks, checkout=src.parent)
    config = grpo.write_json(folder / "config.yaml", body)
    command = [sys.executable, "-m", "shakedown.cli", "train", "grpo", "--config", str(config)]
    command += ["--assets", str(start), "--run-dir", str(folder)]
    rows = folder / "stages" / "grpo" / "metrics.jsonl"
    out, variables = folder / "out.txt", sft.environment(src)
    watched = sft.watch(command, rows, out, variables, limit=900, cwd=src.parent)
    if watched.code:
        return _failed(tool, ranks, watched, folder)
    read = grpo.rows_of(rows)
    tokens, rewards = ([row[n] for row in read] for n in ("trained_tokens", "reward_mean"))
    ends = (watched.times, watched.cpu)
    return _summed(tool, ranks, watched.seconds, ends=ends, tokens=tokens, rewards=rewards)


def _theirs(
    folder: Path, assets: Mapping[str, str], steps: int, *, ranks: int, peer: Path | None
) -> Run:
    prompts = write_prompts(folder / "prompts.json", assets["train"], steps)
    plan = trl_plan(assets, prompts, steps, ranks=ranks, rollouts=None)
    command, rows = sft.trl_command(folder, plan, ranks=ranks)
    watched = sft.watch(command, rows, folder / "out.txt", sft.environment(peer), limit=900)
    if watched.code:
        return _failed("TRL", ranks, watched, folder)
    read = grpo.rows_of(rows)
    ends = [of_grpo_steps(sft.of_steps(read, seen), plan) for seen in (watched.times, watched.cpu)]
    tokens, rewards = their_steps(read, plan, ranks)
    return _summed(
        "TRL", ranks, watched.seconds, ends=(ends[0], ends[1]), tokens=tokens, rewards=rewards
    )


def write_prompts(path: Path, train: str, steps: int) -> Path:
    """Prompts and answers in the order in which our stage draws them."""
    from shakedown.data_sources import epoch_order, load_rows

    body = grpo.demo()
    rows = load_rows(train)
    order = epoch_order(len(rows), seed=body["seed"], epoch=0)
    wanted = order[: steps * body["stages"]["grpo"]["batch_size"]]
    found = [{"prompt": rows[i].messages, "answer": rows[i].answer} for i in wanted]
    path.write_text(json.dumps(found), encoding="utf-8")
    return path


def of_grpo_steps(seen: Sequence[float], plan: Mapping[str, Any]) -> list[float]:
    """Of TRL's updates those that end a step: `epochs` of them are on one batch."""
    return list(seen[plan["epochs"] - 1 :: plan["epochs"]])


def their_steps(
    rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], ranks: int
) -> tuple[list[float], list[float]]:
    """Trained tokens and mean reward of each step, from what TRL logs where it generated."""
    made = [row for row in rows if "completions/mean_length" in row]
    samples = plan["batch_size"] * ranks
    tokens = [float(row["completions/mean_length"]) * samples for row in made]
    return tokens, [float(row["reward"]) for row in made]


def _summed(
    tool: str,
    ranks: int,
    seconds: float,
    *,
    ends: tuple[Sequence[float], Sequence[float]],
    tokens: Sequence[float],
    rewards: Sequence[float],
) -> Run:
    """Args: ends: of each step, in wall and in CPU seconds."""
    counts = [round(count) for count in tokens]
    speed, step_ms = sft.rate(ends[0], counts, grpo.WARMUP)
    by_cpu, _ = sft.rate(ends[1], counts, grpo.WARMUP)
    return Run(
        tool,
        ranks,
        round(speed, 1),
        round(by_cpu, 1),
        round(step_ms, 1),
        round(statistics.fmean(tokens), 1),
        round(statistics.fmean(rewards[:3]), 4),
        round(statistics.fmean(rewards[-3:]), 4),
        round(seconds, 1),
        "",
    )


def _failed(tool: str, ranks: int, watched: sft.Watched, folder: Path) -> Run:
    fault = f"exit code {watched.code}, see {folder / 'out.txt'}"
    return Run(tool, ranks, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, round(watched.seconds, 1), fault)


def _agree(place: Path, assets: Mapping[str, str], *, peer: Path | None) -> Agreement:
    """TRL on the samples of our first step.

    Raises:
        StageFailedError: TRL's run failed.
    """
    from shakedown.rollout.recording import read_step
    from shakedown.training.algorithms.grpo import token_batch

    folder = place / "same-samples"
    folder.mkdir()
    stage = place / "stages" / "grpo"
    batch = read_step(stage / "rollouts", 1)
    rollouts = grpo.write_json(folder / "rollouts.json", as_samples(batch))
    prompts = write_prompts(folder / "prompts.json", assets["train"], 1)
    plan = trl_plan(assets, prompts, 1, ranks=1, rollouts=rollouts)
    command, rows = sft.trl_command(folder, plan, ranks=1)
    if sft.watch(command, rows, folder / "out.txt", sft.environment(peer)).code:
        raise grpo.StageFailedError(f"TRL failed on our samples, see {folder / 'out.txt'}")
    ours = grpo.rows_of(stage / "metrics.jsonl")[0]
    logged = [row for row in grpo.rows_of(rows) if "grad_norm" in row]
    theirs = json.loads((folder / "advantages.json").read_text(encoding="utf-8"))
    own = token_batch(batch, pad=0).extra["advantages"].tolist()
    return Agreement(
        samples=len(own),
        loss=Sides(ours["loss"], statistics.fmean(float(row["loss"]) for row in logged)),
        grad_norm=Sides(
            ours["grad_norm"], statistics.fmean(float(row["grad_norm"]) for row in logged)
        ),
        advantages_apart=max(abs(a - b) for a, b in zip(own, theirs, strict=True)),
    )


def as_samples(batch: Any) -> dict[str, list[Any]]:
    """Our rollout batch as what TRL's `rollout_func` returns, groups beside each other.

    Raises:
        ValueError: samples of a group do not stand beside each other, as TRL takes them.
    """
    groups = batch.groups.tolist()
    if groups != sorted(groups, key=groups.index):
        raise ValueError("a group's samples do not stand beside each other")
    made: dict[str, list[Any]] = {
        name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "reward")
    }
    for tokens, mask, logprobs, reward in zip(
        batch.tokens, batch.loss_mask, batch.logprobs, batch.rewards, strict=True
    ):
        (places,) = mask.nonzero()
        made["prompt_ids"].append(tokens[: places[0]].tolist())
        made["completion_ids"].append(tokens[places].tolist())
        made["logprobs"].append(logprobs[places].tolist())
        made["reward"].append(float(reward))
    return made


def table(runs: Sequence[Run]) -> str:
    """A Markdown table of the medians."""
    head = ["ranks", "trainer", "trained tokens/s", "lowest to highest", "tokens/CPU s"]
    head += ["s a step", "tokens a step", "reward, first 3 steps", "last 3"]
    rows = [head, ["---"] * len(head)]
    for ranks, tool in dict.fromkeys((run.ranks, run.tool) for run in runs):
        here = [run for run in runs if (run.ranks, run.tool) == (ranks, tool)]
        speeds = [run.tokens_per_s for run in here]
        by_cpu, step_ms, tokens, first, last = (
            statistics.median(getattr(run, name) for run in here)
            for name in ("tokens_per_cpu_s", "step_ms", "tokens", "reward_first", "reward_last")
        )
        rows.append(
            [str(ranks), tool, f"{statistics.median(speeds):.0f}"]
            + [f"{min(speeds):.0f} to {max(speeds):.0f}", f"{by_cpu:.0f}", f"{step_ms / 1000:.2f}"]
            + [f"{tokens:.0f}", f"{first:.3f}", f"{last:.3f}"]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def said(agreement: Agreement) -> str:
    """One line on the step that both did on the same samples."""
    loss, norm = agreement.loss, agreement.grad_norm
    return (
        f"one step on the same {agreement.samples} samples: loss {loss.ours:.6f} (ours) and "
        f"{loss.trl:.6f} (TRL), gradient norm {norm.ours:.5f} and {norm.trl:.5f}, advantages "
        f"at most {agreement.advantages_apart:.1e} apart"
    )


def figures(runs: Sequence[Run], agreement: Agreement | None) -> dict[str, Any]:
    """For the JSON of all figures."""
    return {
        "runs": [asdict(run) for run in runs],
        "agreement": asdict(agreement) if agreement else None,
    }
