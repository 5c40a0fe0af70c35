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
