"""The small byte-level BPE tokenizer of the embedded policy, and the chat format that both sampler and warm start use.

A word keeps its *trailing* space (``if ``, ``x ``, ``< ``) instead of the usual leading one, so that a line of code has
the same tokens wherever it starts: after an indentation in a file view and right behind ``<parameter=old_str>``. Copying a
line out of an observation is then copying tokens, which a small model can learn.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, USER, ASSISTANT, TOOL, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"
SPECIAL = (PAD, USER, ASSISTANT, TOOL, END)

# The tools of an action and their parameters: the one table that the parser reads too.
TOOLS: dict[str, tuple[str, ...]] = {
    "file_editor": ("command", "path", "view_range", "file_text", "old_str", "new_str", "insert_line"),
    "execute_bash": ("cmd",),
    "search": ("search_term", "path"),
    "finish": ("command",),
}
_PARAMETERS = dict.fromkeys(name for names in TOOLS.values() for name in names)  # each once, in this order
MARKUP = (
    *(f"<function={name}>" for name in TOOLS),
    "</function>",
    *(f"<parameter={name}>" for name in _PARAMETERS),
    "</parameter>",
)

# Words, numbers, operator runs, single punctuation marks; each with at most one trailing space.
WORDS = Regex(r"[A-Za-z]+ ?|_|[0-9]+ ?|[<>=!+\-*/%]+ ?|\n|[^\sA-Za-z0-9_<>=!+\-*/%] ?| +|\s")

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(
    corpus: Iterable[str], words: Iterable[str], vocab_size: int, max_context: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most ``vocab_size`` entries on ``corpus`` and single ``words``.

    Chat roles are special tokens; the tool-call markup is one token per tag. Any text round-trips (byte fallback).
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKUP),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator([*corpus, *(f"{w} {w}" for w in (*keyword.kwlist, *words))], trainer)
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, TOOL],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_context,
        clean_up_tokenization_spaces=False,
    )


def word_pieces(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """The lower-case words and parts of words that are tokens, sorted."""
    found = {str(tokenizer.decode([i])).strip() for i in range(len(tokenizer))}
    return tuple(sorted(piece for piece in found if piece.isascii() and piece.isalpha() and piece.islower()))


def token_id(tokenizer: Any, token: str) -> int:
    """The id of one token of the vocabulary."""
    number = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(number, int):
        raise ValueError(f"{token!r} is no single token")
    return number


@dataclass(frozen=True)
class ChatFormat:
    """Turns messages into token ids. Text from tasks and tools can never produce a role token."""

    tokenizer: Any  # a fast transformers tokenizer

    @property
    def end_id(self) -> int:
        return self._role(END)

    def _role(self, name: str) -> int:
        return token_id(self.tokenizer, name)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; role markers inside it stay ordinary characters."""
        core: Tokenizer = self.tokenizer.backend_tokenizer
        core.encode_special_tokens = True
        try:
            return list(core.encode(text, add_special_tokens=False).ids)
        finally:
            core.encode_special_tokens = False

    def prompt(self, statement: str) -> list[int]:
        """The opening of an episode: the user's message and the cue for the first reply."""
        return [self._role(USER), *self.encode(statement), self.end_id, self._role(ASSISTANT)]

    def observation(self, text: str, *, close_reply: bool = False) -> list[int]:
        """A tool result and the cue for the next reply; ``close_reply`` first ends a reply that was cut off."""
        head = [self.end_id] if close_reply else []
        return [*head, self._role(TOOL), *self.encode(text), self.end_id, self._role(ASSISTANT)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of a reply, without its end-of-turn token."""
        ids = [int(t) for t in tokens]
        if ids and ids[-1] == self.end_id:
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))
