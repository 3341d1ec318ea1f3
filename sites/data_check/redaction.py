"""File names without the people in them: what tags say about patients is known here, and never shown.

A name hides an identifier if a folded form of it (no case, no accents, letters and digits only) stands in it. That masks
too much rather than too little: a patient called Norma takes `normal` away. Whether a path *names* somebody is judged
more strictly, word by word, because it stops a site.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath

MASKED = "***"
SHORTEST = 4  # letters of what is looked for inside longer words
SHORTEST_WORD = 3  # letters of a name that stands as a word of its own
WHOLE = 6  # letters of a whole name or number that names somebody wherever it stands
# what is written where nobody is meant
_NOBODY = (
    "anon anonym anonymous anonymised anonymized deidentified example hidden name none null patient phantom pseudonym "
    "removed research sample subject test unknown"
)
NOBODY = frozenset(_NOBODY.split())
_GERMAN = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue", "ß": "ss"})
_WORDS = re.compile(r"[^\W\d_]+|\d+")
_CAMEL = re.compile(r"(?<=[a-zß-ÿ])(?=[A-ZÀ-Þ])")
_PIECES = re.compile(r"[^/\\\n:;,'\"()]+")


@dataclass(frozen=True)
class Mask:
    words: frozenset[str] = field(default=frozenset(), repr=False)  # of names
    wholes: frozenset[str] = field(default=frozenset(), repr=False)  # names and numbers without blanks

    @classmethod
    def of(cls, secrets: Iterable[str]) -> Mask:
        words: set[str] = set()
        wholes: set[str] = set()
        for secret in secrets:
            for form in _forms(secret):
                parts = _WORDS.findall(form)
                if not any(part.isdecimal() for part in parts):
                    words |= {part for part in parts if len(part) >= SHORTEST_WORD}
                wholes |= {"".join(parts), "".join(reversed(parts))}
        whole = {w for w in wholes if len(w) >= SHORTEST}
        return cls(frozenset(words - NOBODY), frozenset(whole - NOBODY))

    def hides(self, part: str) -> bool:
        """Whether an identifier stands anywhere in it."""
        if not self.words and not self.wholes:
            return False
        return any(self._anywhere.inside(_joined(form)) for form in _forms(part)) or self._words_of(part)

    def names(self, part: str) -> bool:
        """Whether it names somebody: by a word of its own, or by a whole name or number."""
        if self._words_of(part):
            return True
        forms = [_joined(form) for form in _forms(PurePosixPath(part).stem)]
        return any(form in self.wholes or self._long.inside(form) for form in forms)

    def path(self, path: str) -> str:
        return "/".join(self._part(part) for part in path.split("/"))

    def text(self, text: str) -> str:
        return _PIECES.sub(lambda found: self._piece(found[0]), text)

    def _part(self, part: str) -> str:
        suffix = PurePosixPath(part).suffix
        return part if not self.hides(part) else MASKED + ("" if self.hides(suffix) else suffix)

    def _piece(self, piece: str) -> str:
        if not self.hides(piece):
            return piece
        masked = re.sub(r"\S+", lambda word: self._part(word[0]), piece)
        return f" {MASKED} " if self.hides(masked) else masked

    def _words_of(self, part: str) -> bool:
        return any(word in self.words for form in _forms(_CAMEL.sub(" ", part)) for word in _WORDS.findall(form))

    @cached_property
    def _anywhere(self) -> Needles:
        return Needles.of(self.words | self.wholes, SHORTEST)

    @cached_property
    def _long(self) -> Needles:
        return Needles.of(self.wholes, WHOLE)


@dataclass(frozen=True)
class Needles:
    """Thousands of words, looked for in a short one by its pieces of their lengths."""

    known: frozenset[str]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, words: frozenset[str], shortest: int) -> Needles:
        known = frozenset(word for word in words if len(word) >= shortest)
        return cls(known, tuple({len(word) for word in known}))

    def inside(self, joined: str) -> bool:
        return any(joined[at : at + n] in self.known for n in self.lengths for at in range(len(joined) - n + 1))


def _forms(text: str) -> set[str]:
    """Folded, with Müller as muller and as mueller."""
    return {_fold(text), _fold(text.translate(_GERMAN))}


def _fold(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text)
    return "".join(c for c in plain if not unicodedata.combining(c)).casefold()


def _joined(folded: str) -> str:
    return "".join(_WORDS.findall(folded))
