"""Images of data rows: good ones in every form, hostile ones refused with the row's number."""

import base64
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shakedown.consistency.images import has_images, take_images, with_images
from shakedown.consistency.samples import read_prompts
from shakedown.core.errors import UsageError
from shakedown.training.demo_vision import counting_rows


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
        (uri(png()[:50]), "cannot be read"),
        (uri(bomb()), "cannot be read"),
        (uri(png(), "text/html"), "no image in base64"),
        ("data:image/png;base64,???", "not base64"),
        (uri(b"<svg/>"), "cannot be read"),
        ("http://127.0.0.1/a.png", "not fetched"),
        ("../out.png", "outside"),
        ("/etc/passwd", "outside"),
        ("link.png", "outside"),
        ("pipe", "no regular file"),
        ("none.png", "cannot read"),
        (7, "no image"),
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
