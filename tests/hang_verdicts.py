"""Diagnosis verdicts of any number of ranks, for the page and the terminal."""

from typing import Any

from shakedown.core.verdict import Finding, Verdict

BASE = ["<module> (launch.py:15)", "main (train.py:120)", "train (train.py:88)"]


def path(number: int) -> list[str]:
    """Call path of class `number`: they part in the middle and below."""
    layer = [
        f"forward (model/block.py:{40 + number // 8})",
        f"mlp (model/mlp.py:{10 + number % 8})",
    ]
    return [*BASE, *layer, "all_reduce (torch/distributed/distributed_c10d.py:3252)"]


def large(ranks: int = 16384, classes: int = 64, per_host: int = 8) -> Verdict:
    """Rank 4711 and the 8 ranks of one further host are busy; all others wait in `classes`."""
    culprits = [r for r in (4711, *range(9000, 9008)) if r < ranks] or [1]
    others = [r for r in range(ranks) if r not in culprits]
    step = -(-len(others) // (classes - 1))
    rows: list[dict[str, Any]] = [
        {"ranks": others[i * step : (i + 1) * step], "path": path(i), "waiting_in": "all_reduce"}
        for i in range(classes - 1)
    ]
    busy = {"ranks": culprits, "path": [*BASE, "validate (data/clean.py:31)"], "waiting_in": "busy"}
    rows = sorted([row for row in [*rows, busy] if row["ranks"]], key=lambda r: -len(r["ranks"]))
    sentence = f"ranks {culprits[0]} and {len(culprits) - 1} more have not entered all_reduce"
    finding = Finding(
        "missing_rank", "fail", "rank", str(culprits[0]), sentence,
        evidence=[f"round1/pyspy-{r}.json" for r in culprits], remedy="see what the rank does",
    )  # fmt: skip
    waits = [
        {"from": f"rank {r}", "to": f"rank {c}", "why": "all_reduce, number 812 of dp, not entered"}
        for r in others[:: max(1, len(others) // 24)]
        for c in culprits[:8]
    ][:200]
    call = {"op": "all_reduce", "sizes": "[4096]", "dtypes": "Float", "where": "mlp (mlp.py:10)"}
    timeline = [
        {
            "group": "dp", "members": f"0-{ranks - 1}", "silent": "", "break": 812,
            "rows": [
                {"seq": 811, "calls": [{**call, "state": "done", "ranks": "all"}], "missing": ""},
                {"seq": 812, "calls": [{**call, "state": "started", "ranks": "0-4710"}],
                 "missing": "4711"},
            ],
        }
    ]  # fmt: skip
    hosts = {
        f"gpu{n:04d}": f"{n * per_host}-{min(ranks, (n + 1) * per_host) - 1}"
        for n in range(-(-ranks // per_host))
    }
    return Verdict(
        stage="hang",
        status="FAIL",
        summary=sentence,
        findings=[finding],
        metrics={"ranks_seen": float(ranks), "confidence": 0.8},
        started="2026-01-01T00:00:00+00:00",
        extra={
            "diagnosis": {
                "state": "hung",
                "cause": "missing_rank",
                "pattern": None,
                "culprits": {"ranks": culprits, "nodes": [], "roles": []},
                "victims": {"ranks": others},
                "confidence": 0.8,
                "classes": rows,
                "wait_for": waits,
                "conflicts": ["uneven inputs: rank 12 has one batch less"],
                "needed": ["a second stack of rank 4711"],
            },
            "sources": {f"round1/pyspy-{r}.json": "py-spy json" for r in range(min(ranks, 4096))},
            "timeline": timeline,
            "hosts": hosts,
        },
    )
