"""Where the ranks of an allocation stand, and what does not fit."""

import json
import warnings
from math import prod

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shakedown.cli import main
from shakedown.cluster.allocation import INFERENCE, Allocation, parse_allocation
from shakedown.cluster.placement import Placement, PlacementError, place, place_stage

SIZE = st.sampled_from([1, 1, 2, 3, 4, 8])


def _place(text: str, nodes: int = 2, gpus: int = 8) -> Placement:
    return place(parse_allocation(text), nodes=nodes, gpus_per_node=gpus)


def _slots(text: str, nodes: int = 2, gpus: int = 8) -> list[list[tuple[int, int | None]]]:
    """(node, GPU) of every rank, one list a part."""
    return [[(r.node, r.gpu) for r in part.ranks] for part in _place(text, nodes, gpus).parts]


def _on(node: int, first: int, end: int) -> list[tuple[int, int | None]]:
    return [(node, gpu) for gpu in range(first, end)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("megatron:d2p1t8", [_on(0, 0, 8) + _on(1, 0, 8)]),
        ("fsdp:d8", [_on(0, 0, 4) + _on(1, 0, 4)]),  # over all nodes
        ("megatron:t8", [_on(0, 0, 8)]),  # but not through a tensor group
        ("vllm:d4+fsdp:d8", [_on(0, 0, 4), _on(0, 4, 8) + _on(1, 4, 8)]),
        ("fsdp:d8+vllm:d4", [_on(0, 4, 8) + _on(1, 4, 8), _on(0, 0, 4)]),
        ("vllm:d8+megatron:t8", [_on(0, 0, 8), _on(1, 0, 8)]),
        ("vllm:d2+megatron:t8", [_on(0, 0, 2), _on(1, 0, 8)]),
        ("sglang:d3t3", [_on(0, 0, 6) + _on(1, 0, 3)]),  # a replica does not straddle
        ("vllm:t16", [_on(0, 0, 8) + _on(1, 0, 8)]),  # larger than a node: whole nodes
        ("fsdp[a]:d4|vllm[b]:d2t2", [_on(0, 0, 2) + _on(1, 0, 2)] * 2),
        (
            "sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4",
            [_on(0, 0, 2), _on(0, 2, 4) + _on(1, 2, 4), _on(0, 2, 4) + _on(1, 2, 4)],
        ),
    ],
)
def test_parts_stand_on_nodes_and_gpus(
    text: str, expected: list[list[tuple[int, int | None]]]
) -> None:
    assert _slots(text) == expected


def test_without_gpus_trainers_go_over_all_nodes_and_inference_on_the_first() -> None:
    server, trainer = _slots("vllm:d2+fsdp:d4", nodes=2, gpus=0)

    assert server == [(0, None), (0, None)]
    assert trainer == [(0, None), (0, None), (1, None), (1, None)]


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "words"),
    [
        ("fsdp:d24", 2, 8, "fsdp:d24 needs 24 GPUs, the cluster has 2 x 8"),
        ("vllm:d8+fsdp:d16", 2, 8, "needs 24 GPUs, the cluster has 2 x 8"),
        (
            "vllm:d4+fsdp:d12",
            2,
            8,
            "d12 needs 12 GPUs in equal parts, but the node(s) have 4, 8 free",
        ),
        ("vllm:d2t5", 1, 12, None),
        ("vllm:d3t5", 2, 8, "vllm:d3t5 needs replicas of 5 GPUs, but the node(s) have 3, 3 free"),
        ("vllm:t12", 2, 8, "a replica is t*p = 12 GPUs: more than the 8 of a node"),
        ("vllm:d1+sglang:t8p2", 3, 8, None),
        ("vllm:d1+sglang:t8p2", 2, 9, "a replica is t*p = 16 GPUs: more than the 9"),
        ("fsdp[a]:d8|vllm[b]:t8", 2, 4, None),  # lies over two whole nodes
        ("fsdp[a]:d6|vllm[b]:d3t2", 2, 4, "a replica of t*p = 2 GPUs would span 2 nodes"),
        ("fsdp:d3", 2, 0, "3 ranks cannot be split equally over 2 nodes"),
        ("megatron:d3e2", 1, 8, "e=2 does not divide d*c = 3"),
        ("fsdp:d999999999", 1, 0, "at most 65536 ranks"),
        ("fsdp:d999999999t999999999", 60000, 1024, "the cluster has 60000 x 1024"),
        ("fsdp:d1", 0, 8, "at least one node is needed"),
        ("fsdp:d1", 1, -1, "at least one node is needed"),
    ],
)
def test_what_does_not_fit_is_named(text: str, nodes: int, gpus: int, words: str | None) -> None:
    if words is None:
        assert _place(text, nodes, gpus).parts
        return
    with pytest.raises(PlacementError) as caught:
        _place(text, nodes, gpus)

    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "gpus", "words"),
    [
        ("megatron:t16", 8, ["a tensor-parallel group of 16 over 2 nodes"]),
        ("vllm:t16", 8, ["a replica of 16 GPUs spans 2 nodes"]),
        ("vllm:d1+fsdp:t4", 3, ["a tensor-parallel group of 4 over 2 nodes"]),
        ("megatron:d2t8", 8, []),
        ("megatron:t16", 0, []),
    ],
)
def test_what_fits_badly_is_a_warning(text: str, gpus: int, words: list[str]) -> None:
    found = _place(text, gpus=gpus).warnings

    assert len(found) == len(words)
    assert all(word in warning for word, warning in zip(words, found, strict=True))


