from __future__ import annotations

import pytest

from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.cli.studies.defense_specs import DefenseSpec, parse_defenses
from lightning_fedleak.defenses import Freeze, GradientNoise


def test_values_make_a_grid_in_order() -> None:
    specs = parse_defenses("gradient_noise:clip=1/none,sigma=0/1e-3")
    assert [dict(s.settings) for s in specs] == [
        {"clip": clip, "sigma": sigma} for clip in (1, None) for sigma in (0, 0.001)
    ]
    (defense,) = specs[1].build()
    assert isinstance(defense, GradientNoise)
    assert (defense.clip, defense.sigma) == (1, 0.001)
    assert [str(s) for s in specs] == [
        "gradient_noise:clip=1,sigma=0",
        "gradient_noise:clip=1,sigma=0.001",
        "gradient_noise:clip=none,sigma=0",
        "gradient_noise:clip=none,sigma=0.001",
    ]
    assert [parse_defenses(str(s)) for s in specs] == [[s] for s in specs]


def test_words_and_none() -> None:
    (spec,) = parse_defenses("freeze:part=head+embeddings")
    (defense,) = spec.build()
    assert isinstance(defense, Freeze)
    assert defense.part == "head+embeddings"
    assert parse_defenses("none") == [DefenseSpec("none", {})]
    assert parse_defenses("none")[0].build() == []


def test_a_mechanism_is_a_word_for_token_ldp() -> None:
    specs = parse_defenses("grr:epsilon=1/4,per=token")
    assert [str(s) for s in specs] == [
        "token_ldp:mechanism=grr,epsilon=1,per=token",
        "token_ldp:mechanism=grr,epsilon=4,per=token",
    ]


def test_settings_in_groups_are_written_like_the_others() -> None:
    specs = parse_defenses("dpsgd:max_grad_norm=1,noise_multiplier=2,trust=local/central")
    first, second = (spec.build()[0].settings() for spec in specs)
    assert (first["trust"], second["trust"]) == ("local", "central")
    (rappor,) = parse_defenses("rappor:epsilon=1,decode=first,keep_special=false")
    assert rappor.arguments["decode"] == "first"
    assert rappor.arguments["keep_special"] is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gradient_nose:sigma=1", r"no defence 'gradient_nose' \(did you mean 'gradient_noise'"),
        ("gradient_noise:sigm=1", r"no setting 'sigm' \(did you mean 'sigma'\?\). It has: clip"),
        ("gradient_noise:clip=1,sigma", r"'sigma' of .* must be setting=value"),
        ("gradient_noise:clip=1,sigma=", r"must be setting=value"),
        ("gradient_noise:clip=1,sigma=[1]", r"cannot be built: .*sigma must be a number"),
        ("gradient_noise:clip=-1,sigma=1", r"cannot be built: .*clip must be a number above 0"),
        ("gradient_noise:clip=1", r"argument: 'sigma'\. 'gradient_noise' takes clip, sigma"),
        ("none:sigma=1", r"'none' is no defence and takes no settings"),
    ],
)
def test_errors_name_the_part_that_is_wrong(text: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        parse_defenses(text)
