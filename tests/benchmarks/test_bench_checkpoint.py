"""The benchmark of checkpoints, on a tiny model."""

from checkpoint import Training, seconds_of


def test_each_round_measures_each_time_once(tmp_path):
    seconds = Training("tiny", str(tmp_path)).measure(2)
    assert {name: len(values) for name, values in seconds.items()} == {
        "alone": 2,
        "held": 2,
        "saving": 2,
        "committed": 2,
        "load": 2,
        "first": 1,
    }
    assert all(value > 0 for values in seconds.values() for value in values)


def test_a_time_is_that_of_one_call():
    calls = []
    assert seconds_of(lambda: calls.append("called")) > 0
    assert calls == ["called"]
