"""The training benchmark's own parts: what it counts as a step, a token and a difference."""

import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import train
from training import curves, gpu, gpu_stages, grpo, grpo_trl, sft, workload
from training.workload import Workload

from shakedown.config import load_config
from shakedown.data_sources import load_rows
from shakedown.rollout.batch import RolloutBatch
from shakedown.training.demo import write_model

SCRIPT = Path(train.__file__)


def _run(tool: str, ranks: int, speed: float, *, first: float = 4.5, mean: float = 3.0) -> sft.Run:
    return sft.Run(tool, ranks, speed, speed / 2, 500.0, first, mean, 20.0, "")


def _grpo_rows(steps: int) -> list[dict[str, float]]:
    """The first steps are slow; of the others one second in four is waiting."""
    return [
        {
            "step_seconds": 30.0 if step < grpo.WARMUP else 4.0,
            "wait_seconds": 25.0 if step < grpo.WARMUP else 1.0,
            "train_seconds": 2.0,
            "sync_seconds": 0.5,
            "rollout_weight_update_seconds": 0.25,
            "staleness_max": float(step % 2),
            "reward_mean": step / steps,
        }
        for step in range(steps)
    ]


def test_the_rate_leaves_out_the_warm_up_and_counts_the_tokens_behind_it() -> None:
    speed, step_ms = sft.rate([10.0, 30.0, 31.0, 33.0], [999, 999, 100, 200], warmup=2)

    assert speed == pytest.approx(300 / 3)
    assert step_ms == pytest.approx(1500)


@pytest.mark.parametrize(("times", "warmup"), [([1.0, 2.0], 1), ([1.0, 2.0, 3.0], 3), ([], 1)])
def test_a_run_with_missing_steps_has_no_rate(times: list[float], warmup: int) -> None:
    with pytest.raises(ValueError, match="of 3 steps"):
        sft.rate(times, [5, 5, 5], warmup)


def test_rows_of_a_log_are_no_steps_and_unseen_rows_are_refused() -> None:
    rows: list[dict[str, object]] = [{"step": 1}, {"logged": 1, "loss": 4.0}, {"step": 2}]

    assert sft.of_steps(rows, [1.0, 1.1, 2.0]) == [1.0, 2.0]
    with pytest.raises(ValueError, match="3 rows were written, 2 seen"):
        sft.of_steps(rows, [1.0, 1.1])


def test_both_sides_losses_are_the_first_and_the_mean_of_the_others() -> None:
    ours: list[dict[str, float]] = [{"loss": 4.0, "tokens": 10.0}, {"loss": 3.0, "tokens": 12.0}]
    ours.append({"loss": 2.0, "tokens": 11.0})
    theirs: list[dict[str, object]] = [{"step": 1}, {"logged": 1, "loss": "4.0", "num_tokens": 10}]
    theirs += [{"step": 2}, {"step": 3}, {"logged": 3, "loss": "2.5", "num_tokens": 33.0}]
    theirs.append({"logged": 3, "train_loss": 9.0, "train_runtime": 1.0})

    assert sft.our_losses(ours) == sft.their_losses(theirs) == (4.0, 2.5, 33.0)


def test_losses_that_differ_are_told_and_equal_ones_are_not() -> None:
    equal = [_run("ours", 1, 120.0), _run("TRL", 1, 100.0, first=4.50004)]
    other = [*equal, _run("ours", 2, 120.0, mean=3.0), _run("TRL", 2, 100.0, mean=3.01)]

    assert sft.differences(equal) == []
    assert ["2 rank(s): mean_loss" in line for line in sft.differences(other)] == [True]


def test_the_ratio_is_that_of_the_medians_and_needs_both_sides() -> None:
    speeds = {"ours": (110.0, 130.0, 900.0), "TRL": (100.0, 90.0, 800.0)}
    runs = [_run(tool, 2, speed) for tool, each in speeds.items() for speed in each]

    assert sft.ratios(runs) == [
        "2 rank(s): ours trains 1.30 times TRL's tokens a second, "
        "1.30 times its tokens a CPU second"
    ]
    assert sft.ratios(runs[:3]) == []
    assert "| 2 | ours | 130 | 110 to 900 | 65 | 500 |" in sft.table(runs)


