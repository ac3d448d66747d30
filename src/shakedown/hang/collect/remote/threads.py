"""The threads of one interpreter and their frames, in another process's memory."""

from collections.abc import Mapping
from struct import Struct
from typing import NamedTuple

from shakedown.hang.collect.remote.asleep import MAX_THREADS, Asleep
from shakedown.hang.collect.remote.layout import LAYOUTS, LOCK, Layout
from shakedown.hang.collect.remote.memory import Memory, Moved, Unreadable
from shakedown.hang.collect.remote.objects import Code, Items, Objects, Types

MAX_FRAMES = 32768  # of all threads
MAX_CHUNK = 2**20  # bytes of frames read at once; a chunk has 16 KiB, more only for a huge frame
_FINAL = 0xF  # a release, not a candidate whose structs may differ (PY_VERSION_HEX)
_POINTER = Struct("<Q")
_POINTERS = Struct("<QQ")


class Frame:
    """One call; `entry` where C called Python. Calls from one place in one code are one object."""

    def __init__(self, code: Code, instruction: int, *, entry: bool, outer: bool = False) -> None:
        self.code, self.line, self.entry = code, code.line(instruction), entry
        self.outer = outer  # the last call of Python before C, or the thread's last one
        self.outermost = self if outer else Frame(code, instruction, entry=entry, outer=True)


class Thread(NamedTuple):
    """One Python thread, innermost frame first."""

    ident: int
    native_id: int
    name: str | None
    owns_gil: bool
    frames: list[Frame]


class _State(NamedTuple):
    address: int
    ident: int
    native_id: int
    cframe: int
    chunk: int
    top: int


class Interpreter:
    """The only interpreter of a process. Every method raises Unreadable."""

    def __init__(self, memory: Memory, symbols: Mapping[str, int]) -> None:
        self._memory = memory
        self._layout = _layout(memory, symbols["Py_Version"])
        kinds = ("Code", "Unicode", "Bytes", "Dict", "Module", "Long")
        types = Types(*(symbols[f"Py{kind}_Type"] for kind in kinds))
        self._objects = Objects(memory, self._layout, types)
        self._runtime = symbols["_PyRuntime"]
        self._address, self._holder = self._main()
        self._known: dict[tuple[int, int, int], Frame] = {}
        self._frames_left = MAX_FRAMES

    def _main(self) -> tuple[int, int]:
        """The interpreter, and the thread that holds its lock, 0 for none."""
        layout = self._layout.runtime
        ready, ending, head, main = layout.unpack(self._memory.witness(self._runtime, layout.size))
        if ready != 1 or ending or head != main or main & 7:
            raise Unreadable("an interpreter that starts or ends, or several of them")
        return main, self._lock_holder(main)

    def _lock_holder(self, main: int) -> int:
        """The thread that holds the interpreter's lock, 0 for none."""
        layout, witness = self._layout, self._memory.witness
        if not layout.lock:
            # its place follows pthread's types: what stands beside it tells that it is the place
            holder, automatic = _POINTERS.unpack(witness(self._runtime + layout.holder, 16))
            if automatic != main:
                raise Unreadable("another layout of the runtime")
            return int(holder)
        (lock,) = _POINTER.unpack(witness(main + layout.lock, 8))
        last, locked = LOCK.unpack(witness(lock, LOCK.size))
        if locked not in (0, 1):
            raise Unreadable("no lock of the interpreter")
        return int(last) if locked else 0

    def threads(self, pid: int, places: dict[str, int]) -> list[Thread]:
        """All threads, the newest first, where all of them sleep.

        `places`: where names were found in dicts, to look there first in the next process.
        """
        states = self._states()
        asleep = Asleep(pid, [state.native_id for state in states])
        again = self._states()
        if again != states:
            raise Moved("a thread began or ended meanwhile")
        stacks = [self._frames(state) for state in states]
        names = self._names(places)
        self._memory.confirm()
        asleep.confirm()
        return [
            Thread(s.ident, s.native_id, names.get(s.ident), s.address == self._holder, frames)
            for s, frames in zip(states, stacks, strict=True)
        ]

    def _states(self) -> list[_State]:
        layout = self._layout.interpreter
        following, _, first, runtime, ending = layout.unpack(
            self._memory.witness(self._address, layout.size)
        )
        if following or runtime != self._runtime or ending:
            raise Unreadable("an interpreter that starts or ends, or several of them")
        states: list[_State] = []
        while first:
            if first & 7 or len(states) == MAX_THREADS:
                raise Unreadable("no list of threads, or too long a one")
            states.append(self._state(first))
            first = self._next
        addresses = {state.address for state in states}
        if not states or len(addresses) != len(states) or self._holder not in {0, *addresses}:
            raise Unreadable("no list of threads")
        return states

    def _state(self, address: int) -> _State:
        layout = self._layout.thread
        body = self._memory.witness(address, layout.size)
        self._next, interpreter, cframe, ident, native_id, chunk, top = layout.unpack(body)
        if interpreter != self._address or cframe & 7 or not 0 < native_id <= 2**22:
            raise Unreadable("no thread")
        return _State(address, ident, native_id, cframe, chunk, top)

    def _frames(self, state: _State) -> list[Frame]:
        layout = self._layout
        (address,) = layout.cframe.unpack(self._memory.witness(state.cframe, layout.cframe.size))
        stack, unpack, size = _DataStack(self._memory, layout, state), layout.frame.unpack_from, 0
        start, body, turns = 0, b"", 0
        frames: list[Frame] = []
        while address:
            if address & 7 or not 0 <= address - start <= size:
                start, body = stack.part_with(address)
                size = len(body) - layout.frame.size
            code, address, instruction, kind = unpack(body, address - start)
            if layout.kinds.get(kind, False) is not None:
                frames.append(self._frame(code, instruction, kind))
            elif frames:
                frames[-1] = frames[-1].outermost
            turns += 1
            if turns > self._frames_left:
                raise Unreadable("no chain of frames, or too long a one")
        self._frames_left -= turns
        return [*frames[:-1], *(frame.outermost for frame in frames[-1:])]

    def _frame(self, code: int, instruction: int, kind: int) -> Frame:
        known = self._known.get((code, instruction, kind))
        if known is None:
            entry = self._layout.kinds.get(kind)
            if entry is None:
                raise Unreadable("a frame that does not run")
            found = self._objects.code(code)
            known = self._known[code, instruction, kind] = Frame(found, instruction, entry=entry)
        return known

    def _names(self, places: dict[str, int]) -> dict[int, str]:
        """By ident; empty where the program did not import `threading`."""
        objects = self._objects
        (modules,) = _POINTER.unpack(self._memory.read(self._address + self._layout.modules, 8))
        module = self._value(objects.items(modules), "threading", places)
        if not module:
            return {}
        active = self._value(objects.items(objects.module_dict(module)), "_active", places)
        names = {}
        for key, thread in objects.items(active) if active else ():
            name = self._value(objects.attributes(thread), "_name", places)
            if name:
                names[objects.number(key)] = objects.text(name)
        return names

    def _value(self, items: Items, name: str, places: dict[str, int]) -> int:
        """The address of what a dict holds under `name`, 0 for nothing."""
        place = places.get(name, len(items))
        if place < len(items) and self._objects.text(items[place][0]) == name:
            return items[place][1]
        for place, (key, value) in enumerate(items):
            if self._objects.text(key) == name:
                places[name] = place
                return value
        return 0


