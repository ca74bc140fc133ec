import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nnscaler_table import read_table

from annotations.binding import BoundAnnotation, Split, Spread, bind
from annotations.errors import BindingError, PartitionError
from annotations.grammar import Annotation, Reduce

GQA = "b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^, b (g 4) l"
GQA_SHAPES = [(2, 128, 8, 64), (2, 128, 2, 64), (2, 128, 2, 48)]
REPLICATE, PARTIAL = Spread.REPLICATE, Spread.PARTIAL


def fit(text, shapes, **sizes) -> BoundAnnotation:
    return bind(text, "op", [f"x{i}" for i in range(len(shapes))], shapes, sizes)


def test_what_is_bound_is_kept():
    for row in read_table():
        bound = fit(row.text, row.shapes, **row.sizes)
        assert bound.input_shapes == row.shapes
        assert bound.annotation.text == row.text
        assert fit(Annotation.parse(row.text), row.shapes, **row.sizes) == bound


def test_gradients_that_are_not_reduced():
    bound = fit("l h^ : /m /n, m+ n+ : / -> l", [(8, 4), (6, 10)])
    assert [split.grad_reduce for split in bound.splits()] == [
        (True, False),  # l
        (False, False),  # m
        (False, False),  # n
    ]


def test_grouped_attention():
    bound = fit(GQA, GQA_SHAPES)
    assert bound.sizes == {"b": 2, "l": 128, "g": 2, "hd": 64, "vd": 48}
    assert bound.output_shapes() == ((2, 128, 8, 48), (2, 8, 128))
    reduce, grad = Reduce.SPLIT, (True, True, True)
    assert bound.splits() == (
        Split("b", reduce, (0, 0, 0), (0, 0), grad),
        Split("l", reduce, (1, 1, 1), (1, 2), grad),
        Split("g", reduce, (2, 2, 2), (2, 1), grad),
    )
    assert [bound.split(name) for name in ("b", "l", "g")] == list(bound.splits())
    assert bound.divisible("l", 64) and not bound.divisible("l", 3)
    assert bound.divisible("g", 2) and not bound.divisible("g", 4)


def test_matmul_on_the_inner_dim_leaves_partial_sums():
    bound = fit("m k+, k+ n -> m n", [(4, 6), (6, 8)])
    assert bound.split("k") == Split("k", Reduce.SUM, (1, 0), (PARTIAL,), (True, True))
    assert bound.split("n") == Split("n", Reduce.SPLIT, (REPLICATE, 1), (1,), (True, True))


def test_inputs_without_a_summed_dim_are_replicated():
    bound = fit("m k+, k+ n, n -> m n", [(4, 6), (6, 8), (8,)])
    assert bound.split("k").inputs == (1, 0, REPLICATE)


@pytest.mark.parametrize(
    "shape, expanded, names",
    [
        ((5, 6), "k+, k+ n -> n", ""),
        ((5, 6, 7), "a k+, k+ n -> a n", "a"),
        ((5, 4, 6, 7), "a b k+, k+ n -> a b n", "a b"),
    ],
)
def test_star(shape, expanded, names):
    *star, k, n = shape
    bound = fit("* k+, k+ n -> * n", [(*star, k), (k, n)])
    assert str(bound.annotation) == expanded
    assert bound.annotation == Annotation.parse(expanded)
    assert bound.annotation.text == "* k+, k+ n -> * n"
    assert bound.output_shapes() == ((*star, n),)
    assert [split.identifier for split in bound.splits()] == [*names.split(), "k", "n"]


def test_star_takes_names_that_are_free():
    assert str(fit("a c *+ -> 1", [(1, 2, 3, 4)]).annotation) == "a c b+ d+ -> 1"
    assert str(fit("* -> *, *", [()]).annotation) == "() -> (), ()"
    assert fit("* -> *, *", [()]).output_shapes() == ((), ())


def test_sizes_of_inner_dims():
    assert fit("(a b), b -> a", [(12,), (3,)]).sizes == {"a": 4, "b": 3}
    assert fit("(1 a 2) -> a", [(12,)]).sizes == {"a": 6}
    assert fit("(a b) -> b", [(12,)], a=4).sizes == {"a": 4, "b": 3}
    # An argument that happens to be called like a dim of its own has no say over it.
    assert fit("a -> a", [(12,)], a=4).sizes == {"a": 12}
    assert fit("? -> a 2", [None], a=4).output_shapes() == ((4, 2),)


def test_a_size_of_zero_is_a_size():
    bound = fit("l (g 4) -> g l", [(0, 8)])
    assert bound.output_shapes() == ((2, 0),)
    assert bound.divisible("l", 2)


def test_not_tensors():
    bound = fit("a, ?, ? -> ?, a", [(4,), None, (3, 3)])
    assert bound.output_shapes() == (None, (4,))
    assert bound.split("a").inputs == (0, REPLICATE, REPLICATE)
    assert bound.split("a").outputs == (REPLICATE, 0)
    assert fit("-> 3 4", []).output_shapes() == ((3, 4),)


def test_one_is_a_tensor_of_one_dim_or_of_none():
    assert fit("1 -> 1", [()]).output_shapes() == ((1,),)
    assert fit("1 -> 1", [(1,)]).output_shapes() == ((1,),)
    with pytest.raises(BindingError):
        fit("a -> a", [()])


def test_a_name_in_two_dims_of_a_tensor_is_not_split():
    bound = fit("L 8^ (L 2), L E -> 8^ (L 2) E", [(6, 8, 12), (6, 5)])
    assert [split.identifier for split in bound.splits()] == ["E"]
    with pytest.raises(PartitionError, match="two dims"):
        bound.split("L")


def test_bound_annotations_compare_hash_and_pickle():
    bound = fit(GQA, GQA_SHAPES)
    assert pickle.loads(pickle.dumps(bound)) == bound == fit(GQA, GQA_SHAPES)
    assert len({bound, fit(GQA, GQA_SHAPES), fit("a -> a", [(3,)])}) == 2


def test_every_split_gives_shards_that_fit_the_annotation():
    """Cut all inputs as a split says, bind the shards: the outputs are cut as the split says."""
    cut_something = 0
    for row in read_table():
        bound = fit(row.text, row.shapes, **row.sizes)
        for split in bound.splits():
            name = split.identifier
            assert bound.divisible(name, 2)

            def cut(shape, spread):
                if not isinstance(spread, int):
                    return shape
                return (*shape[:spread], shape[spread] // 2, *shape[spread + 1 :])

            local_sizes = {k: v // 2 if k == name else v for k, v in row.sizes.items()}
            local = fit(row.text, list(map(cut, row.shapes, split.inputs)), **local_sizes)
            assert list(local.output_shapes()) == list(map(cut, row.outputs, split.outputs))
            assert local.sizes == {**bound.sizes, name: bound.sizes[name] // 2}
            cut_something += 1
    assert cut_something >= 500


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=5), st.integers(1, 9), st.integers(1, 9))
def test_bind_reads_off_what_shapes_were_made_of(star, k, g):
    shapes = [(*star, k, g * 4), (g, k)]
    bound = fit("* k+ (g 4), g k+ -> g *", shapes)
    letters = [name for name in "abcdefghij" if name not in ("g", "k")][: len(star)]
    assert bound.sizes == {**dict(zip(letters, star, strict=True)), "k": k, "g": g}
    assert bound.output_shapes() == ((g, *star),)
