"""TokenLDP: how many tokens survive, and how much of epsilon the decoded token still spends.

    python -m benchmarks.defenses.token_ldp --vocabulary 30522

Exact, by epsilon. Membership games under it: ``token_ldp_games.py``.
"""

import math

from benchmarks.shared import parser_of, print_row, table
from lightning_fedleak.defenses.token_ldp.mechanisms import Randomizer, bit_rates, the_rates

SMOKE = ("--vocabulary 2048 --epsilon 5",)


def decoded_epsilon(randomizer: Randomizer, epsilon: float) -> float:
    """Return the decoded index' epsilon, at most ``epsilon``: log of the law's largest ratio."""
    b = randomizer.k
    if randomizer.decode != "first":
        keep = randomizer.keep(epsilon)
        # Above, float64 holds too few digits of 1 - keep.
        if randomizer.mechanism == "grr" or keep > 1 - 1e-9:
            return epsilon
        return math.log(keep) + math.log(b - 1) - math.log1p(-keep)
    p, q = (the_rates if randomizer.mechanism == "the" else bit_rates)(epsilon)
    none_set = (1.0 - p) * (1.0 - q) ** (b - 1)
    # Without the factor (1 - q)^(y - 1): the input is y itself, below y, above y.
    chances = [p * (1.0 - q), (1.0 - p) * q]
    if b > 2:
        chances.append(q * (1.0 - q))
    ratios = [(p + none_set) / (q + none_set), max(chances) / min(chances)]
    return math.log(max(ratios))


def main() -> None:
    args = parser_of(__doc__, vocabulary=30_522, epsilon=[5, 7.5, 10, 15, 20]).parse_args()
    print(table(["mechanism, rule", *(f"eps {e:g}" for e in args.epsilon)], []))
    for mechanism, rule, bits in (
        ("grr", None, None), ("rappor", "uniform", None), ("dbitflip", "uniform", 1024),
        ("dbitflip", "uniform", 16), ("the", "argmax", None), ("the", "uniform", None),
    ):  # fmt: skip
        randomizer = Randomizer.with_defaults(mechanism, args.vocabulary, rule, bits)
        results = [
            f"{randomizer.keep(e):.2g} ({decoded_epsilon(randomizer, e):.2f})" for e in args.epsilon
        ]
        name = f"{mechanism}, {rule or '-'}" + (f", {bits} bits" if bits else "")
        print_row(name, *results)


if __name__ == "__main__":
    main()
