"""What page and terminal are made of: ranges, merged paths, wait-for graph, timeline, grid."""

from pathlib import Path
from typing import Any

import pytest

from shakedown.core.ranges import named, ranges
from shakedown.diagnosis import advice, wait_graph
from shakedown.diagnosis.facts import Facts
from shakedown.diagnosis.outline import outline
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import read_paths
from shakedown.diagnosis.records import FlightRecord, GroupStatus, Identity, Operation, SourceRef
from shakedown.diagnosis.timeline import break_of, timeline
from shakedown.report import diagnosis_graph, diagnosis_grid, stack_tree
from shakedown.report.diagnosis_view import letters, user_frame
from tests.hang_verdicts import large

DATA = Path(__file__).parents[2] / "data"


def facts_of(case: str) -> Facts:
    return build_facts(read_paths([DATA / case]).records)


@pytest.fixture(scope="module")
def branch() -> Facts:
    return facts_of("hang_dumps/b_cond")


@pytest.fixture(scope="module")
def locked() -> Facts:
    return facts_of("fr_traces/lock_gil_1st")


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([], ""),
        ([3], "3"),
        ([1, 0], "0, 1"),
        ([2, 1, 0, 7], "0-2, 7"),
        (range(16384), "0-16383"),
        (range(0, 40, 2), "0, 2, 4, 6, 8, 10, 12, 14, +12 more ranges"),
    ],
)
def test_neighbouring_ranks_are_one_range(ranks: Any, told: str) -> None:
    assert ranges(ranks) == told
    assert named(ranks).endswith(told or "no rank")


def test_paths_are_merged_up_to_where_ranks_part_and_the_culprits_come_first() -> None:
    classes: list[dict[str, Any]] = [
        {"ranks": [0, 1, 3], "path": ["main", "train", "forward", "mlp"], "waiting_in": "send"},
        {"ranks": [2], "path": ["main", "train", "log"], "waiting_in": "broadcast"},
        {"ranks": [4], "path": [], "waiting_in": "unknown"},
    ]  # fmt: skip
    (root,) = stack_tree.merge_paths(classes, frozenset({2}))
    assert root.frames == ("main", "train")
    assert root.ranks == {0, 1, 2, 3}
    assert [(c.frames, sorted(c.ranks), c.culprit) for c in root.children] == [
        (("log",), [2], True),
        (("forward", "mlp"), [0, 1, 3], False),
    ]
    assert root.children[0].waiting_in == ("broadcast",)


def test_a_class_that_ends_where_another_goes_on_keeps_its_end() -> None:
    classes = [
        {"ranks": [0], "path": ["main", "step"], "waiting_in": "user"},
        {"ranks": [1], "path": ["main", "step", "sync"], "waiting_in": "barrier"},
    ]
    (root,) = stack_tree.merge_paths(classes, frozenset())
    assert root.frames == ("main", "step")
    assert root.waiting_in == ("user",)
    assert root.children[0].frames == ("sync",)


