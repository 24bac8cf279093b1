import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import StageSpec, cut, partition_by_count


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
    message = "num_stages must be at most the number of layers, got 5 stages and 4 layers"
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
        with pytest.raises(ValueError, match="got 1 stages and 0 layers"):
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
