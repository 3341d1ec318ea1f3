"""Removes personal identifiers, as found in file metadata, from paths and messages.

A text is redacted if it contains a folded form of an identifier (letters and digits, without case and accents). That
redacts too much rather than too little: if a patient is called Norma, `normal` is redacted. Whether a path *identifies*
a person is decided more strictly, word by word, because such a path stops a site.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath

REDACTED = "***"
MIN_SUBSTRING_LETTERS = 4  # of identifiers that are searched for inside longer words
MIN_WORD_LETTERS = 3  # of names that are searched for as separate words
MIN_FULL_IDENTIFIER_LETTERS = 6  # of full names and numbers that identify a person anywhere in a path
# words that replace names
_PLACEHOLDER_TEXT = (
    "anon anonym anonymous anonymised anonymized deidentified example hidden name none null patient phantom pseudonym "
    "removed research sample subject test unknown"
)
PLACEHOLDER_NAMES = frozenset(_PLACEHOLDER_TEXT.split())
_GERMAN_TRANSLITERATION = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue", "ß": "ss"})
_WORD_PATTERN = re.compile(r"[^\W\d_]+|\d+")
_CAMEL_CASE_PATTERN = re.compile(r"(?<=[a-zß-ÿ])(?=[A-ZÀ-Þ])")
_PIECE_PATTERN = re.compile(r"[^/\\\n:;,'\"()]+")


@dataclass(frozen=True)
class Redactor:
    name_words: frozenset[str] = field(default=frozenset(), repr=False)  # single words of names
    full_identifiers: frozenset[str] = field(
        default=frozenset(), repr=False
    )  # full names and numbers, without separators

    @classmethod
    def from_identifiers(cls, identifiers: Iterable[str]) -> Redactor:
        name_words: set[str] = set()
        full_identifiers: set[str] = set()
        for identifier in identifiers:
            for form in _folded_forms(identifier):
                parts = _WORD_PATTERN.findall(form)
                if not any(part.isdecimal() for part in parts):
                    name_words |= {part for part in parts if len(part) >= MIN_WORD_LETTERS}
                full_identifiers |= {"".join(parts), "".join(reversed(parts))}
        long_identifiers = {w for w in full_identifiers if len(w) >= MIN_SUBSTRING_LETTERS}
        return cls(frozenset(name_words - PLACEHOLDER_NAMES), frozenset(long_identifiers - PLACEHOLDER_NAMES))

    def contains_identifier(self, part: str) -> bool:
        """Whether an identifier occurs anywhere in `part`, also inside a word."""
        if not self.name_words and not self.full_identifiers:
            return False
        return any(
            self._substring_index.occurs_in(_join_words(form)) for form in _folded_forms(part)
        ) or self._contains_name_word(part)

    def identifies_person(self, part: str) -> bool:
        """Whether `part` contains a name as a separate word, or a full name or number."""
        if self._contains_name_word(part):
            return True
        forms = [_join_words(form) for form in _folded_forms(PurePosixPath(part).stem)]
        return any(form in self.full_identifiers or self._full_identifier_index.occurs_in(form) for form in forms)

    def redact_path(self, path: str) -> str:
        return "/".join(self._redact_part(part) for part in path.split("/"))

    def redact_text(self, text: str) -> str:
        return _PIECE_PATTERN.sub(lambda match: self._redact_piece(match[0]), text)

    def _redact_part(self, part: str) -> str:
        suffix = PurePosixPath(part).suffix
        return (
            part
            if not self.contains_identifier(part)
            else REDACTED + ("" if self.contains_identifier(suffix) else suffix)
        )

    def _redact_piece(self, piece: str) -> str:
        if not self.contains_identifier(piece):
            return piece
        redacted = re.sub(r"\S+", lambda match: self._redact_part(match[0]), piece)
        return f" {REDACTED} " if self.contains_identifier(redacted) else redacted

    def _contains_name_word(self, part: str) -> bool:
        return any(
            word in self.name_words
            for form in _folded_forms(_CAMEL_CASE_PATTERN.sub(" ", part))
            for word in _WORD_PATTERN.findall(form)
        )

    @cached_property
    def _substring_index(self) -> SubstringIndex:
        return SubstringIndex.from_words(self.name_words | self.full_identifiers, MIN_SUBSTRING_LETTERS)

    @cached_property
    def _full_identifier_index(self) -> SubstringIndex:
        return SubstringIndex.from_words(self.full_identifiers, MIN_FULL_IDENTIFIER_LETTERS)


@dataclass(frozen=True)
class SubstringIndex:
    """Searches a short text for thousands of words, by looking up its substrings of their lengths."""

    substrings: frozenset[str]
    lengths: tuple[int, ...]

    @classmethod
    def from_words(cls, words: frozenset[str], min_length: int) -> SubstringIndex:
        substrings = frozenset(word for word in words if len(word) >= min_length)
        return cls(substrings, tuple({len(word) for word in substrings}))

    def occurs_in(self, text: str) -> bool:
        return any(
            text[start : start + length] in self.substrings
            for length in self.lengths
            for start in range(len(text) - length + 1)
        )


def _folded_forms(text: str) -> set[str]:
    """Müller becomes muller and mueller."""
    return {_fold_text(text), _fold_text(text.translate(_GERMAN_TRANSLITERATION))}


def _fold_text(text: str) -> str:
    decomposed = unicodedata.normalize("NFKD", text)
    return "".join(c for c in decomposed if not unicodedata.combining(c)).casefold()


def _join_words(folded: str) -> str:
    return "".join(_WORD_PATTERN.findall(folded))
