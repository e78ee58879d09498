r"""From instructions to token ids, with the tokenizer of the checkpoint.

OpenVLA asks "In: What action should the robot take to <instruction>?\nOut:" and then expects the token of a lone space
mark (id 29871 in Llama 2), which training put there by tokenizing the action string after a space.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import torch
from jaxtyping import Bool, Int64
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from vla_rl.policies.openvla.config import NANO_TEXT_VOCAB_SIZE
from vla_rl.policies.openvla.model import BOS_ID

_SPACE_MARK = "\u2581"
_WORD = r"[a-z0-9]+|[^\sa-z0-9]"
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def prompt_text(instruction: str) -> str:
    """The prompt of one instruction.

    Raises:
        ValueError: The instruction is empty.
    """
    if not instruction.strip():
        raise ValueError(f"the instruction {instruction!r} has no words; a policy needs one, e.g. 'pick up the bowl'")
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


class PromptTokenizer:
    """The checkpoint's tokenizer and how it pads; ids of every sentence are computed once."""

    def __init__(self, tokenizer: Tokenizer, pad_token_id: int, files: dict[str, bytes]) -> None:
        """Use a tokenizer.

        Args:
            tokenizer: With a post-processor that puts BOS in front.
            pad_token_id: Fills up the rows of a batch.
            files: All files of the tokenizer, by name, as `save` writes them.

        Raises:
            ValueError: The tokenizer has no space mark.
        """
        space = tokenizer.token_to_id(_SPACE_MARK)
        if space is None:
            raise ValueError("the tokenizer has no token for a lone space mark, so it is none of Llama's kind")
        self.pad_token_id = pad_token_id
        self._space_id = space
        self._tokenizer = tokenizer
        self._files = files

    @classmethod
    def load(cls, folder: Path, pad_token_id: int) -> Self:
        """The tokenizer of a checkpoint folder.

        Raises:
            ValueError: The folder has no readable `tokenizer.json`.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json; copy the tokenizer of the base model into it")
        files = {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{path} is damaged: {error}") from error
        return cls(tokenizer, pad_token_id, files)

    @classmethod
    def from_instructions(cls, instructions: Iterable[str]) -> Self:
        """A small tokenizer, one token per word of these instructions, for models that are trained from scratch.

        Raises:
            ValueError: The instructions have more different words than fit.
        """
        splitter = pre_tokenizers.Split(Regex(_WORD), "removed", invert=True)
        texts = [prompt_text(instruction) for instruction in instructions]
        words = sorted({word for text in texts for word, _ in splitter.pre_tokenize_str(text.lower())})
        vocabulary = ["<unk>", "<s>", "</s>", _SPACE_MARK, *words]
        num_fillers = NANO_TEXT_VOCAB_SIZE - 256 - len(vocabulary)
        if num_fillers < 0:
            raise ValueError(
                f"the instructions have {len(words)} different words; the small model's tokenizer has room for "
                f"{len(words) + num_fillers}. Train on fewer tasks, or start from an OpenVLA checkpoint"
            )
        vocabulary += [f"<unused_{i}>" for i in range(num_fillers)] + [f"<action_{i}>" for i in range(256)]
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = splitter
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
        return cls(tokenizer, NANO_TEXT_VOCAB_SIZE, {"tokenizer.json": tokenizer.to_str(pretty=True).encode()})

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files."""
        for name, content in self._files.items():
            (folder / name).write_bytes(content)

    @cached_property
    def _ids_of(self) -> dict[str, list[int]]:
        return {}

    def ids(self, instruction: str) -> list[int]:
        """BOS, prompt and the space mark of one instruction."""
        if instruction not in self._ids_of:
            ids = self._tokenizer.encode(prompt_text(instruction)).ids
            if ids[0] != BOS_ID:
                raise ValueError(f"the tokenizer begins a prompt with id {ids[0]}; expected BOS ({BOS_ID})")
            self._ids_of[instruction] = ids if ids[-1] == self._space_id else [*ids, self._space_id]
        return self._ids_of[instruction]

    def batch(
        self, instructions: Sequence[str]
    ) -> tuple[Int64[torch.Tensor, "batch tokens"], Bool[torch.Tensor, "batch tokens"]]:
        """Prompt ids after BOS, padded on the left to the longest prompt, and which of them are real."""
        rows = [self.ids(instruction)[1:] for instruction in instructions]
        ids = np.full((len(rows), max(map(len, rows))), self.pad_token_id, dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, ids.shape[1] - len(row) :] = row
        lengths = np.array([len(row) for row in rows])
        mask = np.arange(ids.shape[1])[None] >= ids.shape[1] - lengths[:, None]
        return torch.from_numpy(ids), torch.from_numpy(mask)
