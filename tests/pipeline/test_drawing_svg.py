import sys
from xml.etree import ElementTree

import pytest
from drawn_orders import read

from pipeline import SCHEDULES, Picture, picture, simulate, svg, write_png
from pipeline.schedules.drawing.heat_map import Quantity, heat_map
from pipeline.schedules.drawing.moves import moves_picture
from pipeline.schedules.drawing.svg import IDLE, Box, Words, stacked

SVG = "{http://www.w3.org/2000/svg}"


def picture_of(name="1f1b", num_ranks=2, num_microbatches=4, **times) -> Picture:
    schedule = SCHEDULES[name]
    orders = schedule.orders(num_ranks, num_microbatches)
    return picture(simulate(orders, num_stages=schedule.num_stages(num_ranks), **times), name)


def actions(drawn: Picture) -> list[tuple[Box, str]]:
    """Boxes of actions, which have their micro-batch in their middle."""
    middles = {(w.x, w.y): w.text for w in drawn.words if w.anchor == "middle"}
    return [
        (box, middles[box.x + box.width / 2, box.y + box.height / 2])
        for box in drawn.boxes
        if box.fill != IDLE and (box.x + box.width / 2, box.y + box.height / 2) in middles
    ]


def test_every_action_is_a_box_with_its_microbatch_in_its_row():
    drawn = actions(picture_of())
    rows = sorted({box.y for box, _ in drawn})
    assert [[text for box, text in drawn if box.y == y] for y in rows] == [list("01021323"), list("00112233")]


def test_lengths_are_times_and_the_rest_is_grey():
    drawn = picture_of("gpipe", 2, 1, forward=[1, 2], backward_input=2, backward_weight=1)
    f0, b0, f1, b1 = (box for box, _ in actions(drawn))
    idle = [box for box in drawn.boxes if box.fill == IDLE]
    unit = f0.width + 1  # a point between neighbours
    assert [round((box.width + 1) / unit, 6) for box in (f0, b0, f1, b1)] == [1, 3, 2, 3]
    assert round((f1.x - f0.x) / unit, 6) == 1
    assert [round(box.width / unit, 6) for box in idle[:2]] == [9, 9]
    assert drawn.boxes.index(idle[0]) < drawn.boxes.index(f0)  # under the actions


def test_kinds_have_colours_and_chunks_shades():
    def colours(name):
        return len({box.fill for box, _ in actions(picture_of(name))})

    assert [colours(name) for name in ("1f1b", "zero_bubble_h1", "interleaved_1f1b", "zbv")] == [2, 3, 4, 6]


def test_the_legend_explains_what_occurs():
    def legend(name):
        drawn = picture_of(name)
        return [words.text for words in drawn.words if words.y > max(box.y + box.height for box, _ in actions(drawn))]

    assert legend("1f1b") == ["forward", "backward", "idle"]
    assert legend("zbv") == [
        "forward",
        "backward, input half",
        "backward, weight half",
        "idle",
        "the lighter, the later the chunk of the rank",
    ]


def test_the_head_says_what_it_is_and_what_it_costs():
    title, costs = picture_of().words[:2]
    assert title.text == "1f1b"
    assert title.bold
    assert (
        costs.text == "bubble 25.0% of ideal time (makespan), 20.0% of a rank's span · peak 2 1 stage activations held"
    )
    assert picture_of(num_ranks=1, num_microbatches=1).words[1].text.endswith(" · peak 1 stage activation held")


@pytest.mark.parametrize("name", SCHEDULES)
def test_everything_is_on_the_page(name):
    for drawn in (picture_of(name, 1, 1), picture_of(name, 4, 4)):
        for box in drawn.boxes:
            assert 0 <= box.x <= box.x + box.width <= drawn.width
            assert 0 <= box.y <= box.y + box.height <= drawn.height
        for words in drawn.words:
            assert 0 <= words.x < drawn.width
            assert 0 <= words.y < drawn.height


