"""Orders that hang, mended: with one move for one swapped action, and never with more than any other way takes."""

import random
from itertools import combinations, product

import pytest
from drawn_orders import read

from pipeline import SCHEDULES, ScheduleError, dump, validate
from pipeline.cli.main import main
from pipeline.schedules.drawing.moves import BAR, MOVED, moves_picture
from pipeline.schedules.drawing.svg import LABEL_WIDTH, MARGIN
from pipeline.schedules.repair import repair
from pipeline.schedules.simulate import walk


def runs(orders, num_stages):
    try:
        for _ in walk(orders, num_stages):
            pass
    except ScheduleError:
        return False
    return True


def broken_by_a_swap(schedule, num_ranks, num_microbatches, seed):
    """Return orders of which one action was put elsewhere, so that they hang; None where no try does that."""
    rng = random.Random(seed)
    for _ in range(200):
        orders = schedule.orders(num_ranks, num_microbatches)
        order = rng.choice(orders)
        order.insert(rng.randrange(len(order)), order.pop(rng.randrange(len(order))))
        if not runs(orders, schedule.num_stages(num_ranks)):
            return orders
    return None


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_one_action_in_a_wrong_place_takes_one_move(schedule):
    num_stages = schedule.num_stages(4)
    for seed in range(5):
        orders = broken_by_a_swap(schedule, 4, 8, seed)
        mended, moved = repair(orders, num_stages=num_stages)
        validate(mended, num_stages=num_stages, num_microbatches=8, rank_of=schedule.rank_of)
        assert len(moved) == 1
        ((rank, before), (same_rank, after)) = moved[0]
        assert rank == same_rank
        assert orders[rank][before] == mended[rank][after]
        expected = [list(order) for order in orders]
        expected[rank].insert(after, expected[rank].pop(before))
        assert mended == expected  # all others are where they were


def fewest_moves(orders, num_stages):
    """Return the fewest moves of all ways there are to take actions out and put them in again."""
    cells = [(rank, i) for rank, order in enumerate(orders) for i in range(len(order))]
    for count in range(len(cells)):
        for taken in combinations(cells, count):
            rest = [[a for i, a in enumerate(order) if (r, i) not in taken] for r, order in enumerate(orders)]
            if any(runs(put, num_stages) for put in ways_to_put_in(rest, [(r, orders[r][i]) for r, i in taken])):
                return count
    raise AssertionError


def ways_to_put_in(rest, loose):
    if not loose:
        yield rest
        return
    (rank, action), others = loose[0], loose[1:]
    for place in range(len(rest[rank]) + 1):
        order = [*rest[rank][:place], action, *rest[rank][place:]]
        yield from ways_to_put_in([*rest[:rank], order, *rest[rank + 1 :]], others)


@pytest.mark.parametrize("seed", range(12))
def test_no_fewer_moves_would_do(seed):
    """Brute force over all orders with so many actions elsewhere, for two ranks and shuffled orders."""
    rng = random.Random(seed)
    schedule = SCHEDULES[("1f1b", "gpipe", "zero_bubble_h1")[seed % 3]]
    orders = schedule.orders(2, 1 if seed % 3 == 2 else 2)
    for order, _ in product(orders, range(2)):
        i, j = rng.sample(range(len(order)), 2)
        order[i], order[j] = order[j], order[i]
    assert len(repair(orders, num_stages=2).moved) == fewest_moves(orders, 2)


def test_what_runs_is_left_as_it_is():
    orders = SCHEDULES["zbv"].orders(4, 8)
    assert repair(orders, num_stages=8) == (orders, [])


def test_what_no_moves_mend_is_said():
    with pytest.raises(ScheduleError, match="no 6 moves mend the orders"):
        repair(read("0F0\n1BW0"), num_stages=2)
    with pytest.raises(ScheduleError, match="no 1 moves mend the orders"):
        repair(read("0BW0 0BW1 0F0 0F1\n1BW0 1BW1 1F0 1F1"), num_stages=2, most_moves=1)


