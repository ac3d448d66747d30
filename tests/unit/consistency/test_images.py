"""Images of data rows: good ones in every form, hostile ones refused with the row's number."""

import base64
import io
import json
import os
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from shakedown.cli import main
from shakedown.consistency.factors import Bench, measure, measure_noise
from shakedown.consistency.images import has_images, take_images, with_images
from shakedown.consistency.part import ComparedSample
from shakedown.consistency.plan import ComparisonPlan
from shakedown.consistency.samples import ComparedCompletion, Scored, check_rows, read_prompts
from shakedown.consistency.score import Reference
from shakedown.consistency.server import OwnServer, _spec
from shakedown.consistency.vision import _as_text
from shakedown.core.errors import CannotJudgeError, UsageError
from shakedown.data_sources.formats.clevr_count import CLEVR_COUNT
from tests.tiny_vision import counting_rows, write_vision_model


def png(color: str = "red") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 4), color).save(out, "PNG")
    return out.getvalue()


def uri(raw: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(raw).decode()}"


def row(image: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image", "image": image}]}]}


def bomb() -> bytes:
    """A PNG whose header tells of 60,000 x 60,000 pixels."""
    raw = bytearray(png())
    raw[16:24] = struct.pack(">II", 60_000, 60_000)
    raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))
    return bytes(raw)


@pytest.mark.parametrize("form", ["uri", "bytes", "path", "pil", "listed"])
def test_an_image_is_the_same_whatever_its_form(form: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    given = {
        "uri": row(uri(png())),
        "bytes": row({"bytes": png(), "path": None}),
        "path": row("a.png"),
        "pil": row(Image.open(io.BytesIO(png()))),
        "listed": {**row(None), "images": [{"bytes": png(), "path": "x"}]},
    }[form]

    messages, images = take_images(given, "data row 1", tmp_path)

    assert messages == [{"role": "user", "content": [{"type": "image"}]}]
    assert [Image.open(io.BytesIO(each)).getpixel((0, 0)) for each in images] == [(255, 0, 0)]
    sent = with_images(messages, images)[0]["content"][0]["image_url"]["url"]
    assert base64.b64decode(sent.removeprefix("data:image/png;base64,")) == images[0]


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (uri(png()[:50]), "unreadable image"),
        (uri(bomb()), "unreadable image"),
        (uri(png(), "text/html"), "is not a base64 image"),
        ("data:image/png;base64,???", "not base64"),
        (uri(b"<svg/>"), "unreadable image"),
        ("http://127.0.0.1/a.png", "not fetched"),
        ("../out.png", "outside"),
        ("/etc/passwd", "outside"),
        ("link.png", "outside"),
        ("pipe", "not a regular file"),
        ("none.png", "cannot read"),
        (7, "an image is missing"),
    ],
)
def test_an_image_that_cannot_be_used_is_refused(image: Any, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "out.png").write_bytes(png())
    (folder / "link.png").symlink_to(tmp_path / "out.png")
    os.mkfifo(folder / "pipe")

    with pytest.raises(UsageError, match=f"data row 3: .*{said}"):
        take_images(row(image), "data row 3", folder)


def test_images_that_no_message_shows_are_refused() -> None:
    given = {"messages": [{"role": "user", "content": "How many?"}], "images": [png()]}

    assert has_images(given)
    with pytest.raises(UsageError, match="no message shows"):
        take_images(given, "data row 1", None)


def test_a_row_with_an_image_is_never_read_as_text_where_the_model_sees_none() -> None:
    with pytest.raises(UsageError, match="data row 1 has images"):
        read_prompts([row(uri(png()))], tokenizer=None)


def test_drawn_rows_depend_on_the_seed_alone() -> None:
    assert counting_rows(3, seed=1) == counting_rows(3, seed=1) != counting_rows(3, seed=2)


