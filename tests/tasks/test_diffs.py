"""Unified diffs: a round trip for any two texts, and strictness where something does not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muonrl.errors import TaskError
from muonrl.tasks.diffs import apply_diff, diff_path, make_diff

LINES = st.lists(
    st.sampled_from(["a\n", "b\n", "-\n", "+ c\n", " d\f\n", "\n", "@@ -1 +1 @@\n"]), max_size=12
)
TEXTS = st.builds(lambda lines, end: "".join(lines) + end, LINES, st.sampled_from(["", "no newline"]))


@given(TEXTS, TEXTS)
def test_a_diff_applied_to_the_old_text_gives_the_new(before, after):
    diff = make_diff("p/a.py", before, after)
    if before == after:
        assert diff == ""
    else:
        assert diff_path(diff) == "p/a.py"
        assert apply_diff(before, diff) == after


BEFORE = "one\ntwo\nthree\n"
DIFF = make_diff("a.py", BEFORE, "one\n2\nthree\n")


@pytest.mark.parametrize(
    "text, diff, message",
    [
        ("one\nTWO\nthree\n", DIFF, "line 2 is not the `two`"),
        ("one\n", DIFF, "line 2 is not"),
        (BEFORE, "nonsense", "does not start with"),
        (BEFORE, "--- a/a.py\n+++ b/b.py\n", "does not start with"),
        (BEFORE, "--- a/a.py\n+++ b/a.py\n@@ -99,1 +99,1 @@\n-x\n", "outside the file"),
        (BEFORE, "--- a/a.py\n+++ b/a.py\n@@ -1,1 +1,1 @@\n?x\n", "no line of|not a line of"),
    ],
)
def test_a_diff_that_does_not_fit_is_refused(text, diff, message):
    with pytest.raises(TaskError, match=message):
        apply_diff(text, diff)
