"""What several files of kernel tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.interpreter import interpreted


@pytest.fixture(scope="module")
def triton_device() -> Iterator[torch.device]:
    """Where ``backend="triton"`` runs while the test does: the GPU, or without one the CPU, by Triton's interpreter."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
    else:
        with interpreted():
            yield torch.device("cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs Triton kernels, so that it can be run apart from the rest."""
    for item in items:
        if "triton_device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.interpreted)
