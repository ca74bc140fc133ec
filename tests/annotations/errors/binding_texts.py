"""What shapes and values that do not fit an annotation say, whole."""

GQA = "b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^"
Q, K, V = (2, 128, 8, 64), (2, 128, 2, 64), (2, 128, 2, 64)


BINDING = {
    "l_mismatch_with_a_fix": (
        (GQA, "wrap_ring_attn_func", ["q", "k", "v"], [Q, (2, 96, 2, 64), V]),
        """
wrap_ring_attn_func: argument 'k' does not fit the annotation
    b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^
                     ^
    dim 1 of k is 'l' = 128 from dim 1 of q, but k has shape (2, 96, 2, 64)
    expected: k of shape (2, 128, 2, 64)
""",
    ),
    "mismatch_without_a_certain_fix": (
        (GQA, "op", ["q", "k", "v"], [Q, (2, 96, 2, 64), (2, 96, 2, 64)]),
        """
op: argument 'k' does not fit the annotation
    b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^
                     ^
    dim 1 of k is 'l' = 128 from dim 1 of q, but k has shape (2, 96, 2, 64)
""",
    ),
    "group_mismatch": (
        (GQA, "op", ["q", "k", "v"], [(2, 128, 9, 64), K, V]),
        """
op: argument 'q' does not fit the annotation
    b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^
        ^~~~~
    dim 2 of q is '(g 4)' = 8, where 'g' = 2 from dim 2 of k, but q has shape (2, 128, 9, 64)
    expected: q of shape (2, 128, 8, 64)
""",
    ),
    "not_a_multiple": (
        ("(g 4) -> g", "op", ["x"], [(10,)]),
        """
op: argument 'x' does not fit the annotation
    (g 4) -> g
    ^~~~~
    dim 0 of x is '(g 4)', a multiple of 4, but x has shape (10,)
""",
    ),
    "not_a_multiple_of_an_argument": (
        ("(h d^) -> d^", "op", ["x"], [(12,)], {"h": 5}),
        """
op: argument 'x' does not fit the annotation
    (h d^) -> d^
    ^~~~~~
    dim 0 of x is '(h d^)', where 'h' = 5 from argument h, a multiple of 5, but x has shape (12,)
""",
    ),
    "argument_contradicts": (
        ("(h 6) -> h", "op", ["x"], [(12,)], {"h": 3}),
        """
op: argument 'x' does not fit the annotation
    (h 6) -> h
    ^~~~~
    dim 0 of x is '(h 6)' = 18, where 'h' = 3 from argument h, but x has shape (12,)
""",
    ),
    "fixed_sizes_in_brackets": (
        ("(2 4) -> 1", "op", ["x"], [(9,)]),
        """
op: argument 'x' does not fit the annotation
    (2 4) -> 1
    ^~~~~
    dim 0 of x is '(2 4)' = 8, but x has shape (9,)
    expected: x of shape (8,)
""",
    ),
    "fixed_size": (
        ("a 8 -> a", "op", ["x"], [(2, 7)]),
        """
op: argument 'x' does not fit the annotation
    a 8 -> a
      ^
    dim 1 of x is 8, but x has shape (2, 7)
    expected: x of shape (2, 8)
""",
    ),
    "underdetermined": (
        ("n, (a b c) -> a", "op", ["x", "y"], [(2,), (12,)]),
        """
op: argument 'y' does not fit the annotation
    n, (a b c) -> a
       ^~~~~~~
    dim 0 of y is '(a b^ c^)', which needs integer arguments for 'b', 'c', but y has shape (12,)
""",
    ),
    "underdetermined_by_zero": (
        ("(a b) -> a", "op", ["x"], [(0,)], {"a": 0}),
        """
op: argument 'x' does not fit the annotation
    (a b) -> a
    ^~~~~
    dim 0 of x is '(a b^)', which needs integer arguments for 'b', but x has shape (0,)
""",
    ),
    "too_few_dims": (
        (GQA, "op", ["q", "k", "v"], [Q, (2, 128, 64), V]),
        """
op: argument 'k' does not fit the annotation
    b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^
                   ^~~~~~~~~
    k is annotated as 4 dims, 'b l g hd^', but k has shape (2, 128, 64)
""",
    ),
    "too_few_dims_for_a_star": (
        ("n, * a b -> *", "op", ["x", "y"], [(2,), (2,)]),
        """
op: argument 'y' does not fit the annotation
    n, * a b -> *
       ^~~~~
    y is annotated as 2 or more dims, '* a b', but y has shape (2,)
""",
    ),
    "too_many_dims": (
        ("a -> a", "op", ["x"], [(2, 3)]),
        """
op: argument 'x' does not fit the annotation
    a -> a
    ^
    x is annotated as 1 dim, 'a', but x has shape (2, 3)
""",
    ),
    "no_dim_too_many": (
        ("n, () -> n", "op", ["x", "y"], [(2,), (2,)]),
        """
op: argument 'y' does not fit the annotation
    n, () -> n
       ^~
    y is annotated as 0 dims, '()', but y has shape (2,)
""",
    ),
    "stars_of_two_lengths": (
        ("* k+, * k+ -> *", "op", ["x", "y"], [(2, 3, 4), (3, 4)]),
        """
op: argument 'y' does not fit the annotation
    * k+, * k+ -> *
          ^
    '*' is 2 dims in x of shape (2, 3, 4), but 1 in y of shape (3, 4)
""",
    ),
    "mismatch_in_a_star": (
        ("*, * -> *", "op", ["x", "y"], [(2, 3), (2, 4)]),
        """
op: argument 'y' does not fit the annotation
    *, * -> *
       ^
    dim 1 of y is 'b' = 3 from dim 1 of x, but y has shape (2, 4)
    expected: y of shape (2, 3)
""",
    ),
    "star_in_an_output_only": (
        ("a -> a, b *", "op", ["x"], [(2,)]),
        """
op: '*' is in an output, but in no input
    a -> a, b *
              ^
""",
    ),
    "too_few_arguments": (
        (GQA, "op", ["q", "k"], [Q, K]),
        """
op: the inputs in the annotation are 3, the arguments 2
    b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^
                              ^~~~~~~~~
    arguments: q, k
""",
    ),
    "too_many_arguments": (
        ("a -> a", "op", ["x", "y"], [(2,), (2,)]),
        """
op: the inputs in the annotation are 1, the arguments 2
    a -> a
    arguments: x, y
""",
    ),
    "no_arguments": (
        ("a -> a", "op", [], []),
        """
op: the inputs in the annotation are 1, the arguments 0
    a -> a
    ^
    arguments: none
""",
    ),
    "not_a_tensor": (
        (GQA, "op", ["q", "k", "v"], [Q, None, V]),
        """
op: argument 'k' is not a tensor
    b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^
                   ^~~~~~~~~
    expected: a tensor for k, or '?' in the annotation
""",
    ),
    "open_output": (
        ("a, ? -> a, (a n)", "op", ["x", "y"], [(2,), None]),
        """
op: the shape of output 1 is open: 'n' is in no input
    a, ? -> a, (a n)
                  ^
    expected: an integer argument 'n' of the op, or '?' as the output
""",
    ),
    "syntax_error": (
        ("a, b^^ -> a", "op", ["x", "y"], [(2,), (2,)]),
        """
op: 'b^^' is not a dim
    a, b^^ -> a
       ^~~
    expected: a name or a size, then at most one of '+' and '^'
""",
    ),
}