@st.composite
def _allocations(draw: st.DrawFn) -> Allocation:
    """Up to three groups of up to two parts of equal worlds."""
    groups = []
    for number in range(draw(st.integers(1, 3))):
        sizes = {letter: draw(SIZE) for letter in draw(st.permutations("dt"))}
        cut = "".join(f"{letter}{size}" for letter, size in sizes.items())
        backends = draw(st.lists(st.sampled_from(["vllm", "fsdp", "megatron"]), max_size=1))
        backends.append(draw(st.sampled_from(["sglang", "archon"])))
        groups.append("|".join(f"{b}[n{number}{k}]:{cut}" for k, b in enumerate(backends)))
    return parse_allocation("+".join(groups))


@settings(max_examples=100)
@given(_allocations(), st.integers(1, 4), st.integers(0, 9))
def test_every_rank_has_its_place_and_groups_with_plus_share_nothing(
    allocation: Allocation, nodes: int, gpus: int
) -> None:
    try:
        placement = place(allocation, nodes=nodes, gpus_per_node=gpus)
    except PlacementError:
        assume(False)
    taken: list[set[tuple[int, int | None]]] = []
    places = iter(placement.parts)
    for group in allocation.groups:
        laid = [next(places) for _ in group]
        slots = {tuple((r.node, r.gpu) for r in part.ranks) for part in laid}
        assert len(slots) == 1  # parts of a group stand on the same ones
        taken.append(set(slots.pop()))
        for part in laid:
            assert [r.rank for r in part.ranks] == list(range(part.part.world))
            assert all(0 <= r.node < nodes for r in part.ranks)
            assert len({tuple(r.coordinates.values()) for r in part.ranks}) == part.part.world
    if gpus:
        assert sum(map(len, taken)) == len(set().union(*taken)) == allocation.gpus
        assert all(0 <= (gpu or 0) < gpus for slots in taken for _, gpu in slots)
    for part in placement.parts:
        if gpus and part.part.backend in INFERENCE:
            replica = part.part.size("t") * part.part.size("p")
            for at in range(0, part.part.world, replica):
                over = {r.node for r in part.ranks[at : at + replica]}
                assert len(over) == 1 or len(over) * gpus == replica


def test_groups_are_the_ranks_that_differ_in_one_dimension() -> None:
    (part,) = _place("megatron:d2t2p2", nodes=1).parts

    assert part.order == "pdct"
    assert part.groups == {
        "p": ((0, 4), (1, 5), (2, 6), (3, 7)),
        "d": ((0, 2), (1, 3), (4, 6), (5, 7)),
        "t": ((0, 1), (2, 3), (4, 5), (6, 7)),
    }
    for letter, groups in part.groups.items():
        for group in groups:
            others = [
                {k: v for k, v in part.ranks[rank].coordinates.items() if k != letter}
                for rank in group
            ]
            assert all(other == others[0] for other in others)


