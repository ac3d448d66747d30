"""The tables of docs/preflight.md, from the checks: `python scripts/preflight_table.py`."""

from pathlib import Path

from shakedown.preflight.checks import CHECKS
from shakedown.preflight.faults import FAULTS
from shakedown.preflight.gpu_models import GPU_MODELS, MIN_MEMORY_SHARE

PAGE = Path(__file__).parents[1] / "docs" / "preflight.md"
BEGIN, END = "<!-- checks: scripts/preflight_table.py -->", "<!-- end of checks -->"

_ABOUT_MODELS = """Least rates of known GPU models in GB/s; others are compared with neighbours.
Memory is held against 70 % of NVIDIA's data sheet (ours)."""
_FAULTS_BEGIN, _FAULTS_END = "<!-- faults: scripts/preflight_table.py -->", "<!-- end of faults -->"


def table() -> str:
    """A row a check, in Markdown."""
    rows = ["| Check | Tier, scope | Needs | Fails or warns when | Threshold | Its source |"]
    rows.append("|---|---|---|---|---|---|")
    for check in CHECKS.values():
        when = f"{check.tier}{', once' if check.health else ''}, {check.scope}"
        cells = [f"`{check.name}`", when]
        cells += [f"`{check.needs}`" if check.needs else "", check.fails, check.limit, check.source]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def gpu_table() -> str:
    """A row a GPU model, in Markdown."""
    rows = ["| GPU | Host to GPU and back | Memory | All-reduce, 8 GPUs | Source |"]
    rows.append("|---|---|---|---|---|")
    for model in GPU_MODELS:
        least = f"{MIN_MEMORY_SHARE * model.memory:.0f}"
        numbers = f"{model.host:g} | {least} of {model.memory:g} | {model.all_reduce:g}"
        rows.append(f"| `{model.name}` | {numbers} | {model.source} |")
    return "\n".join(rows)


def fault_table() -> str:
    """A row a fault that can be injected, in Markdown."""
    rows = [f"| `{kind}` | {fault.text} |" for kind, fault in FAULTS.items()]
    return "\n".join(["| KIND | What goes wrong |", "|---|---|", *rows])


def page(text: str) -> str:
    """The page with its tables anew."""
    text = _between(text, BEGIN, END, f"{table()}\n\n{_ABOUT_MODELS}\n\n{gpu_table()}")
    return _between(text, _FAULTS_BEGIN, _FAULTS_END, fault_table())


def _between(text: str, begin: str, end: str, body: str) -> str:
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{body}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
