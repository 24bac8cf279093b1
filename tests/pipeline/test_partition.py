import inspect
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import StageSpec, cut, cut_by_sizes, cut_by_weights, partition_by_count


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "parts"),
    [
        (4, 1, [(0, 4)]),
        (4, 2, [(0, 2), (2, 4)]),
        (5, 2, [(0, 3), (3, 5)]),
        (7, 4, [(0, 2), (2, 4), (4, 6), (6, 7)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_the_remainder_is_on_the_first_stages(num_blocks, num_stages, parts):
    assert partition_by_count(num_blocks, num_stages) == parts


@settings(deadline=None)  # a busy machine is no failure
@given(st.integers(1, 40), st.integers(0, 60))
def test_parts_are_contiguous_and_differ_by_one_at_most(num_stages, more):
    parts = partition_by_count(num_stages + more, num_stages)
    assert [block for start, stop in parts for block in range(start, stop)] == list(range(num_stages + more))
    sizes = [stop - start for start, stop in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "cut_blocks", [lambda n: partition_by_count(4, n), lambda n: cut(["embed", *"abcd", "head"], n)]
)
def test_every_stage_has_a_block(cut_blocks):
    message = "num_stages must be at most the number of layers, got 5 and 4"
    with pytest.raises(ValueError, match=message):
        cut_blocks(5)
    with pytest.raises(ValueError, match="num_stages must be at least 1, got 0"):
        cut_blocks(0)


def test_embedding_and_head_go_to_the_ends():
    assert cut(["embed", "b0", "b1", "b2", "head"], 2) == [
        StageSpec(0, 2, 0, 3, 0, 2, has_embedding=True, has_lm_head=False),
        StageSpec(1, 2, 3, 5, 2, 3, has_embedding=False, has_lm_head=True),
    ]
    assert "layers 0:3, blocks 0:2, has_embedding" in inspect.getdoc(StageSpec)
    assert "layers 3:5, blocks 2:3, has_lm_head" in inspect.getdoc(StageSpec)


def test_a_model_may_have_neither():
    assert cut(("fc0", "fc1", "fc2"), 2) == [
        StageSpec(0, 2, 0, 2, 0, 2, has_embedding=False, has_lm_head=False),
        StageSpec(1, 2, 2, 3, 2, 3, has_embedding=False, has_lm_head=False),
    ]


def test_only_the_ends_are_special():
    (spec,) = cut(["head", "b0", "embed"], 1)
    assert (spec.num_blocks, spec.has_embedding, spec.has_lm_head) == (3, False, False)


def test_a_model_without_blocks_cannot_be_cut():
    for names in ([], ["embed"], ["embed", "head"]):
        with pytest.raises(ValueError, match="got 1 and 0"):
            cut(names, 1)


@settings(deadline=None)  # a busy machine is no failure
@given(st.booleans(), st.booleans(), st.integers(1, 20), st.data())
def test_specs_cover_every_layer_once(embed, head, num_blocks, data):
    names = ["embed"] * embed + [f"b{i}" for i in range(num_blocks)] + ["head"] * head
    num_stages = data.draw(st.integers(1, num_blocks))
    specs = cut(names, num_stages)
    assert [name for spec in specs for name in names[spec.layer_start : spec.layer_stop]] == names
    for spec in specs:
        own = names[spec.layer_start : spec.layer_stop]
        assert [name for name in own if name[0] == "b"] == [f"b{i}" for i in range(spec.block_start, spec.block_end)]
        assert (spec.has_embedding, spec.has_lm_head) == ("embed" in own, "head" in own)
        assert spec.num_blocks == len(own) - spec.has_embedding - spec.has_lm_head
    assert [spec.stage_id for spec in specs if spec.is_first] == [0]
    assert [spec.stage_id for spec in specs if spec.is_last] == [num_stages - 1]


NAMES = ["embed", "b0", "b1", "b2", "head"]


def test_sizes_say_where_to_cut():
    assert cut_by_sizes(NAMES, [1, 3, 1]) == [
        StageSpec(0, 3, 0, 1, 0, 0, has_embedding=True, has_lm_head=False),
        StageSpec(1, 3, 1, 4, 0, 3, has_embedding=False, has_lm_head=False),
        StageSpec(2, 3, 4, 5, 3, 3, has_embedding=False, has_lm_head=True),
    ]
    assert cut_by_sizes(NAMES, [3, 2]) == cut(NAMES, 2)


@pytest.mark.parametrize("sizes", [[], [5, 0], [6, -1], [2, 2], [3, 3]])
def test_sizes_cover_the_layers(sizes):
    with pytest.raises(ValueError, match="sizes must be at least 1 and add up to the number of layers, 5, got "):
        cut_by_sizes(NAMES, sizes)


def sizes_of(specs):
    return [spec.layer_stop - spec.layer_start for spec in specs]


@pytest.mark.parametrize(
    ("weights", "num_stages", "sizes"),
    [
        ([1, 1, 1, 1, 1], 1, [5]),
        ([1, 1, 1, 1, 1], 2, [2, 3]),
        ([1, 1, 1, 1, 1], 5, [1, 1, 1, 1, 1]),
        ([9, 1, 1, 1, 9], 3, [1, 3, 1]),  # a large embedding and head stand alone
        ([2, 3, 3, 3, 4], 2, [3, 2]),
        ([1, 9, 1, 1, 1], 3, [1, 1, 3]),  # the heaviest cannot be lighter, the rest is still spread evenly
        ([1, 1, 3, 5, 1], 3, [3, 1, 1]),  # the most even of all, [2, 1, 2], has a stage of 6
        ([0, 0, 0, 0, 0], 2, [1, 4]),
    ],
)
def test_weights_say_where_to_cut(weights, num_stages, sizes):
    assert sizes_of(cut_by_weights(NAMES, weights, num_stages)) == sizes


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_no_cut_has_a_lighter_heaviest_stage_nor_is_more_even(weights, data):
    num_stages = data.draw(st.integers(1, len(weights)))

    def cost(bounds):
        stages = [sum(weights[start:stop]) for start, stop in pairwise([0, *bounds, len(weights)])]
        return max(stages), sum(stage * stage for stage in stages)

    specs = cut_by_weights([f"b{i}" for i in range(len(weights))], weights, num_stages)
    every_cut = combinations(range(1, len(weights)), num_stages - 1)
    assert cost([spec.layer_start for spec in specs[1:]]) == min(map(cost, every_cut))


@pytest.mark.parametrize(
    ("weights", "num_stages", "message"),
    [
        ([1, 1], 2, "weights must be one for each layer, got 2 and 5"),
        ([1, 1, -1, 1, 1], 2, r"weights must be at least 0 and finite, got \[1, 1, -1, 1, 1\]"),
        ([1, 1, float("nan"), 1, 1], 2, "weights must be at least 0 and finite"),
        ([1, 1, 1, 1, 1], 6, "num_stages must be at most the number of layers, got 6 and 5"),
        ([1, 1, 1, 1, 1], 0, "num_stages must be at least 1, got 0"),
    ],
)
def test_weights_are_checked(weights, num_stages, message):
    with pytest.raises(ValueError, match=message):
        cut_by_weights(NAMES, weights, num_stages)


def test_layers_are_no_names_and_floats_no_sizes():
    """Specs came of them, without an embedding or with a float where a slice ends."""
    layers = [(name, lambda param: None) for name in NAMES]
    for cut_it in (lambda: cut_by_weights(layers, [1] * 5, 2), lambda: cut_by_sizes(layers, [2, 3])):
        with pytest.raises(TypeError, match=r"names are those of the layers, .* got \('embed', .* among them$"):
            cut_it()
    with pytest.raises(TypeError, match=r"sizes must be integers, got \[2\.0, 3\]$"):
        cut_by_sizes(NAMES, [2.0, 3])
    assert cut_by_sizes(NAMES, tuple(np.array([2, 3]))) == cut_by_sizes(NAMES, [2, 3])
