"""Where CPython keeps what a stack is made of: a row for each minor version that was tested.

Offsets in bytes on x86-64, from the headers of that version (Include/internal/pycore_*.h); the
structs are not to change within a minor version, and what does not fit is refused. `struct` reads
each in one step.
"""

from collections.abc import Mapping
from struct import Struct
from typing import NamedTuple


class Layout(NamedTuple):
    """Structs of one minor version, each with the fields that it gives in order."""

    runtime: Struct  # initialized, _finalizing, interpreters.head, .main
    interpreter: Struct  # next, next thread's number, first thread, runtime, finalizing
    modules: int  # sys.modules in the interpreter
    holder: int  # in the runtime: the thread that holds the lock, then the main interpreter
    lock: int  # in the interpreter: pointer to its lock; 0 where the runtime has it
    thread: Struct  # next, interpreter, cframe, ident, native id, stack chunk, its top
    cframe: Struct  # current frame
    frame: Struct  # code, previous, last instruction, kind
    kinds: Mapping[int, bool | None]  # whether C called it; None: C itself, no call of Python
    chunk: Struct  # previous, size, top
    code: Struct  # type, instructions, first line, file name, qualified name, line table
    instructions: int  # offset of a code object's first one
    text: Struct  # type, length, state
    text_sizes: tuple[int, int]  # of the head of an ASCII string, of another one
    long: Struct  # type, size, two digits of 30 bits each
    long_shift: int  # of the number of digits in its size
    type: Struct  # flags
    cached_keys: int  # of a heap type: names of its instances' attributes
    tagged: bool  # an object's values or dict are one pointer; two where not


LAYOUTS: Mapping[tuple[int, int], Layout] = {
    (3, 11): Layout(
        runtime=Struct("<16xi4xQ8xQQ"),
        interpreter=Struct("<QQQ16xQ36xi"),
        modules=888,
        holder=576,
        lock=0,
        thread=Struct("<8xQQ32xQ88xQQ128xQQ"),
        cframe=Struct("<8xQ"),
        frame=Struct("<32xQ8xQQ4xH"),
        kinds={0: False, 1: True, 256: False, 257: True},  # is_entry, then owner: 1 a generator
        chunk=Struct("<QQQ"),
        code=Struct("<8xQq48xi36xQ8xQQ"),
        instructions=184,
        text=Struct("<8xQq8xI"),
        text_sizes=(48, 72),
        long=Struct("<8xQqII"),
        long_shift=0,
        type=Struct("<168xQ"),
        cached_keys=872,
        tagged=False,
    ),
    (3, 12): Layout(
        runtime=Struct("<16xi4xQ8xQQ"),
        interpreter=Struct("<Q56xQQ16xQQ"),
        modules=944,
        holder=0,
        lock=384,
        thread=Struct("<8xQQ32xQ72xQQ80xQQ"),
        cframe=Struct("<Q"),
        frame=Struct("<QQ40xQ6xB"),
        kinds={0: False, 1: False, 3: None},  # owner
        chunk=Struct("<QQQ"),
        code=Struct("<8xQq44xi40xQ8xQQ"),
        instructions=192,
        text=Struct("<8xQq8xI"),
        text_sizes=(40, 56),
        long=Struct("<8xQqII"),
        long_shift=3,  # below it the sign: 0 for a positive number
        type=Struct("<168xQ"),
        cached_keys=880,
        tagged=True,
    ),
}

# The same in all of them (Include/object.h, cpython/bytesobject.h, internal/pycore_dict.h).
OBJECT = Struct("<8xQ")  # type
BYTES = Struct("<8xQq8x")  # type, length; the content follows
DICT = Struct("<8xQq8xQQ")  # type, used, keys, values
KEYS = Struct("<9xBB5x8xq")  # log2 of the index's bytes, kind, entries; the index follows
MODULE = Struct("<8xQQ")  # type, dict
LOCK = Struct("<8xQi")  # thread that held it last, whether it holds it
