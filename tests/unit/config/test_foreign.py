"""Configs of AReaL and prime-rl: all real ones are read, and one change in one is told."""

import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shakedown.cli import main
from shakedown.config.foreign import PROJECTS, judge_foreign, read_toml, source
from shakedown.config.foreign.document import Document
from shakedown.config.load import KeyLocations, read_yaml
from shakedown.core.errors import ConfigError
from shakedown.core.verdict import Verdict

SAMPLE = Path(__file__).parents[2] / "data" / "foreign"
SAMPLES = sorted([*SAMPLE.glob("*/*.yaml"), *SAMPLE.glob("*/*.toml")])

# One change to a real config: file, what is replaced, by what; status, check and key of what is
# told, and the text that begins where its place points.
# These truths were written before the rules that find them had run.
BROKEN = [
    (
        "areal/gsm8k_grpo.yaml",
        "consumer_batch_size: ${train_dataset.batch_size}",
        "consumer_batch_size: 64",
        "fail staleness rollout.consumer_batch_size",
        "consumer_batch_size: 64",
    ),
    (
        "areal/gsm8k_grpo.yaml",
        "  consumer_batch_size: ${train_dataset.batch_size}\n",
        "",
        "fail staleness rollout.consumer_batch_size",
        "rollout:",
    ),
    (
        "areal/gsm8k_grpo.yaml",
        "consumer_batch_size: ${train_dataset.batch_size}",
        "consumer_batch_size: 200",
        "fail staleness rollout.consumer_batch_size",
        "consumer_batch_size: 200",
    ),
    (
        "areal/gsm8k_grpo.yaml",
        "consumer_batch_size: ${train_dataset.batch_size}",
        "consumer_batch_size: 512",
        "warn staleness rollout.consumer_batch_size",
        "consumer_batch_size: 512",
    ),
    (
        "areal/gsm8k_grpo.yaml",
        "max_head_offpolicyness: 2",
        "max_head_offpolicyness: -1",
        "fail staleness rollout.max_head_offpolicyness",
        "max_head_offpolicyness: -1",
    ),
    (
        "areal/gsm8k_grpo.yaml",
        "queue_size: null",
        "queue_size: 128",
        "fail queue rollout.queue_size",
        "queue_size: 128",
    ),
    (
        "areal/gsm8k_grpo.yaml",
        'backend: "sglang:d4p1t1"',
        'backend: "sglang:d8p1t1"',
        "fail gpus rollout.backend",
        'backend: "sglang:d8p1t1"',
    ),
    (
        "areal/gsm8k_grpo.yaml",
        "temperature: ${gconfig.temperature}",
        "temperature: 0.7",
        "fail logprobs actor.temperature",
        "temperature: 0.7",
    ),
    (
        "areal/gsm8k_grpo.yaml",
        "max_new_tokens: 1024",
        "max_new_tokens: 32768",
        "fail lengths gconfig.max_new_tokens",
        "max_new_tokens: 32768",
    ),
    (
        "areal/gsm8k_grpo.yaml",
        "max_tokens_per_mb: 10240",
        "max_tokens_per_mb: 512",
        "fail lengths actor.mb_spec.max_tokens_per_mb",
        "max_tokens_per_mb: 512",
    ),
    (
        "areal/gsm8k_grpo.yaml",
        "group_size: ${gconfig.n_samples}",
        "group_size: 8",
        "fail groups actor.reward_norm.group_size",
        "group_size: 8",
    ),
    (
        "areal/gsm8k_grpo.yaml",
        "use_decoupled_loss: true",
        "use_decoupled_loss: false",
        "warn logprobs actor.rejection_sampling",
        "rejection_sampling:",
    ),
    (
        "areal/gsm8k_grpo.yaml",
        "greedy: false",
        "greedy: true",
        "fail sampling gconfig.greedy",
        "greedy: true",
    ),
    (
        "areal/tau2_8b.yaml",
        'backend: "sglang:d16"',
        'backend: "sglang:d12"',
        "fail gpus rollout.backend",
        'backend: "sglang:d12"',
    ),
    (
        "areal/tau2_8b.yaml",
        "n_nodes: 3",
        "n_nodes: 2",
        "fail gpus rollout.backend",
        'backend: "sglang:d16"',
    ),
    (
        "areal/tau2_8b.yaml",
        "    mode: inline\n",
        "    mode: inline\n    session_timeout_seconds: 600\n",
        "warn timeouts rollout.agent.session_timeout_seconds",
        "session_timeout_seconds: 600",
    ),
    (
        "areal/tau2_8b.yaml",
        "mode: inline",
        "mode: online",
        "fail online valid_dataset",
        "valid_dataset:",
    ),
    (
        "areal/tau2_8b.yaml",
        "kl_ctl: 0.0",
        "kl_ctl: 0.1",
        "fail gpus rollout.backend",
        'backend: "sglang:d16"',
    ),
    (
        "areal/scaffolding_2nodes.yaml",
        "allocation_mode: sglang:d8+d8",
        "allocation_mode: sglang:d8+d16",
        "fail gpus allocation_mode",
        "allocation_mode: sglang:d8+d16",
    ),
    (
        "areal/scaffolding_2nodes.yaml",
        "allocation_mode: sglang:d8+d8",
        "allocation_mode: sglang.d8+d8",
        "fail allocation allocation_mode",
        "allocation_mode: sglang.d8+d8",
    ),
    (
        "areal/gsm8k_sft.yaml",
        'backend: "fsdp:d8p1t1"',
        'backend: "fsdp:d4p2t1"',
        "fail allocation actor.backend",
        'backend: "fsdp:d4p2t1"',
    ),
    (
        "prime_rl/reverse_text.toml",
        "batch_size = 128",
        "batch_size = 120",
        "fail batch orchestrator.batch_size",
        "batch_size = 120",
    ),
    (
        "prime_rl/reverse_text.toml",
        "group_size = 16",
        "group_size = 1",
        "warn groups orchestrator.group_size",
        "group_size = 1",
    ),
    (
        "prime_rl/reverse_text.toml",
        "group_size = 16",
        "group_size = 16\nmax_off_policy_steps = 0",
        "warn staleness orchestrator.max_off_policy_steps",
        "max_off_policy_steps = 0",
    ),
    (
        "prime_rl/reverse_text.toml",
        "max_completion_tokens = 128",
        "max_completion_tokens = 4096",
        "warn lengths orchestrator.train.sampling.max_completion_tokens",
        "max_completion_tokens = 4096",
    ),
    (
        "prime_rl/reverse_text.toml",
        "[inference]",
        '[inference.vllm]\nlogprobs_mode = "raw_logprobs"',
        "warn logprobs inference.vllm.logprobs_mode",
        'logprobs_mode = "raw_logprobs"',
    ),
    (
        "prime_rl/wordle.toml",
        "[trainer] # Default trainer config",
        "[trainer]\ndist_timeout_seconds = 600",
        "warn timeouts trainer.dist_timeout_seconds",
        "dist_timeout_seconds = 600",
    ),
    (
        "prime_rl/reverse_text.toml",
        "[trainer.optim]",
        "[trainer.model]\nseq_len = 1024\n\n[trainer.optim]",
        "fail shared trainer.model.seq_len",
        "seq_len = 1024",
    ),
    (
        "prime_rl/lora.toml",
        "[ckpt]",
        '[weight_broadcast]\ntype = "nccl"\n\n[ckpt]',
        "fail lora weight_broadcast.type",
        'type = "nccl"',
    ),
    (
        "prime_rl/qwen3_30b_math.toml",
        "num_infer_nodes = 2",
        "num_infer_nodes = 0",
        "fail gpus deployment.num_infer_nodes",
        "num_infer_nodes = 0",
    ),
    (
        "prime_rl/qwen3_30b_math.toml",
        "tensor_parallel_size = 8",
        "tensor_parallel_size = 16",
        "fail gpus inference.vllm.tensor_parallel_size",
        "tensor_parallel_size = 16",
    ),
    (
        "prime_rl/qwen3_30b_math.toml",
        '[slurm]\njob_name = "math-qwen30b"\n',
        "",
        "fail slurm deployment.type",
        'type = "multi_node"',
    ),
    (
        "prime_rl/qwen3_30b_math.toml",
        "ep = 8",
        "ep = 3",
        "fail gpus trainer.model.ep",
        "ep = 3",
    ),
    (
        "prime_rl/glm_swe.toml",
        "max_inflight = 8192",
        "max_inflight = 2048",
        "fail concurrency orchestrator.concurrency.initial_inflight",
        "initial_inflight = 4096",
    ),
    (
        "prime_rl/wordle.toml",
        "num_infer_gpus = 6",
        "num_infer_gpus = 8",
        "fail gpus deployment.num_infer_gpus",
        "num_infer_gpus = 8",
    ),
    (
        "prime_rl/wordle.toml",
        "data_parallel_size = 6",
        "data_parallel_size = 4",
        "warn gpus inference.vllm.data_parallel_size",
        "data_parallel_size = 4",
    ),
    (
        "prime_rl/glm_infer.toml",
        '[slurm]\njob_name = "glm5"\npartition = "cluster"\n',
        "",
        "fail slurm deployment.type",
        'type = "disaggregated"',
    ),
    (
        "prime_rl/lora.toml",
        'name = "r8-1e-4"',
        "rank = 16",
        "fail lora orchestrator.model.lora.rank",
        "rank = 16",
    ),
    (
        "prime_rl/mixed_grpo_opd.toml",
        "[[orchestrator.train.source]]",
        "[orchestrator.algo.sampling]\nsource = 3\n\n[[orchestrator.train.source]]",
        "fail teacher orchestrator.algo.sampling.source",
        "source = 3",
    ),
    (
        "prime_rl/k8s_orch.toml",
        "batch_size = 128",
        "batch_size = 100",
        "fail batch batch_size",
        "batch_size = 100",
    ),
]


