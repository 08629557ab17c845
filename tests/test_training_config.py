from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import toys
from gradsieve import METHODS
from gradsieve.checks import UsageError
from gradsieve.training.config import (
    TrainConfig,
    convert,
    from_mapping,
    make_method,
    method_label,
    option_types,
    parse_method,
    to_mapping,
)


@pytest.mark.parametrize(
    ("expression", "name", "options"),
    [
        ("micro", "micro", {}),
        ("  micro ", "micro", {}),
        ("micro()", "micro", {}),
        ("micro(control=paper)", "micro", {"control": "paper"}),
        ("micro(control='paper')", "micro", {"control": "paper"}),
        ('micro(control="paper",)', "micro", {"control": "paper"}),
        ("iwp(eps=0.1, per_layer=True)", "iwp", {"eps": 0.1, "per_layer": True}),
        ("iwp(\n  eps=1e-3,\n  ceiling=None)", "iwp", {"eps": 1e-3, "ceiling": None}),
        ("dgc(momentum=-1)", "dgc", {"momentum": -1}),
        ("anything(at='all, (of) it')", "anything", {"at": "all, (of) it"}),
        ("sidco(x=[1, 2])", "sidco", {"x": [1, 2]}),
    ],
)
def test_a_method_expression_has_a_name_and_options(expression: str, name: str, options: dict[str, Any]) -> None:
    assert parse_method(expression) == (name, options)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        " ",
        "micro(",
        "micro)",
        "micro control=paper",
        "micro(paper)",
        "micro(**{'control': 'paper'})",
        "micro(*[1])",
        "micro(control=)",
        "micro.paper",
        "gradsieve.micro()",
        "micro()()",
        "'micro'",
        "5",
        "micro(density=0.1 + x)",
        "micro(density=abs(-0.1))",
        "micro(density=1 if True else 2)",
        "micro(density=__import__('os').getpid())",
        "micro(control=f'{1}')",
        "micro, topk",
        "micro; topk",
        "lambda: micro",
        "micro\0",
        "(" * 500,
    ],
)
def test_what_is_no_method_expression_is_refused_with_the_names(expression: str) -> None:
    with pytest.raises(UsageError, match=r"is not a method: write a name \(dense, topk, .*\) or name\(option=value"):
        parse_method(expression)


@pytest.mark.parametrize(
    "expression", ["micro(density={[]: 1})", "micro(density={{}})", f"micro(density={'-' * 5000}1)"]
)
def test_a_value_that_cannot_be_made_is_refused_alike(expression: str) -> None:
    with pytest.raises(UsageError, match="is not a method"):
        parse_method(expression)


