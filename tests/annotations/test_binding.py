import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotations.binding import BoundAnnotation, Split, Spread, bind
from annotations.errors import BindingError, PartitionError
from annotations.grammar import Annotation, Reduce

GQA = "b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^, b (g 4) l"
GQA_SHAPES = [(2, 128, 8, 64), (2, 128, 2, 64), (2, 128, 2, 48)]
REPLICATE, PARTIAL = Spread.REPLICATE, Spread.PARTIAL


def fit(text, shapes, **sizes) -> BoundAnnotation:
    return bind(text, "op", [f"x{i}" for i in range(len(shapes))], shapes, sizes)


def split_text(split: Split) -> str:
    """E.g. 'k+: 1 R! -> P': the cut dim, R(eplicate) or P(artial); '!': gradient not reduced."""
    signs = {REPLICATE: "R", PARTIAL: "P"}
    inputs = [
        f"{signs.get(spread, spread)}{'' if reduce else '!'}"
        for spread, reduce in zip(split.inputs, split.grad_reduce, strict=True)
    ]
    outputs = [str(signs.get(spread, spread)) for spread in split.outputs]
    return f"{split.identifier}{split.reduce.value}: {' '.join(inputs)} -> {' '.join(outputs)}"


# annotation, input shapes, integer arguments, output shapes, splits: as nnscaler 0.9 has them.
TABLE = [
    ("* -> *", [(4, 6)], {}, [(4, 6)], "a: 0 -> 0; b: 1 -> 1"),
    ("*, * -> *", [(4, 6), (4, 6)], {}, [(4, 6)], "a: 0 0 -> 0; b: 1 1 -> 1"),
    ("*, ? -> *", [(4, 6), None], {}, [(4, 6)], "a: 0 R -> 0; b: 1 R -> 1"),
    ("?, * -> *", [None, (4,)], {}, [(4,)], "a: R 0 -> 0"),
    ("? -> ?", [(4, 6)], {}, [None], ""),
    ("1 -> 1", [(1,)], {}, [(1,)], ""),
    ("* -> *, *", [(4, 6)], {}, [(4, 6), (4, 6)], "a: 0 -> 0 0; b: 1 -> 1 1"),
    (
        "* k+, n k+ -> * n",
        [(2, 4, 6), (8, 6)],
        {},
        [(2, 4, 8)],
        "a: 0 R -> 0; b: 1 R -> 1; k+: 2 1 -> P; n: R 0 -> 2",
    ),
    (
        "* k^, n k^, n -> * n",
        [(2, 4, 6), (8, 6), (8,)],
        {},
        [(2, 4, 8)],
        "a: 0 R R -> 0; b: 1 R R -> 1; n: R 0 0 -> 2",
    ),
    (
        "b m k+, b k+ n -> b m n",
        [(2, 4, 6), (2, 6, 8)],
        {},
        [(2, 4, 8)],
        "b: 0 0 -> 0; m: 1 R -> 1; k+: 2 1 -> P; n: R 2 -> 2",
    ),
    (
        "b m n, b m k^, b k^ n -> b m n",
        [(2, 4, 8), (2, 4, 6), (2, 6, 8)],
        {},
        [(2, 4, 8)],
        "b: 0 0 0 -> 0; m: 1 1 R -> 1; n: 2 R 2 -> 2",
    ),
    ("k+, k+ -> 1", [(6,), (6,)], {}, [(1,)], "k+: 0 0 -> P"),
    ("m k+, k+ n -> m n", [(4, 6), (6, 8)], {}, [(4, 8)], "m: 0 R -> 0; k+: 1 0 -> P; n: R 1 -> 1"),
    ("k+, k+ n -> n", [(6,), (6, 8)], {}, [(8,)], "k+: 0 0 -> P; n: R 1 -> 0"),
    ("m k+, k+ -> m", [(4, 6), (6,)], {}, [(4,)], "m: 0 R -> 0; k+: 1 0 -> P"),
    (
        "* m k+, k+ n -> * m n",
        [(2, 3, 4, 6), (6, 8)],
        {},
        [(2, 3, 4, 8)],
        "a: 0 R -> 0; b: 1 R -> 1; m: 2 R -> 2; k+: 3 0 -> P; n: R 1 -> 3",
    ),
    (
        "m k+, * k+ n -> * m n",
        [(4, 6), (2, 6, 8)],
        {},
        [(2, 4, 8)],
        "m: 0 R -> 1; k+: 1 1 -> P; a: R 0 -> 0; n: R 2 -> 2",
    ),
    (
        "* m k+, * k+ n -> * m n",
        [(2, 4, 6), (2, 6, 8)],
        {},
        [(2, 4, 8)],
        "a: 0 0 -> 0; m: 1 R -> 1; k+: 2 1 -> P; n: R 2 -> 2",
    ),
    (
        "*, n+ e -> * e",
        [(2, 5), (10, 4)],
        {},
        [(2, 5, 4)],
        "a: 0 R -> 0; b: 1 R -> 1; n+: R 0 -> P; e: R 1 -> 2",
    ),
    ("C^, N -> N", [(5,), (3,)], {}, [(3,)], "N: R 0 -> 0"),
    ("N C^, N -> N", [(3, 5), (3,)], {}, [(3,)], "N: 0 0 -> 0"),
    ("N C^ *, N * -> N", [(3, 5, 2), (3, 2)], {}, [(3,)], "N: 0 0 -> 0; a: 2 1 -> R"),
    ("N C^ *, N * -> N *", [(3, 5, 2), (3, 2)], {}, [(3, 2)], "N: 0 0 -> 0; a: 2 1 -> 1"),
    ("N+ C^, N+ -> 1", [(3, 5), (3,)], {}, [(1,)], "N+: 0 0 -> P"),
    ("N+ C^ *, N+ * -> 1", [(3, 5, 2), (3, 2)], {}, [(1,)], "N+: 0 0 -> P; a: 2 1 -> R"),
    ("N^ C^, N^ -> 1", [(3, 5), (3,)], {}, [(1,)], ""),
    ("N^ C^ *, N^ * -> 1", [(3, 5, 2), (3, 2)], {}, [(1,)], "a: 2 1 -> R"),
    ("n, m -> n m", [(4,), (6,)], {}, [(4, 6)], "n: 0 R -> 0; m: R 0 -> 1"),
    (
        "n iC+ 8, oC iC+ 3 -> n oC 6",
        [(2, 4, 8), (6, 4, 3)],
        {},
        [(2, 6, 6)],
        "n: 0 R -> 0; iC+: 1 1 -> P; oC: R 0 -> 1",
    ),
    (
        "n iC^ 8, oC iC^ 3, oC -> n oC 6",
        [(2, 4, 8), (6, 4, 3), (6,)],
        {},
        [(2, 6, 6)],
        "n: 0 R R -> 0; oC: R 0 0 -> 1",
    ),
    (
        "n (g 2) 8, (g 3) 2 3 -> n (g 3) 6",
        [(2, 8, 8), (12, 2, 3)],
        {},
        [(2, 12, 6)],
        "n: 0 R -> 0; g: 1 0 -> 1",
    ),
    (
        "n (g 2) 8, (g 3) 2 3, (g 3) -> n (g 3) 6",
        [(2, 8, 8), (12, 2, 3), (12,)],
        {},
        [(2, 12, 6)],
        "n: 0 R R -> 0; g: 1 0 0 -> 1",
    ),
    (
        "n iC+ 8, iC+ oC 3 -> n oC 10",
        [(2, 4, 8), (4, 6, 3)],
        {},
        [(2, 6, 10)],
        "n: 0 R -> 0; iC+: 1 0 -> P; oC: R 1 -> 1",
    ),
    (
        "n (groups group_size^) 8, (groups group_size^) oC 3 -> n (groups oC) 10",
        [(2, 8, 8), (8, 6, 3)],
        {"groups": 2},
        [(2, 12, 10)],
        "n: 0 R -> 0; groups: 1 0 -> 1",
    ),
    ("N C 6 6 -> N (C 9) 16", [(2, 3, 6, 6)], {}, [(2, 27, 16)], "N: 0 -> 0; C: 1 -> 1"),
    (
        "b l h hd^, b l h hd^, b l h vd^ -> b l h vd^",
        [(2, 8, 4, 16), (2, 8, 4, 16), (2, 8, 4, 12)],
        {},
        [(2, 8, 4, 12)],
        "b: 0 0 0 -> 0; l: 1 1 1 -> 1; h: 2 2 2 -> 2",
    ),
    (
        "b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^",
        [(2, 8, 8, 16), (2, 8, 2, 16), (2, 8, 2, 12)],
        {},
        [(2, 8, 8, 12)],
        "b: 0 0 0 -> 0; l: 1 1 1 -> 1; g: 2 2 2 -> 2",
    ),
    (
        "l (g 4) hd^, l g hd^, l g vd^, e^, e^, ? -> l (g 4) vd^",
        [(8, 8, 16), (8, 2, 16), (8, 2, 12), (3,), (3,), None],
        {},
        [(8, 8, 12)],
        "l: 0 0 0 R R R -> 0; g: 1 1 1 R R R -> 1",
    ),
    (
        "l h hd^, l h hd^, l h vd^, e^, e^, h -> l h vd^, h l",
        [(8, 4, 16), (8, 4, 16), (8, 4, 12), (3,), (3,), (4,)],
        {},
        [(8, 4, 12), (4, 8)],
        "l: 0 0 0 R R R -> 0 1; h: 1 1 1 R R 0 -> 1 0",
    ),
    (
        "l (g 4) hd^, al^ g hd^, al^ g vd^, e^, e^, ? -> l (g 4) vd^, (g 4) l",
        [(8, 8, 16), (16, 2, 16), (16, 2, 12), (3,), (3,), None],
        {},
        [(8, 8, 12), (8, 8)],
        "l: 0 R R R R R -> 0 1; g: 1 1 1 R R R -> 1 0",
    ),
    ("l h, e^ -> l h", [(8, 4), (3,)], {}, [(8, 4)], "l: 0 R -> 0; h: 1 R -> 1"),
    (
        "b l^ (g 4) hd^, b s^ g hd^, b s^ g vd^, b l^ -> b l^ (g 4) vd^",
        [(2, 8, 8, 16), (2, 6, 2, 16), (2, 6, 2, 12), (2, 8)],
        {},
        [(2, 8, 8, 12)],
        "b: 0 0 0 0 -> 0; g: 2 2 2 R -> 2",
    ),
    (
        "b l d^, n^ d^, b l -> b l",
        [(2, 8, 4), (10, 4), (2, 8)],
        {},
        [(2, 8)],
        "b: 0 R 0 -> 0; l: 1 R 1 -> 1",
    ),
    (
        "n^ l^ h^, e^ h^ -> (n^ l^) 64, (n^ l^) 64, 1",
        [(2, 3, 4), (5, 4)],
        {},
        [(6, 64), (6, 64), (1,)],
        "",
    ),
    (
        "n l h^, (n l) 6, (n l) 6, 1, E+ d+ h^, E+ d+ h^, E+ h^ d+ -> n l h^",
        [(2, 3, 4), (6, 6), (6, 6), (1,), (8, 10, 4), (8, 10, 4), (8, 4, 10)],
        {},
        [(2, 3, 4)],
        "n: 0 0 0 R R R R -> 0; E+: R R R R 0 0 0 -> P; d+: R R R R 1 1 2 -> P",
    ),
    (
        "B (2 h^ 2 w^) C^ -> B (h^ w^) (4 C^)",
        [(2, 48, 5)],
        {"h": 3, "w": 4},
        [(2, 12, 20)],
        "B: 0 -> 0",
    ),
    (
        "B ic+ (ps^ w^) (ps^ h^), oc ic+ k^ k^, oc -> B oc w^ h^",
        [(2, 3, 8, 12), (6, 3, 2, 2), (6,)],
        {"ps": 2},
        [(2, 6, 4, 6)],
        "B: 0 R R -> 0; ic+: 1 1 R -> P; oc: R 0 0 -> 1",
    ),
    (
        "B HW^ E^, H+ E^, H+, E^ H+ -> B HW^ E^",
        [(2, 9, 4), (16, 4), (16,), (4, 16)],
        {},
        [(2, 9, 4)],
        "B: 0 R R R -> 0; H+: R 0 0 1 -> P",
    ),
    (
        "B N^ C^, (h+ dh^ 3) C^, (h+ dh^ 3), (wh^ ww^) (wh^ ww^), t^ h+, C^ (h+ dh^), ? -> B N^ C^",
        [(2, 9, 8), (24, 8), (24,), (9, 9), (25, 2), (8, 8), None],
        {"h": 2, "wh": 3},
        [(2, 9, 8)],
        "B: 0 R R R R R R -> 0; h+: R 0 0 R 1 1 R -> P",
    ),
    (
        "B (nh^ ws^) (nw^ ws^) C -> (B nh^ nw^) ws^ ws^ C",
        [(2, 6, 9, 4)],
        {"ws": 3},
        [(12, 3, 3, 4)],
        "B: 0 -> 0; C: 3 -> 3",
    ),
    (
        "(B nh^ nw^) ws^ ws^ C -> B (nh^ ws^) (nw^ ws^) C",
        [(12, 3, 3, 4)],
        {"nh": 2, "nw": 3},
        [(2, 6, 9, 4)],
        "B: 0 -> 0; C: 3 -> 3",
    ),
    ("b^ l^ -> ?", [(2, 3)], {}, [None], ""),
    ("a b, b c -> a c", [(4, 6), (6, 8)], {}, [(4, 8)], "a: 0 R -> 0; b: 1 0 -> R; c: R 1 -> 1"),
    ("a b, b c -> ?", [(4, 6), (6, 8)], {}, [None], "a: 0 R -> R; b: 1 0 -> R; c: R 1 -> R"),
    ("a b, (b c) -> a (b c)", [(4, 6), (12,)], {}, [(4, 12)], "a: 0 R -> 0; b: 1 0 -> 1"),
    ("(a number), (b number) -> (a b)", [(8,), (12,)], {"number": 2}, [(24,)], "a: 0 R -> 0"),
    (
        "(a number), (b number), (a b) -> 1",
        [(8,), (12,), (24,)],
        {"number": 2},
        [(1,)],
        "a: 0 R 0 -> R",
    ),
    ("a b, (b n) c -> a (n c)", [(4, 6), (12, 5)], {}, [(4, 10)], "a: 0 R -> 0; b: 1 0 -> R"),
    ("a b, (b n) c -> a (n b c)", [(4, 6), (12, 5)], {}, [(4, 60)], "a: 0 R -> 0"),
    (
        "a b, (b n) c -> a (1 b c) n",
        [(4, 6), (12, 5)],
        {},
        [(4, 30, 2)],
        "a: 0 R -> 0; b: 1 0 -> 1",
    ),
    (
        "a b, (d^ n) c -> a (c n) d^",
        [(4, 6), (12, 5)],
        {"n": 3},
        [(4, 15, 4)],
        "a: 0 R -> 0; b: 1 R -> R; c: R 1 -> 1",
    ),
    (
        "* a : /c, a b -> * b",
        [(3, 4), (4, 5)],
        {},
        [(3, 5)],
        "c: 0! R -> 0; a: 1 0 -> R; b: R 1 -> 1",
    ),
    (
        "a b : /a, b c -> a c",
        [(4, 6), (6, 8)],
        {},
        [(4, 8)],
        "a: 0! R -> 0; b: 1 0 -> R; c: R 1 -> 1",
    ),
    ("a b, / -> a b", [(4, 6), (3,)], {}, [(4, 6)], "a: 0 R! -> 0; b: 1 R! -> 1"),
    (
        "l h^ : /m /n, m+ n+ : / -> l",
        [(8, 4), (6, 10)],
        {},
        [(8,)],
        "l: 0 R! -> 0; m+: R! 0! -> P; n+: R! 1! -> P",
    ),
]


