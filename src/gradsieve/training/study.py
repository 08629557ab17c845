"""Studies: named grids of runs in a file, each run remembered by its digest, wherever it was made.

A study file has `title` and `shows`, options common to all runs in `[common]`, those of its two forms in `[short]` and
`[full]`, and one table for each grid in `[grids.NAME]`, which may have `short` and `full` of its own. Later ones go
before earlier ones, and the command line before them all. Beside the options of `train` a grid may give `global_batch`,
which is shared out over the workers; its `data` is a path below that of the command line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from gradsieve.checks import UsageError, nearest, shown
from gradsieve.digests import Digest, digest_text, is_digest, read_digest, retold
from gradsieve.runs import read_run
from gradsieve.tasks import Task, load_task
from gradsieve.training.config import TrainConfig, method_label, to_mapping
from gradsieve.training.folder import cell_name, make_writable, plain_name
from gradsieve.training.grid import AXES, Cell, check_folder, expand, plan_of
from gradsieve.training.recorder import write_text
from gradsieve.training.runner import num_workers

Form: TypeAlias = Literal["short", "full"]
FORMS: tuple[Form, ...] = get_args(Form)
KEYS = ("title", "shows", "common", *FORMS, "grids")
WHEREVER = frozenset(
    {
        *("data", "device", "backend", "output", "threads", "timeout", "checkpoint_every"),
        *("tensorboard", "wandb", "interface", "uplink", "passes_alone"),
    }
)
"""Options that make no other experiment: a run made with others of these is the one that a study asks for."""


@dataclass(frozen=True)
class Study:
    """What a study file says."""

    name: str
    title: str
    shows: str
    common: Mapping[str, Any]
    forms: Mapping[Form, Mapping[str, Any]]
    grids: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class StudyCell:
    """One run that a study asks for."""

    grid: str
    config: TrainConfig
    """As asked, with what the task decides left open."""
    global_batch: int | None = None

    @property
    def name(self) -> str:
        return cell_name(f"{self.grid}-{self.config.method}", self.config, num_workers(self.config))

    @property
    def asked(self) -> dict[str, Any]:
        """What makes it this run and no other: options that are not the defaults."""
        defaults = {field.name: field.default for field in fields(TrainConfig)}
        values = to_mapping(self.config)
        return {
            k: v for k, v in values.items() if k not in WHEREVER and v is not None and (v != defaults[k] or k in AXES)
        }


def make_study(name: str, values: Mapping[str, Any], source: str) -> Study:
    """A study from what its file holds, checked for names and kinds; options are checked when its grids are made."""
    for key in values:
        if key not in KEYS:
            raise UsageError(f"{source}: a study has no {shown(key)}; {nearest(str(key), KEYS)}")
    for key in ("title", "shows"):
        if not isinstance(values.get(key), str):
            raise UsageError(f"{source}: {key} must be text, not {shown(values.get(key))}")
    grids = _table(values, "grids", source)
    if not grids:
        raise UsageError(f"{source}: a study needs a grid: a table [grids.NAME] with options of train")
    for grid in grids:
        for form in FORMS:
            _table(_table(grids, grid, source), form, f"{source}, grid {grid}")
    return Study(
        name=name,
        title=values["title"],
        shows=values["shows"],
        common=_table(values, "common", source),
        forms={form: _table(values, form, source) for form in FORMS},
        grids=grids,
    )


def _table(values: Mapping[str, Any], key: str, source: str) -> dict[str, Any]:
    table = values.get(key, {})
    if not isinstance(table, Mapping):
        raise UsageError(f"{source}: {key} must be a table of options, not {shown(table)}")
    return {str(name).replace("-", "_") if key != "grids" else str(name): value for name, value in table.items()}


def study_cells(
    study: Study, form: Form, given: Mapping[str, Any], only: Iterable[str] = (), source: str = ""
) -> list[StudyCell]:
    """The runs of a study, or of some of its grids; options that are given go before its own."""
    wanted = list(only) or list(study.grids)
    for grid in wanted:
        if grid not in study.grids:
            raise UsageError(f"{source or study.name} has no grid {shown(grid)}; {nearest(grid, study.grids)}")
    cells: dict[str, StudyCell] = {}
    for grid in wanted:
        for cell in _grid_cells(study, form, grid, given, f"{source or study.name}, grid {grid}"):
            if cells.setdefault(cell.name, cell) != cell:
                raise UsageError(f"{source or study.name}: two runs are called {cell.name}; name the grids otherwise")
    return list(cells.values())


def _grid_cells(study: Study, form: Form, grid: str, given: Mapping[str, Any], source: str) -> list[StudyCell]:
    own = _table(study.grids, grid, source)
    in_form = {name: own.pop(name, {}) for name in FORMS}[form]
    values = {**study.common, **study.forms[form], **own, **in_form}
    below = values.pop("data", None)
    if below is not None and not isinstance(below, str):
        raise UsageError(f"{source}: data must be a path below that of the command line, not {shown(below)}")
    if "workers" in given or "virtual" in given:
        values = {name: value for name, value in values.items() if name not in ("workers", "virtual")}
    if "batch_size" in given:
        values.pop("global_batch", None)
    global_batch = values.pop("global_batch", None)
    values |= given
    if below is not None and given.get("data") is not None:
        values["data"] = str(Path(given["data"]) / below)
    configs = [_shared_out(config, global_batch, source) for config in expand(values, source)]
    return [StudyCell(grid, config, global_batch) for config in dict.fromkeys(map(_canonical, configs))]


def _shared_out(config: TrainConfig, global_batch: Any, source: str) -> TrainConfig:
    """Give each worker its part of a batch that all have together."""
    if global_batch is None:
        return config
    world = num_workers(config)
    if type(global_batch) is not int or global_batch < world or global_batch % world:
        raise UsageError(f"{source}: global_batch {shown(global_batch)} cannot be shared out over {world} workers")
    return replace(config, batch_size=global_batch // world)


def _canonical(config: TrainConfig) -> TrainConfig:
    """However the method was written."""
    made, baseline = config.make_method(), config.baseline
    if baseline is not None:
        return replace(config, method=baseline.expression)
    return replace(config, method=method_label(made), density=None if made.name == "dense" else made.density)


def form_name(form: Form, given: Mapping[str, Any]) -> str:
    """The form's, with what the command line changes in every run: such runs lie apart from the study's own.

    >>> form_name("short", {"epochs": 1, "seed": [0], "data": "/data"})
    'short-epochs-1'
    """
    changed = sorted(name for name in given if name not in WHEREVER and name not in AXES)
    return "-".join([form, *(plain_name(f"{name}-{given[name]}") for name in changed)])


class Results:
    """The digests of a study in one form, a file a run; beside them lie those of other studies."""

    def __init__(self, folder: Path, study: Study, form: str) -> None:
        self._all = folder.expanduser().resolve()
        self.folder = self._all / study.name / form
        self._study, self._form = study, form

    def path(self, cell: StudyCell) -> Path:
        return self.folder / f"{cell.name}.json"

    def find(self, cell: StudyCell) -> Digest | None:
        """The digest of a run, be it another study's; one of another run under its name is refused."""
        path = self.path(cell)
        if not path.exists():
            elsewhere = self._anywhere.get(_key(cell.asked))
            return None if elsewhere is None else read_digest(elsewhere)
        digest = read_digest(path)
        found, asked = digest.study.get("asked", {}), cell.asked
        for name in sorted({*found, *asked}):
            if found.get(name) != asked.get(name):
                raise UsageError(
                    f"{path} is of a run with {name} {found.get(name)!r}, and {asked.get(name)!r} is asked for: "
                    "give another --results, or remove that file"
                )
        return digest

    def keep(self, cell: StudyCell, folder: Path) -> None:
        """Write the digest of a run that has finished."""
        self._write(cell, digest_text(read_run(folder), self._about(cell)))

    def take_over(self, cells: Iterable[StudyCell]) -> None:
        """Write what other grids and studies have of these runs in their place, too: so a study's folder is whole."""
        for cell in cells:
            elsewhere = self._anywhere.get(_key(cell.asked))
            if elsewhere is not None and not self.path(cell).exists():
                self._write(cell, retold(elsewhere, self._about(cell)))

    @cached_property
    def _anywhere(self) -> dict[str, Path]:
        """Where there is which run, be it asked for by another grid, form or study."""
        paths = filter(is_digest, sorted(self._all.glob("*/*/*.json")))
        return {_key(read_digest(path).study.get("asked", {})): path for path in paths}

    def _about(self, cell: StudyCell) -> dict[str, Any]:
        about: dict[str, Any] = {"name": self._study.name, "form": self._form, "grid": cell.grid, "asked": cell.asked}
        return about if cell.global_batch is None else about | {"global_batch": cell.global_batch}

    def _write(self, cell: StudyCell, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.path(cell), text)


def distinct(cells: Iterable[StudyCell]) -> list[StudyCell]:
    """The first of those that ask for the same run."""
    return list({_key(cell.asked): cell for cell in reversed(list(cells))}.values())[::-1]


def _key(asked: Mapping[str, Any]) -> str:
    return json.dumps(asked, sort_keys=True)


def planned(cells: Sequence[StudyCell], folder: Path) -> dict[Path, tuple[StudyCell, Cell]]:
    """Runs ready to be carried out, all checked, by their folders; a task is loaded once."""
    tasks: dict[tuple[str, Path | None], Task] = {}
    ready: dict[Path, tuple[StudyCell, Cell]] = {}
    folder = folder.expanduser().resolve()
    for cell in cells:
        key = cell.config.task, cell.config.data
        if key not in tasks:
            tasks[key] = load_task(*key)
        planned = Cell(plan_of(cell.config, tasks[key]), folder / cell.name)
        check_folder(planned)
        ready[planned.folder] = cell, planned
    make_writable(folder)
    return ready
