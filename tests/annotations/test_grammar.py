import ast
import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotations.grammar import Annotation, Dim, Reduce, Shape

FROZEN = Reduce.FROZEN


def dim(*parts: str) -> Dim:
    """A dim of literal parts, each a name followed by its mark."""
    names = tuple(part.rstrip("+^") for part in parts)
    marks = (part[len(name) :] for part, name in zip(parts, names, strict=True))
    return Dim(names, tuple(map(Reduce, marks)))


def test_parse_gives_the_whole_structure():
    parsed = Annotation.parse("m (k+ 2) : /m /n, *^ ? -> 1, /")
    assert parsed.inputs == (
        Shape((dim("m"), dim("k+", "2^")), ("m", "n")),
        Shape((dim("*^"), dim("?^"))),
    )
    assert parsed.outputs == (Shape((dim("1^"),)), Shape((dim("?^"),), ("",)))
    assert [shape.ignored for shape in parsed.inputs + parsed.outputs] == [0, 0, 0, 1]
    assert parsed.text == "m (k+ 2) : /m /n, *^ ? -> 1, /"


def test_spans_are_where_the_text_says_so():
    text = "b l  (g 4) : /l,hd^ *-> (1 g)"
    parsed = Annotation.parse(text)
    shapes = parsed.inputs + parsed.outputs
    assert [text[slice(*s.span)] for s in shapes] == ["b l  (g 4) : /l", "hd^ *", "(1 g)"]
    dims = [d for shape in shapes for d in shape.dims]
    assert [text[slice(*d.span)] for d in dims] == ["b", "l", "(g 4)", "hd^", "*", "(1 g)"]
    parts = [text[slice(*span)] for d in dims for span in d.spans]
    assert parts == ["b", "l", "g", "4", "hd^", "*", "1", "g"]
    assert text[slice(*dims[2].span_of("4"))] == "4"


@pytest.mark.parametrize(
    "text, canonical",
    [
        ("a b, b c -> a c", "a b, b c -> a c"),
        ("  a^   b,b c->a^ c ", "a^ b, b c -> a^ c"),
        ("m k+,\n  k+ n\n-> m n", "m k+, k+ n -> m n"),
        ("a(b c)d -> a", "a (b c^) d -> a"),
        ("(a) -> (a)", "a -> a"),
        ("4+ 8^ 2 -> 1^", "4 8 2 -> 1"),
        ("?^ -> ?+", "? -> ?"),
        ("*+ -> 1", "*+ -> 1"),
        ("/ -> ?:/", "/ -> /"),
        ("? : /m -> a:/ ", "? : /m -> a : /"),
        ("a : -> a", "a -> a"),
        ("a : / /m /m -> a", "a : / /m /m -> a"),
        ("a () b -> ()", "a b -> ()"),
        ("a, -> a", "a, () -> a"),
        ("-> a", "-> a"),
        ("a ->", "a ->"),
        # Only the first in brackets, after leading ones, stays what it is; the rest freezes.
        ("a b, (b n) c -> a (n c)", "a b, (b n^) c^ -> a (n^ c^)"),
        ("a b, (b n) c -> a (n b c)", "a b^, (b^ n^) c^ -> a (n^ b^ c^)"),
        ("a b, (b n) c -> a (1 b c) n", "a b, (b n^) c^ -> a (1 b c^) n^"),
        ("a b, (b n) c -> a (1 1 1 b c) n", "a b, (b n^) c^ -> a (1 1 1 b c^) n^"),
        ("a b, (d^ n) c -> a (c n) d^", "a b, (d^ n^) c -> a (c n^) d^"),
        ("(2 h) k+, (k+ k+) -> h", "(2 h^) k^, (k^ k^) -> h^"),
        ("(01 h) -> h", "(01 h^) -> h^"),
        ("(h+ dh 3) -> 1", "(h+ dh^ 3) -> 1"),
    ],
)
def test_canonical_form(text, canonical):
    parsed = Annotation.parse(text)
    assert str(parsed) == canonical
    assert Annotation.parse(canonical) == parsed
    assert hash(Annotation.parse(canonical)) == hash(parsed)