@pytest.mark.parametrize("text, shapes, sizes, outputs, splits", TABLE, ids=[t[0] for t in TABLE])
def test_table(text, shapes, sizes, outputs, splits):
    bound = fit(text, shapes, **sizes)
    assert "; ".join(map(split_text, bound.splits())) == splits
    assert list(bound.output_shapes()) == outputs
    assert bound.input_shapes == tuple(shapes)
    assert bind(Annotation.parse(text), "op", ["x"] * len(shapes), shapes, sizes) == bound


def test_the_table_is_large():
    assert len({row[0] for row in TABLE}) >= 40


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
    for text, shapes, sizes, outputs, _ in TABLE:
        bound = fit(text, shapes, **sizes)
        for split in bound.splits():
            name = split.identifier
            if not bound.divisible(name, 2):
                continue

            def cut(shape, spread):
                if not isinstance(spread, int):
                    return shape
                return (*shape[:spread], shape[spread] // 2, *shape[spread + 1 :])

            local_sizes = {k: v // 2 if k == name else v for k, v in sizes.items()}
            local = fit(text, list(map(cut, shapes, split.inputs)), **local_sizes)
            assert list(local.output_shapes()) == list(map(cut, outputs, split.outputs))
            assert local.sizes == {**bound.sizes, name: bound.sizes[name] // 2}
            cut_something += 1
    assert cut_something > 80


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=5), st.integers(1, 9), st.integers(1, 9))
def test_bind_reads_off_what_shapes_were_made_of(star, k, g):
    shapes = [(*star, k, g * 4), (g, k)]
    bound = fit("* k+ (g 4), g k+ -> g *", shapes)
    letters = [name for name in "abcdefghij" if name not in ("g", "k")][: len(star)]
    assert bound.sizes == {**dict(zip(letters, star, strict=True)), "k": k, "g": g}
    assert bound.output_shapes() == ((g, *star),)
