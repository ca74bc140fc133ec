"""What is cached of calls, and which keys are equal."""

from __future__ import annotations

import pytest

from annotations.library.cached_calls import cached, typed_key


def test_is_made_once_and_the_oldest_makes_room() -> None:
    known: dict[int, str] = {}
    made: list[int] = []

    def ask(key: int) -> str:
        def make() -> str:
            made.append(key)
            return str(key)

        return cached(known, key, make, most=2)

    assert [ask(1), ask(2), ask(1), ask(3), ask(2)] == ["1", "2", "1", "3", "2"]
    assert made == [1, 2, 3]
    assert ask(1) == "1"
    assert made == [1, 2, 3, 1]


def test_two_who_make_it_at_once_get_the_same() -> None:
    known: dict[int, list[int]] = {}
    others: list[list[int]] = []

    def make() -> list[int]:
        others.append(cached(known, 0, list))  # as another thread, while this one makes it
        return []

    assert cached(known, 0, make) is others[0]


def test_a_key_without_hash_and_an_error_are_not_remembered() -> None:
    known: dict[object, int] = {}
    assert cached(known, ([],), lambda: 1) == 1

    def fails() -> int:
        raise TypeError("wrong")

    for _ in range(2):
        with pytest.raises(TypeError, match="wrong"):
            cached(known, 0, fails)
    assert known == {}


@pytest.mark.parametrize(
    ("a", "b"), [(1, True), (1, 1.0), ((4, 0), (4.0, 0)), ((4, 0), [4, 0]), (((1,),), ((True,),))]
)
def test_equal_is_not_alike(a: object, b: object) -> None:
    assert typed_key([a]) != typed_key([b])
    assert typed_key([a]) == typed_key([a])
    assert hash(typed_key([a])) == hash(typed_key([a]))
