"""A made-up language, what a server observes of a client that trains on it, and rates."""

import torch

from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage

VOCAB, WIDTH = 600, 32


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Language:
    """Texts of a made-up language: each word has its own few followers, words are Zipfian."""

    def __init__(self, seed=0):
        g = generator(seed)
        zipf = 1 / (torch.arange(VOCAB - 3) + 3.0)
        self.followers = 3 + torch.multinomial(
            zipf.expand(VOCAB, -1), 12, replacement=False, generator=g
        )
        self.likely = torch.tensor([0.3, 0.15, 0.1, 0.1] + [0.35 / 8] * 8)

    def texts(self, n, length, seed):
        g = generator(seed)
        ids = torch.randint(3, VOCAB, (n, 1), generator=g)
        for _ in range(length - 1):
            pick = torch.multinomial(self.likely, n, replacement=True, generator=g)
            ids = torch.cat([ids, self.followers[ids[:, -1], pick][:, None]], 1)
        return ids


def observation(gradient, step=0, **more):
    return Observation((GradientSnapshot(step, Stage.SHARED, {"head.weight": gradient}, **more),))


def rates(types, truth):
    right = torch.isin(types, truth).sum().item()
    precision, recall = right / max(1, len(types)), right / len(truth)
    return precision, recall, 2 * right / (len(types) + len(truth))


def mean_f1(attack, cases):
    return sum(rates(attack.run(view).types, truth)[2] for view, truth in cases) / len(cases)
