"""A trainer that ends itself at one point of an update, as a process that is killed does.

``python -m engines.trainer ADDRESS CONFIG SEED MOMENT BUCKET_BYTES``
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, NoReturn

from . import models
from .engine import Engine

MOMENTS = ["before start", "after start", "at the post", "in the source", "after the update", "at finish"]


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Mortal(Engine):
    """A client that dies at a moment."""

    def __init__(self, address: str, moment: str) -> None:
        super().__init__(address)
        self.moment = moment

    def start_weight_update(self) -> None:
        if self.moment == "before start":
            die()
        super().start_weight_update()
        if self.moment == "after start":
            die()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self.moment == "at the post":
            self.post("update_weights", {"update_info": update_info})
            die()
        super().update_weights(update_info)
        if self.moment == "after the update":
            die()

    def finish_weight_update(self) -> None:
        if self.moment == "at finish":
            self.post("finish_weight_update")
            die()
        super().finish_weight_update()


def main() -> None:
    address, config, seed, moment, bucket_bytes = sys.argv[1:]
    import device_ipc.vllm

    state = models.checkpoint(json.loads(config), "cuda")
    models.fill(state, int(seed))

    def source() -> Any:
        for number, pair in enumerate(state.items()):
            if moment == "in the source" and number == len(state) // 2:
                die()
            yield pair

    layout = [device_ipc.vllm._sender.Layout.of(*pair) for pair in state.items()]
    sender = device_ipc.vllm.WeightSender(Mortal(address, moment), bucket_bytes=int(bucket_bytes), timeout=60)
    sender.send(source(), layout)


if __name__ == "__main__":
    main()
