"""The tests of the loss kernels notice faults that are put into them."""

from __future__ import annotations

import pytest

from tests import mutation_loss
from tests.mutation_loss import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_the_text_of_every_fault_is_in_the_source(mutation: Mutation) -> None:
    text = (mutation_loss.ROOT / mutation_loss.KERNELS / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1


@pytest.mark.mutation
def test_every_fault_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutation_loss.main() == 0, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("caught") for line in lines) == len(MUTATIONS) == 5
