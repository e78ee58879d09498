"""Words to ids: 0 pads, 1 is unknown, the vocabulary counts from 2 in alphabetical order."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_rl.policies.word_tokenizer import WordTokenizer

# blue, cube, red, the -> 2, 3, 4, 5
TOKENIZER = WordTokenizer.from_instructions(["the red cube", "The BLUE cube!"])


def test_ids_by_hand() -> None:
    assert TOKENIZER.words == ["blue", "cube", "red", "the"]
    assert TOKENIZER.vocab_size == 6
    ids = TOKENIZER.encode(["The red, blue... cube", "green cube", "cube"])
    assert ids.tolist() == [[5, 4, 2, 3], [1, 3, 0, 0], [3, 0, 0, 0]]


def test_word_order_and_number_count() -> None:
    one, other = TOKENIZER.encode(["red the blue", "blue the red"]).tolist()
    assert one == other[::-1]
    assert WordTokenizer.from_instructions(["bin 2", "bin 10"]).words == ["10", "2", "bin"]


@pytest.mark.parametrize("empty", ["", "  ", "...!"])
def test_an_instruction_needs_a_word(empty: str) -> None:
    with pytest.raises(ValueError, match=r"instruction '.*' has no words; a policy needs one, e\.g\. 'pick up"):
        TOKENIZER.encode(["the cube", empty])


def test_a_file_keeps_the_ids(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    loaded = WordTokenizer.load(tmp_path)
    assert loaded.words == TOKENIZER.words
    assert loaded.encode(["red thing"]).tolist() == [[4, 1]]
