"""Our training runtime against TRL's trainers, on the same rows, turn by turn in one run.

    python benchmarks/train.py [--ranks 1 2] [--repeats 3] [--out FILE]      about 3 minutes
    python benchmarks/train.py --grpo [--levels 0 1 2] [--curves FILE.svg]   2 to 5 minutes a level
    python benchmarks/train.py --grpo --peer [--ranks 1 2] [--levels 0 1]    about 10 minutes
    python benchmarks/train.py --memory                                      5 to 10 minutes
    python benchmarks/train.py --gpu                                         one CUDA device
    python benchmarks/train.py --gpu --stages                                one CUDA device, vLLM

Without options: tokens a second of SFT on CPU ranks (a Qwen3 of 1.25M random parameters, float32,
one torch thread a rank); both sides must show the same losses. `--grpo`: where the time of a GRPO
step goes with a real vLLM server, and what is learned, at each async level; with `--peer` against
TRL's GRPOTrainer, which generates with transformers, and both on the same samples. `--memory`: what
a rank holds at 10M, 50M and 200M parameters, in bytes a parameter, and how fast rank 0 publishes
the weights. `--against main=../main/src` measures other checkouts beside this one, with `--memory`
and with `--grpo --peer`.
`--gpu`: tokens a second and MFU of a model of Qwen3-0.6B's shape in bfloat16, against plain
transformers; with `--stages` an SFT and a GRPO stage with a vLLM server on the same GPU, against
what `train --plan` predicts.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from training import curves, gpu, gpu_stages, grpo, grpo_trl, memory, sft
from training.workload import Workload

import shakedown
from shakedown.training.metrics.flops import known_gpu

PEER = "trl==1.16.0"
INSTALL = f"python -m pip install --no-deps {PEER}"


def main() -> int:
    arguments = _parser().parse_args()
    fault = _fault(arguments)
    if fault:
        print(fault, file=sys.stderr)
        return 2
    # Unwind on SIGTERM too: no rank must outlive this program.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    if arguments.gpu and arguments.stages:
        code, figures = _gpu_stages(arguments, folder)
    elif arguments.gpu:
        code, figures = _gpu(arguments)
    elif arguments.memory:
        code, figures = _memory(arguments, folder)
    elif arguments.grpo and arguments.peer:
        code, figures = _grpo_peer(arguments, folder)
    elif arguments.grpo:
        code, figures = _grpo(arguments, folder)
    else:
        code, figures = _sft(arguments, folder)
    out = arguments.out or folder.with_suffix(".json")
    out.write_text(json.dumps({**surroundings(), **figures}, indent=2) + "\n", encoding="utf-8")
    print(f"written: {out}")
    if code:
        print(f"left for a look: {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", nargs="+", type=int, default=[1, 2], metavar="N", help="numbers of ranks (1 2)")
    add("--repeats", type=int, default=3, help="runs of each side, turn by turn (3)")
    add("--steps", type=int, help="optimizer steps of a run (SFT 15, GRPO 40, GPU 10)")
    add("--micro-batch-size", type=int, default=8, help="rows of a forward pass, both sides (8)")
    add("--grpo", action="store_true", help="GRPO with a vLLM server instead")
    add("--levels", nargs="+", type=int, default=[0, 1, 2], metavar="K", help="async levels")
    add("--peer", action="store_true", help="with --grpo: against TRL's GRPOTrainer")
    add("--curves", type=Path, metavar="FILE", help="with --grpo: the reward curves as SVG")
    add("--memory", action="store_true", help="memory of a rank instead")
    add(
        "--against", nargs="+", type=_side, default=[], metavar="NAME=SRC", help="other src folders"
    )
    add("--allocations", nargs="+", default=["fsdp:d2", "fsdp:d4", "archon:d2p2"], metavar="A")
    sizes = [size.name for size in memory.SIZES]
    add("--sizes", nargs="+", choices=sizes, default=sizes, help="parameters, with --memory")
    add("--gpu", action="store_true", help="one CUDA device instead")
    add("--stages", action="store_true", help="with --gpu: whole stages, beside their plan")
    add("--tiny", action="store_true", help="with --gpu: a tiny shape, on a CPU too")
    add("--out", type=Path, metavar="FILE", help="JSON of all figures")
    return parser


def _side(given: str) -> tuple[str, Path]:
    name, _, folder = given.partition("=")
    if not (Path(folder) / "shakedown").is_dir():
        raise argparse.ArgumentTypeError(f"{given!r}: expected NAME=SRC of a checkout")
    return name, Path(folder).absolute()


def _fault(arguments: argparse.Namespace) -> str:
    """What is wrong with the arguments; empty when nothing is."""
    load = Workload()
    size, micro = load.batch_size, arguments.micro_batch_size
    bad = [n for n in arguments.ranks if n < 1 or micro < 1 or size % (n * micro)]
    if bad and not (arguments.grpo or arguments.gpu or arguments.memory):
        return f"--ranks {bad}: ranks x --micro-batch-size {micro} must divide {size} rows"
    samples = grpo_trl.samples_a_step()
    uneven = [n for n in arguments.ranks if n < 1 or samples % n]
    if uneven and arguments.grpo and arguments.peer:
        return f"--ranks {uneven}: ranks must divide {samples} samples"
    least = grpo.WARMUP + 1 if arguments.grpo else load.warmup + 1
    if arguments.repeats < 1 or (arguments.steps is not None and arguments.steps < least):
        return f"expected --repeats of at least 1 and --steps of at least {least}"
    if min(arguments.levels) < 0 or len(arguments.levels) > len(curves.COLOURS):
        return f"--levels {arguments.levels}: expected up to {len(curves.COLOURS)}, from 0 on"
    if arguments.gpu and not arguments.tiny and not _has_cuda():
        return "--gpu: torch sees no CUDA device; --gpu --tiny runs the same code on a CPU"
    return ""


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _sft(arguments: argparse.Namespace, folder: Path) -> tuple[int, Mapping[str, object]]:
    load = Workload(
        steps=arguments.steps or Workload.steps, micro_batch_size=arguments.micro_batch_size
    )
    try:
        peer = find_peer(folder / "peer")
    except subprocess.CalledProcessError:
        return _no_peer()
    runs, parameters = sft.measure(
        folder, load, ranks=arguments.ranks, repeats=arguments.repeats, peer=peer
    )
    faults = [run.fault for run in runs if run.fault] or sft.differences(runs)
    print(f"{parameters / 1e6:.2f}M parameters, {asdict(load)}", sft.table(runs), sep="\n")
    print(*sft.ratios(runs), *faults, sep="\n")
    figures = {"peer": peer_version(peer), "parameters": parameters, "workload": asdict(load)}
    return int(bool(faults)), {**figures, "faults": faults, "runs": [asdict(run) for run in runs]}


def _grpo(arguments: argparse.Namespace, folder: Path) -> tuple[int, Mapping[str, object]]:
    try:
        levels = grpo.measure(folder, levels=arguments.levels, steps=arguments.steps or 40)
    except grpo.StageFailedError as error:
        print(error, file=sys.stderr)
        return 1, {}
    print(grpo.table(levels))
    if arguments.curves:
        rewards = {f"async level {level.async_level}": level.rewards for level in levels}
        arguments.curves.write_text(
            curves.picture(rewards, x="GRPO step", y="mean reward"), encoding="utf-8"
        )
    return 0, {"levels": [asdict(level) for level in levels]}


def _grpo_peer(arguments: argparse.Namespace, folder: Path) -> tuple[int, Mapping[str, object]]:
    try:
        peer = find_peer(folder / "peer")
        runs, agreement = grpo_trl.measure(
            folder,
            ranks=arguments.ranks,
            levels=arguments.levels,
            steps=arguments.steps or 15,
            repeats=arguments.repeats,
            peer=peer,
            against=dict(arguments.against),
        )
    except subprocess.CalledProcessError:
        return _no_peer()
    except grpo.StageFailedError as error:
        print(error, file=sys.stderr)
        return 1, {}
    faults = [run.fault for run in runs if run.fault]
    print(grpo_trl.table(runs))
    for tool in dict.fromkeys(run.tool for run in runs if run.tool != "TRL"):
        print(*sft.ratios(runs, tool), sep="\n")
    if agreement:
        faults += agreement.faults()
        print(grpo_trl.said(agreement))
    print(*faults, sep="\n", end="\n" if faults else "")
    found = {"peer": peer_version(peer), "faults": faults, **grpo_trl.figures(runs, agreement)}
    return int(bool(faults)), found


def _no_peer() -> tuple[int, Mapping[str, object]]:
    print(f"TRL could not be installed; by hand: {INSTALL}", file=sys.stderr)
    return 3, {}


def _memory(arguments: argparse.Namespace, folder: Path) -> tuple[int, Mapping[str, object]]:
    sizes = [size for size in memory.SIZES if size.name in arguments.sizes]
    ours = Path(shakedown.__file__).parents[1]
    found = memory.measure(
        folder, {**dict(arguments.against), "ours": ours}, arguments.allocations, sizes
    )
    print(memory.table(found))
    return 0, {"memory": [asdict(one) for one in found]}


def _gpu(arguments: argparse.Namespace) -> tuple[int, Mapping[str, object]]:
    shape = gpu.Shape(gpu.TINY, 2, 16) if arguments.tiny else gpu.Shape(gpu.QWEN3_06B, 2, 4096)
    steps = arguments.steps or 10
    speeds = gpu.measure(shape, steps=steps, repeats=arguments.repeats)
    print(gpu.table(speeds))
    return 0, {"shape": asdict(shape), "speeds": [asdict(speed) for speed in speeds]}


def _gpu_stages(arguments: argparse.Namespace, folder: Path) -> tuple[int, Mapping[str, object]]:
    import torch

    name = torch.cuda.get_device_name() if _has_cuda() else ""
    load = (
        gpu_stages.TINY
        if arguments.tiny
        else gpu_stages.Load(steps=arguments.steps or gpu_stages.Load.steps)
    )
    try:
        stages = gpu_stages.measure(folder, load, known_gpu(name) or "")
    except grpo.StageFailedError as error:
        print(error, file=sys.stderr)
        return 1, {}
    print(name or "CPU", gpu_stages.table(stages), sep="\n")
    return 0, {"device": name, "load": asdict(load), "stages": [asdict(one) for one in stages]}


def find_peer(folder: Path) -> Path | None:
    """None where TRL is installed; else it is installed into `folder`, which only its runs see.

    Raises:
        subprocess.CalledProcessError: pip could not.
    """
    if importlib.util.find_spec("trl") is not None:
        return None
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", os.fspath(folder), PEER], check=True)
    return folder


def peer_version(folder: Path | None) -> str:
    """TRL's own word on its version."""
    places = sys.path if folder is None else [os.fspath(folder)]
    found = list(importlib.metadata.distributions(name="trl", path=places))
    return found[0].version if found else "unknown"


def surroundings() -> dict[str, object]:
    """What the figures depend on."""
    packages = ["torch", "transformers", "accelerate"]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "load": [round(value, 2) for value in os.getloadavg()],
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }


if __name__ == "__main__":
    sys.exit(main())
