"""Comparing trainer and engine: our `compare` beside one prompt at a time, and memory to 1M tokens.

    python benchmarks/consistency.py [--rows 256] [--repeats 3]      about 12 minutes
    python benchmarks/consistency.py --quick                         half a minute, no vLLM

Speed: a vLLM server with the demo's model, prompts with answers, 16 tokens each. The peer does what
AReaL's examples/docs/debug/cmp_rollout.py does, on text: for each prompt one greedy generation by
transformers, one greedy request to the server, both answers judged. Ours is all of `shakedown
compare`: sampled and greedy answers of the server scored by transformers, scored by the server
once more, judged, the same prompts completed by transformers, intervals, tables. Models are loaded
before the clock runs, both sides run turn by turn, each after a round that is not counted, on one
torch thread. `tokens`: of the server, held against transformers.

Memory: the whole comparison of so many tokens in a process of its own, against a server on this
machine that answers by a script: prompts of 8 tokens, answers of 64, no reward.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from _http_server import serve
from transformers import AutoModelForCausalLM, AutoTokenizer

from shakedown.agents.rewards import get_reward
from shakedown.cluster.nodes import free_port
from shakedown.consistency.plan import ComparisonPlan
from shakedown.consistency.run import compare
from shakedown.consistency.server import ComparedServer, OwnServer, open_server
from shakedown.inference.auth import bearer
from shakedown.models.huggingface import quiet
from shakedown.training.demo import addition_rows, write_model

ANSWER = 16  # tokens, as cmp_rollout asks for
LONG = 64  # tokens of an answer where memory is measured
_REWARD = "exact_match"
_SCRIPTED = 20  # the token that the scripted server always writes
_LOGPROB = -4.5


@dataclass(frozen=True)
class Run:
    """One comparison: seconds without loading, tokens of the server that were compared."""

    seconds: float
    tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables."""
    arguments = _parser().parse_args(argv)
    quiet()
    # On cores that others use too, more threads wait for each other: ten times slower was seen.
    torch.set_num_threads(1)
    if arguments.memory_of:
        url, model, tokens = arguments.memory_of
        print(json.dumps(_memory(url, Path(model), int(tokens))))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        write_model(folder / "model", seed=0)
        with scripted_engine() as scripted:
            if arguments.quick:
                _print_speed(folder, scripted, rows=8, repeats=1)
                _print_memory(folder, scripted.url, [1_000, 4_000])
                return 0
            own = OwnServer(folder / "server", say=lambda line: print(line, file=sys.stderr))
            with open_server(f"vllm:{folder / 'model'}", own) as server:
                _print_speed(folder, server, rows=arguments.rows, repeats=arguments.repeats)
            _print_memory(folder, scripted.url, arguments.tokens)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=int, default=256, help="prompts of a run (256)")
    add("--repeats", type=int, default=3, help="runs of each side; the median counts (3)")
    add("--tokens", type=int, nargs="+", default=[10_000, 100_000, 300_000, 1_000_000], metavar="N")
    add("--quick", action="store_true", help="small sizes against the scripted server alone")
    add("--memory-of", nargs=3, help=argparse.SUPPRESS, metavar=("URL", "MODEL", "TOKENS"))
    return parser


def _print_speed(folder: Path, server: ComparedServer, *, rows: int, repeats: int) -> None:
    prompts, _ = addition_rows(train_size=rows, heldout_size=0, seed=0)
    model = folder / "model"
    sides: dict[str, Callable[[], Run]] = {
        "one at a time (cmp_rollout)": one_at_a_time(model, server, prompts),
        "shakedown compare": whole_comparison(model, server, prompts, folder / "compared"),
    }
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            run = side()
            if turn:
                runs[name].append(run)
    print("| prompts | side | seconds | tokens | tokens a second | prompts a second |")
    print("|--:|---|--:|--:|--:|--:|")
    for name, found in runs.items():
        seconds = statistics.median(run.seconds for run in found)
        tokens = statistics.median(run.tokens for run in found)
        print(
            f"| {rows} | {name} | {seconds:.2f} | {tokens:.0f} | {tokens / seconds:.0f} "
            f"| {rows / seconds:.1f} |",
            flush=True,
        )