def test_every_row_is_seen_as_the_file_grows_and_the_exit_code_is_kept(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    code = "import sys,time\nfor _ in range(3):\n print('row', flush=True); time.sleep(.02)\n"
    command = [sys.executable, "-c", f"{code}sys.exit(7)"]
    script = f'exec "$0" "$@" > {rows}'

    seen = sft.watch(["/bin/sh", "-c", script, *command], rows, tmp_path / "log", {})

    assert (seen.code, len(seen.times)) == (7, 3)
    assert list(seen.times) == sorted(seen.times)
    assert list(seen.cpu) == sorted(seen.cpu)
    assert len(seen.cpu) == 3


def test_a_run_that_never_ends_is_ended(tmp_path: Path) -> None:
    seen = sft.watch(["sleep", "60"], tmp_path / "none", tmp_path / "log", {}, limit=0.1)

    assert seen.code < 0
    assert seen.times == []


def test_rows_are_the_same_for_a_seed_and_half_of_each_is_answer() -> None:
    load = Workload(steps=3, batch_size=4, longest=20)

    rows = workload.random_rows(load, seed=1)

    assert rows == workload.random_rows(load, seed=1) != workload.random_rows(load, seed=2)
    assert len(rows) == 12
    for row in rows:
        prompt, answer = row["messages"][0]["content"], row["answer"]
        assert 10 <= len(prompt) + len(answer) <= 20
        assert len(answer) - len(prompt) in (0, 1)


def test_the_peers_rows_have_the_order_and_labels_of_our_batches(tmp_path: Path) -> None:
    from shakedown.config.load import parse_config
    from shakedown.data_sources import RowStream
    from shakedown.models.chat import encode_row
    from shakedown.models.huggingface import read_tokenizer

    load = Workload(steps=2, warmup=1, batch_size=4, micro_batch_size=2, longest=12)
    written = workload.write(tmp_path, load)
    tokenizer = read_tokenizer(written.model)
    stream = RowStream(
        str(tmp_path / "train.jsonl"),
        lambda row: encode_row(tokenizer, row),
        seed=workload.SEED,
    )

    encoded = json.loads(written.encoded.read_text())

    for row, ours in zip(encoded, stream.take(8), strict=True):
        ((start, end),) = ours.spans
        assert row["input_ids"] == ours.tokens
        assert row["labels"] == [-100] * start + ours.tokens[start:]
        assert end == len(ours.tokens)
    assert sum(written.tokens) == sum(len(row["input_ids"]) for row in encoded)
    assert 1.24e6 < written.parameters < 1.26e6
    assert parse_config(workload.stage_config(tmp_path, load, ranks=2)).stages["sft"].steps == 2


def test_a_grpo_stage_is_summed_up_behind_its_warm_up() -> None:
    evals = [{"sampled_accuracy": 0.5}, {"sampled_accuracy": 0.75}]

    level = grpo.summary(1, _grpo_rows(10), evals)

    assert (level.step_s, level.wait_s, level.update_s) == (4.0, 1.0, 0.25)
    assert level.idle_share == 0.25
    assert level.training_s == 30 * grpo.WARMUP + 4 * (10 - grpo.WARMUP)
    assert (level.accuracy_before, level.accuracy_after) == (0.5, 0.75)
    assert "| 1 | 4.00 | 1.00 | 2.00 | 0.50 | 0.25 | 25% |" in grpo.table([level])


@pytest.mark.parametrize(("steps", "evals"), [(grpo.WARMUP, 2), (10, 1)])
def test_a_grpo_stage_that_was_cut_off_is_not_summed_up(steps: int, evals: int) -> None:
    with pytest.raises(ValueError, match="too few"):
        grpo.summary(0, _grpo_rows(steps), [{"sampled_accuracy": 0.5}] * evals)


def test_each_level_is_the_demos_stage_but_for_level_and_steps() -> None:
    from shakedown.config.load import parse_config

    demo = grpo.demo()

    stage = parse_config(grpo.level_config(demo, 2, 7)).own_stages["grpo"]

    assert stage.grpo is not None
    assert (stage.grpo.async_level, stage.steps) == (2, 7)
    assert stage.batch_size == demo["stages"]["grpo"]["batch_size"]


def test_both_sides_train_on_equally_many_samples_with_the_same_settings(tmp_path: Path) -> None:
    from shakedown.config.load import parse_config

    stage = parse_config(grpo_trl.stage_config(1, 7, ranks=2)).own_stages["grpo"]
    plan = grpo_trl.trl_plan({"model": "m"}, tmp_path, 7, ranks=2, rollouts=None)

    own = stage.grpo
    assert own is not None
    assert (stage.allocation, stage.steps, stage.eval_samples, own.async_level) == (
        "fsdp:d2",
        7,
        0,
        1,
    )
    assert 2 * plan["batch_size"] == stage.batch_size * own.group_size
    assert plan["micro_batch_size"] == plan["batch_size"], "one forward pass, as without micro rows"
    assert stage.micro_batch_size is None
    assert plan["optimizer"]["lr"] == stage.optimizer.lr
    assert stage.optimizer.warmup_steps == 0
    assert (plan["epochs"], plan["max_tokens"]) == (own.epochs, own.max_tokens)
    assert plan["clip"] == [own.clip_low, own.clip_high]


def test_the_peers_prompts_have_the_order_in_which_the_stage_draws_them(tmp_path: Path) -> None:
    from shakedown.models.huggingface import read_tokenizer
    from shakedown.rollout.groups import draw, encode_prompts

    train_file = tmp_path / "train.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{i}="}], "answer": str(i)} for i in range(100)
    ]
    train_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_model(tmp_path / "model", seed=0)

    written = grpo_trl.write_prompts(tmp_path / "prompts.json", str(train_file), 2)

    prompts = encode_prompts(load_rows(str(train_file)), read_tokenizer(tmp_path / "model"))
    drawn = islice(draw(prompts, seed=grpo.demo()["seed"], start=0), 64)
    assert [row["answer"] for row in json.loads(written.read_text())] == [
        prompt.answer for prompt in drawn
    ]


