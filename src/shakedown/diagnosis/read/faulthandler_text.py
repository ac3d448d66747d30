"""faulthandler's dump: innermost frame first, thread ids instead of names."""

import re

from shakedown.diagnosis.read.attribution import header
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import Identity, Record, Stack, Thread, clean
from shakedown.stacks.frames import Frame

# `Current thread 0x00007f12345678 (most recent call first):`; newer Pythons write the thread's name
# in brackets before the parenthesis.
_THREAD = re.compile(
    r"^(Current thread|Thread) 0x([0-9a-fA-F]{1,16})(?: \[(.{0,80}?)\])?"
    r" \(most recent call first\):"
)
_FRAME = re.compile(r'^\s+File "([^"]{1,400})", line (\d{1,9}) in (.{1,300})$')

_MAIN = frozenset({"<module>", "_run_module_as_main"})  # `python FILE`, `python -m MODULE`

_Open = tuple[str, str, list[Frame]]  # thread id, name, frames


def parse(source: EvidenceFile) -> list[Record]:
    """One stack a dump. A thread id seen again begins the next dump of the same process."""
    if "(most recent call first):" not in source.text:
        return []
    stacks: list[Record] = []
    who, line = Identity(), 0
    threads: list[_Open] = []
    seen: set[str] = set()

    def flush() -> None:
        nonlocal threads
        if any(frames for _, _, frames in threads):
            stacks.append(_stack(source, who, threads, line, sample=len(stacks)))
        threads = []
        seen.clear()

    for number, text in enumerate(source.lines, start=1):
        heading = header(text)
        if heading is not None:
            flush()
            who = heading
        elif match := _THREAD.match(text):
            # Dumps of one process are appended to one file without anything between them.
            if match[2] in seen:
                flush()
            seen.add(match[2])
            line = line if threads else number
            name = match[3] or ("current" if match[1].startswith("C") else match[2])
            threads.append((match[2], name, []))
        elif threads and (match := _FRAME.match(text)):
            threads[-1][2].append(Frame(clean(match[3], 200), clean(match[1], 300), int(match[2])))
    flush()
    return stacks


def _stack(
    source: EvidenceFile, who: Identity, threads: list[_Open], line: int, sample: int
) -> Stack:
    identity = who.completed_by(source.who(who.pid))
    # faulthandler marks no main thread: it is the only one that began at module level.
    outermost = {at: frames[-1].name for at, (_, _, frames) in enumerate(threads) if frames}
    mains = [at for at, name in outermost.items() if name in _MAIN]
    rows = tuple(
        Thread("MainThread" if mains == [at] else clean(name, 80), tuple(reversed(frames)))
        for at, (_, name, frames) in enumerate(threads)
    )
    return Stack(identity, rows, source.place(line), "faulthandler", sample=source.sample or sample)
