"""Differences planted between a real vLLM and transformers, and what compare must say of each.

The truth of each was written before its first run: the statuses that are right, what the verdict
must name, and that it names no other cause.
"""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consistency_models import write_variant
from consistency_relay import logprobs_of, relayed

from shakedown.consistency.compare import METRICS
from shakedown.core.verdict import Verdict, read_verdict
from shakedown.inference.client import Client
from shakedown.inference.engines import LaunchSpec, get_token_engine
from shakedown.inference.folder import Endpoint, ServerOrder
from shakedown.inference.server import start, stop
from shakedown.training.demo import addition_rows, write_rows

_PATIENCE = 400.0  # seconds
# Consequences of a difference, whatever its cause.
_EFFECTS = frozenset({*METRICS, "greedy_divergence_rate", "greedy_divergence", "greedy"})


class NotPlantedError(Exception):
    """The trouble itself could not be made, or was not met as it must be."""


@dataclass(frozen=True)
class Serving:
    """The server that a case needs; cases of one share it."""

    variant: str = "base"
    dtype: str = "float32"
    logprobs: str = "processed"


@dataclass
class Site:
    """One running server, and folders."""

    root: Path
    serving: Serving
    endpoint: Endpoint

    def load(self, variant: str, *, reset: bool = True) -> None:
        """Load a variant's weights into the server; `reset`: and empty its prefix cache."""

        async def work() -> None:
            engine = get_token_engine("vllm")
            name, key = self.endpoint.served_name, self.endpoint.api_key()
            url = self.endpoint.base_url
            async with Client(engine, url, name, api_key=key, timeout=60.0) as client:
                requests = engine.update_weights(str(write_variant(self.root, variant)))
                for request in requests if reset else requests[:1]:
                    await client.send(request)

        asyncio.run(work())

    def again(self) -> None:
        """Start the server anew, at another port."""
        stop(self.root / "server", say=_quiet)
        self.endpoint = _started(self.root, self.serving)


@contextmanager
def site(root: Path, serving: Serving) -> Iterator[Site]:
    """A server of that kind, ended at the end."""
    try:
        yield Site(root, serving, _started(root, serving))
    finally:
        stop(root / "server", say=_quiet)


# --- troubles: each yields the URL that is compared


@contextmanager
def nothing(place: Site) -> Iterator[str]:
    yield place.endpoint.base_url


@contextmanager
def stale_cache(place: Site) -> Iterator[str]:
    """The cache is filled by a comparison with the old weights; then others are loaded."""
    before = CASES["the same long prompts, before any update"]
    filled = compared(place, before, place.endpoint.base_url)
    if filled.status != "PASS":
        raise NotPlantedError(f"the cache could not be filled: {filled.summary}")
    place.load("other", reset=False)
    try:
        yield place.endpoint.base_url
    finally:
        place.load("base")


@contextmanager
def loaded_since(place: Site) -> Iterator[str]:
    place.load("one tensor")
    try:
        yield place.endpoint.base_url
    finally:
        place.load("base")


@contextmanager
def above_zero(place: Site) -> Iterator[str]:
    def spoil(number: int, reply: Any) -> None:
        for row in logprobs_of(reply)[:1] if number % 4 == 0 else []:
            row["logprob"] = abs(row["logprob"]) + 0.5

    with relayed(place.endpoint.base_url, spoil) as url:
        yield url


@contextmanager
def silent_tokens(place: Site) -> Iterator[str]:
    def spoil(number: int, reply: Any) -> None:
        for row in logprobs_of(reply)[1:2] if number % 4 == 0 else []:
            row["logprob"] = None

    with relayed(place.endpoint.base_url, spoil) as url:
        yield url


@contextmanager
def cut_answers(place: Site) -> Iterator[str]:
    def spoil(number: int, reply: Any) -> None:
        if number % 4 == 0 and logprobs_of(reply):
            del reply["choices"][0]["logprobs"]["content"][-2:]

    with relayed(place.endpoint.base_url, spoil) as url:
        yield url


