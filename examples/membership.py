"""Is a text in a client's batch? The game of Vu et al. 2024: `python examples/membership.py`.

A secret bit decides whether a message is in the batch that a client trains on. Two servers guess it
from one gradient: an honest one that adds nothing to the model, and a dishonest one that adds
layers. In the last games the client replaces its tokens at random first.
"""

import os

from peft import LoraConfig, get_peft_model

from lightning_fedleak import attacks
from lightning_fedleak.cli.finetuning import (
    EMBEDDED_MESSAGES,
    load_model,
    load_tokenizer,
    read_texts,
)
from lightning_fedleak.defenses import DefenseContext, TokenLDP
from lightning_fedleak.evaluation.games import GameConfig, SentencePool, play
from lightning_fedleak.model.anatomy import find_anatomy

TOKENS, BATCH, LAYER = 16, 8, 3


def replaced(anatomy, tokenizer, epsilon: float):
    """Returns what a client under TokenLDP makes of the token ids of a batch."""
    ldp = TokenLDP("grr", epsilon, per="token", memoize=False, special_ids=tokenizer)
    where = {"device": anatomy.device, "precision": "32-true", "entropy": os.urandom(32)}
    context = DefenseContext(anatomy.model, client=0, clients=1, step=0, **where)
    ldp.before_setup(context)
    print(f"{ldp.guarantee}:")

    def client(ids, mask):
        return ldp.on_batch({"input_ids": ids, "attention_mask": mask}, context)["input_ids"]

    return client


def show(results, fitted: bool = False) -> None:
    """Prints the AUC of each attack, in all games, and its accuracy."""
    for result in results:
        rates = result.summary(fitted=fitted)
        auc, right = rates["auc"], rates["accuracy"]
        print(
            f"  {result.attack}: AUC {auc.value:.3f} ({auc.low:.2f} to {auc.high:.2f}), "
            f"right in {right.value:.3f} of {len(result)} games"
        )


def main(games: int = 24) -> None:
    """Plays the games of both servers, and those of a client that replaces its tokens."""
    tokenizer, anatomy = load_tokenizer(None), find_anatomy(load_model(None).eval())
    texts = read_texts(EMBEDDED_MESSAGES)
    public = attacks.PublicText(texts[:40], tokenizer)  # what the servers calibrate on
    pool = SentencePool.from_texts(texts[40:], tokenizer, TOKENS)
    config = GameConfig(games=games, batch=BATCH, targets_per_batch=4)  # of one gradient
    print("A server that adds nothing, to a client that trains a LoRA:")
    # B is not zero, as after some steps: while it is, A has no gradient.
    config_of_lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    lora = find_anatomy(get_peft_model(load_model(None), config_of_lora).eval())
    kinds = attacks.GradientMembership, attacks.SubspaceMembership
    honest = [kind(public, tokens=TOKENS) for kind in kinds]
    show(play(lora, honest, pool, config))
    print("A server that adds layers:")
    crafted = [
        attacks.FCMembership(LAYER, "full", tokens=TOKENS),
        attacks.FCMembership(LAYER, "token", tokens=TOKENS, name="fc_membership_of_a_token"),
        attacks.AttentionMembership(LAYER, public, tokens=TOKENS, batch=BATCH),
    ]
    show(play(anatomy, crafted, pool, config))
    crafted = [attacks.WordMembership(LAYER, public, tokens=TOKENS, batch=BATCH)]
    for epsilon in (8, 2):
        defend = replaced(anatomy, tokenizer, epsilon)
        show(play(anatomy, crafted, pool, config, defend=defend), fitted=True)


if __name__ == "__main__":
    main()