@pytest.fixture(autouse=True)
def _nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_installed", lambda _layout: iter(()))


def _judge(*paths: Path, source: Path | None = None) -> Verdict:
    verdict = judge_foreign(paths, source)
    assert verdict is not None, f"of no known project: {paths}"
    return verdict


def _told(verdict: Verdict) -> list[str]:
    """The findings, but for the one that no source was there to read names from."""
    return [f"{f.status} {f.check} {f.subject}" for f in verdict.findings if f.check != "source"]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_real_config_is_read_without_an_error(path: Path) -> None:
    assert _judge(path).status in ("PASS", "WARN")


@pytest.mark.parametrize("row", BROKEN, ids=[f"{row[0]}:{row[3]}" for row in BROKEN])
def test_one_change_in_a_real_config_is_told_at_its_place(
    tmp_path: Path, row: tuple[str, str, str, str, str]
) -> None:
    name, old, new, told, line = row
    text = (SAMPLE / name).read_text()
    assert old in text
    path = tmp_path / Path(name).name
    path.write_text(text.replace(old, new, 1))
    before = _told(_judge(SAMPLE / name))

    verdict = _judge(path)

    assert told in _told(verdict)
    assert told not in before
    finding = verdict.findings[_told(verdict).index(told)]
    place, number, column = finding.evidence[0].rsplit(":", 2)
    assert place == str(path)
    assert path.read_text().splitlines()[int(number) - 1][int(column) - 1 :] == line


