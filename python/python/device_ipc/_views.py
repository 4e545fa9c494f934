"""Mappings whose values are arrays of a framework. The framework imports each region once; an array is a view of its region."""

from __future__ import annotations

import collections.abc
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import _native
from ._errors import NotPermittedError

if TYPE_CHECKING:
    from typing_extensions import Self


class Views(collections.abc.Mapping[str, Any]):
    """A mapping of names to arrays in the memory of another process.

    As a context manager, it releases the memory at the end of the block, in the order of its stream. An array that is still in
    use after the block keeps the memory mapped. Once it is closed, every access raises ``ValueError``.
    """

    # Whether each array counts as a use of the mapping under the name of its tensor.
    _is_counted = False

    def __init__(self, mapping: _native.Mapping) -> None:
        self._mapping = mapping
        self._open: dict[str, Any] | None = self._import(mapping)

    @property
    def _views(self) -> dict[str, Any]:
        views = self._open
        if views is None:
            raise ValueError("the mapping is closed")
        return views

    def _import(self, mapping: _native.Mapping) -> dict[str, Any]:
        """Returns views of all tensors."""
        raise NotImplementedError

    @property
    def mapping(self) -> _native.Mapping:
        """The mapping that the arrays lie in."""
        return self._mapping

    @property
    def tensor(self) -> Any:
        """The array without a name."""
        return self._views[""]

    @property
    def closed(self) -> bool:
        """Whether the mapping was closed."""
        return self._open is None

    def close(self, stream: object | None = None) -> None:
        """Releases the memory, and raises ``GoneError`` where the bytes were never written, as ``Mapping.close`` does."""
        self._open = None
        self._mapping.close(stream)

    def __getitem__(self, name: str) -> Any:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        views = self._open or {}
        # One reference is that of the dictionary, one that of the call.
        kept = [] if self._is_counted else [name for name in views if sys.getrefcount(views[name]) > 2]
        del views
        self.close()
        if exception[0] is None and (kept or (kept := self._mapping._in_use())):
            warn_of_kept(kept)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__} in {self._mapping!r}>"


def warn_of_kept(names: list[str]) -> None:
    """Warns that tensors outlive the block that opened their memory: the exporter waits for them."""
    shown = ", ".join(repr(name) for name in names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    text = (
        f"tensors outlive the block that opened their memory, which stays mapped: {shown}; a variable still names them, such as that "
        "of a loop"
    )
    logging.getLogger("device_ipc").warning(text)
    warnings.warn(text, ResourceWarning, stacklevel=3)


def open_writable(
    framework: str, descriptor: _native.Descriptor | str | bytes, allow_read_only: bool, **options: Any
) -> _native.Mapping:
    """Opens memory for a framework without read-only arrays. Refuses a read-only mapping, unless that is permitted."""
    mapping = _native.open(descriptor, allow_read_only=allow_read_only, **options)
    if mapping.read_only and not allow_read_only:
        mapping.close()
        raise NotPermittedError(
            f"the memory is shared read-only, and {framework} has no read-only tensors: a write would end this process's use of "
            "the device; if no work writes the tensors, pass allow_read_only=True"
        )
    return mapping
