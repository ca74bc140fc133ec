"""The diffs of the page about training frameworks: how many lines they change, what they import."""

from __future__ import annotations

import re

from doc_blocks import ROOT

PAGE = (ROOT / "customized_ops/ring_attention/docs/frameworks.md").read_text()
FEWER_THAN = 20


def changed(section: str) -> list[str]:
    """The lines that the diffs of a section take out or put in."""
    diffs = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    return [line for diff in diffs for line in diff.splitlines() if line[:1] in ("+", "-")]


def test_each_section_changes_as_many_lines_as_the_table_says() -> None:
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("|")]
    head, _, *table = [[cell.strip() for cell in row] for row in rows]
    told = {row[0]: int(row[head.index("changed lines")]) for row in table}
    sections = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
    found = {title: len(changed(section)) for title, section in sections.items()}
    assert found == told and len(told) == 6
    assert all(0 < lines < FEWER_THAN for lines in told.values())
    assert "```py" not in PAGE  # what is to be written is in the diffs


def test_what_the_diffs_import_is_there() -> None:
    ours = [line[1:].strip() for line in changed(PAGE) if " customized_ops" in line]
    assert len(ours) >= 8
    for line in ours:
        exec(line, {})


def test_torchtitans_diff_sets_the_backend() -> None:
    set_here = [line for line in changed(PAGE) if "spmd_backend" in line]
    assert set_here == ['+    config.parallelism.spmd_backend = "partial_dtensor"']
