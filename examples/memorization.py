"""What do the trained weights leak? `python examples/memorization.py`.

Two fifths of the texts are left out of the training by a secret draw. Within the first epoch and
after each one, the model and its base are queried on both sides. The loss of the texts that were
left out hardly changes in the second epoch; what the weights leak does.
"""

import lightning as L
from torch.utils.data import DataLoader

from lightning_fedleak.attacks.memorization import Combined, Loss
from lightning_fedleak.callbacks import LeakageMonitor, WatchSettings
from lightning_fedleak.cli.finetuning import CausalLMFineTuning
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES
from lightning_fedleak.cli.finetuning.module import PadRight, load_tokenizer, tokenize_rows
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.engine import Memorization
from lightning_fedleak.evaluation.canaries import leave_out


def main() -> None:
    """Fine-tunes two epochs and prints what was read at each look."""
    tokenizer = load_tokenizer(None)
    rows = tokenize_rows(read_texts(EMBEDDED_MESSAGES), tokenizer, 128)
    train, others = leave_out(rows, 200, seed=0)
    pad = PadRight(tokenizer.pad_token_id or 0)
    # Nearly all texts are queried, to show much on few: the default is 2% of an epoch's time.
    monitor = LeakageMonitor(
        [Combined(), Loss()], settings=WatchSettings(memorization=Memorization(max_overhead=1.34))
    )
    trainer = L.Trainer(
        max_epochs=2,
        callbacks=[monitor],
        default_root_dir="fedleak_runs",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        CausalLMFineTuning(lr=5e-4),
        DataLoader(train, batch_size=8, shuffle=True, collate_fn=pad),
        DataLoader(others, batch_size=8, collate_fn=pad),
    )
    for row in monitor.to_dataframe().query("metric == 'auc'").itertuples():
        print(
            f"{row.attack} after {row.step} steps: AUC {row.value:.3f} "
            f"(95%, all looks together: {row.low:.2f} to {row.high:.2f})"
        )


if __name__ == "__main__":
    main()
