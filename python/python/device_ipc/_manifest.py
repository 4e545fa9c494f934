"""The identity of the processed weights of one rank of an engine: what has to be equal so that another engine can use them.

Processed weights are fused, cut and quantised for one engine. Their names and shapes may be equal where their bytes mean something else, so
engines compare manifests before they open memory. Each kind of engine has a subclass, which adds what only its weights depend on.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ._errors import LayoutError

if TYPE_CHECKING:
    from typing_extensions import Self

IN_PLACE = "device_ipc_weights"
"""The name of a model's attribute that holds the mapping of the parameters, if they are a keeper's memory."""


@dataclass(frozen=True)
class Manifest:
    """What determines the bytes of the processed weights of one rank, for all kinds of engines."""

    model: str
    revision: str | None
    dtype: str
    quantization: str | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    rank: int
    device: str
    """The name of the kind of device: kernels choose layouts by it."""
    config: str
    """A digest of the model's ``config.json``, with what the command line changes of it."""

    @property
    def ranks(self) -> int:
        """The number of ranks of an engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @classmethod
    def parse(cls, values: Any) -> Self:
        """Returns the manifest that ``asdict`` has made the values of. Raises ``LayoutError`` for other values."""
        try:
            manifest = cls(**values)
        except TypeError as error:
            raise LayoutError(f"this is not a manifest: {error}") from None
        for one in fields(cls):
            if type(value := getattr(manifest, one.name)) not in _TYPES[str(one.type)]:
                raise LayoutError(f"this is not a manifest: {one.name} has the type {type(value).__name__}, and not {one.type}")
        return manifest

    def check(self, kept: Manifest) -> None:
        """Raises ``LayoutError``, which names the first difference, if kept weights are not those of this manifest."""
        there = asdict(kept)
        for name, needed in asdict(self).items():
            if needed != there[name]:
                raise LayoutError(
                    f"the kept weights have another {name} than this engine: {there[name]!r}, and not {needed!r}; "
                    "keep the weights of this configuration under another name"
                )


_TYPES: dict[str, list[type]] = {"str": [str], "str | None": [str, type(None)], "int": [int], "bool": [bool]}
"""The permitted types of an annotation: a truth value is no number."""


_NOT_OF_WEIGHTS = ("_name_or_path", "transformers_version")


def digest(config: Any) -> str:
    """Returns a digest of the configuration of transformers for a model."""
    values = {name: value for name, value in config.to_dict().items() if name not in _NOT_OF_WEIGHTS}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]