def test_what_differs_in_meaning_is_not_equal():
    texts = ["a -> a", "b -> b", "a^ -> a^", "a+ -> a+", "a : /a -> a", "a : / -> a", "(a 2) -> a"]
    assert len({Annotation.parse(text) for text in texts}) == len(texts)


def test_parse_is_cached_and_immutable():
    parsed = Annotation.parse("a -> a")
    assert Annotation.parse("a -> a") is parsed
    with pytest.raises(dataclasses.FrozenInstanceError):
        parsed.text = "b -> b"


def test_expand_and_star():
    (shape,) = Annotation.parse("a *^ b : /b -> a").inputs
    assert shape.star == dim("*^")
    assert str(shape.expand((dim("x^"), dim("y^")))) == "a x^ y^ b : /b"
    assert str(shape.expand(())) == "a b : /b"
    assert {d.span for d in shape.expand((dim("x^"),)).dims[1:2]} == {(2, 4)}
    plain = Annotation.parse("a -> a").inputs[0]
    assert plain.star is None and plain.expand((dim("x"),)) is plain


def test_dims_of():
    (shape,) = Annotation.parse("a (b a) b -> a").inputs
    assert (shape.dims_of("a"), shape.dims_of("b"), shape.dims_of("c")) == ((0, 1), (1, 2), ())


def test_the_examples_of_the_table_parse():
    import annotations.grammar

    examples = re.findall(r"``([^`]*->[^`]*)``", annotations.grammar.__doc__)
    examples.remove("->")  # the row of the arrow itself
    assert len(examples) == 13
    for example in examples:
        Annotation.parse(example)


def test_needs_no_torch():
    import annotations.binding
    import annotations.errors
    import annotations.grammar

    for module in (annotations.binding, annotations.errors, annotations.grammar):
        with open(module.__file__, encoding="utf-8") as file:
            tree = ast.parse(file.read())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
        froms = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert "torch" not in {alias.name for node in imports for alias in node.names} | set(froms)


NAMES = ["a", "b", "cc", "d_1", "é"]
names = st.sampled_from(NAMES)
spaces = st.sampled_from([" ", "  ", "\n "])


@st.composite
def annotation_texts(draw) -> str:
    """Texts in the language; a name has one mark throughout."""
    marks = {name: draw(st.sampled_from(["", "+", "^"])) for name in [*NAMES, "*"]}
    part = st.one_of(
        names.map(lambda name: name + marks[name]),
        st.sampled_from(["1", "1^", "12", "3+"]),
    )
    group = st.lists(part, max_size=4).map(lambda parts: f"({' '.join(parts)})")
    dims = st.lists(st.one_of(part, part, group, st.just("?")), max_size=4)
    modifier = st.one_of(st.just("/"), names.map(lambda name: f"/{name}"))

    def shape() -> str:
        if draw(st.integers(0, 6)) == 0:
            return draw(st.sampled_from(["?", "/", "()", "? :/ /a"]))
        words = draw(dims)
        if draw(st.booleans()):
            words.insert(draw(st.integers(0, len(words))), "*" + marks["*"])
        text = draw(spaces).join(words)
        if draw(st.integers(0, 3)) == 0:
            text += draw(st.sampled_from([":", " : "])) + " ".join(draw(st.lists(modifier)))
        return text

    def side() -> str:
        return draw(st.sampled_from([",", ", "])).join(shape() for _ in range(draw(counts)))

    counts = st.integers(0, 4)
    return side() + draw(st.sampled_from(["->", " -> "])) + side()


@settings(max_examples=150, deadline=None)
@given(annotation_texts())
def test_round_trip(text):
    parsed = Annotation.parse(text)
    canonical = str(parsed)
    assert Annotation.parse(canonical) == parsed
    assert str(Annotation.parse(canonical)) == canonical
    whole = parsed.inputs + parsed.outputs
    inner = {name for shape in whole for d in shape.dims for name in d.inner}
    for shape in whole:
        for d in shape.dims:
            for name, reduce in zip(d.identifiers, d.reduces, strict=True):
                assert reduce is FROZEN or not (name.isdecimal() or name in inner)