@pytest.mark.parametrize(
    "code",
    [
        "{made}.touch()",
        "micro(density={made}.touch())",
        "micro(control=[{made}.touch()])",
        "micro(**{made}.touch())",
        "{made}.touch()(density=0.1)",
        "micro(control=f'{{{made}.touch()}}')",
    ],
)
def test_code_in_a_method_expression_does_not_run(code: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    with pytest.raises(UsageError):
        TrainConfig(method=code.format(made=f"__import__('pathlib').Path({str(made)!r})"))
    assert not made.exists()


@given(st.text(max_size=30))
def test_any_text_is_a_method_expression_or_refused(text: str) -> None:
    try:
        name, _ = parse_method(text)
    except UsageError:
        return
    assert name.isidentifier()


@pytest.mark.parametrize(
    ("expression", "density", "message"),
    [
        ("dense", 0.1, "dense sends everything and takes no density: leave --density out"),
        ("micro(density=0.1)", 0.2, "the density is given twice, in 'micro\\(density=0.1\\)' and as 0.2"),
        ("mikro", None, "unknown method 'mikro'; did you mean 'micro'\\?"),
        ("micro(kontrol=paper)", None, "micro\\(\\) has no option 'kontrol'; did you mean 'control'\\?"),
        ("micro(control=papier)", None, "control must be one of 'adaptive', 'paper', not 'papier'"),
        ("micro(density=2)", None, "density must lie in \\(0, 1\\], not 2"),
        ("iwp(per_layer=true)", None, "per_layer must be True or False, not 'true'"),
        ("iwp(eps=small)", None, "eps must be a number, not 'small'"),
        ("dense(density=0.1)", None, "dense\\(\\) has no option 'density'"),
    ],
)
def test_a_method_that_cannot_be_made_is_refused_when_the_config_is(
    expression: str, density: float | None, message: str
) -> None:
    values = {"method": expression} | ({} if density is None else {"density": density})
    with pytest.raises(UsageError, match=f"^here: {message}"):
        from_mapping(TrainConfig, values, "here")


@pytest.mark.parametrize(
    ("expression", "density", "expected"),
    [("micro", None, 0.01), ("micro", 0.2, 0.2), ("micro(density=0.3)", None, 0.3), ("dense", None, 1.0)],
)
def test_the_density_stands_beside_the_method_or_in_it(expression: str, density: float | None, expected: float) -> None:
    assert make_method(expression, density).density == expected
    assert TrainConfig(method=expression, density=density).make_method().density == expected


@pytest.mark.parametrize("variant", toys.VARIANTS)
def test_a_label_makes_the_method_again(variant: str) -> None:
    made = toys.make(variant, 0.03)
    label = method_label(made)
    again = make_method(label, None if made.name == "dense" else made.density)
    assert again == made
    assert method_label(again) == label
    assert label.startswith(made.name)
    assert "density" not in label


@pytest.mark.parametrize("name", METHODS)
def test_the_label_of_a_method_as_it_comes_is_its_name(name: str) -> None:
    assert method_label(METHODS[name]()) == name


def test_a_label_names_what_is_not_the_default() -> None:
    made = make_method("iwp(per_layer=True, eps=0.1, momentum=0.5, density=0.2)", None)
    assert method_label(made) == "iwp(per_layer=True, momentum=0.5)"
    assert method_label(make_method("micro(control=paper)", None)) == "micro(control='paper')"


NO_WHOLE = [True, 2.0, "2", math.nan]
NO_NUMBER = [True, "2", math.nan, math.inf]
LIMITS: list[tuple[str, list[Any], list[Any]]] = [
    (name, [1, 7], [0, -1, *NO_WHOLE])
    for name in ("workers", "virtual", "batch_size", "epochs", "steps", "eval_examples", "threads")
]
LIMITS += [(name, [1e-9, 1, 10.5], [0, -0.1, *NO_NUMBER]) for name in ("lr", "clip", "timeout")]
LIMITS += [(name, [0, 0.5, 3], [-0.1, *NO_NUMBER]) for name in ("warmup_epochs", "weight_decay", "eval_every")]
LIMITS += [
    ("checkpoint_every", [0, 1, 10], [-1, 0.5, *NO_WHOLE]),
    ("momentum", [0, 0.9], [1, -0.1, *NO_NUMBER]),
    ("seed", [0, 2**63 - 1], [-1, 2**63, *NO_WHOLE]),
    ("density", [1e-9, 0.5, 1], [0, -0.1, 1.1, *NO_NUMBER]),
]
ACCEPTED = [(name, value) for name, good, _ in LIMITS for value in good]
REFUSED = [(name, value) for name, _, bad in LIMITS for value in bad]


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_a_number_within_its_limits_is_taken(name: str, value: Any) -> None:
    assert getattr(TrainConfig(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_number_outside_of_its_limits_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name} must"):
        TrainConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_from_a_mapping_it_is_refused_with_its_source(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^here: {name} must"):
        from_mapping(TrainConfig, {name: value}, "here")


CHOICES = {"schedule": "linear", "optimizer": "lion", "precision": "float16", "scope": "layer", "wire": "float16"}


@pytest.mark.parametrize(("name", "value"), CHOICES.items())
def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"^here: {name} must be '.*' or '.*', not '{value}'"):
        from_mapping(TrainConfig, {name: value}, "here")


@pytest.mark.parametrize(("name", "value"), CHOICES.items())
def test_a_choice_that_does_not_exist_is_refused_in_python_too(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        TrainConfig(**{name: value})


def test_workers_and_virtual_workers_exclude_one_another() -> None:
    with pytest.raises(UsageError, match="workers and virtual exclude one another"):
        TrainConfig(workers=2, virtual=2)


def test_virtual_workers_have_no_buckets() -> None:
    with pytest.raises(UsageError, match="virtual workers have no buckets: leave scope=bucket out, or use processes"):
        TrainConfig(virtual=2, scope="bucket")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("densty", "here: there is no option 'densty'; did you mean '?density"),
        ("batch-size", "here: there is no option 'batch-size'; did you mean '?batch_size"),
        ("learning rate", "here: there is no option 'learning rate'; valid are: task, model, data, method, density"),
        ("", "here: there is no option ''; valid are: task"),
    ],
)
def test_an_option_that_does_not_exist_is_refused_with_near_ones(key: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        from_mapping(TrainConfig, {key: 1}, "here")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lr", 1, 1.0),
        ("lr", 0.5, 0.5),
        ("density", 1, 1.0),
        ("workers", 3, 3),
        ("workers", None, None),
        ("data", "some/where", Path("some/where")),
        ("data", Path("some/where"), Path("some/where")),
        ("output", None, None),
        ("tensorboard", True, True),
        ("model", "mlp", "mlp"),
        ("schedule", "cosine", "cosine"),
        ("schedule", None, None),
    ],
)
def test_values_from_files_take_the_type_of_their_option(name: str, value: Any, expected: Any) -> None:
    found = getattr(from_mapping(TrainConfig, {name: value}, "here"), name)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("workers", True, "a whole number"),
        ("workers", "2", "a whole number"),
        ("workers", 2.0, "a whole number"),
        ("seed", None, "a whole number"),
        ("seed", False, "a whole number"),
        ("lr", "0.1", "a number"),
        ("lr", True, "a number"),
        ("lr", [0.1], "a number"),
        ("task", 5, "text"),
        ("task", None, "text"),
        ("method", ["micro"], "text"),
        ("data", 5, "a path"),
        ("tensorboard", 1, "true or false"),
        ("tensorboard", "yes", "true or false"),
        ("wandb", True, "text"),
        ("schedule", 1, "'step' or 'cosine' or 'constant'"),
        ("precision", None, "'float32' or 'bfloat16' or 'auto'"),
    ],
)
def test_values_of_another_type_are_refused(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_mapping(TrainConfig, {name: value}, "here")
    assert str(caught.value) == f"here: {name} must be {wanted}, not {value!r}"


def test_every_option_has_a_type_that_files_can_hold_a_help_text_and_a_default() -> None:
    kinds = option_types(TrainConfig)
    for field in fields(TrainConfig):
        assert field.metadata["help"].endswith(".")
        default = field.default
        assert convert(field.name, default, kinds[field.name], "here") == default


CONFIGS = [
    TrainConfig(),
    TrainConfig(
        task="characters",
        model="lstm",
        data=Path("/data/text"),
        method="micro(control='paper')",
        density=0.001,
        workers=4,
        device="cpu",
        backend="gloo",
        timeout=60.0,
        seed=7,
        batch_size=20,
        epochs=3,
        steps=100,
        stop_at=0.9,
        lr=1.0,
        warmup_epochs=0.5,
        schedule="constant",
        optimizer="adamw",
        momentum=0.0,
        weight_decay=0.01,
        clip=0.25,
        precision="bfloat16",
        scope="bucket",
        wire="bfloat16",
        eval_every=0.5,
        eval_examples=100,
        checkpoint_every=0,
        output=Path("/tmp/run"),
        tensorboard=True,
        wandb="project",
        threads=2,
        interface="eth0",
        uplink="7:eth0",
        passes_alone=3,
    ),
    TrainConfig(virtual=16, method="dense"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "everything", "virtual"])
def test_a_config_comes_back_from_its_plain_values_through_json(config: TrainConfig) -> None:
    values = json.loads(json.dumps(to_mapping(config)))
    assert list(values) == [field.name for field in fields(TrainConfig)]
    assert from_mapping(TrainConfig, values, "here") == config


def test_the_examples_above_use_every_option() -> None:
    for field in fields(TrainConfig):
        assert any(getattr(config, field.name) != field.default for config in CONFIGS), field.name
