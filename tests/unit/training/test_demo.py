"""The demo's model, tokenizer and problems."""

import json
from pathlib import Path

import pytest

from shakedown.core.errors import ConfigError
from shakedown.models import huggingface
from shakedown.training.demo import addition_rows, write_model, write_rows

CHAT = [{"role": "user", "content": "12+34="}]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "model"
    write_model(folder, seed=3)
    return folder


def test_model_folder_is_an_ordinary_checkpoint_of_about_600k_parameters(
    model_folder: Path,
) -> None:
    model = huggingface.read_model(model_folder)

    assert 550_000 < sum(p.numel() for p in model.parameters()) < 700_000
    assert (model_folder / "generation_config.json").is_file()
    assert not list(model_folder.parent.glob(".*")), "the staging folder is left over"


def test_same_seed_writes_the_same_weights_and_another_seed_others(
    model_folder: Path, tmp_path: Path
) -> None:
    write_model(tmp_path / "same", seed=3)
    write_model(tmp_path / "other", seed=4)

    weights = (model_folder / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "same" / "model.safetensors").read_bytes()
    assert weights != (tmp_path / "other" / "model.safetensors").read_bytes()


def test_chat_and_completion_prompts_have_the_same_tokens(model_folder: Path) -> None:
    tokenizer = huggingface.read_tokenizer(model_folder)

    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)

    assert chat == tokenizer("12+34=").input_ids
    assert chat[0] == tokenizer.bos_token_id
    assert chat.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("text", ["How many items are there?\n[N]", "héllo 漢字 🙂", "", "\t\x00"])
def test_any_text_has_tokens_of_the_vocabulary(model_folder: Path, text: str) -> None:
    tokenizer = huggingface.read_tokenizer(model_folder)

    ids = tokenizer(text).input_ids

    assert len(ids) == len(text) + 1
    assert all(0 <= token < len(tokenizer) for token in ids)


def test_printable_text_survives_encoding_and_decoding(model_folder: Path) -> None:
    tokenizer = huggingface.read_tokenizer(model_folder)
    text = "What is 12+34? {answer}~\n"

    ids = tokenizer(text, add_special_tokens=False).input_ids

    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_train_and_heldout_problems_are_disjoint_and_right() -> None:
    train, heldout = addition_rows(train_size=9600, heldout_size=400, seed=0)

    prompts = [row["messages"][0]["content"] for row in train + heldout]
    assert len(set(prompts)) == 10_000
    for row in heldout:
        left, right = row["messages"][0]["content"].removesuffix("=").split("+")
        assert int(row["answer"][::-1]) == int(left) + int(right)
        assert len(row["answer"]) == 3


def test_problems_depend_on_the_seed_alone() -> None:
    first = addition_rows(train_size=50, heldout_size=5, seed=1)

    assert first == addition_rows(train_size=50, heldout_size=5, seed=1)
    assert first != addition_rows(train_size=50, heldout_size=5, seed=2)


def test_more_problems_than_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"10400.*10000.*\n.*at most 9600"):
        addition_rows(train_size=10_000, heldout_size=400, seed=0)


def test_rows_are_written_as_json_lines(tmp_path: Path) -> None:
    _, heldout = addition_rows(train_size=1, heldout_size=3, seed=0)

    write_rows(tmp_path / "rows.jsonl", heldout)

    lines = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == heldout
