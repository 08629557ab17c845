"""The claims of the papers, in our words, and ours: what it takes to call each confirmed, and what runs say of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradsieve.digests import Digest
from gradsieve.report import texts
from gradsieve.report.grouping import sections
from gradsieve.report.judging import (
    Found,
    Judge,
    ahead_at_bytes,
    density_error,
    density_factor,
    density_falls_at_decay,
    growth_over_worlds,
    mean_relative_to,
    measure_to,
    near_dense,
    range_over_worlds,
    share_of_step,
    threshold_follows_error,
)
from gradsieve.report.table import Cell, Column, Table
from gradsieve.runs import Run
from gradsieve.training.study import Form

FORMS: tuple[Form, ...] = ("full", "short")
"""The better one first."""

OURS = ("micro", "exdyna", "union")
PAPER_MICRO, PAPER_EXDYNA = "micro(control='paper')", "exdyna(control='paper')"
NOT_RUN, NOT_TESTABLE = "not run yet", "not testable here"


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, in our words, and what it takes for us to call it confirmed."""

    words: str
    source: str
    study: str
    condition: str
    judge: Judge | None = None
    """None: it cannot be tested here, and `condition` says why."""
    forms: Sequence[Form] = FORMS
    """Those it can be judged by, the best first."""
    anywhere: bool = True
    """It can be judged by other runs, too: neither models nor a device's times are part of its words."""

    def is_tested_by(self, run: Run) -> bool:
        """Is the run of the study that is for it?"""
        return _study(run, "name") == self.study and _study(run, "form") in self.forms

    def told(self, runs: Sequence[Run]) -> Found | None:
        """What runs say of it, those that are of a form that it can be judged by."""
        if self.judge is None:
            return None
        whole = self.forms == FORMS
        return self.judge(sections([run for run in runs if whole or _study(run, "form") in self.forms]))


def _study(run: Run, name: str) -> str | None:
    """What a run's digest says of the study that it is of."""
    return run.study.get(name) if isinstance(run, Digest) else None


MICRO, EXDYNA, IWP = "MiCRO (HiPC 2023)", "ExDyna (CCGrid 2024)", "IWP (arXiv 1901.01544)"
NO_CLUSTER = "needs sixteen GPUs on two machines; virtual workers share one, and take turns"