def one_at_a_time(
    model: Path, server: ComparedServer, rows: Sequence[Mapping[str, Any]]
) -> Callable[[], Run]:
    """The peer's loop; the connection to the server is kept, which it does not do."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    reward = get_reward(_REWARD)

    def run() -> Run:
        tokens, began = 0, time.perf_counter()
        with httpx.Client(timeout=60.0, headers=bearer(server.api_key)) as client:
            for row in rows:
                given = tokenizer.apply_chat_template(
                    row["messages"],
                    add_generation_prompt=True,
                    return_dict=True,
                    return_tensors="pt",
                )
                with torch.inference_mode():
                    out = loaded.generate(**given, max_new_tokens=ANSWER, do_sample=False)
                own = tokenizer.decode(
                    out[0][given["input_ids"].shape[-1] :], skip_special_tokens=True
                )
                body = {
                    "model": server.model or "policy",
                    "prompt": given["input_ids"][0].tolist(),
                    "temperature": 0,
                    "max_tokens": ANSWER,
                    "return_token_ids": True,
                }
                reply = client.post(f"{server.url}/v1/completions", json=body)
                ids = reply.raise_for_status().json()["choices"][0]["token_ids"]
                theirs = tokenizer.decode(ids, skip_special_tokens=True)
                for text in (own, theirs):
                    reward(text, row["answer"])
                tokens += len(ids)
        return Run(time.perf_counter() - began, tokens)

    return run


def whole_comparison(
    model: Path, server: ComparedServer, rows: Sequence[Mapping[str, Any]], out: Path
) -> Callable[[], Run]:
    """Ours; sampled and greedy tokens count, as both are held against transformers."""
    reward = get_reward(_REWARD)

    def judge(given: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[float | None]:
        return [float(reward(text, answer)) for text, answer, _ in given]

    def run() -> Run:
        plan = ComparisonPlan(
            url=server.url,
            model=server.model,
            api_key=server.api_key,
            reference=str(model),
            rows=rows,
            max_tokens=ANSWER,
            reward=judge,
            reward_name=_REWARD,
        )
        began = time.perf_counter()
        result = compare(plan, out)
        seconds = time.perf_counter() - began - result.seconds["load"]
        return Run(seconds, result.tokens + _greedy_tokens(out))

    return run


def _greedy_tokens(out: Path) -> int:
    import pyarrow.parquet as pq

    column = pq.read_table(out / "samples.parquet", columns=["greedy_token_ids"])
    return sum(len(ids) for ids in column["greedy_token_ids"].to_pylist())


def _print_memory(folder: Path, url: str, sizes: Sequence[int]) -> None:
    print("\n| tokens | seconds | peak MB | of it while comparing |")
    print("|--:|--:|--:|--:|")
    for size in sizes:
        command = [sys.executable, __file__, "--memory-of", url, str(folder / "model"), str(size)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {found['tokens']:,} | {found['seconds']:.0f} | {found['peak']:.0f} "
            f"| {found['peak'] - found['loaded']:.0f} |",
            flush=True,
        )


def _memory(url: str, model: Path, tokens: int) -> dict[str, float]:
    """The comparison of so many tokens in this process; memory in MB (10^6 bytes)."""
    rows = [{"prompt": f"{number % 10_000:07d}"} for number in range(-(-tokens // LONG))]
    with tempfile.TemporaryDirectory(prefix="bench-") as out:
        plan = ComparisonPlan(url=url, reference=str(model), rows=rows, max_tokens=LONG)
        # All is imported and loaded once, so that what then grows is the comparison's.
        small = ComparisonPlan(url=url, reference=str(model), rows=rows[:4], max_tokens=LONG)
        compare(small, Path(out) / "small")
        loaded, began = _peak(), time.perf_counter()
        result = compare(plan, Path(out) / "whole")
        seconds = time.perf_counter() - began
    return {"tokens": result.tokens, "seconds": seconds, "peak": _peak(), "loaded": loaded}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


@contextmanager
def scripted_engine() -> Iterator[ComparedServer]:
    """A server process that speaks vLLM's protocol and always writes the same token."""
    port = free_port()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(port, _answer), daemon=True)
    process.start()
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url)
        yield ComparedServer(url)
    finally:
        process.terminate()
        process.join()


def _wait(url: str) -> None:
    for _ in range(600):
        try:
            httpx.get(f"{url}/v1/models")
        except httpx.HTTPError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"the scripted server does not answer at {url}")


_MODELS = {"data": [{"id": "policy", "owned_by": "vllm"}]}


def _reply(body: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's answer to completions and chat completions, with token ids."""
    count = body.get("max_tokens", 0)
    ids, values = [_SCRIPTED] * count, [_LOGPROB] * count
    choice: dict[str, Any] = {"index": 0, "token_ids": ids, "finish_reason": "length"}
    if "messages" in body:
        choice |= {"message": {"content": "5" * count}}
        choice |= {"logprobs": {"content": [{"logprob": value} for value in values]}}
    else:
        choice |= {"text": "5" * count, "logprobs": {"token_logprobs": values}}
    if "prompt_logprobs" in body:
        scored = [{str(token): {"logprob": _LOGPROB}} for token in body["prompt"][1:]]
        choice["prompt_logprobs"] = [None, *scored]
    return {"choices": [choice], "usage": {}}


def _answer(sent: bytes) -> bytes:
    body = json.loads(sent or b"{}")
    return json.dumps(_reply(body) if body else _MODELS).encode()


if __name__ == "__main__":
    sys.exit(main())