def test_a_step_of_the_peer_ends_with_its_last_update_and_has_the_tokens_it_generated() -> None:
    plan = {"epochs": 2, "batch_size": 8}
    rows: list[dict[str, object]] = [
        {"logged": 1, "loss": "0.1", "completions/mean_length": 4.5, "reward": 0.25},
        {"logged": 2, "loss": "0.2"},
        {"logged": 3, "completions/mean_length": 5.0, "reward": 0.5},
        {"logged": 4, "train_runtime": 3.0},
    ]

    assert grpo_trl.of_grpo_steps([1.0, 2.0, 3.0, 4.0], plan) == [2.0, 4.0]
    assert grpo_trl.their_steps(rows, plan, ranks=2) == ([72.0, 80.0], [0.25, 0.5])


def test_recorded_samples_are_cut_into_prompt_and_answer() -> None:
    batch = _batch(groups=[3, 3, 1, 1])

    samples = grpo_trl.as_samples(batch)

    assert samples["prompt_ids"] == [[5, 6]] * 4
    assert samples["completion_ids"] == [[7, 8]] * 4
    assert samples["logprobs"] == [[-1.0, -2.0]] * 4
    assert samples["reward"] == [0.0, 1.0, 0.0, 1.0]


def test_samples_of_a_group_that_do_not_stand_together_are_refused() -> None:
    with pytest.raises(ValueError, match="beside each other"):
        grpo_trl.as_samples(_batch(groups=[3, 1, 3, 1]))


def _batch(groups: list[int]) -> RolloutBatch:
    tokens = np.array([[5, 6, 7, 8, 0]] * 4)
    mask = np.array([[False, False, True, True, False]] * 4)
    return RolloutBatch(
        step=1,
        versions=np.zeros(4, dtype=np.int64),
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.array([[0, 0, -1, -2, 0]] * 4, dtype=np.float32),
        rewards=np.array([0, 1, 0, 1], dtype=np.float32),
        groups=np.array(groups),
    )


@pytest.mark.parametrize(
    ("loss", "norm", "advantage", "told"),
    [
        (0.5, 2.0, 0.0, []),
        (0.51, 2.0, 0.0, ["losses on the same samples are 0.01 apart"]),
        (0.5, 2.1, 0.0, ["gradient norms on the same samples are 0.1 apart"]),
        (0.5, 2.0, 0.02, ["advantages of the same rewards are 0.02 apart"]),
    ],
)
def test_a_step_on_the_same_samples_that_comes_out_otherwise_is_told(
    loss: float, norm: float, advantage: float, told: list[str]
) -> None:
    found = grpo_trl.Agreement(512, grpo_trl.Sides(0.5, loss), grpo_trl.Sides(2.0, norm), advantage)

    assert found.faults() == told
    assert "same 512 samples: loss 0.500000 (ours)" in grpo_trl.said(found)


def test_grpo_runs_are_summed_up_by_their_medians_and_compared_by_level() -> None:
    runs = [
        grpo_trl.Run(tool, 1, speed, speed / 2, 1500.0, 2000.0, 0.4, 0.5, 30.0, "")
        for speed in (100.0, 120.0, 900.0)
        for tool in ("ours, async level 1", "TRL")
    ]

    assert "| 1 | TRL | 120 | 100 to 900 | 60 | 1.50 | 2000 | 0.400 | 0.500 |" in (
        grpo_trl.table(runs)
    )
    assert sft.ratios(runs, "ours, async level 1") == [
        "1 rank(s): ours, async level 1 trains 1.00 times TRL's tokens a second, "
        "1.00 times its tokens a CPU second"
    ]


