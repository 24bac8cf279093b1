"""The verdict of `make bench-slow-link`: one method has to reach both targets."""

from slow_link import MEANINGS, table
from slow_link_job import METHODS, STEPS_A_ROUND

SENT = {"alone": 0.0, "plain": 4e6, "int8": 1e6, "local_30": 1e5}
SPEEDS = {"alone": [90.0, 100, 110], "plain": [25.0, 20, 30], "int8": [89.0], "local_30": [90.0]}


def verdict(**losses):
    return list(table(SPEEDS, SENT, {"plain": 2.0} | losses))[-1]


def test_speed_and_loss_have_to_be_one_methods():
    assert verdict(int8=2.0, local_30=2.021).endswith("missed"), "one is too slow, the other learns too little"
    assert verdict(int8=2.0, local_30=2.019).endswith("met by local steps, H = 30")


def test_a_line_has_the_share_of_the_speed_alone_and_the_loss_over_plain():
    lines = list(table(SPEEDS, SENT, {"plain": 2.0, "int8": 2.1}))
    assert lines[2].split()[-5:] == ["25", "25%", "4,000,000", "2.000", "+0.0%"]
    assert lines[3].split()[-5:] == ["89", "89%", "1,000,000", "2.100", "+5.0%"]


def test_every_method_has_words_and_a_round_has_all_that_it_sends():
    assert MEANINGS.keys() == METHODS.keys()
    assert all(STEPS_A_ROUND % method.every == 0 for method in METHODS.values() if method.every)
