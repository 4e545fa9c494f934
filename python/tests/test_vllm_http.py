"""The client of vLLM's HTTP server, against a server with the routes of vLLM, and workers in processes of their own."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

import device_ipc.vllm
from test_vllm import TIMEOUT, Engine, engines, processes, start, weights

__all__ = ["engines", "processes"]


class Routes(BaseHTTPRequestHandler):
    """The routes for updates, which pass the payload to the engine, and reply with status 500 where it fails."""

    engine: "Engine"

    def do_POST(self) -> None:
        # Some versions read a body from each request.
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, text = 200, ""
        try:
            if self.path == "/init_weight_transfer_engine":
                self.engine.init_weight_transfer_engine(body["init_info"])
            elif self.path == "/update_weights":
                self.engine.update_weights(body["update_info"])
            else:
                {"/start_weight_update": self.engine.start_weight_update, "/finish_weight_update": self.engine.finish_weight_update}[
                    self.path
                ]()
        except Exception as error:
            status, text = 500, str(error)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def url(engines: "list[Engine]") -> Iterator[str]:
    """Returns the address of a server in this process; the test sets ``Routes.engine``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join(TIMEOUT)
    server.server_close()


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_http_client_sends_weights(bucket_bytes: int, url: str, engines: "list[Engine]") -> None:
    state: "dict[str, Any]" = weights()
    Routes.engine = start(engines, "0.25", state)
    sender = device_ipc.vllm.WeightSender(device_ipc.vllm.HTTPClient(url), bucket_bytes=bucket_bytes)
    for _ in range(2):
        for tensor in state.values():
            tensor.copy_((tensor + 1).to(tensor.dtype))
        sender.send(state.items())
        Routes.engine.check(state)
    sender.close()


def test_http_client_shows_the_reply_of_the_server(url: str, engines: "list[Engine]") -> None:
    state: "dict[str, Any]" = weights()
    Routes.engine = start(engines, "0.25", state)
    Routes.engine.ask("refuse", "layers.1.a")
    sender = device_ipc.vllm.WeightSender(device_ipc.vllm.HTTPClient(url))
    with pytest.raises(RuntimeError, match="POST update_weights: the server replied 500 .*the model refuses 'layers.1.a'"):
        sender.send(state.items())
    sender.send(state.items())
    Routes.engine.check(state)


def test_http_client_without_a_server_fails() -> None:
    client = device_ipc.vllm.HTTPClient("http://127.0.0.1:1")
    with pytest.raises(OSError):
        client.start_weight_update()
