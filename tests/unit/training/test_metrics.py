"""Where a step's time goes, what a model's FLOPs are, and the table that shows it: pure parts."""

from types import SimpleNamespace

import pytest

from shakedown.training.metrics.flops import DecoderShape, peak_flops, shape_of, utilisation
from shakedown.training.metrics.meter import busy_seconds, resident_peak, time_columns
from shakedown.training.metrics.phases import Lap, Phases
from shakedown.training.metrics.table import COLUMNS, HEADER_EVERY, ProgressTable, fitting

QWEN3_8B = SimpleNamespace(
    model_type="qwen3",
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
)


class HandClock:
    """Seconds that a test moves by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def phases(clock: HandClock) -> Phases:
    return Phases(clock)


def test_a_phase_inside_another_one_stops_the_outer_one(clock: HandClock, phases: Phases) -> None:
    clock.now += 1
    with phases("train"):
        clock.now += 2
        with phases("sync"):
            clock.now += 4
        clock.now += 8
    clock.now += 16

    lap = phases.take()

    assert lap == Lap(31.0, {"train": 10.0, "sync": 4.0})
    assert phases.take() == Lap(0.0, {})


def test_a_phase_that_raises_is_charged_and_left(clock: HandClock, phases: Phases) -> None:
    def fail() -> None:
        clock.now += 2
        raise KeyError

    with pytest.raises(KeyError), phases("train"):
        fail()
    clock.now += 5

    assert phases.take() == Lap(7.0, {"train": 2.0})


def test_calls_of_a_followed_object_are_charged_also_when_the_lap_ends_inside(
    clock: HandClock, phases: Phases
) -> None:
    class Engine:
        def step(self, norm: float) -> float:
            clock.now += 3
            laps.append(phases.take())
            clock.now += 1
            return norm

    laps: list[Lap] = []
    engine = Engine()
    phases.follow(engine, step="optimizer")

    assert engine.step(0.5) == 0.5
    assert laps == [Lap(3.0, {"optimizer": 3.0})]
    assert phases.take() == Lap(1.0, {"optimizer": 1.0})


def test_seconds_of_all_phases_add_up_to_the_step_and_speed_leaves_out_what_is_no_training() -> (
    None
):
    lap = Lap(10.0, {"forward_backward": 3.0, "optimizer": 0.5, "checkpoint": 4.0, "eval": 1.0})

    columns = time_columns(lap, {"wait_seconds": 0.25, "tokens": 1000.0, "loss": 1.0})

    parts = [v for k, v in columns.items() if k.endswith("_seconds") and k != "step_seconds"]
    assert sum(parts) == columns["step_seconds"] == 10.0
    assert columns["other_seconds"] == 1.25
    assert busy_seconds(columns) == 5.0
    assert columns["tokens_per_second"] == 200.0


def test_peak_memory_is_read_from_the_process_status() -> None:
    assert resident_peak("Name:\tpython\nVmPeak:\t 9 kB\nVmHWM:\t 2097152 kB\n") == 2.0
    assert resident_peak("Name:\tpython\n") == 0.0


def test_qwen3_8b_has_the_parameters_and_flops_that_a_pencil_gives() -> None:
    # A layer: q and o 4096 x 4096, k and v 4096 x 1024, three matrices of 4096 x 12288.
    layer = 2 * 16_777_216 + 2 * 4_194_304 + 3 * 50_331_648
    head = 4096 * 151_936

    shape = shape_of(QWEN3_8B)

    assert shape == DecoderShape(36 * layer + head, layers=36, heads=32, head_size=128)
    assert shape.parameters == 7_568_097_280
    # 12 x 36 x 32 x 128 x 4096 = 7.248e9 operations of attention a token.
    assert shape.flops_per_token(4096) == 6 * 7_568_097_280 + 7_247_757_312


def test_a_head_size_that_is_not_told_is_the_share_of_the_hidden_size() -> None:
    config = SimpleNamespace(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=None,
        intermediate_size=100,
        vocab_size=10,
    )

    assert shape_of(config) == DecoderShape(2 * (4 * 64 * 64 + 3 * 64 * 100) + 640, 2, 4, 16)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt2", ""])
def test_a_model_of_another_build_has_no_shape(kind: str) -> None:
    assert shape_of(SimpleNamespace(**{**vars(QWEN3_8B), "model_type": kind})) is None


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989.4e12),
        ("NVIDIA H200 NVL", "bfloat16", 835.5e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
        ("NVIDIA L40S", "bfloat16", 362.05e12),
        ("NVIDIA A10", "bfloat16", 125e12),
        ("NVIDIA GB200", "bfloat16", 2500e12),
        ("NVIDIA A10G", "bfloat16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("NVIDIA H200", "float8", None),
        ("", "bfloat16", None),
    ],
)
def test_a_gpu_is_known_by_the_name_that_torch_gives(
    name: str, dtype: str, peak: float | None
) -> None:
    assert peak_flops(name, dtype) == peak


def test_utilisation_is_the_share_of_what_all_gpus_could_do() -> None:
    shape = DecoderShape(1_000_000_000, layers=10, heads=8, head_size=128)
    # 6e9 + 12 x 10 x 8 x 128 x 1000 = 6.12288e9 a token; 8000 tokens in 0.5 s on 2 x 100 TFLOP/s.
    expected = 8000 * 6.12288e9 / (0.5 * 2e14)

    found = utilisation(shape, tokens=8000, sequences=8, seconds=0.5, peak=2e14)

    assert found == pytest.approx(expected)
    assert utilisation(shape, tokens=0, sequences=8, seconds=0.5, peak=2e14) == 0.0


def row(step: int, **more: float) -> dict[str, float]:
    base = {"step": step, "loss": 0.43, "lr": 2e-4, "grad_norm": 1.5, "tokens_per_second": 2500.0}
    return {**base, "step_seconds": 0.5, "wait_seconds": 0.2, "sync_seconds": 0.0, **more}


def test_a_progress_line_begins_with_the_step_and_stands_below_its_titles(clock: HandClock) -> None:
    header, line = ProgressTable(150, width=120, clock=clock).lines(row(1, reward_mean=0.5))

    assert line.startswith("step 1/150 ")
    for title, cell in {"loss": "0.43", "reward": "0.500", "tok/s": "2500", "wait": "0.20"}.items():
        end = header.index(f" {title}") + len(title) + 1
        assert line[:end].endswith(f" {cell}"), (header, line)
    assert "sync" not in header, "nothing was ever synchronised"


def test_the_header_comes_again_after_twenty_lines_and_with_another_column(
    clock: HandClock,
) -> None:
    table = ProgressTable(1000, width=120, clock=clock)
    headers = []
    for step in range(1, 46):
        clock.now += 100
        more = {"checkpoint_seconds": 2.0} if step == 44 else {}
        if len(table.lines(row(step, **more))) == 2:
            headers.append(step)

    assert headers == [1, 1 + HEADER_EVERY, 1 + 2 * HEADER_EVERY, 44]


def test_a_long_run_says_less_but_always_its_first_and_last_step(clock: HandClock) -> None:
    table = ProgressTable(20_000, width=120, clock=clock)
    said = []
    for step in range(1, 20_001):
        if table.lines(row(step)):
            said.append(step)
        clock.now += 1

    assert said[:3] == [1, 3, 5]
    assert said[-2] - said[-3] == 60
    assert said[-1] == 20_000


@pytest.mark.parametrize("width", [200, 120, 80, 40, 0])
def test_a_narrow_terminal_loses_the_least_important_columns(width: int, clock: HandClock) -> None:
    full = {column.key: 1.0 for column in COLUMNS}
    lines = ProgressTable(150, width=width, clock=clock).lines({**full, "step": 1})

    assert all(len(line) <= max(width, len("step 150/150")) for line in lines)
    shown = [column.title for column in fitting(COLUMNS, width)]
    assert ("other" in shown) == (width == 200)
    assert ("loss" in shown) == (width >= 40)


def test_the_width_is_that_of_the_terminal_which_the_supervisor_told(
    clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")

    lines = ProgressTable(150, clock=clock).lines(row(1))

    assert max(map(len, lines)) <= 60 - len("[trainer-rank0] ")
