"""GRPO on one batch: the loss against loops in float64, its split, and the engine's updates."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shakedown.config import GrpoConfig, OptimizerConfig, StageConfig
from shakedown.models import huggingface
from shakedown.rollout.batch import RolloutBatch
from shakedown.training.algorithms.grpo import rollout_metrics, token_batch
from shakedown.training.algorithms.policy_update import (
    PolicyUpdate,
    ReferenceModel,
    policy_part,
)
from shakedown.training.batch import TokenBatch, rank_share
from shakedown.training.coordination import Ranks
from shakedown.training.demo import write_model
from shakedown.training.engines.base import Scores
from shakedown.training.engines.fsdp import FsdpEngine
from shakedown.training.stage.job import StageJob

CPU = torch.device("cpu")
OPTIMIZER = OptimizerConfig(lr=0.003)
EVERYTHING: dict[str, Any] = {
    "advantage": "group_mean",
    "loss_level": "sequence",
    "drop_flat_groups": True,
    "tis_cap": 1.5,
    "kl_coef": 0.3,
    "entropy_coef": 0.1,
}
SETTINGS = [
    {},
    EVERYTHING,
    {"loss_level": "sequence"},
    {"advantage": "group_mean", "kl_coef": 0.1},
    {"decoupled": False, "entropy_coef": 0.5},
    {"tis_cap": 0.0, "kl_coef": 1.0},
    {"drop_flat_groups": True, "tis_cap": 1.0},
    {"loss_level": "constant", "advantage": "group_mean"},
    {"ratio": "sequence", "loss_level": "sequence", "clip_low": 0.1, "clip_high": 0.15},
    {"ratio": "sequence", "decoupled": False, "kl_coef": 0.2},
]


def _rollouts() -> RolloutBatch:
    """Four groups of three answers of 0 to 4 tokens; the rewards of the third are equal."""
    draw = np.random.default_rng(3)
    lengths = np.array([4, 1, 3, 2, 0, 4, 3, 3, 1, 2, 4, 1])
    places = np.arange(8)
    prompts = draw.integers(2, 5, 12)
    mask = (places >= prompts[:, None]) & (places < (prompts + lengths)[:, None])
    tokens = np.where(places < (prompts + lengths)[:, None], draw.integers(3, 90, (12, 8)), 0)
    return RolloutBatch(
        step=1,
        versions=np.zeros(12, dtype=np.int64),
        tokens=tokens.astype(np.int64),
        loss_mask=mask,
        logprobs=np.where(mask, draw.normal(-4.5, 0.5, (12, 8)), 0).astype(np.float32),
        rewards=np.array([1, 0, 0, 0, 1, 1, 0.5, 0.5, 0.5, 0, 0.25, 1], dtype=np.float32),
        groups=np.repeat(np.array([5, 2, 9, 0]), 3),
    )


def _shuffled(rollouts: RolloutBatch) -> RolloutBatch:
    order = np.random.default_rng(1).permutation(12)
    names = ("versions", "tokens", "loss_mask", "logprobs", "rewards", "groups")
    return replace(rollouts, **{name: getattr(rollouts, name)[order] for name in names})


def _batch(rollouts: RolloutBatch, settings: GrpoConfig) -> TokenBatch:
    return token_batch(
        rollouts,
        pad=0,
        advantage=settings.advantage,
        level=settings.loss_level,
        drop_flat=settings.drop_flat_groups,
        longest=settings.max_tokens,
    )


Table = dict[tuple[int, int], float]  # by row and column of the rollouts


def _policy(rollouts: RolloutBatch, seed: int, spread: float) -> Table:
    draw = np.random.default_rng(seed)
    places = [(int(i), int(j)) for i, j in np.argwhere(rollouts.loss_mask)]
    return {place: float(rollouts.logprobs[place]) + draw.normal(0, spread) for place in places}


def _loops(
    rollouts: RolloutBatch, s: GrpoConfig, new: Table, old: Table, reference: Table
) -> float:
    """The objective written out, sequence by sequence; the entropy is new^2 here."""
    rewards, groups = rollouts.rewards.tolist(), rollouts.groups.tolist()
    losses: list[list[float]] = []
    for row, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if s.drop_flat_groups and min(own) == max(own):
            continue
        mean = math.fsum(own) / len(own)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in own) / (len(own) - 1))
        scale = 1.0 if s.advantage == "group_mean" else std + 1e-4
        advantage = (reward - mean) / scale
        losses.append([])
        own_places = [place for place in new if place[0] == row]
        logs = {
            p: new[p] - (old[p] if s.decoupled else float(rollouts.logprobs[p])) for p in own_places
        }
        for place in own_places:
            engine = float(rollouts.logprobs[place])
            ratio = math.exp(logs[place])
            if s.ratio == "sequence":  # the geometric mean of the tokens' ratios
                ratio = math.prod(map(math.exp, logs.values())) ** (1 / len(logs))
            bounded = min(max(ratio, 1 - s.clip_low), 1 + s.clip_high)
            value = -min(ratio * advantage, bounded * advantage)
            if s.decoupled and s.tis_cap:
                value *= min(math.exp(old[place] - engine), s.tis_cap)
            apart = reference[place] - new[place]
            value += s.kl_coef * (math.exp(apart) - apart - 1)
            losses[-1].append(value - s.entropy_coef * new[place] ** 2)
    if s.loss_level == "token":
        flat = list(itertools.chain(*losses))
        return math.fsum(flat) / len(flat)
    if s.loss_level == "constant":
        sums = [math.fsum(each) / s.max_tokens for each in losses if each]
        return math.fsum(sums) / len(sums)
    means = [math.fsum(each) / len(each) for each in losses if each]
    return math.fsum(means) / len(means)


def _parts(
    batch: TokenBatch, settings: GrpoConfig, tables: list[torch.Tensor], world: int, micro: int
) -> tuple[torch.Tensor, dict[str, float]]:
    """The sum over the micro batches of `world` ranks, each scored from tables by place."""
    new, old, reference = tables
    loss, sums = torch.zeros((), dtype=torch.float64), dict[str, float]()
    for rank in range(world):
        for share in rank_share(batch, rank=rank, world_size=world, micro_batch_size=micro):
            at = share.masked("place")
            part = policy_part(
                Scores(new[at], new[at] ** 2),
                share,
                old=old[at],
                reference=reference[at] if settings.kl_coef else None,
                total=batch.trained_tokens,
                settings=settings,
            )
            loss = loss + part.loss
            for name, value in part.sums.items():
                sums[name] = sums.get(name, 0.0) + float(value)
    return loss, sums


def _tables(rollouts: RolloutBatch, settings: GrpoConfig) -> tuple[list[Table], list[list[float]]]:
    """New, old and reference by place, and the same in the order of the batch's trained tokens."""
    tables = [_policy(rollouts, 7, 0.5), _policy(rollouts, 8, 0.5), _policy(rollouts, 9, 0.5)]
    kept = list(tables[0])
    if settings.drop_flat_groups:
        kept = [place for place in kept if rollouts.groups[place[0]] != 9]
    return tables, [[table[place] for place in kept] for table in tables]


