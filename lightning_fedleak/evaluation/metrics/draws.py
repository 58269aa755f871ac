"""Test the statement that members were drawn at random, by scores that ignore the training.

Whoever says so may be wrong: members and others may be of different kinds, or the *base*, the model
before the training, may know the members. A draw would then be a coincidence that is refuted.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from torch import Tensor

from lightning_fedleak.attacks.memorization.scores import Loss, MinK, Zlib, normal_scores
from lightning_fedleak.evaluation.canaries.repeats import group_texts
from lightning_fedleak.model.snapshots import ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps import Text

MAX_P_VALUE = 1e-4  # below it a draw is refuted; higher: more honest draws are. Four tests share it
PERMUTATIONS = 20_000  # the fewest with a p-value below MAX_P_VALUE, and one chunk for the scale
_CHUNK = 500  # permutations at once; more take memory. The first chunk gives each score's scale
# Groups that are compared at most, half of either side, and rows of each, all at random:
# similarities grow with the square of their number.
_UNITS, _ROWS_OF_A_GROUP = 2000, 2

Floats = NDArray[np.float64]


def refute_draw(
    base: TokenSnapshot,
    compressed: Tensor,
    texts: Sequence[Text],
    members: Tensor,
    owners: Tensor | None = None,
) -> str | None:
    """Return why N texts were not divided at random, or None.

    The scores are the similarity of words within each side, and the base's loss, zlib ratio and
    Min-K%++. Memberships are permuted among groups of texts that share a row or passages, and the
    largest score, in standard deviations, is compared with that of each permutation. The test is
    exact for random draws of rows, up to the choice of groups.

    Args:
        base: The base's outputs for the texts.
        compressed: (N,) the zlib-compressed size of each text in bytes.
        texts: The texts.
        members: (N,) bool, whether each text is a member.
        owners: (N,) int64, the row that holds each text; None: each text is a row.
    """
    generator, labels = np.random.default_rng(0), members.numpy()
    groups = group_texts(texts, labels, None if owners is None else owners.numpy())
    order = generator.permutation(len(groups))
    by_group = np.argsort(groups[order], kind="stable")
    sizes = np.bincount(groups)
    places = np.empty_like(by_group)  # of each row in its group
    places[by_group] = np.arange(len(order)) - np.repeat(sizes.cumsum() - sizes, sizes)
    firsts = order[places == 0]
    chosen = [firsts[labels[firsts] == side][: _UNITS // 2] for side in (True, False)]
    kept = np.isin(groups[order], groups[np.concatenate(chosen)])
    rows = np.sort(order[kept & (places < _ROWS_OF_A_GROUP)])
    firsts, units = np.unique(groups[rows], return_index=True, return_inverse=True)[1:]
    labels = labels[rows]
    released = ReleasedModel(base, base, compressed).rows(torch.from_numpy(rows))
    scores = {attack.name: attack.score(released) for attack in (Loss(), Zlib(), MinK())}
    ranks = np.stack([normal_scores(values).numpy() for values in scores.values()])
    similar = _similarities([texts[row] for row in rows.tolist()])
    similar[units[:, None] == units] = 0

    def measure(sides: NDArray[np.bool_]) -> Floats:
        """Return (4, P) the scores of P memberships of the groups, (P, U) bool."""
        values = sides[:, units].astype(float)
        values -= values.mean(1, keepdims=True)
        words = ((values @ similar) * values).sum(1)
        return np.stack([words, *np.abs(ranks @ values.T)])

    observed = labels[firsts]
    sides = np.tile(observed, (_CHUNK, 1))
    scale = measure(generator.permuted(sides, axis=1))
    mean, deviation = scale.mean(1, keepdims=True), scale.std(1, keepdims=True) + 1e-12
    found = (measure(observed[None]) - mean) / deviation
    for _ in range(PERMUTATIONS // _CHUNK - 1):
        permuted = (measure(generator.permuted(sides, axis=1)) - mean) / deviation
        if (permuted.max(0) >= found.max()).any():
            return None
    name = ["words", *scores][int(found.argmax())]
    meaning = "they are of different kinds"
    meaning = meaning if name == "words" else f"the base knows one side, or {meaning}"
    return (
        f"not drawn at random from the same rows: '{name}', which ignores the training, tells "
        f"them apart (p < {MAX_P_VALUE:g} by permutation): {meaning}"
    )


def _similarities(texts: Sequence[Text]) -> Floats:
    """Return (N, N) the cosines of texts by their token counts, rare tokens weighted higher."""
    ids = torch.cat([text.ids for text in texts]).numpy()
    owners = np.repeat(np.arange(len(texts)), [len(text.ids) for text in texts])
    tokens, columns = np.unique(ids, return_inverse=True)
    counts = coo_array((np.ones(len(ids)), (owners, columns)), (len(texts), len(tokens))).tocsr()
    weights = np.log(len(texts) / np.bincount(counts.indices, minlength=len(tokens)))
    weighted = counts.log1p().multiply(weights).tocsr()
    norms = np.sqrt(weighted.multiply(weighted).sum(1)) + 1e-12
    weighted = weighted.multiply(1 / norms[:, None]).tocsr()
    return np.asarray((weighted @ weighted.T).todense())