@contextmanager
def changed_in_run(place: Site) -> Iterator[str]:
    """Other weights come once the engine has scored the samples that it made."""
    rows = len(_rows(place.root, "short").read_text().splitlines())

    def spoil(number: int, _reply: Any) -> None:
        # Sampled, greedy, and the engine's scores of the sampled tokens.
        if number == 3 * rows:
            place.load("one tensor")

    with relayed(place.endpoint.base_url, spoil) as url:
        yield url
    place.load("base")


@contextmanager
def resumed(place: Site) -> Iterator[str]:
    """The server is killed in the middle of a comparison, which must be UNKNOWN; then started."""
    case = CASES["the server dies in the middle, and is back"]
    out = place.root / "out" / case.name.replace(" ", "-")
    running = subprocess.Popen(
        _command(place, case, place.endpoint.base_url, out),
        env=_environment(place),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _wait_for(lambda: _answered(out) >= 8, running)
    os.kill(place.endpoint.pid, 9)
    running.wait(_PATIENCE)
    verdict = read_verdict(out / "verdict.json")
    if verdict.status != "UNKNOWN" or not _answered(out):
        raise NotPlantedError(f"killed server: {verdict.status}, {verdict.summary}")
    place.again()
    yield place.endpoint.base_url


# --- cases


@dataclass(frozen=True)
class Case:
    """A difference and its truth.

    Attributes:
        status: statuses that are right.
        named: each must stand in what the verdict names (see `told`) or in its summary; other
            checks may not.
        reference: the variant that transformers has.
        data: which prompts, see `_rows`.
    """

    name: str
    status: Sequence[str]
    named: Sequence[str] = ()
    serving: Serving = field(default_factory=Serving)
    reference: str = "base"
    data: str = "short"
    options: Mapping[str, str] = field(default_factory=dict)
    trouble: Callable[[Site], AbstractContextManager[str]] = nothing

    def others(self, verdict: Verdict) -> list[str]:
        """Causes that the verdict names and that are none."""
        mine = {each.split(":")[0] for each in self.named}
        return [line for line in told(verdict) if line.split(":")[0] not in mine]

    def is_right(self, verdict: Verdict) -> bool:
        said = "\n".join([*told(verdict), verdict.summary])
        found = all(name in said for name in self.named)
        return verdict.status in self.status and found and not self.others(verdict)


_FAIL = ("FAIL",)
# Of a few tokens a small difference may stay within the limits that fail.
_SEEN = ("FAIL", "WARN")

CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("identical sides", ("PASS",)),
        Case("the same long prompts, before any update", ("PASS",), data="long"),
        Case(
            "one tensor of one layer 5 % off in the engine",
            _FAIL,
            ("factor_weights", "layer: model.layers.1", "1.05 times the reference's"),
            serving=Serving("one tensor"),
        ),
        Case(
            "output embeddings untied and 5 % off in the reference",
            _FAIL,
            ("factor_weights", "layer: lm_head"),
            reference="head",
        ),
        Case("embeddings untied, the same numbers", ("PASS",), reference="untied"),
        Case(
            "the server holds the checkpoint before the last update",
            _SEEN,
            ("factor_weights", "layer: weights", "another checkpoint"),
            reference="updated",
        ),
        Case(
            "another layer loaded behind the same files",
            _FAIL,
            ("no measured factor explains it", "cannot be read"),
            trouble=loaded_since,
        ),
        Case(
            "weights change during the comparison",
            _FAIL,
            ("factor_weights_in_run", "weights_in_run: scored"),
            trouble=changed_in_run,
        ),
        Case(
            "prefix cache of the old weights after an update",
            _FAIL,
            ("factor_prefix_cache",),
            # The server still names the folder that it was started with.
            reference="other",
            data="long",
            trouble=stale_cache,
        ),
        Case(
            "another rope theta in the reference's config.json",
            _SEEN,
            ("factor_config", "rope_theta"),
            reference="rope",
        ),
        Case(
            "another rms eps in the engine's config.json",
            _SEEN,
            ("factor_config", "rms_norm_eps"),
            serving=Serving("eps"),
        ),
        Case(
            "bfloat16 engine, float32 reference",
            ("WARN",),
            ("factor_precision",),
            serving=Serving("wide", dtype="bfloat16"),
            reference="wide",
        ),
        Case(
            "raw log-probabilities at temperature 0.7",
            _FAIL,
            ("factor_temperature",),
            serving=Serving(logprobs="raw"),
            options={"--temperature": "0.7"},
        ),
        Case("another chat template", _FAIL, ("prompt_ids: template",), reference="template"),
        Case("double BOS", _FAIL, ("prompt_ids: special tokens",), reference="double bos"),
        Case("special tokens dropped", _FAIL, ("prompt_ids: special tokens",), reference="no bos"),
        Case("added tokens", _FAIL, ("prompt_ids: tokenizer",), reference="added tokens"),
        Case(
            "log-probabilities above 0 from a proxy", _FAIL, ("bad_logprobs",), trouble=above_zero
        ),
        Case(
            "answers without some values", ("WARN",), ("missing_logprobs",), trouble=silent_tokens
        ),
        Case("answers cut short by a proxy", ("WARN",), ("requests",), trouble=cut_answers),
        Case("the server dies in the middle, and is back", ("PASS",), data="many", trouble=resumed),
    )
}


