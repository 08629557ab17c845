"""Digests: a run in one small JSON file that a repository can hold.

    format        what it is
    study         the study, its form and grid, and what was asked there; absent of runs outside of studies
    run           what `run.json` says
    result        how it ended, and the summary, over all steps
    steady        means of times over all steps after the warm-up
    steps         columns of the steps' records, thinned by means over blocks of steps
    evaluations   columns of the evaluations' records, all of them

A column that never changes is one number. `read_run` of a digest gives a `Run`, of which a report is drawn as of one in
a folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from gradsieve import runs
from gradsieve.runs import HEADER, RUN, Record, Run, RunError, Status, is_run, summarise

FORMAT = "gradsieve digest 1"
PARTS = ("run", "result", "steady", "steps", "evaluations")
MOST_POINTS = 100
DIGITS = 5
"""Of the numbers in thinned columns; all others are whole."""
PLACES = frozenset({"step", "epoch", "time/elapsed"})
"""Columns that say where a step is: of a block, the last one's."""
LEFT_OUT = frozenset(
    {
        *("sparsity/support", "comm/wire_bytes", "comm/messages"),
        *("time/forward", "time/backward", "time/compute", "time/select", "time/exchange", "time/rest", "time/wall"),
    }
)
"""Columns whose means say enough."""


@dataclass(frozen=True)
class Digest(Run):
    """A run with thinned steps; means are those over all of them."""

    study: Mapping[str, Any]
    steady_means: Mapping[str, float | None]

    @property
    def setting(self) -> str:
        form, batch = self.study.get("form"), self.study.get("global_batch")
        config = self.config
        # elsewhere nothing else is to be expected
        float32 = config.get("precision") == "float32" and str(config.get("device")).startswith("cuda")
        parts = (
            f"{form} form" if form else "",
            f"{batch} examples a step" if batch else "",
            "in processes" if form and not self.virtual else "",
            "passes in float32" if form and float32 else "",
        )
        return ", ".join(filter(None, parts))

    @property
    def num_steps(self) -> int:
        return int(self.summary["steps"])

    @property
    def median_density_error(self) -> float:
        return self.mean("sparsity/density_error")

    def mean(self, name: str) -> float:
        return _number(self.summary.get(name))

    def steady(self, name: str) -> float:
        return _number(self.steady_means.get(name))


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def digest_text(run: Run, study: Mapping[str, Any] | None = None) -> str:
    """The digest of a run, the same text whenever it is made."""
    times = sorted({name for record in run.steps for name in record if name.startswith("time/")} - PLACES)
    digest = {
        "format": FORMAT,
        "study": dict(study or {}),
        "run": dict(run.header),
        "result": {
            "status": run.status,
            "error": run.error,
            "summary": _finite(summarise(run.steps, run.evaluations, run.header["steps_per_epoch"])),
        },
        "steady": _finite({name: run.steady(name) for name in times}),
        "steps": _columns(thinned(run.steps), DIGITS),
        "evaluations": _columns(run.evaluations),
    }
    return _text(digest)


def retold(path: Path, study: Mapping[str, Any]) -> str:
    """A digest as one of another study that asks for the same run."""
    return _text(runs.read_json(path) | {"study": dict(study)})