@pytest.mark.parametrize(
    "drawn",
    [
        picture(simulate(read("0F0 0BW0"), num_stages=1), 5 * "a folder of a long name/" + "mine.csv"),
        heat_map(
            {(0.0, 3.0): 4.0},
            Quantity("bytes"),
            "zbv: most memory that a rank holds",
            down=Quantity("latency"),
            across=Quantity("memory"),
        ),
        moves_picture(read("0F0 0BW0"), read("0F0 0BW0"), [], "mine.csv: mended with 1 moved action"),
    ],
    ids=["timeline", "heat map", "moves"],
)
def test_words_that_are_wider_than_what_they_stand_over_are_on_the_page(drawn):
    """A heat map of three cells had its title cut off."""
    textpath = pytest.importorskip("matplotlib.textpath", reason="to measure words")
    for words in drawn.words:
        if words.anchor == "start" and words.text:
            font = {"weight": "bold" if words.bold else "normal", "family": "DejaVu Sans"}  # the widest of the usual
            path = textpath.TextPath((0, 0), words.text, size=words.size, prop=font)
            assert words.x + path.get_extents().x1 <= drawn.width


def test_an_svg_holds_every_box_and_every_word():
    drawn = picture_of()._replace(words=[Words(1, 2, "a < b & c", 10, "#000000", bold=True)])
    page = ElementTree.fromstring(svg(drawn))
    paper, *boxes = page.findall(f"{SVG}rect")
    assert paper.attrib["width"] == "100%"
    assert [box.attrib["fill"] for box in boxes] == [box.fill for box in drawn.boxes]
    (text,) = page.findall(f"{SVG}text")
    assert text.text == "a < b & c"
    assert (text.attrib["x"], text.attrib["y"], text.attrib["font-weight"]) == ("1", "2", "bold")


def test_the_same_schedule_gives_the_same_bytes():
    assert svg(picture_of("zbv")) == svg(picture_of("zbv"))


def test_a_single_rank_has_shades_too():
    timeline = simulate(read("0F0 1F0 1BW0 0BW0"), num_stages=2)
    assert len({box.fill for box, _ in actions(picture(timeline, ""))}) == 4


def test_a_png_is_written_and_the_same_again(tmp_path):
    pytest.importorskip("matplotlib", reason="an extra: pip install 'minigrad-distributed[draw]'")
    for name in ("first.png", "second.png"):
        write_png(picture_of(), tmp_path / name)
    first = (tmp_path / "first.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert first == (tmp_path / "second.png").read_bytes()
    drawn = picture_of()
    width, height = (int.from_bytes(first[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (int(2 * drawn.width), int(2 * drawn.height))


def test_without_matplotlib_a_png_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = r"a PNG needs matplotlib: pip install matplotlib, or pip install '.\[draw\]' .*; an SVG needs nothing"
    with pytest.raises(RuntimeError, match=message):
        write_png(picture_of(), tmp_path / "mine.png")


def test_a_scale_sets_the_width_and_numbers_without_room_are_left_out():
    schedule = SCHEDULES["1f1b"]
    timeline = simulate(schedule.orders(2, 4), num_stages=2, forward=[1, 30], backward_input=20)
    drawn = picture(timeline, "measured", scale=2.0)
    whole = next(box for box in drawn.boxes if box.fill == IDLE)
    assert whole.width == 2.0 * timeline.makespan
    shown = actions(drawn)
    assert [text for box, text in shown if box.y == whole.y] == list("0123")  # backwards only
    narrow = [box for box in drawn.boxes if box.y == whole.y and box.width < 3 and box.height == whole.height]
    assert [box.width for box in narrow] == [1.5] * 4


def test_what_is_wider_than_a_page_goes_on_below():
    timeline = simulate(SCHEDULES["1f1b"].orders(2, 12), num_stages=2)
    whole, paged = picture(timeline, "x"), picture(timeline, "x", width=600)
    assert whole.width > 600 >= paged.width
    assert paged.height > whole.height
    seconds = [sum(box.width + 1 for box, _ in actions(drawn)) for drawn in (whole, paged)]
    assert seconds[0] == pytest.approx(seconds[1], abs=30)  # an action on an edge may show its number in one part
    numbers = [sorted(text for _, text in actions(drawn)) for drawn in (whole, paged)]
    assert set(numbers[0]) == set(numbers[1])
    assert max(box.x + box.width for box in paged.boxes) <= 600


def test_stacked_drawings_have_one_scale():
    """Chunks of half the length had their drawing stretched to twice the width of the others."""
    whole = simulate(SCHEDULES["1f1b"].orders(2, 2), num_stages=2)
    halves = simulate(SCHEDULES["zbv"].orders(2, 2), num_stages=4, forward=0.5, backward_input=0.5, backward_weight=0.5)
    drawn = stacked([(whole, "1f1b"), (halves, "zbv")])
    rows = [box.width for box in drawn.boxes if box.fill == IDLE and box.width > 100]
    assert len(rows) == 4
    assert rows == [pytest.approx(rows[0])] * 4
