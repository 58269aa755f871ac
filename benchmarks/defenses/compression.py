"""What attacks read through compressed gradients: words, membership and whole texts.

    python -m benchmarks.defenses.compression --model DIR --bos 1
    python -m benchmarks.defenses.compression --model DIR --bos 1 --rank 16 \
        --targets q_proj,k_proj,v_proj

The gradient of a batch of real texts is compressed, tensor by tensor, without error feedback, and
the attacks know the method. Prints for each method, the gradient as it is first: F1 of the
words that SubspaceWords names, the AUC of SubspaceMembership and of GradientMembership (of each
batch the share of pairs of a member and a non-member that are in order, mean over batches; the
latter are texts of the same source), F1 of AlignedFlatChat on the head (not of a LoRA, which has
none), whose readout is fitted anew for each method, and of SubspaceTexts the share of tokens in
place and of texts that are exact (the last token of each text, which is not in these gradients,
does not count).
*unknown* counts the batches without a result, which count as 0 in words and texts. With error
feedback a monitor reads the gradient before it is compressed: its numbers are those of the first
row.
"""

import time
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.attacks.subspace_texts import backward, move_adapters, texts_of
from benchmarks.attacks.subspace_words import SOURCE, Source, adapted, built, f1_of
from benchmarks.shared import parser_of, print_place, with_ends
from lightning_fedleak import attacks as known
from lightning_fedleak.attacks import PublicText, Query, UnusableObservation
from lightning_fedleak.defenses import GradientCompression
from lightning_fedleak.engine.channels.plans import Plan
from lightning_fedleak.engine.channels.steps import find_unreadable
from lightning_fedleak.evaluation.metrics import TextReconstruction
from lightning_fedleak.evaluation.metrics.texts import in_true_order
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage

SMOKE = (
    "--model {model} --private {text} --public {text} --shape 2x8 --batches 1 --non-members 2 "
    "--budget 1 --public-rows 4 --methods topk:.1,int8 "
    "--attacks subspace_words,subspace_membership,gradient_membership,subspace_texts",
    "--model {model} --private {text} --public {text} --shape 2x8 --batches 1 --non-members 2 "
    "--attacks aligned_flatchat --head-rows 16 --methods int4",
)
METHODS = "none,topk:.1,topk:.01,int8,int4,sign,low_rank:4"


def compression(method: str) -> GradientCompression | None:
    """``topk:share``, ``low_rank:rank``, another method, or none."""
    kind, _, value = method.partition(":")
    if kind == "none":
        return None
    settings: dict[str, Any] = {"topk": {"share": value}, "low_rank": {"rank": value}}.get(kind, {})
    numbers = {name: int(v) if name == "rank" else float(v) for name, v in settings.items() if v}
    return GradientCompression(cast(Any, kind), error_feedback=False, **cast(Any, numbers))


def read(
    attack: Any, roles: tuple[str, ...], snapshot: GradientSnapshot, query: Query | None = None
) -> Any:
    """What an attack makes of a gradient, as a monitor asks it."""
    refusal = find_unreadable(Plan(attack, roles, True, None), snapshot)
    if refusal is not None:
        raise UnusableObservation(refusal.why)
    with torch.no_grad():
        return attack.run(Observation((snapshot,)), query)


def auc(members: Tensor, non_members: Tensor) -> float:
    """The share of pairs in order; ties count half."""
    pairs = members[:, None] - non_members
    return float(((pairs > 0).double() + (pairs == 0).double() / 2).mean())


def main() -> None:
    source = SOURCE | {"rank": (0, "of a LoRA; 0: the whole model")}
    options = parser_of(
        __doc__, "model", **source, shape="1x20", methods=METHODS, public_rows=64,
        non_members=(8, "texts beside those of a batch"), budget=(20.0, "seconds of SubspaceTexts"),
        head_rows=(400, "texts of AlignedFlatChat"),
        attacks=("", "names, by commas; all by default"),
    ).parse_args()  # fmt: skip
    options.config, options.classes, options.dropout, options.chat = None, 0, 0.0, False
    rows, length = map(int, options.shape.split("x"))
    anatomy = find_anatomy(model := built(options))
    private = Source(options.private, options, anatomy.vocab_size)
    public = Source(options.public, options, anatomy.vocab_size)
    move_adapters(model, public, rows, length, options)
    public_texts = PublicText(list(texts_of(public, options.public_rows, length, options)))
    kinds = known.SubspaceMembership, known.GradientMembership
    settings = {"public_rows": options.public_rows // 2, "tokens": length}
    games = [kind(public_texts, **settings) for kind in kinds]
    words = known.SubspaceWords(capacity_seconds=0)
    texts = known.SubspaceTexts(budget_seconds=options.budget)
    head = known.AlignedFlatChat(PublicText(list(texts_of(public, options.head_rows, 64, options))))
    attacks = [words, *games, texts] if options.rank else [words, head, *games, texts]
    chosen = options.attacks.split(",") if options.attacks else [a.name for a in attacks]
    attacks = [attack for attack in attacks if attack.name in chosen]
    roles = {attack: attack.needs(anatomy).gradients for attack in attacks}
    for attack in attacks:
        if attack is not head:
            attack.prepare(anatomy)
            attack.refresh(anatomy, 0)
    names = sorted({role for each in roles.values() for role in each})
    print_place()
    size = rows + options.non_members
    batches = [private.batch(size, length).input_ids for _ in range(options.batches)]
    for method in options.methods.split(","):
        how = compression(method)
        if head in attacks:
            head.meet(known.RunFacts(compression=how and how.compression))
            head.prepare(anatomy)
        scores: dict[Any, list[float]] = {attack: [] for attack in attacks}
        reconstruction = TextReconstruction()
        start = time.process_time()
        for number, ids in enumerate(batches):
            backward(model, ids[:rows], options)
            gradients = {name: anatomy.parameter(name).grad.clone() for name in names}
            if how is not None:
                gradients = how.send(gradients)
            kind = how.method if how else ""
            snapshot = GradientSnapshot(number, Stage.SHARED, gradients, compression=kind)
            truth = ids[:rows, :-1]
            guess = torch.full_like(truth, -1)
            for attack, values in scores.items():
                query = Query(ids, labels=ids) if attack in games else None
                with suppress(UnusableObservation):
                    result = read(attack, roles[attack], snapshot, query)
                    if attack in (words, head):
                        present = (ids[:rows] if attack is head else truth).flatten()
                        values.append(f1_of({*result.types.tolist()}, {*present.tolist()}))
                    elif attack is texts:
                        guess = in_true_order(result.tokens, truth)
                        values.append(1.0)
                    else:
                        values.append(auc(result.scores[:rows], result.scores[rows:]))
            reconstruction.update(guess, truth)
        rates = reconstruction.rates()
        cells = []
        for attack, values in scores.items():
            missed = len(batches) - len(values)
            if attack is texts:
                in_place, exact = rates["token_accuracy"], rates["exact_sentences"]
                rate = f"in place {in_place.value:.3f}, exact {with_ends(exact)}"
            else:  # words that are unknown count as none
                count = len(batches) if attack in (words, head) else max(1, len(values))
                rate = f"{sum(values) / count:.3f}"
            text = f"{rate} ({missed} unknown)" if missed else rate
            cells.append(f"{attack.name} {text if values else 'unknown'}")
        seconds = (time.process_time() - start) / len(batches)
        setting = f"{adapted(options)} {options.shape} {method}"
        print(f"{setting} | {' | '.join(cells)} | {seconds:.1f} s a batch", flush=True)


if __name__ == "__main__":
    main()
