"""What splits that are not possible say, whole."""

from annotations.binding import bind
from annotations.rules import Communicates, PartitionRule

PARTITION = {
    "n": """
op: 'n' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
            ^
    it is not the first in '(b n^)'; only the first can be cut in one piece
    can be split: 'a', 'b'
""",
    "c": """
op: 'c' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
                                            ^
    it is not the first in '(n^ c^)'; only the first can be cut in one piece
    can be split: 'a', 'b'
""",
    "k": """
op: 'k' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
                       ^~
    it is marked frozen: 'k^'
    can be split: 'a', 'b'
""",
    "x": """
op: 'x' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
                           ^~~
    it is in two dims of one tensor; cutting both would lose data
    can be split: 'a', 'b'
""",
    "z": """
op: 'z' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
                                               ^
    it is in no input
    can be split: 'a', 'b'
""",
    "4": """
op: '4' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
                                ^
    it is a fixed size
    can be split: 'a', 'b'
""",
    "?": """
op: '?' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
                                  ^
    it is not a dim
    can be split: 'a', 'b'
""",
    "nope": """
op: 'nope' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
    the annotation has no 'nope'
    can be split: 'a', 'b'
""",
}


BOUND = bind(
    "a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z",
    "op",
    ["p", "q", "r", "s", "t"],
    [(4, 6), (12, 5), (3,), (2, 2), (4, 9)],
    {"z": 2},
)
FROZEN = bind("*^, 4 -> *^", "op", ["x", "y"], [(2, 3), (4,)])
GROUPED = bind("l (g 4), l g -> l (g 4)", "op", ["q", "k"], [(5, 12), (5, 3)])
RULE = PartitionRule(communicates={"l": Communicates(lambda site: {}, None)})
