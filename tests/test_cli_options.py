from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

import gradsieve
from command_line import MODULE, call, complaint, spawn
from gradsieve.cli.options import read_config, split
from gradsieve.training import runner
from gradsieve.training.config import TrainConfig, from_mapping, option_types

FIELDS = [field.name for field in fields(TrainConfig)]
COMMANDS = ("demo", "train", "compare", "report")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def sample(name: str) -> Any:
    """A value of an option, as a file holds it; never the default."""
    wanted = option_types(TrainConfig)[name]
    kind = wanted if get_origin(wanted) is Literal else next(iter(get_args(wanted)), wanted)
    if get_origin(kind) is Literal:
        return get_args(kind)[-1]
    texts = {"method": "micro(control='paper')", "task": "words"}
    return {bool: True, int: 3, float: 0.25, str: texts.get(name, "some text"), Path: "some/where"}[kind]


class SeenError(Exception):
    """Carries a config out of the command line, before anything is done with it."""


def _seen(config: TrainConfig, sinks: object) -> None:  # noqa: ARG001 - stands in for `runner.train`
    raise SeenError(config)


def seen(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> TrainConfig:
    """The config that `train` makes of its arguments."""
    monkeypatch.setattr(runner, "train", _seen)
    with pytest.raises(SeenError) as caught:
        call("train", *arguments)
    config = caught.value.args[0]
    assert isinstance(config, TrainConfig)
    return config


def toml(values: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


WRITERS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    ".toml": toml,
    ".yaml": yaml.safe_dump,
    ".yml": yaml.safe_dump,
}


def written(values: Mapping[str, Any], suffix: str) -> Path:
    path = Path(f"options{suffix}")
    path.write_text(WRITERS[suffix](dict(values)))
    return path


@pytest.mark.parametrize("name", FIELDS)
def test_an_option_means_the_same_on_the_command_line_and_in_a_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = sample(name)
    expected = from_mapping(TrainConfig, {name: value}, "here")
    assert expected != TrainConfig()
    assert seen(monkeypatch, flag(name), *(() if value is True else (value,))) == expected
    assert seen(monkeypatch, "--config", written({name: value}, ".toml")) == expected
    assert seen(monkeypatch, "--config", written({name.replace("_", "-"): value}, ".yaml")) == expected


def test_nothing_given_leaves_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(monkeypatch) == TrainConfig()
    Path("empty.toml").write_text("")
    Path("empty.yaml").write_text("# nothing\n")
    assert seen(monkeypatch, "--config", "empty.toml") == TrainConfig()
    assert seen(monkeypatch, "--config", "empty.yaml") == TrainConfig()


@pytest.mark.parametrize("suffix", [".toml", ".yaml"])
def test_the_command_line_goes_before_the_file(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written({"steps": 3, "seed": 1, "tensorboard": True, "method": "topk", "workers": 4}, suffix)
    arguments = ["--steps", 5, "--no-tensorboard", "--method", "micro"]
    for line in (["--config", file, *arguments], [*arguments, "--config", file]):
        assert seen(monkeypatch, *line) == TrainConfig(steps=5, seed=1, method="micro", workers=4)


def test_virtual_workers_on_the_command_line_take_the_place_of_a_files_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert seen(monkeypatch, "--config", written({"workers": 4}, ".toml"), "--virtual", 2) == TrainConfig(virtual=2)
    assert seen(monkeypatch, "--config", written({"virtual": 4}, ".toml"), "--workers", 2) == TrainConfig(workers=2)


def test_toml_and_yaml_give_the_same() -> None:
    values = {name: sample(name) for name in FIELDS if name != "virtual"}
    read = [read_config(written(values, suffix)) for suffix in WRITERS]
    assert read == [values] * len(read)


def test_yaml_may_leave_an_option_open(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("open.yaml").write_text("steps: null\nmodel:\nseed: 2\n")
    assert seen(monkeypatch, "--config", "open.yaml") == TrainConfig(seed=2)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("typo.toml", "stepz = 3", "typo.toml: there is no option 'stepz'; did you mean"),
        ("typo.yaml", "stepz: 3", "typo.yaml: there is no option 'stepz'; did you mean"),
        ("strange.yaml", "17: 3", "there is no option '17'; valid are: task, model"),
        ("config.yaml", "config: other.toml", "there is no option 'config'"),
        ("section.toml", "[train]\nsteps = 3", "there is no option 'train'"),
        ("damaged.toml", "steps = = 3", "damaged.toml is damaged: Invalid value (at line 1, column 9)"),
        ("damaged.yaml", "steps: [1,\nseed: 2", "damaged.yaml is damaged: while parsing"),
        ("tab.yaml", "a:\n\t- b", "tab.yaml is damaged: while scanning"),
        ("twice.toml", "steps = 3\nsteps = 4", "twice.toml is damaged"),
        ("object.yaml", "!!python/object/apply:os.getpid []", "object.yaml is damaged: could not determine"),
        ("other.json", "{}", "other.json: a config file ends in .toml, .yaml or .yml"),
        ("none", "", "none: a config file ends in .toml, .yaml or .yml"),
        ("list.yaml", "- steps\n- 3", "list.yaml must hold options by name, not a list"),
        ("emptylist.yaml", "[]", "emptylist.yaml must hold options by name, not a list"),
        ("text.yaml", "steps 3", "text.yaml must hold options by name, not a str"),
        ("zero.yml", "0", "zero.yml must hold options by name, not a int"),
        ("words.toml", "steps = 'three'", "words.toml: steps must be a whole number, not 'three'"),
        ("float.toml", "steps = 3.0", "float.toml: steps must be a whole number, not 3.0"),
        ("flag.yaml", "steps: true", "flag.yaml: steps must be a whole number, not True"),
        ("number.yaml", "tensorboard: 1", "number.yaml: tensorboard must be true or false, not 1"),
        ("density.yaml", "density: much", "density.yaml: density must be a number, not 'much'"),
        ("method.yaml", "method: [micro, topk]", "method.yaml: method must be text, not ['micro', 'topk']"),
        ("schedule.toml", "schedule = 'none'", "schedule must be 'step' or 'cosine' or 'constant', not 'none'"),
        ("schedules.yaml", "schedule: [step]", "schedule must be 'step' or 'cosine' or 'constant', not ['step']"),
        ("seed.yaml", "seed: null", "seed.yaml: seed must be a whole number, not None"),
        ("date.yaml", "lr: 2020-01-01", "date.yaml: lr must be a number, not datetime.date(2020, 1, 1)"),
        ("low.toml", "density = 0", "low.toml: density must lie in (0, 1], not 0.0"),
        ("both.toml", "workers = 2\nvirtual = 2", "both.toml: workers and virtual exclude one another"),
    ],
)
def test_a_bad_config_file_is_refused_with_its_name(
    name: str, content: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "train", _seen)
    Path(name).write_text(content)
    assert told in complaint(call("train", "--config", name))


def test_a_config_file_that_cannot_be_read_is_refused() -> None:
    assert "missing.toml cannot be read: No such file" in complaint(call("train", "--config", "missing.toml"))
    assert "missing.yaml cannot be read: No such file" in complaint(call("compare", "--config", "missing.yaml"))
    Path("folder.toml").mkdir()
    assert "folder.toml cannot be read: Is a directory" in complaint(call("train", "--config", "folder.toml"))
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "binary.toml is damaged: 'utf-8' codec" in complaint(call("train", "--config", "binary.toml"))


@pytest.mark.parametrize(("name", "start"), [("deep.toml", "steps = "), ("deep.yaml", "steps: ")])
def test_a_config_file_that_is_nested_without_end_is_refused(name: str, start: str) -> None:
    Path(name).write_text(start + "[" * 5000)
    assert f"{name} is damaged" in complaint(call("train", "--config", name))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "--stepz", "3"], "No such option: --stepz"),
        (["train", "--steps", "three"], "Invalid value for '--steps'"),
        (["train", "--steps"], "--steps"),
        (["train", "--density", "text"], "Invalid value for '--density'"),
        (["train", "and more"], "unexpected extra argument"),
        (["train", "--resume"], "--resume"),
        (["tran"], "No such command 'tran'"),
        (["--verbose"], "No such option: --verbose"),
        (["compare", "--stepz", "3"], "No such option: --stepz"),
        (["compare", "--resume", "there"], "No such option: --resume"),
        (["report"], "Missing argument 'RUNS...'"),
        (["report", "--titel", "x"], "No such option: --titel"),
        (["demo", "--method", "micro"], "No such option: --method"),
        (["demo", "--workers", "0"], "Invalid value for '--workers'"),
        (["demo", "--epochs", "0"], "Invalid value for '--epochs'"),
    ],
)
def test_what_no_command_takes_is_refused_in_one_line(arguments: list[str], told: str) -> None:
    assert told in complaint(call(*arguments))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" , ,", []),
        ("micro", ["micro"]),
        ("1,2, 3", ["1", "2", "3"]),
        ("dense,micro(control=paper),topk", ["dense", "micro(control=paper)", "topk"]),
        ("micro(a=(1, 2), b=3) , iwp", ["micro(a=(1, 2), b=3)", "iwp"]),
        ("micro(a=1,b", ["micro(a=1,b"]),
    ],
)
def test_lists_are_cut_at_commas_outside_of_parentheses(text: str, words: list[str]) -> None:
    assert split(text) == words


