"""The training benchmark's own parts: what it counts as a step, a token and a difference."""

import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import train
from training import curves, gpu, grpo, sft, workload
from training.workload import Workload

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
        lambda row: encode_row(tokenizer, row, longest=1000),
        seed=workload.SEED,
    )

    encoded = json.loads(written.encoded.read_text())

    for row, (tokens, trained) in zip(encoded, stream.take(8), strict=True):
        assert row["input_ids"] == tokens
        assert row["labels"] == [-100] * (len(tokens) - trained) + tokens[-trained:]
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
    import yaml

    from shakedown.config.load import parse_config

    demo = yaml.safe_load(grpo.CONFIG.read_text())

    stage = parse_config(grpo.level_config(demo, 2, 7)).own_stages["grpo"]

    assert stage.grpo is not None
    assert (stage.grpo.async_level, stage.steps) == (2, 7)
    assert stage.batch_size == demo["stages"]["grpo"]["batch_size"]


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


def test_the_defaults_are_accepted_and_a_gpu_that_is_not_there_is_not() -> None:
    assert train._fault(train._parser().parse_args([])) == ""
    if not train._has_cuda():
        assert "no CUDA device" in train._fault(argparse.Namespace(**_gpu_arguments()))


def _gpu_arguments() -> dict[str, object]:
    return vars(train._parser().parse_args(["--gpu"]))
