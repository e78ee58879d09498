"""A word-level tokenizer for the tiny policy: its vocabulary is the words of the training instructions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import Int64

PAD_ID = 0
UNKNOWN_ID = 1


class WordTokenizer:
    """Lower-cased words to ids; 0 pads, 1 stands for a word that training never saw."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._ids = {word: i + 2 for i, word in enumerate(self.words)}

    @classmethod
    def from_instructions(cls, instructions: Iterable[str]) -> Self:
        """The sorted set of the words of all instructions."""
        return cls(sorted({word for instruction in instructions for word in _split(instruction)}))

    @property
    def vocab_size(self) -> int:
        """Number of ids, padding and unknown included."""
        return len(self.words) + 2

    def encode(self, instructions: Sequence[str]) -> Int64[np.ndarray, "batch words"]:
        """Ids, right-padded to the longest instruction of the batch.

        Raises:
            ValueError: An instruction has no word.
        """
        rows = [[self._ids.get(word, UNKNOWN_ID) for word in _split(instruction)] for instruction in instructions]
        for instruction, row in zip(instructions, rows, strict=True):
            if not row:
                raise ValueError(
                    f"the instruction {instruction!r} has no words; a policy needs one, e.g. 'pick up the red cube'"
                )
        ids = np.full((len(rows), max(map(len, rows))), PAD_ID, dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        return ids

    def save(self, folder: Path) -> None:
        """Write `vocabulary.json`."""
        (folder / "vocabulary.json").write_text(json.dumps(self.words, indent=0))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `vocabulary.json`."""
        return cls(json.loads((folder / "vocabulary.json").read_text()))


def _split(instruction: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", instruction.lower())
