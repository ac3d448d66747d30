"""Run hostile inputs of one kind through `shakedown hang analyze`, each in a folder of its own.

    python -m tests.security.examine pickles|bombs|texts

Prints a JSON line an input, and at last the peak memory of the largest process in bytes. A program
of its own, so that the command runs as it does for a user: in a process without threads.
"""

import contextlib
import io
import json
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from shakedown.cli import main as shakedown
from tests.hang_inputs import tags_of
from tests.security.hostile_archives import bombs
from tests.security.hostile_pickles import crafted_pickles
from tests.security.hostile_texts import texts


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder, "mark")
        for name, file, make in inputs(sys.argv[1], str(mark)):
            print(json.dumps({"name": name, **examined(Path(folder, "in"), file, make())}))
            assert not mark.exists(), name
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(json.dumps({"peak": max(_own_peak(), children) * 1024}))


def _own_peak() -> int:
    """In KiB. Not ru_maxrss: exec keeps what it was before, the peak of the test's process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0])


def inputs(kind: str, mark: str) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Name, file name and content."""
    if kind == "bombs":
        for name, make in bombs().items():
            yield name, name, make
        return
    rows = crafted_pickles(mark) if kind == "pickles" else texts()
    file = "_dump_0" if kind == "pickles" else "trainer-rank0.log"
    for name, data in rows.items():
        yield name, file, partial(bytes, data)


def examined(folder: Path, file: str, data: bytes) -> dict[str, object]:
    """Exit code, CPU seconds, what was said, and the tags of the page."""
    folder.mkdir(exist_ok=True)
    path, page = folder / file, folder.parent / "page.html"
    path.write_bytes(data)
    out, said, before = io.StringIO(), io.StringIO(), cpu()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        code = shakedown(["hang", "analyze", str(folder), "--json", "-", "--html", str(page)])
    path.unlink()
    answer = json.loads(out.getvalue()) if out.getvalue() else {}
    tags = sorted(tags_of(page.read_text())) if page.exists() else []
    page.unlink(missing_ok=True)
    skipped = [f["measured"] for f in answer.get("findings", ()) if f["check"] == "read"]
    return {
        "code": code,
        "seconds": round(cpu() - before, 2),
        "said": said.getvalue()[:400],
        "controls": any(c < " " and c != "\n" for c in said.getvalue() + out.getvalue()),
        "skipped": skipped[:3],
        "tags": tags,
    }


def cpu() -> float:
    """CPU seconds of this process and of all that it started."""
    usage = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


if __name__ == "__main__":
    main()
