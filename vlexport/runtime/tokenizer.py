"""Text to token ids and back, and chats to text, as the checkpoint's own files say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vlexport.checkpoint import Checkpoint
from vlexport.errors import CheckpointError, InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Ids, and for each the first character and the one after the last that it stands for."""

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


class Tokenizer(Protocol):
    """What the runtime needs of a tokenizer."""

    def encode(self, text: str, *, add_special: bool) -> Tokens:
        """Tokens of a text; `add_special` puts in what the checkpoint wants at the ends."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""

    def id_of(self, token: str) -> int:
        """The id of a token of the vocabulary."""

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """A chat as one text that ends where the answer begins."""


class CheckpointTokenizer:
    """The tokenizer.json and the chat template of a checkpoint; no code of the checkpoint is run."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers import PreTrainedTokenizerFast

        if not checkpoint.has_file("tokenizer.json"):
            raise CheckpointError(
                f"{checkpoint.path} holds no tokenizer.json; expected it beside config.json. "
                "Download the checkpoint completely, or convert its tokenizer to that form."
            )
        try:
            self._fast = PreTrainedTokenizerFast.from_pretrained(str(checkpoint.path), local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{checkpoint.path}: its tokenizer files cannot be read ({error}). "
                "Download them again."
            ) from error
        self.source = checkpoint.source

    def encode(self, text: str, *, add_special: bool) -> Tokens:
        found = self._fast(text, add_special_tokens=add_special, return_offsets_mapping=True, verbose=False)
        spans = tuple((first, stop) for first, stop in found["offset_mapping"])
        return Tokens(ids=tuple(found["input_ids"]), spans=spans)

    def decode(self, ids: Sequence[int]) -> str:
        text = self._fast.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def id_of(self, token: str) -> int:
        found = self._fast.get_vocab().get(token)
        if found is None:
            raise CheckpointError(
                f"{self.source}: its tokenizer has no token '{token}', which stands for media. "
                "Check that tokenizer.json belongs to the checkpoint."
            )
        return int(found)

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        from jinja2.exceptions import TemplateError

        if not self._fast.chat_template:
            raise CheckpointError(
                f"{self.source} has no chat template, so a chat cannot be put into words for it. "
                "Pass the whole prompt as raw_prompt (--raw-prompt)."
            )
        try:
            text = self._fast.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise InputError(
                f"the checkpoint's chat template refuses these messages ({error}). "
                "Expected roles and parts as in the checkpoint's own examples."
            ) from error
        return str(text)
