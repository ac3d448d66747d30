"""Peak memory of a rank by number of parameters, and what of it grows by how many bytes for each.

Every measurement is a run of its own: `memory_rank.py` on each rank, of one source tree or another.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shakedown.cluster.allocation import parse_allocation
from shakedown.training.forecast.decoder import FLOAT32, read_decoder
from shakedown.training.forecast.trainer import Work, highest, total

RANK = Path(__file__).with_name("memory_rank.py")
# Resident bytes: after loading over those of the empty process; between two micro batches, and at
# most in forward and backward, over those between steps; between steps over those after loading.
KINDS = ("weights", "between micro batches", "peak of the step", "optimizer")
VOCABULARY = 4096
# Of a step; a row computes all of its tokens but the last.
ROWS, LENGTH, MICRO_BATCHES = 2, 17, 3


@dataclass(frozen=True)
class Size:
    """A Qwen3 `hidden` wide with tied embeddings; 13 x hidden^2 parameters a layer."""

    name: str
    hidden: int
    layers: int

    def config(self, vocabulary: int = VOCABULARY) -> dict[str, Any]:
        """What Qwen3Config takes."""
        heads = self.hidden // 64
        return {
            "vocab_size": vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": 64,
            "tie_word_embeddings": True,
        }


# Even numbers of layers, for two stages.
SIZES = (Size("10M", 320, 6), Size("50M", 640, 10), Size("200M", 1024, 14))
# Little but logits: 4,096 tokens of 65,536 words are 1 GiB of float32.
LOGITS = Size("logits", 64, 1)
LOGITS_TOKENS, LOGITS_VOCABULARY = 4096, 65_536


@dataclass(frozen=True)
class Memory:
    """Bytes by kind on the rank that held most.

    `source`: whose code ran. `tokens_vocabulary`: trained tokens of a micro batch x vocabulary.
    `publish`: of rank 0, the weights in float32: `seconds`, `bytes` of the files, `grew` by.
    """

    source: str
    allocation: str
    size: str
    parameters: int
    tokens_vocabulary: int
    kinds: Mapping[str, int]
    publish: Mapping[str, float]


def measure(
    folder: Path, sources: Mapping[str, Path], allocations: Sequence[str], sizes: Sequence[Size]
) -> list[Memory]:
    """Every source at every allocation and size, turn by turn; then the logits on one rank.

    Args:
        sources: the `src` folder of each side.
    """
    found: list[Memory] = []
    for size in sizes:
        parameters = _write(folder / "model", size.config())
        for allocation in allocations:
            for name, source in sources.items():
                kinds, published = _run(
                    folder,
                    source,
                    allocation,
                    rows=ROWS,
                    length=LENGTH,
                    micro_batches=MICRO_BATCHES,
                )
                one = Memory(name, allocation, size.name, parameters, 0, kinds, published)
                found.append(one)
                print(found[-1], file=sys.stderr, flush=True)
    parameters = _write(folder / "model", LOGITS.config(LOGITS_VOCABULARY))
    words = LOGITS_TOKENS * LOGITS_VOCABULARY
    for name, source in sources.items():
        rows, length = LOGITS_TOKENS // 256, 257
        kinds, published = _run(
            folder, source, "fsdp:d1", rows=rows, length=length, micro_batches=1
        )
        found.append(Memory(name, "fsdp:d1", LOGITS.name, parameters, words, kinds, published))
    return found


def predicted(
    size: Size,
    allocation: str,
    *,
    rows: int = ROWS,
    length: int = LENGTH - 1,
    micro_batches: int = MICRO_BATCHES,
    vocabulary: int = VOCABULARY,
) -> dict[str, int]:
    """What the plan of a stage says of a CPU rank, by the kinds of the measurement, and `total`.

    The process holds all of a moment at once, and gradients and what is gathered cannot be told
    apart from the rest of the peak.

    Args:
        length: tokens that a row computes.
    """
    part = parse_allocation(allocation).parts[0]
    model = read_decoder({"model_type": "qwen3", **size.config(vocabulary)}, size.name)
    work = Work(
        part.backend,
        d=part.size("d"),
        t=part.size("t"),
        p=part.size("p"),
        size=FLOAT32,
        rows=rows,
        length=length,
        trained=length,
        micro_batches=micro_batches,
        gpu=False,
    )
    top = max(highest(model, work).values(), key=total)
    kept = {kind: top[kind] for kind in ("weights", "optimizer")}
    return {**kept, "peak of the step": total(top) - sum(kept.values()), "total": total(top)}


def table(found: Sequence[Memory]) -> str:
    """A Markdown table in MiB, with the slope of each kind in bytes a parameter."""
    rows = [["allocation", "code", "kind", *(size.name for size in SIZES), "bytes a parameter"]]
    rows.append(["---"] * len(rows[0]))
    sized = [one for one in found if one.size != LOGITS.name]
    for allocation, source in dict.fromkeys((one.allocation, one.source) for one in sized):
        here = [one for one in sized if (one.allocation, one.source) == (allocation, source)]
        for kind in KINDS:
            values = [one.kinds[kind] for one in here]
            slope = f"{_slope([one.parameters for one in here], values):.2f}"
            by_size = {one.size: f"{one.kinds[kind] / 2**20:.0f}" for one in here}
            cells = [by_size.get(size.name, "") for size in SIZES]
            rows.append([allocation, source, kind, *cells, slope])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", *_against_the_plan(sized), "", *_published(sized)]
    for one in found:
        if one.size == LOGITS.name:
            times = one.kinds["peak of the step"] / (4 * one.tokens_vocabulary)
            lines.append(f"{one.source}: logits, {times:.2f} times float32 [tokens, vocabulary]")
    return "\n".join(lines)


def _against_the_plan(found: Sequence[Memory]) -> list[str]:
    lines = [
        "| allocation | size | predicted MiB | measured | predicted less by |",
        "| --- " * 5 + "|",
    ]
    sizes = {size.name: size for size in SIZES}
    for one in found:
        plan = predicted(sizes[one.size], one.allocation)["total"]
        held = sum(one.kinds[kind] for kind in KINDS if kind != "between micro batches")
        share = f"{1 - plan / held:.1%}"
        cells = [one.allocation, one.size, f"{plan / 2**20:.0f}", f"{held / 2**20:.0f}", share]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _published(found: Sequence[Memory]) -> list[str]:
    lines = ["| allocation | code | size | published MB/s | seconds | rank 0 grew by MiB |"]
    lines.append("| --- " * 6 + "|")
    for one in found:
        told, name = one.publish, f"{one.allocation} | {one.source} | {one.size}"
        speed, grew = told["bytes"] / told["seconds"] / 1e6, told["grew"] / 2**20
        lines.append(f"| {name} | {speed:.0f} | {told['seconds']:.2f} | {grew:.0f} |")
    return lines


def _slope(x: Sequence[int], y: Sequence[int]) -> float:
    """Between the two largest models: a small one is one unit, with a slope of its own."""
    return (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 0.0


def _write(folder: Path, config: Mapping[str, Any]) -> int:
    """Random weights with the demo's tokenizer, which engines read; the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from shakedown.training.demo import write_model

    write_model(folder, seed=0)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**config))
    model.save_pretrained(folder)
    return sum(weights.numel() for weights in model.parameters())