KINDS = {
    "gsm8k_grpo": "AReaL (RL)",
    "tau2_8b": "AReaL (RL)",
    "scaffolding_2nodes": "AReaL (RL)",
    "gsm8k_sft": "AReaL (SFT)",
    "hhrlhf_dpo": "AReaL (DPO)",
    "environ_ref": "AReaL (environment)",
    "single_node.sky": "AReaL (SkyPilot task)",
    "reverse_text": "prime-rl (RL)",
    "reverse_text_sft": "prime-rl (SFT)",
    "wordle": "prime-rl (RL)",
    "glm_swe": "prime-rl (RL)",
    "glm_infer": "prime-rl (inference)",
    "qwen3_30b_math": "prime-rl (RL)",
    "lora": "prime-rl (RL)",
    "mixed_grpo_opd": "prime-rl (RL)",
    "evals_swe": "prime-rl (evals)",
    "k8s_orch": "prime-rl (orchestrator)",
    "k8s_train": "prime-rl (trainer)",
}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_the_project_and_the_kind_are_told_by_the_keys(tmp_path: Path, path: Path) -> None:
    moved = tmp_path / f"any{path.suffix}"
    moved.write_bytes(path.read_bytes())

    assert f": {KINDS[path.stem]}" in _judge(moved).summary


def test_warnings_of_real_configs_are_those_that_were_read_one_by_one() -> None:
    told = {path.stem: _told(_judge(path)) for path in SAMPLES}

    assert {name: rows for name, rows in told.items() if rows} == {
        "scaffolding_2nodes": [
            "warn allocation allocation_mode",
            "warn lengths gconfig.max_new_tokens",
        ],
        "glm_swe": ["warn timeouts trainer.dist_timeout_seconds"],
        "qwen3_30b_math": [
            "warn groups orchestrator.group_size",
            "warn lengths orchestrator.train.sampling.max_completion_tokens",
        ],
    }


