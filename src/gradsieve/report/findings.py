"""What the runs of a section show, in a sentence and a few figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gradsieve.report import texts
from gradsieve.report.grouping import Group, Measure, Section, ratio
from gradsieve.report.summary import SLOW

CLOSE_POINTS = 0.01
CLOSE_PART = 0.02
"""How far from dense still counts as close: a point, or for measures that are no percentages so much of dense's."""
FAR_OFF = 0.2
"""An error of the density that the sentence must not keep quiet about."""
NEARLY = 0.05
"""Numbers of bytes that differ by less are as good as the same."""


@dataclass(frozen=True)
class Card:
    """A key figure."""

    title: str
    value: str
    note: str


@dataclass(frozen=True)
class Finding:
    """The sentence at the head, why it is about this method, and the cards beside it."""

    sentence: str
    rule: str
    cards: tuple[Card, ...]


def finding(section: Section) -> Finding:
    dense, group, rule = section.dense(section.main_world), *_chosen(section)
    if group is None:
        return Finding("No run has been evaluated yet.", "", (_runs_card(section),))
    dense = dense if dense in section.main_judged else None
    sentence = _alone(section, group) if dense is None or group is dense else _against(section, group, dense)
    return Finding(sentence, rule, (*_cards(section, group, dense), _runs_card(section)))


def _chosen(section: Section) -> tuple[Group | None, str]:
    """The method that the sentence is about: the one that sends least of those that end close to dense."""
    dense = section.dense(section.main_world)
    judged = list(section.main_judged)
    sparse = [group for group in judged if not group.is_dense and group.wire_bytes > 0]
    if dense is None or dense not in judged or not sparse:
        return _best(section.measure, sparse or judged), ""
    close = [group for group in sparse if _is_close(section.measure, group, dense)]
    limit = "a point" if section.measure.percent else f"{CLOSE_PART:.0%}"
    if not close:
        return _best(section.measure, sparse), f"No method ends within {limit} of dense; this one ends best."
    fewest = min(group.wire_bytes for group in close)
    chosen = _best(section.measure, [group for group in close if group.wire_bytes <= (1 + NEARLY) * fewest])
    return chosen, f"Of the methods that end within {limit} of dense, or better, it sends the fewest bytes."


def _best(measure: Measure, groups: list[Group]) -> Group | None:
    sign = 1 if measure.higher_is_better else -1
    return max(groups, key=lambda group: sign * group.final.mean, default=None)


def _is_close(measure: Measure, group: Group, dense: Group) -> bool:
    limit = CLOSE_POINTS if measure.percent else CLOSE_PART * abs(dense.final.mean)
    return measure.better(group.final.mean, dense.final.mean) or abs(group.final.mean - dense.final.mean) <= limit


def _against(section: Section, group: Group, dense: Group) -> str:
    part = texts.kept(texts.percent(ratio(group.wire_bytes, dense.wire_bytes)))
    return f"{_name(group)} sends {part} of the bytes of dense and {_ending(section.measure, group, dense)}."


def _ending(measure: Measure, group: Group, dense: Group) -> str:
    difference = group.final.mean - dense.final.mean
    size = measure.difference(abs(difference)).lstrip("+")
    if float(size) == 0:
        return "ends level with it"
    better = "better" if measure.better(group.final.mean, dense.final.mean) else "worse"
    way = f"points {'above' if difference > 0 else 'below'} it" if measure.percent else f"{measure.words} {better}"
    overlap = " (the ranges over seeds overlap)" if group.final.size > 1 and group.final.overlaps(dense.final) else ""
    return f"ends {size} {way}{overlap}"


def _alone(section: Section, group: Group) -> str:
    ending = f"{_name(group)} ends at {section.measure.text(group.final.mean)} {section.measure.words}"
    sending = f", sending {texts.data(group.wire_bytes)} a step" if math.isfinite(group.wire_bytes) else ""
    best = "" if len(section.main) == 1 else ", the best of those compared"
    return f"{ending}{sending}{best}."


def _name(group: Group) -> str:
    label = texts.printable(group.label)
    actual = f" (in fact {texts.number(group.density_actual, 2)})" if abs(group.density_error) > FAR_OFF else ""
    return label if group.is_dense else f"{label} at density {group.density:g}{actual}"


def _cards(section: Section, group: Group, dense: Group | None) -> Iterator[Card]:
    """About the chosen method, beside dense where that was run."""
    measure, name = section.measure, texts.printable(group.label)
    against = None if dense is None or dense is group else dense
    beside = f"; dense {texts.kept(measure.text(against.final.mean))}" if against else ""
    yield Card(f"final {measure.words}", measure.text(group.final.mean), f"{name}{beside}")
    if math.isfinite(group.wire_bytes):
        yield _bytes_card(group, against)
    if not group.is_dense and math.isfinite(group.density_actual):
        asked = f"{group.density:g} asked of {name}"
        yield Card("actual density", texts.number(group.density_actual), asked)
    if against and math.isfinite(group.projected(SLOW)):
        faster = texts.times(ratio(against.projected(SLOW), group.projected(SLOW)))
        yield Card(f"speed-up at {SLOW:g} Gbit/s", faster, "a step over dense, projected")


def _bytes_card(group: Group, dense: Group | None) -> Card:
    size = texts.data(group.wire_bytes)
    if dense is None or not dense.wire_bytes > 0:
        return Card("bytes a step", size, "handed over by a worker")
    part = texts.percent(group.wire_bytes / dense.wire_bytes)
    return Card("bytes a step", part, f"of dense: {texts.kept(size)}, not {texts.kept(texts.data(dense.wire_bytes))}")


def _runs_card(section: Section) -> Card:
    states = Counter(run.status for run in section.runs)
    parts = [f"{number} {status}" for status, number in states.most_common()]
    return Card("runs", str(len(section.runs)), "all finished" if [*states] == ["finished"] else ", ".join(parts))
