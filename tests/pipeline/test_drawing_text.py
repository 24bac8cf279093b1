import inspect

import pytest
from drawn_orders import read

from pipeline import SCHEDULES, draw, draw_order, simulate

BLANK = str.maketrans("", "", " |")


def test_a_full_backward_is_wide_and_idle_time_is_space():
    drawing = """
rank 0 |F0|F1|     |B0   |F2|B1   |  |B2   |
rank 1    |F0|B0   |F1|B1   |F2|B2   |
"""
    assert draw(simulate(SCHEDULES["1f1b"].orders(2, 3), num_stages=2)) == drawing.strip()
    assert all(line in inspect.getdoc(draw) for line in drawing.strip().splitlines())


def test_halves_are_drawn_apart():
    drawing = """
rank 0 |F0|     |B0|W0|
rank 1    |F0|B0|W0|
"""
    assert draw(simulate(read("0F0 0B0 0W0\n1F0 1B0 1W0"), num_stages=2)) == drawing.strip()


def test_columns_fit_the_longest_label():
    drawing = draw(simulate(SCHEDULES["gpipe"].orders(1, 11), num_stages=1))
    assert drawing.startswith("rank 0 |F0 |F1 |F2 |")
    assert "|F9 |F10|B0     |" in drawing


def test_several_stages_on_a_rank_are_named():
    drawing = """
rank 0 |0F0|1F0|1B0    |0B0    |
"""
    assert draw(simulate(read("0F0 1F0 1BW0 0BW0"), num_stages=2)) == drawing.strip()


def test_rank_numbers_are_aligned():
    lines = draw(simulate(SCHEDULES["gpipe"].orders(11, 1), num_stages=11)).splitlines()
    assert lines[0].startswith("rank  0 |F0|")
    assert lines[10].startswith("rank 10  ")


@pytest.mark.parametrize("scale", [1e-3, 0.494, 1 / 3, 7, 1e6])
def test_the_unit_of_time_does_not_matter(scale):
    orders = SCHEDULES["gpipe"].orders(2, 3)
    times = {"forward": scale, "backward_input": scale, "backward_weight": scale}
    assert draw(simulate(orders, num_stages=2, **times)) == draw(simulate(orders, num_stages=2))


@pytest.mark.parametrize("forward", [1.3, 0.77, [1.01, 2.5, 0.9]])
def test_every_label_is_whole_at_uneven_times(forward):
    orders = SCHEDULES["1f1b"].orders(3, 12)
    drawing = draw(simulate(orders, num_stages=3, forward=forward, backward_input=0.83, latency=0.21))
    for line, order in zip(drawing.splitlines(), orders, strict=True):
        cells = [cell.strip() for cell in line.split("|")[1:]]
        labels = [f"{action.kind.value[0]}{action.microbatch}" for action in order]
        assert [cell for cell in cells if cell] == labels


def test_an_order_is_drawn_as_written():
    drawing = """
rank 0  0F0   0F1   0BW0  0BW1
rank 1  1F0   1BW0  1F1   1BW1
"""
    assert draw_order(SCHEDULES["1f1b"].orders(2, 2)) == drawing.strip()


def test_marked_cells_stand_in_brackets():
    orders = read("0F0 0F1 0BW0 0BW1\n1F0 1BW0 1BW0 1F1")
    drawing = """
rank 0  0F0   0F1   0BW0  0BW1 [] <-- here
rank 1  1F0   1BW0 [1BW0] 1F1 <-- here
"""
    assert draw_order(orders, mark=[(1, 2), (0, 4)]) == drawing.strip()
    assert draw_order(orders, mark=[(1, 2)]).splitlines()[1] in inspect.getdoc(draw_order)


def test_what_is_longer_than_a_line_goes_on_below():
    timeline = simulate(SCHEDULES["zero_bubble_h1"].orders(2, 3), num_stages=2)
    drawing = """
rank 0 |F0|F1|  |B0|W0|
rank 1    |F0|B0|F1|B1|

rank 0 |F2|B1|W1|B2|W2|
rank 1 |W0|F2|B2|W1|W2|
"""
    assert draw(timeline, width=23) == drawing.strip()
    assert draw(timeline, width=25) == drawing.strip()
    assert "\n\n" not in draw(timeline, width=40)


def test_the_lines_together_are_the_whole_drawing():
    for name in ("zbv", "1f1b"):
        schedule = SCHEDULES[name]
        timeline = simulate(schedule.orders(3, 12), num_stages=schedule.num_stages(3), forward=1.3, latency=0.37)
        whole = draw(timeline).splitlines()
        for width in (20, 31, 60):
            bands = [band.splitlines() for band in draw(timeline, width=width).split("\n\n")]
            assert max(len(line) for band in bands for line in band) <= width
            for rank, line in enumerate(whole):
                parts = "".join(band[rank].removeprefix(f"rank {rank}") for band in bands)
                letters = line.removeprefix(f"rank {rank}")
                assert parts.translate(BLANK) == letters.translate(BLANK)


def test_a_line_has_room_for_one_action():
    timeline = simulate(SCHEDULES["1f1b"].orders(2, 3), num_stages=2)
    with pytest.raises(ValueError, match="width must have room for an action, at least 11 letters, got 10"):
        draw(timeline, width=10)
    assert draw(timeline, width=11)
