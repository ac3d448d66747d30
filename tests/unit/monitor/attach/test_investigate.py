"""Evidence of one suspicion is nobody else's."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shakedown.core.errors import CannotJudgeError
from shakedown.monitor.attach.investigate import investigate
from shakedown.monitor.attach.judge import Judgement
from shakedown.monitor.attach.subjects import Processes


@pytest.mark.slow
def test_watches_that_suspect_in_the_same_second_write_to_folders_of_their_own(
    tmp_path: Path,
) -> None:
    def look(_number: int) -> Path:
        with pytest.raises(CannotJudgeError) as nothing_there:
            investigate(Processes("no-such-", (), "python3"), Judgement("suspect"), {}, tmp_path)
        return Path(nothing_there.value.hint.removeprefix("look into "))

    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(look, range(3)))

    assert len(folders) == 3
    assert folders == set(tmp_path.iterdir())
    assert all(re.fullmatch(r"\d{8}T\d{6}Z(-\d)?", folder.name) for folder in folders)
    assert all((folder / "collect.log").is_file() for folder in folders)
