"""A client of vLLM's HTTP server, for trainers that have none of vLLM's: it needs the standard library alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

BODY_LIMIT = 4096
"""The number of bytes of an error's body that an exception shows at most."""


class HTTPClient:
    """A client of one vLLM server, of any version, that was started with ``VLLM_SERVER_DEV_MODE=1``, for ``WeightSender``.

    ``url`` is that of the server, such as ``"http://localhost:8000"``. ``timeout`` limits each request, in seconds; an update is one
    request. Each method raises ``RuntimeError`` with the reply of the server if it refuses the request, and ``OSError`` if it cannot be
    reached.
    """

    def __init__(self, url: str, timeout: float = 300.0) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Asks the workers whether they can receive. ``init_info`` is the payload. Raises as the class states."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begins an update."""
        self._post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Passes the payload ``update_info`` to the workers, and waits until they have loaded it. Raises as the class states."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        """Ends the update."""
        self._post("finish_weight_update", {})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/{path}", json.dumps(body).encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as reply:
                reply.read()
        except urllib.error.HTTPError as error:
            text = error.read(BODY_LIMIT).decode(errors="replace")
            raise RuntimeError(f"POST {path}: the server replied {error.code} {error.reason}: {text}") from None