def _leaves(rows: list[list[float]]) -> list[torch.Tensor]:
    leaves = [torch.tensor(row, dtype=torch.float64) for row in rows]
    leaves[0].requires_grad_()
    return leaves


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_loss_and_gradient_match_the_objective_written_as_loops(changes: dict[str, Any]) -> None:
    rollouts, settings = _rollouts(), GrpoConfig(**changes)
    (new, old, reference), rows = _tables(rollouts, settings)
    leaves = _leaves(rows)

    loss, _ = _parts(_batch(rollouts, settings), settings, leaves, world=1, micro=12)
    loss.backward()

    expected = _loops(rollouts, settings, new, old, reference)
    assert loss.item() == pytest.approx(expected, rel=1e-6)  # advantages are float32
    kept = [place for place in new if not changes.get("drop_flat_groups") or place[0] // 3 != 2]
    assert leaves[0].grad is not None
    for place, got in zip(kept, leaves[0].grad.tolist(), strict=True):
        above, below = (
            _loops(rollouts, settings, new | {place: new[place] + by}, old, reference)
            for by in (1e-6, -1e-6)
        )
        assert got == pytest.approx((above - below) / 2e-6, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@pytest.mark.parametrize(("world", "micro"), [(1, 3), (1, 1), (2, 2), (4, 1), (5, 2), (16, 1)])
def test_loss_gradient_and_measurements_are_the_same_for_every_split(
    changes: dict[str, Any], world: int, micro: int
) -> None:
    rollouts, settings = _rollouts(), GrpoConfig(**changes)
    batch = _batch(rollouts, settings)
    _, rows = _tables(rollouts, settings)
    one, many = _leaves(rows), _leaves(rows)

    whole, measured = _parts(batch, settings, one, world=1, micro=12)
    split, added = _parts(batch, settings, many, world=world, micro=micro)
    whole.backward()
    split.backward()

    assert split.item() == pytest.approx(whole.item(), rel=1e-12)
    assert added == pytest.approx(measured, rel=1e-6)
    torch.testing.assert_close(many[0].grad, one[0].grad, rtol=1e-12, atol=0)


def test_measurements_count_what_they_say() -> None:
    settings = GrpoConfig(kl_coef=0.5, tis_cap=1.5)
    rollouts = _rollouts()
    (new, old, reference), rows = _tables(rollouts, settings)

    _, sums = _parts(_batch(rollouts, settings), settings, _leaves(rows), world=2, micro=4)

    apart = [reference[place] - new[place] for place in new]
    heavy = [old[place] - float(rollouts.logprobs[place]) >= math.log(1.5) for place in new]
    assert sums["entropy"] == pytest.approx(math.fsum(v**2 for v in new.values()) / 28)
    assert sums["kl_reference"] == pytest.approx(
        math.fsum(math.exp(d) - d - 1 for d in apart) / 28, rel=1e-9
    )
    assert sums["tis_truncated_share"] == pytest.approx(sum(heavy) / 28)
    assert 0 < sum(heavy) < 28
    assert 0 < sums["clip_fraction"] < 1


def test_flat_groups_leave_the_batch_and_are_counted() -> None:
    rollouts = _rollouts()

    batch = token_batch(rollouts, pad=0, drop_flat=True)

    assert batch.tokens.shape[0] == 9
    assert batch.trained_tokens == 21
    metrics = rollout_metrics(rollouts, batch, trained=0)
    assert metrics["dropped_share"] == pytest.approx(4 / 12)  # and the answer without a token
    assert metrics["sequences"] == 12.0
    assert metrics["reward_mean"] == pytest.approx(5.75 / 12)


@pytest.mark.parametrize("drop_flat", [True, False])
def test_a_single_sample_has_no_advantage_and_with_filtering_no_share(drop_flat: bool) -> None:
    rollouts = _rollouts()
    names = ("versions", "tokens", "loss_mask", "logprobs", "rewards", "groups")
    one = replace(rollouts, **{name: getattr(rollouts, name)[:1] for name in names})

    batch = token_batch(one, pad=0, drop_flat=drop_flat)

    assert batch.extra["advantages"].tolist() == [0.0]
    assert batch.extra["share"].tolist() == [0.0 if drop_flat else 0.25]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("update") / "model"
    write_model(folder, seed=0)
    return folder


@pytest.fixture(scope="module", autouse=True)
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Ranks(store, device=CPU, key=b"key")
    dist.destroy_process_group()


def _reference(folder: Path, settings: GrpoConfig) -> ReferenceModel | None:
    if not settings.kl_coef:
        return None
    stage = StageConfig(
        algorithm="grpo",
        allocation="fsdp:d1",
        steps=1,
        batch_size=4,
        optimizer=OPTIMIZER,
        grpo=settings,
    )
    job = StageJob("grpo", stage, str(folder), "float32", "", "", "", 0, 1, "", "")
    return ReferenceModel(job, CPU)


class _Trainer:
    """An engine of its own and the updates on it."""

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        settings: GrpoConfig,
        *,
        micro: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.settings = settings
        self.engine = FsdpEngine.build(folder, optimizer=OPTIMIZER, dtype="float32", device=CPU)
        self._update = PolicyUpdate(
            self.engine,
            ranks,
            settings,
            micro_batch_size=micro,
            max_tokens=max_tokens,
            reference=_reference(folder, settings),
        )

    def run(self, rollouts: RolloutBatch) -> dict[str, float]:
        silent = lambda _parts: lambda _index, _run: None  # noqa: E731
        sums, values = self._update.run(_batch(rollouts, self.settings), silent)
        return sums | values


@pytest.mark.parametrize("changes", [EVERYTHING, {"decoupled": False}], ids=str)
def test_micro_batches_and_order_do_not_show_in_the_updates(
    folder: Path, ranks: Ranks, changes: dict[str, Any]
) -> None:
    settings = GrpoConfig(**changes, epochs=2)
    found = []
    cuts: list[dict[str, int]] = [{}, {"micro": 3}, {"micro": 2}, {"max_tokens": 20}]
    batches = [_rollouts(), _rollouts(), *[_shuffled(_rollouts())] * 2]
    for cut, rollouts in zip(cuts, batches, strict=True):
        trainer = _Trainer(folder, ranks, settings, **cut)
        found.append([trainer.run(rollouts), trainer.run(rollouts)])

    first, second = found[0]
    for other in found[1:]:
        assert other[0] == pytest.approx(first, rel=1e-4, abs=1e-6)
        assert other[1] == pytest.approx(second, rel=5e-3, abs=1e-4)
    expected = {"loss", "grad_norm", "lr", "entropy", "clip_fraction", "k1", "k3", "pearson"}
    assert expected <= first.keys()
    assert ("kl_reference" in first) == bool(settings.kl_coef)


def _plain(model: Any, rollouts: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the sampled tokens by transformers, row by row."""
    chosen, entropies = [], []
    for row, mask in zip(rollouts.tokens, rollouts.loss_mask, strict=True):
        logits = model(input_ids=torch.tensor(row)[None]).logits[0].double().log_softmax(-1)
        picked = logits[:-1].gather(1, torch.tensor(row[1:, None]))[:, 0]
        chosen.append(picked[torch.tensor(mask[1:])])
        entropies.append(-(logits.exp() * logits).sum(-1)[:-1][torch.tensor(mask[1:])])
    return torch.cat(chosen), torch.cat(entropies)


def test_kl_is_measured_from_the_input_model(folder: Path, ranks: Ranks) -> None:
    rollouts = _rollouts()
    trainer = _Trainer(folder, ranks, GrpoConfig(kl_coef=0.1))

    first = trainer.run(rollouts)
    export = folder.parent / "moved"
    trainer.engine.export(export, trainer.engine.gather())
    second = trainer.run(rollouts)

    before, _ = _plain(huggingface.read_model(folder).eval(), rollouts)
    after, _ = _plain(huggingface.read_model(export).eval(), rollouts)
    apart = (before - after).detach()
    assert first["kl_reference"] == 0.0
    assert second["kl_reference"] == pytest.approx(
        float((apart.exp() - apart - 1).mean()), rel=1e-3
    )
    assert second["kl_reference"] > 1e-6


def test_a_larger_coefficient_keeps_the_policy_nearer_to_the_reference(
    folder: Path, ranks: Ranks
) -> None:
    kept = []
    for coefficient in (1e-9, 10.0):
        trainer = _Trainer(folder, ranks, GrpoConfig(kl_coef=coefficient))
        kept.append([trainer.run(_rollouts()) for _ in range(5)][-1]["kl_reference"])

    assert kept[1] < kept[0] / 4


def test_the_gradient_of_the_entropy_is_that_of_plain_transformers(
    folder: Path, ranks: Ranks
) -> None:
    rollouts = replace(_rollouts(), rewards=np.ones(12, dtype=np.float32))
    trainer = _Trainer(folder, ranks, GrpoConfig(entropy_coef=0.7))
    model = huggingface.read_model(folder)

    measured = trainer.run(rollouts)
    (loss := -0.7 * _plain(model, rollouts)[1].mean()).backward()

    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert measured["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert measured["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_mismatch_is_that_of_the_input_model_over_all_tokens(folder: Path, ranks: Ranks) -> None:
    rollouts = _rollouts()

    measured = _Trainer(folder, ranks, GrpoConfig(), micro=5).run(rollouts)

    trainer, _ = _plain(huggingface.read_model(folder).eval(), rollouts)
    apart = trainer.detach().numpy() - rollouts.logprobs[rollouts.loss_mask]
    assert measured["k1"] == pytest.approx(-apart.mean(), rel=1e-5)
    assert measured["max_abs_dlogp"] == pytest.approx(np.abs(apart).max(), rel=1e-5)


def _no_answers() -> RolloutBatch:
    rollouts = _rollouts()
    return replace(rollouts, loss_mask=np.zeros_like(rollouts.loss_mask))


def test_a_batch_without_signal_is_measured_and_moves_nothing(folder: Path, ranks: Ranks) -> None:
    trainer = _Trainer(folder, ranks, GrpoConfig(**EVERYTHING, epochs=3))
    trainer.run(_rollouts())
    before, updates = trainer.engine.gather(), trainer.engine.updates

    solved = trainer.run(replace(_rollouts(), rewards=np.ones(12, dtype=np.float32)))
    empty = trainer.run(_no_answers())

    assert updates == trainer.engine.updates == 3
    for name, value in trainer.engine.gather().items():
        assert value.equal(before[name]), name
    assert (solved["loss"], solved["grad_norm"], empty["loss"]) == (0.0, 0.0, 0.0)
    assert solved["entropy"] > 0
    assert {"k3", "kl_reference"} <= solved.keys()
    assert "k3" not in empty, "without a token there is nothing to measure"


def test_engine_log_probabilities_far_off_do_not_stop_the_training(
    folder: Path, ranks: Ranks
) -> None:
    rollouts = _rollouts()
    far = np.where(rollouts.loss_mask, -9999.0, 0.0).astype(np.float32)

    for decoupled in (True, False):
        trainer = _Trainer(folder, ranks, GrpoConfig(decoupled=decoupled))
        measured = trainer.run(replace(rollouts, logprobs=far))
        again = trainer.run(rollouts)

        assert all(math.isfinite(v) for v in [*measured.values(), *again.values()])
        assert measured["extreme_share"] == 1.0