def _text(digest: Mapping[str, Any]) -> str:
    parts = [f"{json.dumps(name)}: {_part(value)}" for name, value in digest.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _part(value: Any) -> str:
    """An entry a line."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items()) + "\n}"


def _finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no word for what is not a number."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def thinned(steps: Sequence[Record], most: int = MOST_POINTS) -> list[dict[str, float | int | None]]:
    """So many blocks of steps at most, as even as can be: means, and of what tells the place the last."""
    blocks = np.array_split(np.arange(len(steps)), min(most, len(steps))) if steps else []
    names = list(dict.fromkeys(name for record in steps for name in record if name not in LEFT_OUT))
    return [{name: _block(steps, block, name) for name in names} for block in blocks]


def _block(steps: Sequence[Record], block: npt.NDArray[np.intp], name: str) -> float | int | None:
    if name in PLACES:
        return steps[int(block[-1])].get(name)
    values = [float(value) for place in block if (value := steps[place].get(name)) is not None]
    return sum(values) / len(values) if values else None


def _columns(records: Sequence[Record], digits: int | None = None) -> dict[str, Any]:
    names = dict.fromkeys(name for record in records for name in record)
    return {name: _column([_rounded(record.get(name), digits) for record in records]) for name in names}


def _column(values: list[float | int | None]) -> Any:
    return values[0] if len(values) > 1 and len(set(values)) == 1 else values


def _rounded(value: float | int | None, digits: int | None) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    return value if digits is None or isinstance(value, int) else float(f"{value:.{digits}g}")


def is_digest(path: Path) -> bool:
    """Does a file call itself one? Others are left to whoever knows them."""
    try:
        with path.open(encoding="utf-8") as file:
            return FORMAT.rpartition(" ")[0] in file.read(100)
    except (OSError, UnicodeDecodeError):
        return False


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Folders of runs, and files of digests, among the paths and below them; each once, in order of name.

    A folder without runs is one of digests, and every JSON file in it must be one.
    """
    found: dict[Path, None] = {}
    for path in paths:
        found.update(dict.fromkeys(_found(path)))
    return list(found)


def _found(path: Path) -> list[Path]:
    if path.is_file() and path.suffix == ".json":
        return [path.resolve()]
    files = sorted(path.rglob("*.json")) if path.is_dir() and not is_run(path) else []
    has_runs = any(file.name == RUN for file in files)
    if not files or has_runs:
        digest = next(filter(is_digest, files), None)
        if digest is not None:
            raise RunError(f"{path} holds folders of runs as well as digests, such as {digest}: name them apart")
        return runs.find_runs([path])
    return [file.resolve() for file in files]


def read_run(path: Path) -> Run:
    """A run from its folder, or from its digest."""
    return read_digest(path) if path.is_file() else runs.read_run(path)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """All runs among the paths and below them. One whose digest several studies have counts once in each setting."""
    found: dict[str, Run] = {}
    for path in find_runs(paths):
        run = read_run(path)
        told_again = isinstance(run, Digest) and bool(run.study)
        found.setdefault(json.dumps([run.header, run.setting], sort_keys=True) if told_again else str(path), run)
    return list(found.values())


def read_digest(path: Path) -> Digest:
    """Read a digest; what is none is refused by name."""
    digest = runs.read_json(path)
    if digest.get("format") != FORMAT:
        raise RunError(
            f"{path} is no digest of a run: its format is {digest.get('format')!r}, not {FORMAT!r}; "
            "give what gradsieve compare wrote, and keep other JSON files elsewhere"
        )
    for name in PARTS:
        if not isinstance(digest.get(name), dict):
            raise RunError(f"{path} lacks {name!r}: it is damaged; make it again")
    header, result = digest["run"], digest["result"]
    missing = [name for name in HEADER if name not in header]
    if missing or result.get("status") not in get_args(Status) or "steps" not in result.get("summary", {}):
        raise RunError(f"{path} lacks {', '.join(missing) or 'its status or summary'}: it is damaged; make it again")
    return Digest(
        folder=path,
        header=header,
        status=result["status"],
        error=result.get("error"),
        summary={name: _number(value) for name, value in result["summary"].items()},
        steps=_records(digest["steps"], path),
        evaluations=_records(digest["evaluations"], path),
        study=digest.get("study", {}),
        steady_means=digest["steady"],
    )


def _records(columns: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    sizes = {len(column) for column in columns.values() if isinstance(column, list)}
    if len(sizes) > 1:
        raise RunError(f"{path} has columns of different lengths: it is damaged; make it again")
    size = next(iter(sizes), 0)
    whole = {name: column if isinstance(column, list) else [column] * size for name, column in columns.items()}
    return [{name: column[place] for name, column in whole.items()} for place in range(size)]