def test_an_inference_engine_counts_its_stages_inside_of_a_replica() -> None:
    (part,) = _place("vllm:d2t2p2", nodes=1).parts

    assert part.order == "dpt"
    assert part.groups["p"] == ((0, 2), (1, 3), (4, 6), (5, 7))


@pytest.mark.parametrize(
    ("cut", "experts"),
    [
        ("d2t2p2", {}),
        ("d2t2p2c2", {}),
        ("d4t2e2", {"tp": 2, "ep": 2, "dp": 2, "pp": 1}),
        ("(attn:d4t2p2|ffn:e2t2)", {"tp": 2, "ep": 2, "dp": 2, "pp": 2}),
        ("(attn:c2d2p2t2|ffn:e4t1)", {"tp": 1, "ep": 4, "dp": 2, "pp": 2}),
    ],
)
def test_groups_are_those_that_megatron_makes(cut: str, experts: dict[str, int]) -> None:
    pytest.importorskip("megatron.core")
    from shakedown.training.engines.megatron_cpu import parallel_state

    part = _place(f"megatron:{cut}").parts[0]
    ours = {"t": "tp", "c": "cp", "d": "dp", "p": "pp", "e": "ep"}
    attention = {name: part.part.size(letter) for letter, name in ours.items() if letter != "e"}

    for sizes, found in ((attention, part.groups), (experts, part.expert_groups)):
        if not sizes:
            assert found == {}
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            order = "tp-cp-ep-dp-pp"  # the default of initialize_model_parallel
            ranks = parallel_state.RankGenerator(**{"cp": 1, "ep": 1, **sizes}, order=order)
        for letter, name in ours.items():
            if sizes.get(name, 1) > 1:
                assert [list(group) for group in found[letter]] == ranks.get_ranks(name)


def test_experts_of_the_hybrid_form_have_a_mesh_of_their_own() -> None:
    (part,) = _place("megatron:(attn:d4t2|ffn:e4t2)", nodes=1).parts

    assert part.expert_groups["e"] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert prod(part.part.experts.values()) == part.part.world


def test_a_stage_is_placed_as_its_string_says() -> None:
    trainer, server = (parse_allocation(t).parts[0] for t in ("fsdp:d8", "vllm:d4"))

    found = place_stage(trainer, server, nodes=2, gpus_per_node=8).parts

    assert found == _place("vllm:d4+fsdp:d8").parts[::-1]


LAID = ["--nodes", "2", "--gpus-per-node", "8"]


def test_command_prints_a_table_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["allocation", "megatron[m]:d2p1t8", *LAID]) == 0

    shown = capsys.readouterr()
    assert "megatron m: data 2 x tensor 8, last fastest" in shown.out
    assert "    15     1    7  1  7" in shown.out
    assert "tensor groups: 0-7, 8-15" in shown.out
    assert shown.err == ""


def test_command_prints_the_places_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["allocation", "vllm:d8+megatron:t8", *LAID, "--json"]) == 0

    body = json.loads(capsys.readouterr().out)
    server, trainer = body["parts"]
    assert (body["gpus"], body["nodes"], body["gpus_per_node"]) == (16, 2, 8)
    assert trainer["world"] == 8
    assert trainer["mesh"] == [["p", 1], ["d", 1], ["c", 1], ["t", 8]]
    assert trainer["groups"] == {"t": [list(range(8))]}
    assert trainer["ranks"][5] == {
        "rank": 5,
        "node": 1,
        "gpu": 5,
        "coordinates": {"p": 0, "d": 0, "c": 0, "t": 5},
    }
    assert {rank["node"] for rank in server["ranks"]} == {0}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["fsdp:d24", *LAID], 2, "needs 24 GPUs, the cluster has 2 x 8"),
        (["megatron:t16", *LAID], 0, "WARN megatron:t16: a tensor-parallel group of 16"),
        (["fsdp:d2", "--nodes", "0"], 2, "expected a whole number from 1 to 65536"),
        (["fsdp:d2", "--gpus-per-node", "x"], 2, "expected a whole number from 0 to 1024"),
    ],
)
def test_command_says_what_does_not_fit(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(["allocation", *arguments])
    except SystemExit as end:
        found = int(end.code or 0)

    assert found == code
    assert words in capsys.readouterr().err
