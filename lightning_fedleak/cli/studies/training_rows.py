"""Rows of a table as token ids and labels, encoded as they were for the training.

The labels are -100 at tokens that the loss was not computed on.

:class:`RowReader` chooses an encoder by the columns of the table and the options, and encodes each
row. It raises :class:`UnknownLabels` if nothing says where the loss was computed.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from lightning_fedleak.cli.finetuning import SourceError, column_of, is_chat, read_rows, text_of
from lightning_fedleak.cli.studies.models import Head
from lightning_fedleak.model.batches import IGNORE_INDEX
from lightning_fedleak.model.taps import Text

PROMPTS = ("prompt", "question", "instruction", "input", "query")
"""Usual names of a column of prompts. With more names, users must set --loss more often."""

ANSWERS = ("completion", "response", "answer", "output", "chosen")
"""Usual names of the column that the loss is computed on."""

# The tag of a chat template before the tokens that the assistant writes.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Row = Mapping[str, Any]


class UnknownLabels(ValueError):
    """Nothing says which tokens of the rows the loss was computed on."""


@dataclass(frozen=True)
class RowReader:
    """Encode rows as they were encoded for the training, cut to the same length.

    The form of a row depends on its columns:

    - Text: every token is a label.
    - A prompt and an answer: the answer is the label, followed by an end-of-text token, as in TRL.
      If both are chats, the model's template joins them.
    - A chat (``messages``): rendered with the model's template, and ``tools`` and
      ``chat_template_kwargs`` of the row. Labels are the turns of the assistant: the tokens that
      the template marks by ``{% generation %}``, or without marks all tokens that such a turn adds.
    - ``input_ids`` and ``labels``: used unchanged.
    - For a classifier of rows: text and a class. For a classifier of tokens: a list of words and a
      list of their classes; the label of a word is at its first token, as in the examples of
      transformers. For a masked model: text, in which all but special tokens are labels.

    Attributes:
        tokenizer: The tokenizer of the model.
        length: The maximum number of tokens of a row.
        column: The column that holds the text, the chat, or with a prompt column the answer.
        prompt_column: The column that holds the prompt.
        loss: The tokens that the loss was computed on, ``"answers"`` or ``"all"``; None if that
            follows from the columns.
        template: The model's chat template; None: the template of the tokenizer.
        head: The kind of prediction of the model.
        label_column: The column that holds the class, or the list of classes; None:
            ``labels`` or ``label``.
        classes: The numbers of the model's classes by name.
        empty: The number of rows without text, which are left out, of each source that was read.
    """

    tokenizer: PreTrainedTokenizerBase
    length: int
    column: str | None = None
    prompt_column: str | None = None
    loss: Literal["answers", "all"] | None = None
    template: str | None = None
    head: Head = "causal"
    label_column: str | None = None
    classes: Mapping[str, int] = field(default_factory=dict)
    empty: dict[str, int] = field(default_factory=dict)

    def read(self, source: str | Path) -> dict[int, Text]:
        """Return the texts of a source by the number of their row, counted from 0.

        Rows without text are left out.

        Args:
            source: A file, folder or dataset, see
                :func:`~lightning_fedleak.cli.finetuning.read_texts`.

        Raises:
            SourceError: The source cannot be read, or has no such column.
            UnknownLabels: It is unknown which tokens the loss was computed on, or the rows are
                preferences.
        """
        rows, column = read_rows(source)
        names = list(dict.fromkeys(name for row in rows for name in row))
        encode = self._encoder(rows, names, self.column or column, str(source))
        texts = {}
        for number, row in enumerate(rows):
            try:
                ids, labels = encode(row)
                torch.tensor([ids, labels])  # of one length
            except (UnknownLabels, SourceError):
                raise
            except Exception as error:  # its message may contain private text
                raise SourceError(
                    f"row {number} of '{source}' cannot be read like the others, with as many "
                    f"labels as words or ids ({type(error).__name__})"
                ) from None
            if ids:
                cut = slice(self.length)
                # One more label than ids: the model predicts at the tokens themselves.
                shift = [] if self.head == "causal" else [IGNORE_INDEX]
                texts[number] = Text(torch.tensor(ids[cut]), torch.tensor(shift + labels[cut]))
        if not texts:
            raise SourceError(
                f"'{source}' has {len(rows)} rows, and the tokenizer gives no token for any: give "
                "rows with text, and a --base with its tokenizer"
            )
        self.empty[str(source)] = len(rows) - len(texts)
        return texts

    def _encoder(
        self, rows: Sequence[Row], names: Sequence[str], column: str | None, source: str
    ) -> Callable[[Row], tuple[list[int], list[int]]]:
        """Return a function from a row to its ids and labels."""
        if self.head != "causal":
            return self._head_encoder(rows, names, column, source)
        if any(name.startswith("rejected") for name in names):
            raise UnknownLabels(
                f"'{source}' holds preferences ('rejected'): a loss that prefers chosen texts "
                "makes the others unlikely, so that likelihoods do not show what was trained on. "
                "If training read 'chosen' alone, give rows without the others"
            )
        if "input_ids" in names:
            if "labels" not in names or self.loss or self.prompt_column:
                raise UnknownLabels(
                    f"'{source}' holds input_ids: write the labels that training had beside them "
                    "(-100 where there was no loss), and leave out --loss and --prompt-column"
                )
            return lambda row: (list(row["input_ids"]), list(row["labels"]))
        answers = [name for name in ANSWERS if name in names]
        if (prompts := self.prompt_column) is not None:
            if prompts not in names or not (column or answers):
                raise SourceError(
                    f"'{source}' needs the column '{prompts}' (--prompt-column), and "
                    f"for the answer one of {', '.join(ANSWERS)} or --column"
                )
            answer = column or answers[0]
            return lambda row: self._answered(row.get(prompts), row.get(answer), row)
        if self.loss is None and answers and any(name in names for name in PROMPTS):
            raise UnknownLabels(
                f"'{source}' looks like prompts and answers: name the prompt's column "
                "(--prompt-column), or say that all tokens of --column were trained on (--loss all)"
            )
        return self._text_encoder(rows, names, column, source)

    def _text_encoder(
        self, rows: Sequence[Row], names: Sequence[str], column: str | None, source: str
    ) -> Callable[[Row], tuple[list[int], list[int]]]:
        """Return a function from a row with one column of text or chats to its ids and labels."""
        name = column_of(list(rows), names, column, source)
        if not any(is_chat(row.get(name)) for row in rows):
            if self.loss == "answers":
                raise SourceError(
                    f"'{source}' holds no chats: --loss answers needs --prompt-column"
                )
            return lambda row: self._plain((text_of(row.get(name)) or "").strip())
        if self.loss is None:
            raise UnknownLabels(
                f"'{source}' holds chats: say whether the loss was computed on the assistant's "
                "turns (--loss answers) or on all tokens (--loss all)"
            )
        return lambda row: self._chat(row.get(name), row)

    def _head_encoder(
        self, rows: Sequence[Row], names: Sequence[str], column: str | None, source: str
    ) -> Callable[[Row], tuple[list[int], list[int]]]:
        """Return a function from a row to its ids and labels, for a model that is not causal."""
        if self.prompt_column or self.loss:
            raise SourceError("--prompt-column and --loss are for causal models: leave them out")
        label = self.label_column or ("labels" if "labels" in names else "label")
        if self.head != "masked" and label not in names:
            has = ", ".join(names)
            raise UnknownLabels(
                f"'{source}' has no column '{label}' (--label-column); it has {has}"
            )
        if any(any(row.get("token_type_ids") or ()) for row in rows):
            raise UnknownLabels(f"'{source}' holds pairs of texts (token_type_ids)")
        has_ids, name = "input_ids" in names, column or ("tokens" if "tokens" in names else "words")
        if self.head != "token" and not has_ids:
            name = column_of(list(rows), [name for name in names if name != label], column, source)
        name = "input_ids" if has_ids else name
        if self.head == "token":
            return lambda row: self._word_labels(row[name], row[label], has_ids)
        return lambda row: self._whole(row, name, label, has_ids)

    def _whole(self, row: Row, name: str, label: str, has_ids: bool) -> tuple[list[int], list[int]]:
        """Return the ids of a text; labels are its class at the end, or a masked model's tokens."""
        if has_ids:
            ids = list(row[name])[: self.length]
        else:
            ids, _ = self._plain((text_of(row.get(name)) or "").strip())
        if self.head == "row":
            return ids, [IGNORE_INDEX] * (len(ids) - 1) + [self._class(row[label])] * bool(ids)
        if self.tokenizer.mask_token_id in ids:
            raise UnknownLabels("a row holds masked tokens: give rows without")
        special = {*self.tokenizer.all_special_ids}
        return ids, [IGNORE_INDEX if token in special else token for token in ids]

    def _word_labels(
        self, words: Sequence[Any], classes: Sequence[Any], has_ids: bool
    ) -> tuple[list[int], list[int]]:
        """Return the ids of words, which may already be token ids, and their classes as labels."""
        numbers = [self._class(value) for _, value in zip(words, classes, strict=True)]
        if has_ids:
            return list(words)[: self.length], numbers[: self.length]
        settings = {"truncation": True, "max_length": self.length, "is_split_into_words": True}
        encoded = self.tokenizer(words, **settings)
        word_ids = encoded.word_ids()
        return encoded["input_ids"], [
            IGNORE_INDEX if word is None or word == previous else numbers[word]
            for word, previous in zip(word_ids, [None, *word_ids], strict=False)
        ]

    def _class(self, value: Any) -> int:
        """Return the number of a class, which may be given by its name."""
        if isinstance(value, str) and value in self.classes:
            return self.classes[value]
        value = int(value) if isinstance(value, str) and value.isdecimal() else value
        if isinstance(value, int) and value in (IGNORE_INDEX, *self.classes.values()):
            return value
        raise UnknownLabels(
            "a row has a class that is not in the model's config (label2id), or is not one class"
        )

    def _plain(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of a text, all of which are labels."""
        if not text:
            return [], []
        settings = {"truncation": True, "max_length": self.length, "verbose": False}
        ids = self.tokenizer(text, **settings)["input_ids"]
        return ids, ids

    def _answered(self, prompt: Any, answer: Any, row: Row) -> tuple[list[int], list[int]]:
        """Return the ids of prompt and answer; their common prefix with the prompt is masked."""
        if not answer:
            return [], []
        if is_chat(prompt):
            start = self._rendered(prompt, row, add_generation_prompt=True)["input_ids"]
            ids = self._rendered([*prompt, *answer], row)["input_ids"]
        else:
            end = self.tokenizer.eos_token or ""
            whole = prompt + answer + ("" if answer.endswith(end) else end)
            start, ids = (
                self.tokenizer(text, verbose=False)["input_ids"] for text in (prompt, whole)
            )
        pairs = enumerate(zip(start, ids, strict=False))
        shared = next((n for n, (a, b) in pairs if a != b), min(len(start), len(ids)))
        shared = 0 if self.loss == "all" else shared
        return ids, [IGNORE_INDEX] * shared + ids[shared:]

    def _chat(self, chat: Any, row: Row) -> tuple[list[int], list[int]]:
        """Return the ids of a chat, and its labels."""
        if not chat:
            return [], []
        template = self.template or self.tokenizer.chat_template
        marks = self.loss == "answers" and bool(_GENERATION.search(str(template)))
        encoded = self._rendered(chat, row, return_assistant_tokens_mask=marks)
        ids = encoded["input_ids"]
        if self.loss == "all":
            return ids, ids
        mask = encoded["assistant_masks"] if marks else [0] * len(ids)
        for n, turn in enumerate(() if marks else chat):
            if turn["role"] == "assistant":
                start = self._rendered(chat[:n], row, add_generation_prompt=True)["input_ids"]
                end = self._rendered(chat[: n + 1], row)["input_ids"]
                if end[: len(start)] != start or ids[: len(end)] != end:
                    raise UnknownLabels(
                        "the chat template renders a turn differently when more turns follow, and "
                        "does not mark the assistant's turns ({% generation %}): give rows of "
                        "input_ids and labels"
                    )
                mask[len(start) : len(end)] = [1] * (len(end) - len(start))
        return ids, [i if inside else IGNORE_INDEX for i, inside in zip(ids, mask, strict=True)]

    def _rendered(self, turns: list[Any], row: Row, **settings: Any) -> Any:
        """Return a chat in the model's template, as token ids."""
        if not (self.template or self.tokenizer.chat_template):
            raise SourceError(
                "the rows are chats, and neither --model nor --base has a chat template: save the "
                "tokenizer that training used into --model"
            )
        tools = row.get("tools")
        return self.tokenizer.apply_chat_template(
            turns,
            tools=json.loads(tools) if isinstance(tools, str) else tools,
            chat_template=self.template,
            tokenize=True,
            return_dict=True,
            **(row.get("chat_template_kwargs") or {}),
            **settings,
        )
