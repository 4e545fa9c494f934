"""The views of a mapping, whose iterators make all tensors in one call."""

from __future__ import annotations

import collections.abc
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._native import Mapping, Tensor


class Values(collections.abc.ValuesView["Tensor"]):
    """The tensors of a mapping, in the exporter's order."""

    __slots__ = ()
    _mapping: Mapping

    def __iter__(self) -> Iterator[Tensor]:
        return iter([tensor for _, tensor in self._mapping._items()])


class Items(collections.abc.ItemsView[str, "Tensor"]):
    """Names and tensors of a mapping, in the exporter's order."""

    __slots__ = ()
    _mapping: Mapping

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._mapping._items())
