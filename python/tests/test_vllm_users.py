"""Engines of another user than the keeper's: its list decides who may read its weights, and no other user may publish."""

import os
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

import device_ipc.vllm
import vllm_engines
from test_vllm import WORKERS, weights

NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start an engine of another user")


@pytest.mark.parametrize("version", WORKERS)
def test_engine_of_another_user_reads_where_the_keeper_lists_it(version: str) -> None:
    source = f"keeper:0/users-{os.getpid()}"
    with vllm_engines.engines(version, f"users-{os.getpid()}") as engines:
        own = engines.start("own", publish=True)
        with pytest.raises(RuntimeError, match=f"NotPermittedError: .*does not allow user {NOBODY}"):
            engines.start("other", user=NOBODY, source=source, timeout=20.0)
    with vllm_engines.engines(version, f"users-{os.getpid()}", allow_users=[NOBODY]) as engines:
        own = engines.start("own", publish=True)
        with pytest.raises(RuntimeError, match=f"NotPermittedError: .*does not allow user {NOBODY}"):
            engines.start("publisher", user=NOBODY, source=source, timeout=20.0, publish=True)
        other = engines.start("other", user=NOBODY, source=source)
        assert other.ask("digests") == own.ask("digests") and engines.readers() == 2
        # Its trainers are those of its user.
        with pytest.raises(RuntimeError, match="NotPermittedError: .*served by user 0"):
            device_ipc.vllm.WeightSender(other).send(weights().items())
        state = weights()
        for tensor in state.values():
            tensor.fill_(5)
        sender = device_ipc.vllm.WeightSender(own, timeout=vllm_engines.TIMEOUT)
        sender.send(state.items())
        for engine in (own, other):
            device_ipc.vllm.follow(engine)
        other.ask("sleep", 1)
        other.ask("wake_up", None)
        assert other.ask("digests") == own.ask("digests") and engines.readers() == 2
        sender.close()