CLAIMS = (
    Claim(
        "The published threshold law keeps the actual density close to the asked one.",
        *(MICRO, "micro-cifar10", "the median error over the steps is at most 10 % in every setting"),
        density_error(PAPER_MICRO, 0.1),
    ),
    Claim(
        "Our law, searched within the step, keeps it within 3 %.",
        *("gradsieve", "micro-cifar10", "the median error is at most 3 % in every setting"),
        density_error("micro", 0.03),
    ),
    Claim(
        "Top-k sends more than was asked, up to as many times as there are workers.",
        *(MICRO, "micro-cifar10", "actual density is 1.5 to 16 times the asked one in every setting"),
        density_factor("topk", lambda factor: 1.5 <= factor <= 16),
    ),
    Claim(
        "A fixed threshold, 1 / (2 √target), lets far more through than was asked.",
        *(MICRO, "micro-cifar10", "actual density is at least twice the asked one in every setting"),
        density_factor("hard_threshold", lambda factor: factor >= 2),
    ),
    Claim(
        "Its density falls at once when the learning rate does.",
        *(MICRO, "micro-cifar10", "it is at least 1.5 times as high in the epochs before as in those after"),
        density_falls_at_decay("hard_threshold", 1.5),
    ),
    Claim(
        "MiCRO ends about where dense training does.",
        *(MICRO, "micro-cifar10", "it ends at most a point below dense in every setting"),
        measure_to(PAPER_MICRO, "dense", -1.0),
    ),
    Claim(
        "Top-k converges better than CLT-k, as it sends more.",
        *(MICRO, "micro-cifar10", "it ends above CLT-k in every setting"),
        measure_to("topk", "cltk", 0.0),
    ),
    Claim(
        "Selection in a slice by a threshold costs next to nothing beside sorting.",
        *(
            MICRO,
            "phases",
            "for one worker, whose slice is the whole, and for more it takes at most a tenth of Top-k's",
        ),
        mean_relative_to(PAPER_MICRO, "topk", "time/select", 0.1),
        anywhere=False,
    ),
    Claim(
        "What MiCRO's selection costs a worker does not grow with their number.",
        *(MICRO, "phases", "with the most workers it takes at most 1.1 times as long as with the fewest"),
        growth_over_worlds(PAPER_MICRO, "time/select", 1.1),
        anywhere=False,
    ),
    Claim(
        "Selection by our kernels is a small part of an iteration whose passes are in float32, as published.",
        *(
            "gradsieve",
            "phases",
            "that of micro, exdyna and union takes 16 workers at most 3 % of their time without rest",
        ),
        share_of_step(OURS, "time/select", 0.03, virtual=True, world=16, setting="passes in float32"),
        anywhere=False,
    ),
    Claim(
        "So it is for one worker that has a fast device to itself, whatever the arithmetic.",
        *(
            "gradsieve",
            "phases",
            "with passes launched as one graph it takes at most 3 % of it without rest in every setting",
        ),
        share_of_step(OURS, "time/select", 0.03, virtual=True),
        anywhere=False,
    ),
    Claim(
        "So it is under plain DDP, where the host launches operation by operation.",
        *("gradsieve", "phases", "for one worker it takes at most 3 % of it without rest in every setting"),
        share_of_step(OURS, "time/select", 0.03, virtual=False),
        anywhere=False,
    ),
    Claim("MiCRO reaches its accuracy in less time than the others.", MICRO, "micro-cifar10", NO_CLUSTER),
    Claim(
        "MiCRO converges to the same point for every number of workers.",
        *(MICRO, "micro-scalability", "the best and the worst number of workers end at most a point apart"),
        range_over_worlds(PAPER_MICRO, 1.0),
    ),
    Claim(
        "union converges to the same point for every number of workers.",
        *("gradsieve", "micro-scalability", "the best and the worst number of workers end at most a point apart"),
        range_over_worlds("union", 1.0),
    ),
    Claim("More workers shorten the training in proportion.", MICRO, "micro-scalability", NO_CLUSTER),
    Claim(
        "The threshold rises and falls with the norm of what was not sent.",
        *(MICRO, "micro-threshold", "the two are correlated by at least 0.8 over the steps in every setting"),
        threshold_follows_error(PAPER_MICRO, 0.8),
    ),
    Claim(
        "ExDyna meets the asked density whatever the model and the data.",
        *(EXDYNA, "exdyna", "the median error over the steps is at most 10 % in every setting"),
        density_error(PAPER_EXDYNA, 0.1),
    ),
    Claim(
        "Moving the partitions balances what the workers select.",
        *(EXDYNA, "exdyna", "mean imbalance is at most 0.8 times that of fixed partitions in every setting"),
        mean_relative_to(PAPER_EXDYNA, "micro", "sparsity/imbalance", 0.8),
    ),
    Claim(
        "Our split by what blocks lately yielded balances it, too.",
        *("gradsieve", "frontier", "mean imbalance is at most 0.8 times that of fixed partitions in every setting"),
        mean_relative_to("exdyna", "micro", "sparsity/imbalance", 0.8),
    ),
    Claim(
        "ExDyna's accuracy stays high.",
        *(EXDYNA, "exdyna", "it ends at most a point (or per cent of the measure) behind dense in every setting"),
        measure_to(PAPER_EXDYNA, "dense", -1.0),
    ),
    Claim("ExDyna trains faster than other sparsifiers.", EXDYNA, "exdyna", NO_CLUSTER),
    Claim(
        "64 times (AlexNet) and 58.8 times (ResNet-50) fewer values, and the accuracy is kept.",
        *(IWP, "iwp", "it ends at most a point below dense in every setting; published on ImageNet, here on CIFAR-10"),
        measure_to("iwp", "dense", -1.0),
        anywhere=False,
    ),
    Claim(
        "With indices from one worker alone 16 workers send no more than was asked.",
        *(IWP, "iwp", "actual density is at most 1.1 times the asked one"),
        density_factor("iwp", lambda factor: factor <= 1.1),
    ),
    Claim(
        "At equal density, proposals from everyone end better than one worker's for each slice.",
        *("gradsieve", "micro-cifar10", "union without looking ahead ends above micro in every setting"),
        measure_to("union(ahead=0.0)", "micro", 0.0),
    ),
    Claim(
        "So they do where ranks look ahead, too.",
        *("gradsieve", "frontier", "union ends above micro(ahead=1.0) in every setting"),
        measure_to("union", "micro(ahead=1.0)", 0.0),
    ),
    Claim(
        "None of topk, cltk, micro and exdyna ends better than union for as many bytes.",
        "gradsieve",
        "frontier",
        "a run of union with no more bytes ends above each of theirs, wherever union was run with so few; obtained is "
        "by how much",
        ahead_at_bytes("union", ("topk", "cltk", "micro", "exdyna", PAPER_MICRO, PAPER_EXDYNA)),
        ("short",),
    ),
    Claim(
        "Where ranks look ahead, sparse training ends near dense training.",
        "gradsieve",
        "micro-cifar10",
        "in the short form union ends at most 1.5 points below dense at density 0.01 and 5 at 0.001; obtained is what "
        "is left of that",
        near_dense("union", {0.01: -1.5, 0.001: -5.0}),
        ("short",),
    ),
    Claim(
        "Given time, it comes nearer still.",
        "gradsieve",
        "micro-cifar10",
        "in the full form union ends at most 0.3 points below dense at density 0.01 and 1 at 0.001; obtained is what "
        "is left of that",
        near_dense("union", {0.01: -0.3, 0.001: -1.0}),
        ("full",),
    ),
    Claim(
        "So it does at 0.01 if more is sent while the learning rate rises.",
        "gradsieve",
        "frontier",
        "in the full form union whose density falls from 0.25 to 0.01 over the first 5 of 200 epochs ends at most 0.3 "
        "points below dense; obtained is what is left of that",
        near_dense("union(warmup_steps=485)", {0.01: -0.3}),
        ("full",),
    ),
)


def judged_claims(runs: Sequence[Run]) -> Table:
    """A row for each claim that the runs are for, or can tell something of."""
    columns = (
        Column("claim", "claim", long=True),
        Column("source", "source"),
        Column("condition", "confirmed if", long=True),
        Column("obtained", "obtained", long=True),
        Column("verdict", "verdict"),
    )
    rows = tuple(tuple(Cell(text, text) for text in row) for row in _rows(runs))
    return Table("claims", "The papers' claims, and ours", columns, rows)


def _rows(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    for claim in CLAIMS:
        asked_for, found = any(map(claim.is_tested_by, runs)), claim.told(runs)
        if found is not None and (asked_for or claim.anywhere):
            yield claim.words, claim.source, claim.condition, found.obtained, found.verdict
        elif asked_for:
            verdict = NOT_TESTABLE if claim.judge is None else NOT_RUN
            yield claim.words, claim.source, claim.condition, texts.ABSENT, verdict
