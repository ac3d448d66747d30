"""Files that changed since their sums were noted are found, with the first name."""

from pathlib import Path

import pytest

from shakedown.core.integrity import FileSum, damage, file_sums, files_below, wrong_size


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.bin").write_bytes(b"x" * 1000)
    (tmp_path / "b.bin").write_bytes(b"")
    return tmp_path


def test_files_as_they_were_written_have_no_fault(folder: Path) -> None:
    sums = file_sums(folder, files_below(folder))

    assert sorted(sums) == ["b.bin", "deep/a.bin"]
    assert (wrong_size(folder, sums), damage(folder, sums)) == ("", "")


def test_a_flipped_bit_is_found_by_content_and_not_by_size(folder: Path) -> None:
    sums = file_sums(folder, files_below(folder))
    content = bytearray((folder / "deep/a.bin").read_bytes())
    content[500] ^= 1
    (folder / "deep/a.bin").write_bytes(content)

    assert wrong_size(folder, sums) == ""
    assert damage(folder, sums) == "deep/a.bin has changed since it was written (checksum)"
    assert damage(folder, {"deep/a.bin": FileSum(1000)}) == "", "only its size is known"


def test_a_cut_and_a_lost_file_are_found_by_size(folder: Path) -> None:
    sums = file_sums(folder, files_below(folder))
    (folder / "deep/a.bin").write_bytes(b"x" * 999)

    assert wrong_size(folder, sums) == "deep/a.bin is not 1000 bytes long"
    (folder / "b.bin").unlink()
    assert wrong_size(folder, sums) == "b.bin is not 0 bytes long"
    assert damage(folder, sums).startswith("b.bin cannot be read: No such file")