def test_rows_count_by_what_their_images_show_and_not_by_their_names(tmp_path: Path) -> None:
    def digest() -> str:
        return check_rows([row("a.png")], tmp_path)

    (tmp_path / "a.png").write_bytes(png())
    first = digest()
    same = check_rows([row(Image.open(io.BytesIO(png())))]), check_rows([row(uri(png()))])
    (tmp_path / "a.png").write_bytes(png("blue"))

    assert same[0] == same[1]
    assert digest() != first


def test_a_bad_image_is_refused_before_anything_is_generated(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data row 2: .*cannot read"):
        check_rows([row(uri(png())), row("none.png")], tmp_path)


def test_a_known_data_set_shows_its_images_before_its_text() -> None:
    body = {"problem": "<image>How many different items?", "answer": "3", "images": [png()]}

    shown = CLEVR_COUNT.row(body, "row 1", images=True)

    messages, images = take_images(shown, "data row 1", None)
    assert [part["type"] for part in messages[-1]["content"]] == ["image", "text"]
    assert len(images) == 1
    assert "images" not in CLEVR_COUNT.row(body, "row 1")
    with pytest.raises(UsageError, match="row 1: `images`"):
        CLEVR_COUNT.row({**body, "images": []}, "row 1", images=True)


class Seeing:
    """A tiny model with vision, and the first two drawn rows as its prompts."""

    def __init__(self, folder: Path) -> None:
        write_vision_model(folder, seed=0)
        self.reference = Reference(str(folder), dtype="float32")
        self.prompts = read_prompts(
            counting_rows(2, seed=0), self.reference.tokenizer, image_ids=self.reference.image_ids
        )

    def score(self, completion: list[int], source: int = 0) -> Any:
        prompt = self.prompts[source]
        return self.reference.score([Scored(prompt.ids, completion, prompt)])[0].logprobs


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(tmp_path_factory.mktemp("vision") / "model")


@pytest.mark.slow
def test_scores_are_those_of_one_forward_pass_over_prompt_and_answer(seeing: Seeing) -> None:
    prompt, answer = seeing.prompts[0], [20, 21, 22]
    processor = AutoProcessor.from_pretrained(seeing.reference.name)
    picture = Image.open(io.BytesIO(prompt.images[0]))
    given = processor(text=["<start_of_image>"], images=[[picture]], return_tensors="pt")
    ids = torch.tensor([[*prompt.ids, *answer]])
    kinds = (ids == seeing.reference._model.config.image_token_id).long()

    with torch.inference_mode():
        out = seeing.reference._model(
            input_ids=ids, token_type_ids=kinds, pixel_values=given["pixel_values"]
        )

    expected = out.logits[0, -4:-1].log_softmax(-1)[range(3), answer]
    assert seeing.score(answer) == pytest.approx(expected.numpy(), abs=1e-5)


@pytest.mark.slow
def test_another_image_gives_other_scores_though_the_ids_are_the_same(seeing: Seeing) -> None:
    first, second = seeing.prompts

    assert list(first.ids) == list(second.ids)
    assert np.abs(seeing.score([20, 21]) - seeing.score([20, 21], source=1)).max() > 1e-4


@pytest.mark.slow
def test_an_image_token_that_was_sampled_is_scored_as_the_token_it_is(seeing: Seeing) -> None:
    token = seeing.reference._model.config.image_token_id

    with_image = seeing.score([20, token, 21])

    assert np.isfinite(with_image).all()
    assert with_image[0] == pytest.approx(seeing.score([20, 21])[0], abs=1e-6)


@pytest.mark.slow
def test_greedy_answers_are_the_likeliest_tokens_of_the_scores(seeing: Seeing) -> None:
    made = seeing.reference.generate(seeing.prompts, max_tokens=4, temperature=0.0, seed=0)

    items = [Scored(p.ids, ids, p) for p, ids in zip(seeing.prompts, made, strict=True)]
    assert [s.top_ids.tolist() for s in seeing.reference.score(items)] == made


@pytest.mark.slow
def test_image_tokens_see_each_other_unless_they_are_taken_as_text(seeing: Seeing) -> None:
    own = seeing.score([20, 21])

    with seeing.reference.images_as_text():
        causal = seeing.score([20, 21])

    assert np.abs(own - causal).max() > 1e-4
    assert seeing.score([20, 21]) == pytest.approx(own, abs=1e-7)


@pytest.mark.parametrize("kinds", [[1, 1, 0], [0, 0, 0], None])
def test_token_types_that_do_not_mark_the_image_are_left_alone(kinds: list[int] | None) -> None:
    model = SimpleNamespace(config=SimpleNamespace(image_token_id=8))
    made = {"input_ids": torch.tensor([[2, 8, 3]])}
    made |= {} if kinds is None else {"token_type_ids": torch.tensor([kinds])}

    with pytest.raises(CannotJudgeError, match="does not mark its image tokens"):
        _as_text(made, model)
    marked = {**made, "token_type_ids": torch.tensor([[0, 1, 0]])}
    assert _as_text(marked, model).tolist() == [[0, 0, 0]]


@pytest.mark.slow
def test_a_model_with_vision_scores_rows_of_text_in_batches_as_alone(seeing: Seeing) -> None:
    items = [Scored([2, 30, 31, 32], [20, 21]), Scored([2, 40], [22, 23, 24])]

    together = seeing.reference.score(items)

    for item, score in zip(items, together, strict=True):
        (alone,) = seeing.reference.score([item])
        assert score.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


@pytest.mark.slow
def test_passes_over_ids_alone_are_not_measured_on_rows_with_images(seeing: Seeing) -> None:
    prompt = seeing.prompts[0]
    completion = ComparedCompletion(prompt, [20, 21], np.zeros(2))
    (score,) = seeing.reference.score([completion.scored])
    plan = ComparisonPlan(url="http://127.0.0.1:9", reference=seeing.reference.name, rows=[])
    bench = Bench(plan, seeing.reference, [ComparedSample(completion, score)])

    noise = measure_noise(bench)
    rows = measure(bench, noise, deep=True, progress=lambda _: None)

    notes = {each.factor: each.note for each in rows}
    for name in ("weights_in_run", "prefix_cache", "engine_batch", "packing", "decode_prefill"):
        assert "images" in notes[name], name
    assert {r.factor for r in noise.rows if r.distance is None} == {"engine_noise"}
    by_name = {each.factor: each for each in rows}
    assert (by_name["attention"].distance or 0.0) < 1e-5 < (by_name["precision"].distance or 0.0)


def test_a_server_of_a_model_with_vision_gets_the_length_of_its_text(tmp_path: Path) -> None:
    body = {"vision_config": {}, "text_config": {"max_position_embeddings": 512}}
    (tmp_path / "config.json").write_text(json.dumps(body))

    assert _spec(str(tmp_path), OwnServer(tmp_path / "server")).max_model_len == 512


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_agrees_on_drawn_images_but_for_the_attention_among_their_tokens(
    tmp_path: Path,
) -> None:
    # No build of torchvision for torch+cpu is on PyPI, and vLLM's Gemma 3 imports it.
    pytest.importorskip("torchvision")
    write_vision_model(tmp_path / "model", seed=0)
    rows = [json.dumps(each) for each in counting_rows(12, seed=0)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))

    code = main(
        ["compare", "--reference", f"transformers:{tmp_path}/model"]
        + ["--engine", f"vllm:{tmp_path}/model", "--data", str(tmp_path / "rows.jsonl")]
        + ["--max-tokens", "16", "--reward", "clevr_count", "--out", str(tmp_path / "out")]
    )

    verdict = json.loads((tmp_path / "out/verdict.json").read_text())
    checks = {each["check"]: each["status"] for each in verdict["findings"]}
    assert code == 1, verdict
    assert checks["factor_image_attention"] == "warn"
    (row,) = (each for each in verdict["factors"] if each["factor"] == "image_attention")
    assert row["share"] > 0.99
    assert row["left"] < 1e-4
