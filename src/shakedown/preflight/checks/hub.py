"""Models and data from the Hugging Face hub: in the node's cache, or to be had."""

import os
from collections.abc import Mapping
from pathlib import Path

from shakedown.preflight.check import Check, CheckJudgement
from shakedown.preflight.datatypes import Expectations, NodeFacts, ProbeRequest

_ENDPOINT = "https://huggingface.co"
_CONNECT_SECONDS = 5.0
_TRUE = {"1", "ON", "YES", "TRUE"}  # huggingface_hub's own reading


def measure(request: ProbeRequest, node: str) -> NodeFacts:  # noqa: ARG001
    """`cached`: name -> whether a snapshot lies here, `offline`, `unreached`: why not, `token`."""
    folder = cache_folder(os.environ)
    cached = {name: _has_snapshot(folder, name) for name in request.want.hub}
    offline = is_offline(os.environ)
    asked = not offline and not all(cached.values())
    return {
        "folder": str(folder),
        "cached": cached,
        "offline": offline,
        "unreached": _unreached(os.environ.get("HF_ENDPOINT") or _ENDPOINT) if asked else "",
        "token": has_token(os.environ),
    }


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps what it has loaded."""
    home = Path(environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return Path(environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def has_token(environ: Mapping[str, str]) -> bool:
    """Whether huggingface_hub finds a token; it is not read."""
    if any(environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")):
        return True
    home = Path(environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return Path(environ.get("HF_TOKEN_PATH") or home / "token").expanduser().is_file()


def is_offline(environ: Mapping[str, str]) -> bool:
    """HF_HUB_OFFLINE, and the variable that transformers had before it."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(environ.get(name, "").upper() in _TRUE for name in names)


def _has_snapshot(folder: Path, name: str) -> bool:
    """`name`: `models/Qwen/Qwen3-0.6B`, which lies in `models--Qwen--Qwen3-0.6B`."""
    snapshots = folder / name.replace("/", "--") / "snapshots"
    # Each entry is a link to a blob; one that leads nowhere was left by a broken download.
    return any(entry.exists() for entry in snapshots.glob("*/*"))


def _unreached(endpoint: str) -> str:
    if not endpoint.startswith(("https://", "http://")):
        return f"HF_ENDPOINT={endpoint[:100]} is no web address"
    from shakedown.core.http import NoAnswerError, fetch  # few nodes ask

    try:
        fetch("GET", endpoint, seconds=_CONNECT_SECONDS, largest=0, by_proxy=True)
    except NoAnswerError as error:
        return str(error)
    return ""  # it answered, whatever it said


def judge(facts: NodeFacts, want: Expectations) -> CheckJudgement:  # noqa: ARG001
    """What is not in the cache has to be reached."""
    missing = [name for name, there in facts["cached"].items() if not there]
    if not missing:
        return CheckJudgement("pass", "cached", "in the cache, or to be had")
    kinds = {name: name.partition("/") for name in missing}
    loads = " && ".join(
        f"hf download {rest}{' --repo-type dataset' if kind == 'datasets' else ''}"
        for kind, _, rest in kinds.values()
    )
    measured = f"not in {facts['folder']}: {', '.join(missing)}"
    if facts["offline"] or facts["unreached"]:
        why = "HF_HUB_OFFLINE is set" if facts["offline"] else facts["unreached"]
        remedy = f"where the hub can be reached, with this cache: {loads}"
        expected = "in the cache, or to be had"
        return CheckJudgement("fail", f"{measured}; {why}", expected, "", "environment", remedy)
    remedy = f"once, before the run: {loads}"
    if not facts["token"]:
        remedy += "; gated ones need a token, and there is none (HF_TOKEN, or hf auth login)"
    return CheckJudgement("warn", measured, "in the cache", "", "user", remedy)


HUB = Check(
    "hub",
    "a model or data set of the hub is not in the node's cache, and offline mode is set or the hub "
    "is not reached; warns: not in the cache, so that every rank loads it at once",
    measure,
    judge,
    needs="hub",
    limit="a snapshot in HF_HUB_CACHE",
    source="huggingface_hub's layout of its cache",
)
