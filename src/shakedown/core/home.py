"""`~` in paths that no shell has seen: config files, and options such as `--out=~/results`."""

import re
from pathlib import Path

# A place may name its kind first: `gsm8k=~/rows.jsonl`, `vllm:~/model`.
_HOME = re.compile(r"(\w+[=:])?(~.*)", re.DOTALL)


def expand_home(place: str) -> str:
    """`~` and `~user` at the begin of a path as the home folder; any other text as it is.

    Taken as they stand they would name a folder `~` below the working directory.

    Raises:
        ValueError: no home folder is known for that user.
    """
    found = _HOME.fullmatch(place)
    if found is None:
        return place
    try:
        return (found[1] or "") + str(Path(found[2]).expanduser())
    except RuntimeError as error:
        user = found[2].partition("/")[0]
        raise ValueError(
            f"no home folder is known for {user!r}: write ./{user} for a file here"
        ) from error
