"""The pictures of the experiments: points, bands and ticks stand where they should, and texts stay texts."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from research.svg import Chart, Line, ticks


def test_foreign_texts_stay_texts():
    hostile = "</text><script>alert(1)</script> \x1b[31m \u202e \ud800 <!--"
    picture = Chart(hostile, hostile, hostile, [Line(hostile, [(0.0, 1.0)])]).svg()
    root = ElementTree.fromstring(picture)
    assert {each.tag.rpartition("}")[2] for each in root.iter()} == {
        "svg",
        "title",
        "rect",
        "text",
        "line",
        "path",
        "circle",
    }
    assert "\x1b" not in picture and "\u202e" not in picture


def test_points_stand_where_they_should():
    root = ElementTree.fromstring(Chart("", "", "", [Line("a", [(0, 0), (1, 1)])], (0.0, 1.0), width=680).svg())
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter() if c.tag.endswith("circle")]
    assert circles == [(64.0, 276.0), (664.0, 34.0)]  # the corners of the axes


def test_a_band_goes_there_and_back():
    picture = Chart("", "", "", [Line("a", [(0, 0.5), (1, 0.5)], [(0, 1), (0.25, 0.75)])], (0.0, 1.0), width=680).svg()
    assert 'd="M64.0 34.0L664.0 94.5L664.0 215.5L64.0 276.0Z"' in picture


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=8), st.booleans())
def test_any_numbers_make_a_picture(points, fixed):
    picture = Chart("a", "b", "c", [Line("d", points, [(y, y) for _, y in points])], (0.0, 1.0) if fixed else None).svg()
    ElementTree.fromstring(picture)
    assert "nan" not in picture and "inf" not in picture


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_round_and_within(low, width):
    high = low + width
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    found = ticks(low, high)
    slack = 1e-6 * (high - low)
    assert 1 <= len(found) <= 7 and low - slack <= found[0] and found[-1] <= high + slack
