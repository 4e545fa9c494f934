"""The processes and the deadline of each test on a GPU."""

import signal
from collections.abc import Iterator

import pytest

from gpu.peer import Peer


@pytest.fixture(autouse=True)
def deadline_of_a_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends a test that hangs, also in a wait that holds the interpreter lock. A module may have a `DEADLINE`, in seconds."""
    signal.alarm(getattr(request.module, "DEADLINE", 120))
    yield
    signal.alarm(0)


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selects CUDA: the tests around these run on the mock."""
    monkeypatch.setenv("DEVICE_IPC_BACKEND", "cuda")


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A process for one test."""
    started = Peer()
    yield started
    started.kill()


@pytest.fixture
def other() -> Iterator[Peer]:
    """Another process for one test."""
    started = Peer()
    yield started
    started.kill()