CHECKOUTS = {"SHAKEDOWN_AREAL": "examples/**/*.yaml", "SHAKEDOWN_PRIME_RL": "**/*.toml"}


@pytest.mark.parametrize("variable", CHECKOUTS)
def test_every_example_of_a_checkout_is_read_without_an_error(variable: str) -> None:
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"{variable} names no checkout")
    paths = sorted(Path(folder).glob(CHECKOUTS[variable]))

    found = {path: _judge(path) for path in paths if path.name != "pyproject.toml"}

    # AReaL raises on this key of its own examples.
    failed = {
        str(path): [row for row in _told(v) if "fail" in row and "behav" not in row]
        for path, v in found.items()
    }
    assert found
    assert {path: rows for path, rows in failed.items() if rows} == {}


def _batches(batch: int, own: int, behind: int, limit: int) -> int:
    """Batches that a trainer gets: AReaL's rule, step by step. Rollouts end as soon as they start.

    areal/infra/staleness_manager.py: capacity = (behind + version + 1) * own - accepted.
    """
    accepted = version = 0
    while version < limit:
        accepted = max(accepted, (behind + version + 1) * own)
        if accepted < (version + 1) * batch:
            break
        version += 1
    return version


@pytest.mark.parametrize("behind", [0, 1, 2, 4])
@pytest.mark.parametrize("own", [1, 7, 64, 200, 255, 256])
def test_the_batch_at_which_the_rollout_blocks_is_the_one_of_areals_rule(
    tmp_path: Path, own: int, behind: int
) -> None:
    text = (SAMPLE / "areal" / "gsm8k_grpo.yaml").read_text()
    text = text.replace("max_head_offpolicyness: 2", f"max_head_offpolicyness: {behind}")
    path = tmp_path / "config.yaml"
    path.write_text(text.replace("size: ${train_dataset.batch_size}", f"size: {own}"))

    found = [f.expected for f in _judge(path).findings if f.check == "staleness"]

    batches = _batches(256, own, behind, limit=5000)
    when = f"after {batches} batches" if batches else "before the first batch is full"
    told = f"train_dataset.batch_size, 256: the rollout blocks forever {when}"
    assert found == ([] if own == 256 else [told])


def test_a_run_that_ends_before_it_would_block_is_sound(tmp_path: Path) -> None:
    text = (SAMPLE / "areal" / "gsm8k_grpo.yaml").read_text()
    path = tmp_path / "config.yaml"
    text = text.replace("size: ${train_dataset.batch_size}", "size: 200")
    path.write_text(f"{text}\ntotal_train_steps: 7\n")  # it would block after 7 batches

    assert _told(_judge(path)) == []


def test_references_are_followed_and_circles_and_resolvers_left_alone(tmp_path: Path) -> None:
    text = (SAMPLE / "areal" / "gsm8k_grpo.yaml").read_text()
    text = text.replace("max_new_tokens: 1024", "max_new_tokens: ${limits.answer}", 1)
    text = text.replace("min_new_tokens: 0", "min_new_tokens: ${gconfig.min_new_tokens}")
    text = text.replace("  seed: ${seed}", "  seed: ${oc.env:SEED}")
    path = tmp_path / "config.yaml"
    path.write_text(f"{text}\nlimits:\n  answer: ${{limits.most}}\n  most: 40000\n")

    assert "fail lengths gconfig.max_new_tokens" in _told(_judge(path))
    assert {f.check for f in _judge(path).findings} == {"lengths", "source"}