def _run(
    folder: Path, source: Path, allocation: str, *, rows: int, length: int, micro_batches: int
) -> tuple[Mapping[str, int], Mapping[str, float]]:
    """Bytes by kind of the rank that held most, and rank 0's publishing.

    Raises:
        RuntimeError: a rank failed; its standard error has been shown.
    """
    plan = {
        "model": str(folder / "model"),
        "allocation": allocation,
        "rows": rows,
        "length": length,
        "micro_batches": micro_batches,
    }
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    ranks, port = parse_allocation(allocation).gpus, _free_port()
    running = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(folder)],
            env=_environment(source, rank, ranks, port),
            stdout=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait(600) for process in running]
    finally:  # the others of a rank that failed wait for it
        for process in running:
            process.kill()
    if any(codes):
        raise RuntimeError(f"{allocation} of {source} ended with {codes}")
    held = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    most: Mapping[str, int] = max(
        (one["kinds"] for one in held),
        key=lambda kinds: kinds["weights"] + kinds["optimizer"] + kinds["peak of the step"],
    )
    return most, held[0]["publish"]


def _environment(source: Path, rank: int, ranks: int, port: int) -> dict[str, str]:
    """One thread and one arena, and every tensor of some size mapped on its own: what is freed then
    leaves the resident memory at once. From 1 MiB on was too much: with tensor parallelism many
    activations are smaller, and the heap kept 130 MiB of what they had freed.
    """
    return {
        **os.environ,
        "PYTHONPATH": os.fspath(source),
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "32768",
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
