"""What the backends state for frameworks. Loads no driver."""

from __future__ import annotations

import functools

from . import _native

# DLDeviceType: memory of the host, and of devices that PyTorch has an extension for.
HOST = 1
EXTENSION = 12


@functools.cache
def _kinds() -> dict[str, str]:
    """Returns PyTorch's name of the kind of device of each backend."""
    return {name: "cpu" if number == HOST else kind for name, kind, number in _native._backends()}


def kind(backend: str) -> str:
    """Returns PyTorch's name of the kind of device of a backend."""
    return _kinds()[backend]


def kinds() -> list[str]:
    """Returns PyTorch's names of the kinds of devices of all backends, once each."""
    return list(dict.fromkeys(_kinds().values()))


def of(kind: str) -> str | None:
    """Returns the backend for a kind of device, or None for the host's."""
    return None if kind == "cpu" else next((name for name, known in _kinds().items() if known == kind), None)


def is_host(device: str) -> bool:
    """Returns whether the memory of a device, such as ``"mock:0"``, is that of the host."""
    name = device.partition(":")[0]
    return any(name in (backend, kind) and number == HOST for backend, kind, number in _native._backends())
