"""What annotations that are wrong say, whole."""

# Each text is the whole message, after a newline and before one.
SYNTAX = {
    "a b": """
the annotation has no '->'
    a b
    ^~~
    expected: inputs -> outputs, such as 'm k+, k+ n -> m n'
""",
    "a -> b -> c": """
the annotation has more than one '->'
    a -> b -> c
           ^~
    expected: inputs -> outputs, such as 'm k+, k+ n -> m n'
""",
    "(a (b) c) -> a": """
'(' inside brackets
    (a (b) c) -> a
       ^
    expected: brackets without brackets
""",
    "a, (b c -> a": """
'(' is never closed
    a, (b c -> a
       ^
    expected: a ')' after it, in the same tensor
""",
    "(a, b) -> a": """
'(' is never closed
    (a, b) -> a
    ^
    expected: a ')' after it, in the same tensor
""",
    "a b) -> a": """
')' closes nothing
    a b) -> a
       ^
    expected: a '(' before it
""",
    "a, b++ -> a": """
'b++' is not a dim
    a, b++ -> a
       ^~~
    expected: a name or a size, then at most one of '+' and '^'
""",
    "a +, b -> a": """
'+' is not a dim
    a +, b -> a
      ^
    expected: a name or a size, then at most one of '+' and '^'
""",
    "a-b -> a": """
'a-b' is not a dim
    a-b -> a
    ^~~
    expected: a name or a size, then at most one of '+' and '^'
""",
    "a:b:/b -> a": """
'b' is not a modifier
    a:b:/b -> a
      ^
    expected: '/name' or '/' after ':', separated by spaces
""",
    "a / -> a": """
'/' is not a dim
    a / -> a
      ^
    expected: '/' as a whole tensor ('a, / -> a') or after ':' ('a : / -> a')
""",
    "a, /+ -> a": """
'/' is not a dim
    a, /+ -> a
       ^~
    expected: '/' as a whole tensor ('a, / -> a') or after ':' ('a : / -> a')
""",
    "(a *^) -> a": """
'*^' is inside brackets
    (a *^) -> a
       ^~
    expected: only names and sizes in brackets
""",
    "(4 ?) -> a": """
'?' is inside brackets
    (4 ?) -> a
       ^
    expected: only names and sizes in brackets
""",
    "a, b : m -> a": """
'm' is not a modifier
    a, b : m -> a
           ^
    expected: '/name' or '/' after ':', separated by spaces
""",
    "a : /m /2 -> a": """
'/2' is not a modifier
    a : /m /2 -> a
           ^~
    expected: '/name' or '/' after ':', separated by spaces
""",
    "a : /m : /n -> a": """
':' is not a modifier
    a : /m : /n -> a
           ^
    expected: '/name' or '/' after ':', separated by spaces
""",
    "m k+, k n -> m n": """
'k' is marked in two ways
    m k+, k n -> m n
          ^
    'k' here, but 'k+' before
    expected: the same mark wherever the name appears
""",
    "m (k^ 2), n -> m (n k)": """
'k' is marked in two ways
    m (k^ 2), n -> m (n k)
                        ^
    'k' here, but 'k^' before
    expected: the same mark wherever the name appears
""",
    "* a * -> a": """
a tensor has more than one '*'
    * a * -> a
        ^
    expected: at most one '*' in each tensor
""",
}
