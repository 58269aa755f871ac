"""Are references on honest halves strong, and silent where nothing was trained on?

    python -m benchmarks.attacks.reference_halves --draws 40

Each draw makes 180 rows of 16 tokens by one Markov chain: 60 members, 60 non-members and 60 more. A
tiny GPT-2 is trained on the members, and another on the 60 more, which is the null. Two references
are trained by the same recipe on random halves of members and non-members. Prints for both targets
the gain of the references as a share of the target's, and the AUC beside them.
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks import shared
from lightning_fedleak.attacks.memorization import CombinedReference
from lightning_fedleak.cli.studies.references import Recipe, fit_texts
from lightning_fedleak.engine.reference import measure_strength
from lightning_fedleak.evaluation.canaries import halves
from lightning_fedleak.evaluation.metrics.released import membership_values
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import References, ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps import Text, token_log_probs

SMOKE = ("--draws 1",)
VOCABULARY, LENGTH, SIZE = 40, 16, 60
RECIPE = Recipe(epochs=6, batch_size=6, lr=5e-3)


def base_model() -> GPT2LMHeadModel:
    """Return the base of all models."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2}
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **quiet, n_head=2))


def draw_rows(draw: int) -> list[Text]:
    """Return the rows of a draw."""
    chain = torch.rand(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(7)).pow(6)
    generator = torch.Generator().manual_seed(1000 + draw)
    rows = torch.randint(0, VOCABULARY, (3 * SIZE, 1), generator=generator)
    for _ in range(LENGTH - 1):
        following = torch.multinomial(chain[rows[:, -1]], 1, generator=generator)
        rows = torch.cat([rows, following], 1)
    return [Text(row, row) for row in rows]


def main() -> None:
    """Print a line for each draw and target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=40)
    options = parser.parse_args()
    members = torch.arange(2 * SIZE) < SIZE
    print(shared.table(["draw", "target", "strength", "weak", "AUC (95%)", "above"], []))
    for draw in range(options.draws):
        rows = draw_rows(draw)
        texts = rows[: 2 * SIZE]
        base = token_log_probs(find_anatomy(base_model().eval()), texts)

        def answers(trained: list[Text], seed: int, texts: list[Text] = texts) -> TokenSnapshot:
            torch.manual_seed(seed)
            return token_log_probs(fit_texts(base_model(), trained, RECIPE, "causal", None), texts)

        inside = halves(len(texts), 2, seed=draw)
        own = [[t for t, i in zip(texts, row.tolist(), strict=True) if i] for row in inside]
        references = References([answers(half, 50 + k) for k, half in enumerate(own)], inside)
        for name, trained in (("members", texts[:SIZE]), ("null", rows[2 * SIZE :])):
            now = answers(trained, draw)
            game = ReleasedModel(now, base, torch.ones(len(texts)), references=references)
            strength = measure_strength(game, members, SIZE, SIZE)
            values = membership_values(CombinedReference().score(game), members, alpha=0.05)
            low, high = values["auc_low"], values["auc_high"]
            auc = shared.with_range(values["auc"], low, high)
            weak = "weak" if strength.weak else ""
            shared.print_row(str(draw), name, f"{strength.share:.2f}", weak, auc, str(low > 0.5))


if __name__ == "__main__":
    main()
