"""Fixtures of test_vllm_sleep.py and test_vllm_ranks.py: engines of each version whose weights are in place."""

from collections.abc import Iterator

import pytest

import vllm_engines
from test_vllm import WORKERS
from vllm_engines import Engines

AT_ONCE = 30
"""Seconds on a loaded machine; the limit of the engines' waits is a multiple of that."""


@pytest.fixture(name="processes", scope="module", autouse=True)
def processes_of_a_module() -> Iterator[None]:
    yield
    vllm_engines.end()


@pytest.fixture(name="engines", params=WORKERS)
def engines_of_a_version(request: pytest.FixtureRequest) -> Iterator[Engines]:
    with vllm_engines.engines(request.param) as one:
        yield one