def test_the_picture_is_svg_with_a_line_and_a_mean_a_curve() -> None:
    body = curves.picture({"a < b": [0.0, 0.5, 2.0], "c": [0.1, 0.2]}, x="step", y="reward")

    root = ET.fromstring(body)  # noqa: S314 - our own text

    lines = [e for e in root if e.tag.endswith("polyline")]
    assert len(lines) == 4
    assert "a < b" in [e.text for e in root]
    assert curves.smoothed([0.0, 1.0, 2.0], window=2) == [0.0, 0.5, 1.5]
    with pytest.raises(ValueError, match="two points"):
        curves.picture({"a": [1.0]}, x="step", y="reward")


def test_flops_follow_the_formula_and_peaks_the_devices_name() -> None:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 5}

    assert gpu.flops_per_token(shape, 1000, 7) == 6 * 1000 + 6 * 2 * 3 * 5 * 7
    assert gpu.peak_flops("NVIDIA H200") == 989e12
    assert gpu.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert gpu.peak_flops("CPU") is None


@pytest.mark.slow
def test_the_gpu_part_trains_a_tiny_shape_here_with_equal_first_losses() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--gpu", "--tiny", "--repeats", "1", "--steps", "4"]
        + ["--out", "/dev/null"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "| ours |" in done.stdout
    assert "| transformers |" in done.stdout


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--ranks", "3"], "must divide 32 rows"),
        (["--ranks", "0"], "must divide 32 rows"),
        (["--micro-batch-size", "0"], "must divide 32 rows"),
        (["--repeats", "0"], "at least 1"),
        (["--steps", "3"], "at least 4"),
        (["--grpo", "--steps", "3"], "at least 4"),
        (["--grpo", "--levels", "-1"], "from 0 on"),
        (["--grpo", "--peer", "--ranks", "3"], "must divide 512 samples"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_starts(
    given: list[str], words: str
) -> None:
    assert words in train._fault(train._parser().parse_args(given))


def test_a_peer_that_cannot_be_installed_is_told_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr(sys, "executable", "/bin/false")

    code, figures = train._sft(train._parser().parse_args([]), tmp_path)

    assert (code, figures) == (3, {})
    assert train.INSTALL in capsys.readouterr().err


def test_a_side_that_fails_is_a_fault_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    written = workload.Written(tmp_path, tmp_path, tmp_path, 1, [10, 10])

    run = sft.one_run("TRL", tmp_path, Workload(), written, ranks=2, peer=None)

    assert run.fault == f"exit code 1, see {tmp_path}/out.txt"


def test_a_stage_on_a_gpu_is_told_beside_its_plan_without_its_warm_up() -> None:
    moments = {"head": {"weights": 3e9, "logits": 1e9}, "end": {"weights": 3e9}}
    planned = {"moments": moments, "moment": "head", "mfu": 0.4, "tokens_per_second": 900.0}
    slow, steady = {"step_seconds": 90.0}, {"step_seconds": 4.0}
    more = {"tokens_per_second": 100.0, "wait_seconds": 2.0, "trained_tokens": 50.0, "mfu": 0.1}
    more |= {"sync_seconds": 0.5, "rollout_weight_update_seconds": 0.25, "memory_max_gb": 3.0}

    found = gpu_stages.summary("grpo", [slow | more, slow | more, steady | more], planned)

    assert (found.step_s, found.generated_per_s, found.publish_s) == (4.0, 25.0, 0.5)
    assert found.planned_gb == pytest.approx(4.0)
    assert found.peak_gb == pytest.approx(3.0 * 1.073741824)
    with pytest.raises(grpo.StageFailedError, match="too few"):
        gpu_stages.summary("grpo", [slow | more], planned)


def test_the_stages_of_one_gpu_are_a_config_that_is_taken(tmp_path: Path) -> None:
    body = gpu_stages.config_of(tmp_path, gpu_stages.Load(), "h200")

    # As the commands read it: over the demo's.
    config = load_config(
        grpo.CHECKOUT / "config" / "config.yaml", grpo.write_json(tmp_path / "gpu.yaml", body)
    )

    assert config.own_stages["grpo"].activation_checkpointing
    assert not config.own_stages["sft"].activation_checkpointing


def test_the_defaults_are_accepted_and_a_gpu_that_is_not_there_is_not() -> None:
    assert train._fault(train._parser().parse_args([])) == ""
    if not train._has_cuda():
        assert "no CUDA device" in train._fault(argparse.Namespace(**_gpu_arguments()))


def _gpu_arguments() -> dict[str, object]:
    return vars(train._parser().parse_args(["--gpu"]))