def test_a_deep_recursion_and_a_comb_of_branches_stay_bounded() -> None:
    deep = {"ranks": [0], "path": [f"f{i}" for i in range(5000)], "waiting_in": ""}
    (root,) = stack_tree.merge_paths([deep], frozenset())
    assert len(root.frames) == stack_tree.MAX_FRAMES + 1
    assert "4904 frames" in root.frames[stack_tree.MAX_FRAMES // 2]
    comb = [
        {"ranks": [n], "path": [f"f{i}" for i in range(n)], "waiting_in": "x"} for n in range(1, 60)
    ]
    depths = [depth for depth, _ in stack_tree.walk(stack_tree.merge_paths(comb, frozenset()))]
    assert max(depths) == stack_tree.MAX_DEPTH


def edge(waiter: str, awaited: str, why: str = "w") -> dict[str, str]:
    return {"from": waiter, "to": awaited, "why": why}


def test_ranks_that_wait_alike_are_one_node_and_the_culprit_stands_apart() -> None:
    rows = [edge(f"rank {r}", "rank 5", f"group {r}") for r in range(5)]
    graph = wait_graph.merge(rows, dict.fromkeys(range(6), 0), frozenset({"rank 5"}))
    assert {n.label: (n.culprit, n.layer) for n in graph.nodes} == {
        "rank 5": (True, 0),
        "ranks 0-4": (False, 1),
    }
    (only,) = graph.edges
    assert len(only.why) == 5
    assert not only.cyclic
    assert not any(n.cyclic for n in graph.nodes)


def test_a_cycle_inside_one_class_is_not_merged_away() -> None:
    rows = [edge("rank 0", "rank 1", "tp"), edge("rank 1", "rank 0", "dp")]
    graph = wait_graph.merge([*rows, edge("rank 2", "rank 0")], {0: 0, 1: 0, 2: 0}, frozenset())
    assert {n.label: n.cyclic for n in graph.nodes} == {
        "rank 0": True,
        "rank 1": True,
        "rank 2": False,
    }
    assert sorted(e.cyclic for e in graph.edges) == [False, True, True]


def test_a_chain_is_no_cycle_and_its_length_does_not_recurse() -> None:
    pairs = [(f"rank {i}", f"rank {i + 1}") for i in range(5000)]
    assert wait_graph.cyclic_names(pairs) == {}
    circle = [*pairs, ("rank 5000", "rank 0")]
    assert len(wait_graph.cyclic_names(circle)) == 5001


def test_hundreds_of_different_waits_still_give_a_graph_that_can_be_drawn() -> None:
    rows = [edge(f"rank {i}", f"rank {(i * 7 + 1) % 180}") for i in range(180)]
    rows.append(edge("trainer <b>", "orchestrator"))
    graph = wait_graph.merge(rows, {r: r for r in range(180)}, frozenset({"orchestrator"}))
    assert len(graph.nodes) <= wait_graph.MAX_NODES
    assert any(n.culprit and n.label == "orchestrator" for n in graph.nodes)
    drawing = diagnosis_graph.draw(graph)
    for box in drawing.boxes:
        assert 0 <= box.x <= drawing.width - diagnosis_graph.WIDTH
        assert 0 <= box.y <= drawing.height - diagnosis_graph.HEIGHT


def test_a_chain_of_waits_runs_down_with_the_culprit_last_and_fits_a_phone() -> None:
    rows = [edge("rank 0", "rank 1"), edge("rank 1", "rank 2"), edge("rank 0", "rank 2")]
    drawing = diagnosis_graph.draw(wait_graph.merge(rows, {}, frozenset({"rank 2"})))
    assert [box.text for box in drawing.boxes] == ["rank 0", "rank 1", "rank 2"]
    assert len({box.x for box in drawing.boxes}) == 1
    assert sorted(box.y for box in drawing.boxes) == [box.y for box in drawing.boxes]
    assert drawing.width <= 340


def test_many_that_wait_for_one_stand_left_of_it() -> None:
    rows = [edge(f"rank {r}", "rank 9", f"group {r}") for r in range(6)]
    graph = wait_graph.merge(rows, {r: r for r in range(6)}, frozenset({"rank 9"}))
    boxes = diagnosis_graph.draw(graph).boxes
    assert len(boxes) > diagnosis_graph.MAX_DOWN
    assert max(boxes, key=lambda box: box.x).text == "rank 9"


def test_no_waits_give_no_graph() -> None:
    graph = wait_graph.merge([], {}, frozenset())
    assert graph.nodes == ()
    assert diagnosis_graph.draw(graph).boxes == ()


def test_timeline_shows_both_calls_at_the_break_and_the_steps_before(branch: Facts) -> None:
    (group,) = timeline(branch, [0, 1])
    assert group["break"] == 5
    assert [row["seq"] for row in group["rows"]] == [2, 3, 4, 5]
    assert group["rows"][0]["calls"][0]["state"] == "done"
    calls = {c["ranks"]: (c["op"], c["sizes"], c["state"]) for c in group["rows"][-1]["calls"]}
    assert calls == {
        "0, 1": ("broadcast", "[2]", "started"),
        "2, 3": ("all_reduce", "[64]", "started"),
    }
    assert "hang.py:30" in str(group["rows"][-1])


def test_timeline_of_recorded_gpu_dumps_names_who_has_not_entered(locked: Facts) -> None:
    tables = timeline(locked, [9, 14])
    assert len(tables) <= 9
    assert tables[0]["rows"][0]["calls"][0]["op"] == "send 0->1"
    experts = next(t for t in tables if t["group"] == "EXPERT_MODEL_PARALLEL_GROUP")
    at_break = next(row for row in experts["rows"] if row["seq"] == experts["break"])
    assert at_break["missing"] == "9, 14"


def test_many_different_calls_at_one_number_are_bounded_and_their_state_is_kept() -> None:
    dumps = []
    for rank in range(30):
        call = Operation(1, "0", 1, f"gloo:op{rank}", (), (), (), rank % 2 == 0, False)
        status = {"0": GroupStatus(tuple(range(30)), "default_pg")}
        dumps.append(FlightRecord(Identity(rank), status, [call], SourceRef(f"fr{rank}")))
    (group,) = timeline(build_facts(dumps), [])
    calls = group["rows"][0]["calls"]
    assert len(calls) == 9
    assert (calls[-1]["op"], calls[-1]["state"]) == ("22 other calls", "done or started")


def test_groups_that_stand_together_have_no_break(locked: Facts) -> None:
    calm = [g for g in locked.groups if len({v.completed for v in g.views.values()}) == 1]
    even = [g for g in calm if all(v.pending is None for v in g.views.values())]
    assert even
    assert [break_of(g) for g in even] == [None] * len(even)


def test_outline_quotes_files_that_are_evidence_as_a_whole(branch: Facts) -> None:
    told = outline(
        branch, [0], [SourceRef("b_cond/fr_pkl_0"), SourceRef("x.log", 3, "its own text")]
    )
    assert "last call broadcast, number 5" in told["quotes"]["b_cond/fr_pkl_0"]
    assert "x.log:3" not in told["quotes"]
    assert build_facts([]).groups == []
    assert outline(build_facts([]), [], []) == {"timeline": [], "hosts": {}, "quotes": {}}


def test_map_of_16384_ranks_has_one_path_a_class_and_frames_the_culprits() -> None:
    body = large().extra["diagnosis"]
    rows = [row["ranks"] for row in body["classes"]]
    cells = diagnosis_grid.cells_of(rows, frozenset(body["culprits"]["ranks"]))
    drawn = diagnosis_grid.rank_map(cells)
    assert (len(cells), drawn.columns, drawn.rows, drawn.per_cell) == (16384, 128, 128, 1)
    assert len(drawn.paths) == 64
    assert drawn.culprits == "M103 36h1v1h-1zM40 70h8v1h-8z"


def test_ranks_beyond_the_map_share_cells_and_no_culprit_is_lost() -> None:
    cells = diagnosis_grid.cells_of([range(100_000)], frozenset({77_777}))
    drawn = diagnosis_grid.rank_map(cells)
    assert drawn.per_cell == 7
    assert drawn.columns * (drawn.rows - 1) <= diagnosis_grid.MAX_MAP
    cell = 77_777 // 7
    assert drawn.culprits == f"M{cell % drawn.columns} {cell // drawn.columns}h1v1h-1z"


def test_a_culprit_that_left_nothing_has_a_cell_too() -> None:
    cells = diagnosis_grid.cells_of([[0, 1]], frozenset({5}))
    assert [(c.rank, c.number, c.culprit) for c in cells][-1] == (5, -1, True)


def test_hosts_of_culprits_come_first_and_the_others_are_merged() -> None:
    verdict = large()
    body = verdict.extra["diagnosis"]
    rows = [row["ranks"] for row in body["classes"]]
    cells = diagnosis_grid.cells_of(rows, frozenset(body["culprits"]["ranks"]))
    labels = [letters(n) for n in range(len(rows))]
    table = diagnosis_grid.host_rows(cells, verdict.extra["hosts"], labels)
    assert [row.label for row in table[:2]] == ["gpu0588", "gpu1125"]
    assert [row.culprit for row in table[:3]] == [True, True, False]
    assert len(table) <= diagnosis_grid.MAX_HOST_ROWS + diagnosis_grid.MAX_MERGED + 1


@pytest.mark.parametrize("text", ["", "x-y", "5-", "9" * 40, "0-99999999999999", "-3"])
def test_spans_of_a_broken_host_line_end(text: str) -> None:
    cells = diagnosis_grid.cells_of([[0, 1]], frozenset({0}))
    assert len(diagnosis_grid.host_rows(cells, {"h": text}, ["A"])) <= 1
    assert isinstance(advice.spans(text), list)


def test_commands_quote_no_hostile_node_names() -> None:
    verdict = large(16)
    verdict.extra["diagnosis"]["culprits"]["nodes"] = ["n1; rm -rf x", "n2"]
    commands = [command for _, command in advice.steps(verdict) if command]
    assert commands == [
        "srun --overlap --kill-on-bad-exit=0 -w n2 shakedown hang collect --match train "
        "--out evidence"
    ]


@pytest.mark.parametrize(
    ("path", "frame"),
    [
        (["main (train.py:1)", "all_reduce (torch/distributed/distributed_c10d.py:3)"], "main"),
        (["all_reduce (torch/distributed/distributed_c10d.py:3)"], "all_reduce"),
        (["no parentheses"], "no parentheses"),
        ([], ""),
    ],
)
def test_the_place_of_a_path_is_the_users_own_code(path: list[str], frame: str) -> None:
    assert user_frame(path).split(" (")[0] == frame


def test_letters_go_on_after_z() -> None:
    assert [letters(n) for n in (0, 25, 26, 63)] == ["A", "Z", "AA", "BL"]
