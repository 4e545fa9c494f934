"""Share accelerator memory between processes, without copies.

``share`` and ``open`` take and give tensors of any framework that speaks DLPack. Importing this package loads no driver,
creates no context and starts no thread.
"""

from __future__ import annotations

import collections.abc

# The extension module refers to them. A process that has changed its user or its root may not be able to import them later.
from . import _logging as _logging
from . import _mapping as _mapping
from ._errors import (
    BackendError,
    DescriptorError,
    Error,
    ForkedError,
    GoneError,
    HolderDiedError,
    LayoutError,
    NoSuchTensorError,
    NotPermittedError,
    OutOfMemoryError,
    PlacementError,
    StaleError,
    StillHeldError,
    UnsupportedError,
)
from ._errors import TimeoutError as TimeoutError
from ._native import (
    Changes,
    Channel,
    Descriptor,
    Device,
    Export,
    Grant,
    Holder,
    Keeper,
    Listener,
    Mapping,
    ReaderPosition,
    Received,
    ReceivedExport,
    Reservation,
    Ring,
    RingReader,
    RingReaders,
    RingReadSlot,
    RingWriteSlot,
    Stream,
    Tensor,
    Timeline,
    __version__,
    available,
    close_unused,
    connect,
    counters,
    devices,
    empty,
    enable_remote,
    join,
    keep,
    list_exports,
    listen,
    pull_into,
    share,
    shutdown,
)

from ._native import open as open

collections.abc.Mapping.register(Mapping)

# Without `TimeoutError` and `open`: an import of all names shadows no built-in one.
__all__ = [
    "BackendError",
    "Changes",
    "Channel",
    "Descriptor",
    "DescriptorError",
    "Device",
    "Error",
    "Export",
    "ForkedError",
    "GoneError",
    "Grant",
    "Holder",
    "HolderDiedError",
    "Keeper",
    "LayoutError",
    "Listener",
    "Mapping",
    "NoSuchTensorError",
    "NotPermittedError",
    "OutOfMemoryError",
    "PlacementError",
    "ReaderPosition",
    "Received",
    "ReceivedExport",
    "Reservation",
    "Ring",
    "RingReadSlot",
    "RingReader",
    "RingReaders",
    "RingWriteSlot",
    "StaleError",
    "StillHeldError",
    "Stream",
    "Tensor",
    "Timeline",
    "UnsupportedError",
    "__version__",
    "available",
    "close_unused",
    "connect",
    "counters",
    "devices",
    "empty",
    "enable_remote",
    "join",
    "keep",
    "list_exports",
    "listen",
    "pull_into",
    "share",
    "shutdown",
]
