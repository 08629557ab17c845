from __future__ import annotations

import itertools

import pytest

from gradsieve import METHODS
from gradsieve.report.colours import ALL, OTHERS, PALETTE, SHEET, Colour, looks, style_sheet


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_method_has_a_colour_of_its_own() -> None:
    assert {colour.name for colour in PALETTE} == METHODS.keys()


@pytest.mark.parametrize("colour", [*PALETTE, *OTHERS], ids=lambda colour: colour.name)
def test_lines_stand_out_from_the_page(colour: Colour) -> None:
    assert contrast(colour.light, SHEET.light) >= 3
    assert contrast(colour.dark, SHEET.dark) >= 3


def test_no_two_colours_are_alike() -> None:
    # a figure's colours are replaced by their variables: two that are alike would become one
    for one, other in itertools.combinations((*ALL, SHEET), 2):
        assert one.light != other.light
        assert one.name != other.name


def test_variants_and_densities_share_a_colour_and_differ_in_dashes() -> None:
    found = looks([("micro", 0.01), ("micro", 0.001), ("micro(control='paper')", 0.01), ("topk", 0.01)])
    ours = [look for (label, _), look in found.items() if label.startswith("micro")]
    assert len({look.colour for look in ours}) == 1
    assert len({look.dash for look in ours}) == len({look.marker for look in ours}) == 3
    assert ours[0].dash == "solid"
    assert ours[0].dash_array == ""
    assert ours[1].dash_array != ""


def test_densities_are_named_where_there_are_several() -> None:
    alone = looks([("dense", 1.0), ("micro", 0.01)])
    several = looks([("dense", 1.0), ("micro", 0.01), ("micro", 0.001)])
    assert [look.name for look in alone.values()] == ["dense", "micro"]
    assert [look.name for look in several.values()] == ["dense", "micro at 0.01", "micro at 0.001"]


def test_unknown_methods_get_colours_too() -> None:
    found = looks([(f"own{number}", 0.01) for number in range(6)])
    assert [look.colour for look in found.values()][:4] == list(OTHERS)
    assert [look.place for look in found.values()] == list(range(6))


def test_names_lose_control_characters() -> None:
    (look,) = looks([("a\nb\x00c", 0.01)]).values()
    assert look.name == "a b c"


def test_the_style_sheet_has_both_themes() -> None:
    sheet = style_sheet()
    for colour in ALL:
        assert f"--{colour.name}:{colour.light};" in sheet
        assert sheet.count(f"--{colour.name}:{colour.dark};") == 2