def test_the_command_draws_what_it_moved_and_writes_what_check_accepts(tmp_path, capsys):
    path, mended, drawn = tmp_path / "mine.csv", tmp_path / "mended.csv", tmp_path / "moves.svg"
    path.write_text("0F0,0F1,0BW0,0BW1\n1BW0,1F0,1F1,1BW1\n")
    assert main(["check", str(path)]) == 2
    capsys.readouterr()
    assert main(["repair", str(path), "--csv", str(mended), "--svg", str(drawn)]) == 0
    assert capsys.readouterr().out == (
        "mine.csv: mended with 1 moved action, the fewest that do\n"
        "rank 1: 1F0 moved from place 1 to 0\n"
        "before\n"
        "rank 0  0F0   0F1   0BW0  0BW1\n"
        "rank 1  1BW0 [1F0]  1F1   1BW1 <-- here\n"
        "after\n"
        "rank 0  0F0   0F1   0BW0  0BW1\n"
        "rank 1 [1F0]  1BW0  1F1   1BW1 <-- here\n"
    )
    assert "1F0 from place 1 to 0 of rank 1" in drawn.read_text(encoding="utf-8")
    assert main(["check", str(mended)]) == 0
    assert main(["repair", str(mended)]) == 0
    assert "nothing to mend" in capsys.readouterr().out


def test_the_change_is_drawn_with_what_moved_in_frames_and_bars_where_it_goes_and_was():
    before = read("0F0 0F1 0BW0 0BW1\n1BW0 1BW1 1F0 1F1")
    mended, moved = repair(before, num_stages=2)
    drawn = moves_picture(before, mended, moved, "mine")
    marks = [box for box in drawn.boxes if box.fill == MOVED]
    before_y, after_y = sorted({box.y for box in marks})
    cell = max(box.width for box in marks)

    def places(y, width):
        """Return the cells that frames cover, or those that bars stand before."""
        left = MARGIN + LABEL_WIDTH - (BAR / 2 if width == BAR else 0)
        return [(box.x - left) / cell for box in marks if box.y == y and box.width == width]

    assert moved == [((1, 2), (1, 0)), ((1, 3), (1, 2))]
    assert places(before_y, cell) == pytest.approx([2, 3])
    assert places(before_y, BAR) == pytest.approx([0, 1])
    assert places(after_y, cell) == pytest.approx([0, 2])
    assert places(after_y, BAR) == pytest.approx([4])
    assert drawn.words[1].text == "1F0 from place 2 to 0 of rank 1, 1F1 from place 3 to 2 of rank 1"


def test_a_picture_of_nothing_moved_has_no_marks():
    orders = SCHEDULES["1f1b"].orders(2, 2)
    drawn = moves_picture(orders, orders, [], "mine")
    assert not [box for box in drawn.boxes if box.fill == MOVED]
    assert drawn.words[1].text == "nothing moved"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0BW0\n1BW0\n", "F comes before B before W of a micro-batch, got 1BW0 on rank 1 with no 1F0 before it"),
        ("0F0,0BW0,0F0\n", "a stage runs F of a micro-batch once"),
        ("0F0,what\n", "a cell is a stage, one of F, B, W, BW, and a micro-batch"),
        ("", "a schedule has one row a rank, got none"),
    ],
)
def test_what_is_not_a_matter_of_order_is_named(text, message, tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    assert main(["repair", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_is_one_line(capsys):
    assert main(["repair", "/nowhere/mine.csv"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_that_no_few_moves_mend_a_file_is_said_and_soon(tmp_path, capsys, monkeypatch):
    """Only the fault was said, and that after an hour where the file was large."""
    path = tmp_path / "mine.csv"
    orders = SCHEDULES["1f1b"].orders(4, 32)
    path.write_text(dump([order[::-1] for order in orders]))
    monkeypatch.setattr("pipeline.schedules.repair.MOST_LOOKS", 100 * sum(map(len, orders)))
    assert main(["repair", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m pipeline: mine.csv: F comes before B before W of a micro-batch")
    assert error.endswith("no few moves mend the orders: 101 ways were tried\n")