class _DataStack:
    """Where a thread's frames are: chunks that are read whole, but for frames of generators."""

    def __init__(self, memory: Memory, layout: Layout, state: _State) -> None:
        self._memory, self._layout = memory, layout
        self._start, self._body, self._older = state.chunk, b"", 0
        if state.chunk:
            self._load(state.chunk, state.top - state.chunk)

    def part_with(self, address: int) -> tuple[int, bytes]:
        """The address and the content of memory that holds the whole frame at `address`."""
        if address & 7:
            raise Unreadable("no frame")
        if not self._holds(address) and self._older:
            _, size, top = self._layout.chunk.unpack(
                self._memory.read(self._older, self._layout.chunk.size)
            )
            used = self._layout.chunk.size + 8 * top
            if used > size:
                raise Unreadable("no chunk of frames")
            if 0 <= address - self._older < used:
                self._load(self._older, used)
        if self._holds(address):
            return self._start, self._body
        return address, self._memory.witness(address, self._layout.frame.size)

    def _holds(self, address: int) -> bool:
        return 0 <= address - self._start <= len(self._body) - self._layout.frame.size

    def _load(self, address: int, size: int) -> None:
        if address & 7 or not self._layout.chunk.size <= size <= MAX_CHUNK:
            raise Unreadable("no chunk of frames")
        self._start, self._body = address, self._memory.witness(address, size)
        self._older = self._layout.chunk.unpack_from(self._body)[0]


def _layout(memory: Memory, address: int) -> Layout:
    """By Py_Version: a release whose layout is known."""
    version = int.from_bytes(memory.read(address, 8), "little")
    layout = LAYOUTS.get((version >> 24, version >> 16 & 255))
    if layout is None or version >> 4 & 15 != _FINAL:
        raise Unreadable(f"Python {version >> 24}.{version >> 16 & 255} is not known here")
    return layout
