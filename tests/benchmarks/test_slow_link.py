"""The verdict of `make bench-slow-link`: one method has to reach both targets. And what the wire alone allows."""

import pytest
import slow_link
from slow_link import BITS_A_SECOND, MEANINGS, NUM_SEEDS, bound, mean_excess, measure, next_piece, table
from slow_link_job import METHODS, STEPS_A_ROUND, Method

SENT = {"alone": 0.0, "plain": 4e6, "int8": 1e6, "diloco": 1e5}
ROUNDS = [
    {"alone": (90.0, 90.0), "plain": (25.0, 91.0), "int8": (80.0, 91.0), "diloco": (82.0, 91.0)},
    {"alone": (100.0, 101.0), "plain": (20.0, 100.0), "int8": (89.0, 100.0), "diloco": (90.0, 100.0)},
    {"alone": (110.0, 110.0), "plain": (30.0, 109.0), "int8": (95.0, 105.0), "diloco": (99.0, 110.0)},
]


def verdict(**losses):
    return list(table(ROUNDS, SENT, {"plain": [2.0]} | losses))[-1]


def test_speed_and_loss_have_to_be_one_methods():
    assert verdict(int8=[2.0], diloco=[2.021]).endswith("missed"), "one is too slow, the other learns too little"
    assert verdict(int8=[2.0], diloco=[2.019]).endswith("met by DiLoCo, H = 30")


def test_several_seeds_are_compared_one_by_one_and_their_spread_counts():
    assert mean_excess([2.02, 4.0, 1.0], [2.0, 4.0]) == (pytest.approx(0.005), pytest.approx(0.005))
    assert mean_excess([2.02], [2.0, 4.0]) == (pytest.approx(0.01), None)
    assert verdict(plain=[2.0, 4.0], diloco=[2.04, 4.0]).endswith("missed"), "1% and as much of standard error"
    assert verdict(plain=[2.0, 4.0], diloco=[2.004, 4.032]).endswith("met by DiLoCo, H = 30")
    assert "2.020   +1.0% +- 1.0%" in list(table(ROUNDS, SENT, {"plain": [2.0, 2.0], "int8": [2.0, 2.04]}))[3]


def test_a_line_has_the_share_of_the_speed_alone_around_it_and_the_loss_over_plain():
    lines = list(table(ROUNDS, SENT, {"plain": [2.0], "int8": [2.1]}))
    assert lines[0].split()[-7:] == ["bound", "bytes", "a", "step", "loss", "over", "plain"]
    assert lines[2].split()[-6:] == ["25", "27%", "100%", "4,000,000", "2.000", "+0.0%"]
    assert lines[3].split()[-6:] == ["89", "89%", "100%", "1,000,000", "2.100", "+5.0%"]


def test_every_method_has_words_and_a_round_has_all_that_it_sends():
    assert MEANINGS.keys() == METHODS.keys()
    assert all(STEPS_A_ROUND % method.every == 0 for method in METHODS.values() if method.every)


SECOND = BITS_A_SECOND / 8  # bytes that the wire carries in a second


@pytest.mark.parametrize(
    ("method", "bytes_a_step", "share"),
    [
        (Method(alone=True), 0, 1.0),
        (Method(), 0.5 * SECOND, 1.0),  # within the backward, two thirds of a step of one second
        (Method(), (2 / 3 + 1) * SECOND, 0.5),
        (Method(every=10), SECOND, 0.5),  # no delay: all of it is waited for
        (Method(every=10, delay=5), 0.4 * SECOND, 1.0),  # 4 seconds, in five steps
        (Method(every=10, delay=5), SECOND, 10 / 15),  # 10 seconds, of which 5 are hidden
        (Method(every=10, fragments=5, delay=1), SECOND, 2 / 3),  # 2 seconds every 2 steps, of which 1 is hidden
    ],
)
def test_the_wire_allows_what_a_step_hides(method, bytes_a_step, share):
    assert bound(method, bytes_a_step, step_seconds=1.0) == pytest.approx(share)


def test_it_goes_on_where_a_call_before_has_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(slow_link, "UNFINISHED", tmp_path / "unfinished")
    steps = {}
    calls = []

    def run_job(launcher, job, what, *names):
        calls.append((what, *names))
        assert launcher[0] == slow_link.TWO_HOSTS
        return {"speeds": dict.fromkeys(METHODS, (100.0, 100.0)), "bytes": dict.fromkeys(METHODS, 1.0)}

    def run_alone(job, what, name, _, seed, *arguments):
        calls.append((what, name, seed))
        steps[name, seed] = steps.get((name, seed), 0) + 300
        return {"step": steps[name, seed], "loss": 1.5 + int(seed) if steps[name, seed] == 600 else None}

    monkeypatch.setattr(slow_link, "run_job", run_job)
    monkeypatch.setattr(slow_link, "run_alone", run_alone)
    found = measure(["mpirun"], 2, seconds=0)
    assert (len(found["rounds"]), found["losses"]) == (1, {})
    while next_piece(found, 2) is not None:
        found = measure(["mpirun"], 2, seconds=0)
    assert calls[:4] == [("speed", *METHODS)] * 2 + [("loss", "plain", "0")] * 2
    assert found["losses"].keys() == METHODS.keys() - {"alone"}
    for name, losses in found["losses"].items():
        assert losses == [1.5 + seed for seed in range(NUM_SEEDS.get(name, 1))]
