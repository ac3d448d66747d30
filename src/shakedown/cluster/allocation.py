"""Allocation strings, `sglang:d4t2+fsdp:d8`: the number of GPUs of each engine, and how it splits
them.

The grammar is AReaL's (its single-engine strings and the combined legacy form):

    allocation = group { "+" group }          groups have GPUs of their own
    group      = dims                         the trainer, behind inference engines alone
               | part { "|" part }            parts of a group share GPUs
    part       = BACKEND [ "[" NAME "]" ] ":" ( dims | hybrid )
    dims       = LETTER SIZE { LETTER SIZE }  in any order, sizes >= 1
    hybrid     = "(" "attn" ":" dims "|" "ffn" ":" dims ")"     the brackets may be left out

White space between tokens is ignored. Letters: d data, t tensor, p pipeline, c context, e expert.
World size is d*t*p*c: expert parallelism reuses the same GPUs. Unlike in AReaL, a dimension given
twice is refused, and a hybrid part may have a name. `sglang:d8+d8` was valid in AReaL until
2026-03, and some of its examples still have it: the trainer is megatron when p or e is above 1,
else fsdp.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from shakedown.core.errors import UsageError, did_you_mean

INFERENCE = ("sglang", "vllm")
TRAINING = ("fsdp", "megatron", "archon")
_LETTERS: dict[str, str] = dict.fromkeys(INFERENCE, "dtp") | dict.fromkeys(TRAINING, "dtpce")
_HYBRID = ("megatron", "archon")
_PRINTED = "dtpce"  # order of the dimensions in the printed form
_SHOWN = 60  # characters shown on each side of a fault
_EXAMPLE = "shakedown allocation 'sglang:d4t2+fsdp:d8'"


@dataclass(frozen=True)
class AllocationPart:
    """One engine's share. `dims` holds the given dimensions; the others are 1.

    In the MoE hybrid form `dims` splits the attention and `experts` the feed-forward part, with the
    derived values filled in.
    """

    backend: str
    name: str | None
    dims: Mapping[str, int]
    world: int
    experts: Mapping[str, int] = field(default_factory=dict)

    def size(self, letter: str) -> int:
        """Size of one dimension; 1 if it was not given."""
        return self.dims.get(letter, 1)

    def __str__(self) -> str:
        """The canonical form, `fsdp[a]:d4t2`; parsing it gives an equal part."""
        name = f"[{self.name}]" if self.name else ""
        dims = _printed(self.dims)
        if self.experts:
            dims = f"(attn:{dims}|ffn:{_printed(self.experts)})"
        return f"{self.backend}{name}:{dims}"

    def to_json(self) -> dict[str, Any]:
        """`backend`, `name`, `dims`, `world`; hybrid dims are {`attn`: {}, `ffn`: {}}."""
        dims: dict[str, Any] = dict(self.dims)
        if self.experts:
            dims = {"attn": dims, "ffn": dict(self.experts)}
        return {"backend": self.backend, "name": self.name, "dims": dims, "world": self.world}


@dataclass(frozen=True)
class Allocation:
    """A parsed string: parts of one group share GPUs, groups add up."""

    groups: tuple[tuple[AllocationPart, ...], ...]

    @property
    def parts(self) -> tuple[AllocationPart, ...]:
        return tuple(part for group in self.groups for part in group)

    @property
    def gpus(self) -> int:
        """The total number of GPUs (or processes, on a machine without GPUs)."""
        # One part per group suffices: parts that share GPUs have equal world sizes.
        return sum(group[0].world for group in self.groups)

    def __str__(self) -> str:
        """The canonical form; parsing it gives an equal allocation."""
        return "+".join("|".join(map(str, group)) for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        return {"parts": [part.to_json() for part in self.parts], "gpus": self.gpus}


class AllocationError(UsageError):
    """An invalid allocation string; the message points at the character."""

    def __init__(self, text: str, position: int, message: str) -> None:
        line, caret = _excerpt(text, position)
        super().__init__(
            f"allocation: {message} (character {position + 1})\n  {line}\n  {' ' * caret}^",
            hint=_EXAMPLE,
        )
        self.position = position


def parse_allocation(text: str) -> Allocation:
    """Parse an allocation string.

    Raises:
        AllocationError: not a valid string; `position` is the offending character, from 0.
    """
    return _Parser(text).allocation()


class _Parser:
    """A recursive-descent parser; `at` is the next unread character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.starts: list[int] = []  # start of each part, to point at it later

    def allocation(self) -> Allocation:
        groups = [self._group()]
        while self._take(r"\+"):
            serving = all(part.backend in INFERENCE for group in groups for part in group)
            groups.append(self._group(behind_servers=serving))
        self._check_names([part for group in groups for part in group], chain=len(groups) > 1)
        return Allocation(tuple(groups))

    def _group(self, *, behind_servers: bool = False) -> tuple[AllocationPart, ...]:
        bare = behind_servers and self._peek(r"[dtpce]\s*[0-9]")
        parts = [self._bare_trainer() if bare else self._part()]
        while self._take(r"\|"):
            part = self._part()
            begin = self.starts[-1]
            if part.name is None:
                raise self._error(
                    f"a part that shares GPUs needs a name: {part.backend}[NAME]:...", begin
                )
            if part.world != parts[0].world:
                raise self._error(
                    f"parts that share GPUs need equal world sizes: {parts[0].world} and "
                    f"{part.world}",
                    begin,
                )
            parts.append(part)
        return tuple(parts)

    def _part(self) -> AllocationPart:
        backend = self._backend()
        name = None
        if self._take(r"\["):
            name = self._need(r"[A-Za-z_][A-Za-z0-9_]*", "a name: letters, digits, `_`")
            self._need(r"\]", "`]`")
        self._need(":", f"`:` between {backend} and its dimensions")
        begin = self._next()
        if self._peek(r"\(|attn"):
            return self._hybrid(backend, name, begin)
        dims = self._dims(_LETTERS[backend], backend)
        self._check_end()
        if backend == "fsdp":
            self._check_fsdp(dims)
        return AllocationPart(backend, name, _sizes(dims), _world(_sizes(dims)))

    def _bare_trainer(self) -> AllocationPart:
        """Dimensions without a backend: the one AReaL chose before it required a name."""
        self.starts.append(self._next())
        dims = _sizes(self._dims("dtpce", "a trainer"))
        self._check_end()
        split = any(dims.get(letter, 1) > 1 for letter in "pe")
        return AllocationPart("megatron" if split else "fsdp", None, dims, _world(dims))

    def _backend(self) -> str:
        self.starts.append(self._next())
        word = self._need("[A-Za-z_][A-Za-z_]*", f"a backend: {', '.join(_LETTERS)}")
        if word not in _LETTERS:
            # `d4t2`, dimensions without a backend: the word ends before the first digit, as `d`.
            bare = re.match(r"\s*\d", self.text[self.at :]) and set(word) <= set("dtpce")
            what = (
                "dimensions need a backend before them" if bare else f"unknown backend {word!r:.40}"
            )
            # Cut, because difflib's time grows with the square of a word's length.
            raise self._error(
                f"{what}{did_you_mean(word[:40], _LETTERS)}; valid: {', '.join(_LETTERS)}",
                self.starts[-1],
            )
        return word

    def _dims(self, letters: str, owner: str) -> dict[str, tuple[int, int]]:
        """Letter -> (size, position of the letter)."""
        dims: dict[str, tuple[int, int]] = {}
        while not dims or self._peek("[A-Za-z0-9]"):
            begin = self._next()
            letter = self._need("[A-Za-z]", f"a dimension of {owner}: one of {', '.join(letters)}")
            if letter not in letters:
                valid = ", ".join(letters)
                raise self._error(f"{owner} has no dimension {letter!r}; valid: {valid}", begin)
            if letter in dims:
                raise self._error(
                    f"dimension {letter!r} is given twice; valid: each once at most", begin
                )
            # Without the look-ahead a tenth digit would be reported as a wrong dimension.
            size = self._need("[1-9][0-9]{0,8}(?![0-9])", f"a size of {letter!r}: 1 to 999999999")
            dims[letter] = (int(size), begin)
        return dims

    def _check_fsdp(self, dims: Mapping[str, tuple[int, int]]) -> None:
        for letter in "pe":
            size, position = dims.get(letter, (1, 0))
            if size > 1:
                raise self._error(
                    f"fsdp cannot split by {letter!r}; use megatron or archon", position
                )

    def _hybrid(self, backend: str, name: str | None, begin: int) -> AllocationPart:
        if backend not in _HYBRID:
            raise self._error(f"{backend} has no attn|ffn form; valid: {', '.join(_HYBRID)}", begin)
        bracket = self._take(r"\(")
        self._need("attn", "`attn`")
        self._need(":", "`:` after attn")
        attn = _sizes(self._dims("cdtp", "attn"))
        self._need(r"\|", "`|` and the ffn part")
        ffn_at = self._next()
        self._need("ffn", "`ffn`")
        self._need(":", "`:` after ffn")
        ffn = _sizes(self._dims("detp", "ffn"))
        if bracket:
            self._need(r"\)", "`)`")
        self._check_end()
        experts = self._experts(attn, ffn, ffn_at)
        return AllocationPart(backend, name, attn, _world(attn), experts)

    def _experts(
        self, attn: Mapping[str, int], ffn: Mapping[str, int], ffn_at: int
    ) -> Mapping[str, int]:
        """The ffn sizes, with `p` taken from attn and `d` derived if missing."""
        # Megatron's parallel folding: attention and experts split the same ranks of the same
        # pipeline stages differently, so only `p` has to match.
        world, pipeline = _world(attn), attn.get("p", 1)
        if ffn.get("p", pipeline) != pipeline:
            raise self._error(f"p must match: attn has {pipeline}, ffn has {ffn['p']}", ffn_at)
        without_d = prod(size for letter, size in ffn.items() if letter in "te") * pipeline
        given = ffn.get("d", world // without_d)
        if given * without_d != world:
            raise self._error(
                f"world sizes must match: attn has {world}, ffn's "
                + (f"{given * without_d}" if "d" in ffn else f"e*t*p is {without_d}"),
                ffn_at,
            )
        return {**ffn, "d": given, "p": pipeline}

    def _check_names(self, parts: Sequence[AllocationPart], *, chain: bool) -> None:
        seen: set[str] = set()
        for part, begin in zip(parts, self.starts, strict=True):
            if part.name is None and chain and len(parts) >= 3:
                raise self._error(
                    f"three or more parts must all be named: {part.backend}[NAME]:...", begin
                )
            if part.name in seen:
                raise self._error(
                    f"the name {part.name!r:.40} is used twice; names are unique", begin
                )
            if part.name is not None:
                seen.add(part.name)

    def _check_end(self) -> None:
        """Check the end of a part, before its sizes are judged."""
        if self._next() < len(self.text) and self.text[self.at] not in "+|":
            raise self._error(f"expected `+`, `|` or the end, found {self.text[self.at]!r}")

    def _skip_space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def _next(self) -> int:
        self._skip_space()
        return self.at

    def _peek(self, pattern: str) -> bool:
        return re.compile(pattern).match(self.text, self._next()) is not None

    def _take(self, pattern: str) -> str:
        """Read `pattern`, or nothing (an empty string)."""
        match = re.compile(pattern).match(self.text, self._next())
        if match is None:
            return ""
        self.at = match.end()
        return match[0]

    def _need(self, pattern: str, wanted: str) -> str:
        taken = self._take(pattern)
        if not taken:
            found = repr(self.text[self.at]) if self.at < len(self.text) else "the end"
            raise self._error(f"expected {wanted}, found {found}")
        return taken

    def _error(self, message: str, position: int | None = None) -> AllocationError:
        return AllocationError(self.text, self.at if position is None else position, message)


def _printed(dims: Mapping[str, int]) -> str:
    return "".join(f"{letter}{dims[letter]}" for letter in _PRINTED if letter in dims)


def _excerpt(text: str, position: int) -> tuple[str, int]:
    """One printable line of the text around a character, and the character's position in it."""
    begin, end = max(0, position - _SHOWN), position + _SHOWN
    line = "".join(char if char.isprintable() else " " for char in text[begin:end])
    if begin:
        line = f"...{line}"
    if end < len(text):
        line += "..."
    return line, position - begin + (3 if begin else 0)


def _sizes(dims: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    return {letter: size for letter, (size, _) in dims.items()}


def _world(dims: Mapping[str, int]) -> int:
    return prod(size for letter, size in dims.items() if letter in "dtpc")