def told(verdict: Verdict) -> list[str]:
    """What the verdict names beside the metrics: `check: subject` or, of prompts, their kind."""
    lines = []
    for finding in verdict.findings:
        if finding.status in ("pass", "skip") or finding.check in _EFFECTS:
            continue
        what = finding.measured if finding.check == "prompt_ids" else finding.subject
        lines.append(f"{finding.check}: {what}")
    return lines


def compared(place: Site, case: Case, url: str) -> Verdict:
    """Run `shakedown compare` in a process of its own."""
    out = place.root / "out" / case.name.replace(" ", "-")
    subprocess.run(
        _command(place, case, url, out),
        env=_environment(place),
        check=False,
        timeout=_PATIENCE,
        capture_output=True,
    )
    return read_verdict(out / "verdict.json")


def _command(place: Site, case: Case, url: str, out: Path) -> list[str]:
    reference = write_variant(place.root, case.reference)
    words = [sys.executable, "-m", "shakedown.cli", "compare", "--engine", url]
    words += ["--reference", f"transformers:{reference}", "--out", str(out)]
    words += ["--data", str(_rows(place.root, case.data)), "--dtype", "float32"]
    words += ["--engine-dtype", place.serving.dtype, "--max-tokens", "24"]
    # A server that is killed must have something left to do.
    words += ["--concurrency", "2" if case.data == "many" else "16"]
    return [*words, *(word for pair in case.options.items() for word in pair)]


def _environment(place: Site) -> dict[str, str]:
    return {**os.environ, "OPENAI_API_KEY": place.endpoint.api_key(), "OMP_NUM_THREADS": "1"}


def _rows(root: Path, kind: str) -> Path:
    """`short`: 16 sums. `many`: 96. `long`: 4 texts that fill blocks of vLLM's prefix cache."""
    path = root / f"{kind}.jsonl"
    if path.exists():
        return path
    if kind == "long":
        texts = ["".join(random.Random(n).choices("0123456789+=", k=300)) for n in range(4)]
        write_rows(path, [{"prompt": text} for text in texts])
    else:
        count = 96 if kind == "many" else 16
        write_rows(path, addition_rows(train_size=count, heldout_size=1, seed=0)[0])
    return path


def _answered(out: Path) -> int:
    parts = (out / "parts").glob("**/*") if (out / "parts").is_dir() else ()
    return sum(len(path.read_bytes().splitlines()) for path in parts if path.is_file())


def _started(root: Path, serving: Serving) -> Endpoint:
    spec = LaunchSpec(
        str(write_variant(root, serving.variant)),
        dtype=serving.dtype,
        logprobs="raw" if serving.logprobs == "raw" else "processed",
        kv_cache_gb=0.25,
        max_model_len=512,
    )
    order = ServerOrder("policy", "vllm", spec, lease=3600.0)
    return start(order, root / "server", say=_quiet)


def _wait_for(ready: Callable[[], bool], running: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _PATIENCE
    while not ready():
        if running.poll() is not None or time.monotonic() > end:
            raise NotPlantedError("the comparison was not seen at work")
        time.sleep(0.02)


def _quiet(_line: str) -> None:
    """Nothing is said."""