OWN = {
    "train": ["--config", "--resume"],
    "compare": ["--config"],
    "report": ["--output", "--title", "RUNS..."],
    "demo": ["--output", "--workers", "--density", "--epochs"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("ask", ["-h", "--help"])
def test_help_names_every_option(command: str, ask: str) -> None:
    done = call(command, ask)
    assert (done.code, done.err) == (0, "")
    words = done.out.replace(",", " ").split()
    wanted = [*OWN[command], "--help", *([flag(name) for name in FIELDS] if command in ("train", "compare") else [])]
    assert [option for option in wanted if option not in words] == []


def test_help_says_the_defaults_and_what_may_be_several() -> None:
    out = " ".join(call("compare", "--help").out.split())
    assert (
        "'micro(control=paper)'; or ddp, fp16, bf16, powersgd(rank=N). Several: separated by commas. Default: union."
        in out
    )
    assert "--seed SEED,..." in out
    assert "Default: digits." in out
    assert "Several" not in call("train", "--help").out


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_of_the_whole_lists_the_commands_line_by_line(arguments: list[str]) -> None:
    done = call(*arguments)
    lines = (done.out or done.err).splitlines()
    assert lines[0].startswith("Usage: ")
    words = [line.split() for line in lines]
    assert [command for command in COMMANDS if not any(line[:1] == [command] for line in words)] == []
    if arguments:
        assert (done.code, done.err) == (0, "")


def test_version() -> None:
    assert call("--version") == (0, f"gradsieve {gradsieve.__version__}\n", "")


def test_the_module_is_the_command(tmp_path: Path) -> None:
    assert spawn(*MODULE, "--version", cwd=tmp_path) == (0, f"gradsieve {gradsieve.__version__}\n", "")


BLOCKED = ("typer", "rich", "matplotlib", "jinja2", "sklearn", "yaml", "tensorboard")
WITHOUT = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
import gradsieve
print("imported", gradsieve.__version__)
import runpy
runpy.run_module("gradsieve", run_name="__main__")
"""


def test_the_package_needs_no_extra_and_its_command_says_which_one_it_needs(tmp_path: Path) -> None:
    (tmp_path / "without.py").write_text(WITHOUT)
    done = spawn(MODULE[0], "-W", "error", "without.py", "--version", cwd=tmp_path)
    assert done.out == f"imported {gradsieve.__version__}\n"
    assert done.err == "gradsieve: the command line needs typer: pip install 'gradsieve[cli]'\n"
    assert done.code != 0