def test_files_of_prime_rl_lie_over_each_other_and_the_last_one_is_named(tmp_path: Path) -> None:
    over, fixed = tmp_path / "over.toml", tmp_path / "fixed.toml"
    over.write_text("[orchestrator]\nbatch_size = 120\n")
    fixed.write_text("[orchestrator]\ngroup_size = 8\n")
    base = SAMPLE / "prime_rl" / "reverse_text.toml"

    finding = _judge(base, over).findings[0]

    assert (finding.check, finding.evidence) == ("batch", [f"{over}:2:1"])
    assert _told(_judge(base, over, fixed)) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = 1\nb = = 2\n", r"c\.toml:2:5 is not TOML: "),
        ("[tool.ruff]\nline-length = 100\n", "TOML of an unknown project"),
        ("", "TOML of an unknown project"),
        ("a = \xff", "is not TOML"),
        (f"a = {'[' * 5000}", "nested too deeply|is not TOML"),
    ],
    ids=["twice", "other", "empty", "not utf-8", "deep"],
)
def test_toml_that_is_no_config_is_refused_with_a_sentence(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(text.encode("latin-1"))

    with pytest.raises(ConfigError, match=words):
        judge_foreign([path])


@pytest.mark.parametrize(
    "text",
    [
        "actor: [1]\nrollout: 3\ngconfig: x\ntrain_dataset: {batch_size: {}}\ncluster: []\n",
        "rollout: {backend: [], consumer_batch_size: 1e999, max_head_offpolicyness: .nan}\n",
        f"gconfig: {{max_new_tokens: {'9' * 400}, n_samples: -1, temperature: .inf}}\n",
        "rollout: &a {agent: *a, backend: '${rollout}'}\n",
        "actor: {path: '${actor.path}', reward_norm: '${actor}'}\nrollout: {}\n",
        "1: 2\nactor: {3: 4}\nnull: 5\n2020-01-01: 6\n",
    ],
)
def test_values_of_wrong_kinds_are_no_error_of_ours(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)

    assert _judge(path).status in ("PASS", "WARN", "FAIL")


def _paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    rows = value.items() if isinstance(value, dict) else enumerate(value)
    for name, child in rows:
        yield (*above, name)
        if isinstance(child, dict | list):
            yield from _paths(child, (*above, name))


@pytest.mark.parametrize(
    "name",
    [
        "areal/gsm8k_grpo.yaml",
        "prime_rl/glm_swe.toml",
        "prime_rl/mixed_grpo_opd.toml",
        "prime_rl/reverse_text_sft.toml",
    ],
)
@pytest.mark.parametrize("value", [[], {}, "x", "${seed}", -1, 0, True, math.inf], ids=repr)
def test_any_value_at_any_key_is_judged(name: str, value: object) -> None:
    path = SAMPLE / name
    toml = path.suffix == ".toml"
    body: dict[str, Any] = dict(read_toml(path) if toml else read_yaml(path))
    project, written = PROJECTS[toml], KeyLocations([path])
    for *above, last in list(_paths(body)):
        inner = functools.reduce(lambda inner, name: inner[name], above, body)
        kept, inner[last] = inner[last], value

        kind = project.kind_of(body)
        findings = project.lint(Document(body, written, kind, "", project.null)) if kind else []

        assert all(
            written.at(finding.subject) or "." not in finding.subject for finding in findings
        )
        inner[last] = kept


@pytest.mark.timeout(60)
@pytest.mark.parametrize("below", ["actor: {scheduling_spec: %s}", "econfig: %s", "rollouts: %s"])
def test_aliases_without_end_are_judged_in_time(tmp_path: Path, below: str) -> None:
    rows = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 12)]
    body = ["l0: &l0 [{a: 1, b: '${x.y}'}]", *rows, "rollout: {}", below % "*l11"]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(body) + "\n")

    assert _judge(path).status in ("PASS", "WARN", "FAIL")


def test_a_config_of_shakedown_is_none_of_another_project() -> None:
    config = Path(__file__).parents[3] / "config"

    assert [judge_foreign([path]) for path in config.rglob("*.yaml")] == [
        None for _ in config.rglob("*.yaml")
    ]


def test_the_command_prints_the_place_and_ends_with_the_codes_of_lint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, doubtful = (SAMPLE / name for name in ("areal/gsm8k_grpo.yaml", "prime_rl/glm_swe.toml"))
    wrong = tmp_path / "wrong.toml"
    wrong.write_text((SAMPLE / "prime_rl" / "wordle.toml").read_text().replace("= 6", "= 8", 1))

    codes = [main(["lint", str(path)]) for path in (good, doubtful, wrong)]

    assert codes == [0, 0, 2]
    assert main(["lint", "--strict", str(doubtful)]) == 1
    assert main(["lint", "--resolved", str(good)]) == 2
    printed = capsys.readouterr().out
    assert f"lint: WARN: {good}: AReaL (RL): 0 failed, 1 warning" in printed
    assert f"at {wrong}:6:1" in printed
