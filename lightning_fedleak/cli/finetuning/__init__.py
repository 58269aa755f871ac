"""A small pretrained model, private messages, and fine-tuning of any causal language model.

The names below are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fedleak.extras import lazy

if TYPE_CHECKING:
    from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES as EMBEDDED_MESSAGES
    from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MODEL as EMBEDDED_MODEL
    from lightning_fedleak.cli.finetuning.assets import TRAINING as TRAINING
    from lightning_fedleak.cli.finetuning.assets import SourceError as SourceError
    from lightning_fedleak.cli.finetuning.assets import check_option as check_option
    from lightning_fedleak.cli.finetuning.assets import quiet_logs as quiet_logs
    from lightning_fedleak.cli.finetuning.assets import refuse_errors as refuse_errors
    from lightning_fedleak.cli.finetuning.module import CausalLMFineTuning as CausalLMFineTuning
    from lightning_fedleak.cli.finetuning.module import PadRight as PadRight
    from lightning_fedleak.cli.finetuning.module import TextDataModule as TextDataModule
    from lightning_fedleak.cli.finetuning.module import load_model as load_model
    from lightning_fedleak.cli.finetuning.module import load_tokenizer as load_tokenizer
    from lightning_fedleak.cli.finetuning.module import tokenize_rows as tokenize_rows
    from lightning_fedleak.cli.finetuning.texts import column_of as column_of
    from lightning_fedleak.cli.finetuning.texts import is_chat as is_chat
    from lightning_fedleak.cli.finetuning.texts import read_rows as read_rows
    from lightning_fedleak.cli.finetuning.texts import read_texts as read_texts
    from lightning_fedleak.cli.finetuning.texts import text_of as text_of

__getattr__ = lazy(__name__)
