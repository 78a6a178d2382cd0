from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; threads of each would only wait for one another.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, for tests of what depends on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
