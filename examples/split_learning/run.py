"""Split learning over a real boundary, and its server's view: `python run.py` in this folder.

This process is the client: it has a private message and the model's embeddings and first blocks. A
second process is the server, with the other blocks and the head. The client asks for the message's
logits; what crosses are hidden states, never a token. The server owns the whole model, and reads
the message off them.

``--noise 0.5`` adds noise of so many standard deviations to what leaves. ``--reveal`` prints the
message as the server reads it (else only how much of it is right).
"""

import argparse
import tempfile
from pathlib import Path

import torch
from split import SplitClient, SplitServer, connect, split_model
from torch import multiprocessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_fedleak.attacks.texts.embedding_descent import EmbeddingDescent
from lightning_fedleak.cli.finetuning import EMBEDDED_MESSAGES, EMBEDDED_MODEL, read_texts
from lightning_fedleak.evaluation.metrics.texts import token_hits
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import Observation

LAYER = 2


def load() -> torch.nn.Module:
    """The whole model, which both sides begin with."""
    return AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()


def serve(url: str, guesses: multiprocessing.Queue) -> None:
    """The server: answers the client, then attacks what came."""
    torch.set_num_threads(1)
    model = load()
    server = SplitServer(split_model(model, LAYER), connect(url, "server"), keep=1)
    server.serve()

    attack = EmbeddingDescent(LAYER, steps=300, sweeps=3, budget_seconds=20)
    attack.prepare(find_anatomy(model))
    guess = attack.run(Observation(activations=tuple(server.received)))
    guesses.put(guess.tokens[0].tolist())


def main() -> None:
    """Run the message through both halves, and print how much of it the server could read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--noise", type=float, default=0.0, help="in standard deviations")
    parser.add_argument("--reveal", action="store_true", help="print what the server reads")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)

    def noised(hidden: torch.Tensor) -> torch.Tensor:
        draw = torch.randn(hidden.shape, generator=generator)
        return hidden + options.noise * hidden.std() * draw

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    message = tokenizer(read_texts(EMBEDDED_MESSAGES)[1], return_tensors="pt").input_ids
    context = multiprocessing.get_context("spawn")
    guesses = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{Path(folder) / 'meet'}"
        server = context.Process(target=serve, args=(url, guesses), daemon=True)
        server.start()
        split = split_model(load(), LAYER)
        with SplitClient(split, connect(url, "client"), on_send=noised) as client:
            client.logits(message)
        tokens = torch.tensor([guesses.get(timeout=600)])
        server.join()

    hits, _ = token_hits(tokens, message)
    print(f"message: {message.shape[1]} tokens, token accuracy {hits.float().mean():.3f}")
    if options.reveal:
        print(tokenizer.decode(tokens[0].clamp(min=0)))


if __name__ == "__main__":
    main()
