"""The identity of the processed weights of one rank of an engine: what has to be equal so that another engine can use them.

Processed weights are fused, cut and quantised for one engine. Their names and shapes may be equal where their bytes mean something else, so
engines compare manifests before they open memory.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .._errors import LayoutError

LIMIT = 1 << 20
"""The number of characters of a manifest that is read."""


@dataclass(frozen=True)
class Manifest:
    """What determines the bytes of the processed weights of one rank."""

    model: str
    revision: str | None
    dtype: str
    quantization: str | None
    """The method; its parameters belong to ``further``."""
    tensor_parallel_size: int
    pipeline_parallel_size: int
    expert_parallel: bool
    rank: int
    vllm: str
    """The version of vLLM."""
    architecture: str
    """The device's, such as ``"sm_90"``: kernels choose layouts by it."""
    further: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    """Scalars that the processing has left in Python, such as scales, by their names in the model."""

    @classmethod
    def of(cls, vllm_config: Any, version: str, architecture: str, further: dict[str, Any] | None = None) -> Manifest:
        """Returns the manifest of a rank with vLLM's configuration."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        return cls(
            model=str(model.model),
            revision=model.revision,
            dtype=str(model.dtype).removeprefix("torch."),
            quantization=None if model.quantization is None else str(model.quantization),
            tensor_parallel_size=int(parallel.tensor_parallel_size),
            pipeline_parallel_size=int(parallel.pipeline_parallel_size),
            expert_parallel=bool(parallel.enable_expert_parallel),
            rank=int(parallel.rank) % (int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)),
            vllm=version,
            architecture=architecture,
            further=dict(further or {}),
        )

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Returns the manifest that ``str`` has written. Raises ``LayoutError`` if another program has written the text."""
        try:
            if len(text) > LIMIT:
                raise ValueError(f"it has {len(text)} characters, more than {LIMIT}")
            values = json.loads(text, parse_constant=_refuse)
            if not isinstance(values, dict):
                raise ValueError("it is not an object")
            manifest = cls(**values)
            for one in fields(cls):
                _check(one.name, str(one.type), getattr(manifest, one.name))
        except (TypeError, ValueError, RecursionError) as error:
            raise LayoutError(f"the text is not a manifest: {error}") from None
        return manifest

    def __str__(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)

    def check(self, kept: Manifest) -> None:
        """Raises ``LayoutError``, which names the first difference, if kept weights are not those of this manifest."""
        here, there = self._scalars(), kept._scalars()
        for name in {**here, **there}:
            needed, found = here.get(name, "absent"), there.get(name, "absent")
            if needed != found:
                raise LayoutError(
                    f"the kept weights have another {name} than this engine: {found}, and not {needed}; "
                    "keep the weights of this configuration under another name"
                )

    def _scalars(self) -> dict[str, str]:
        """Returns the values as JSON, in which 1, 1.0 and true differ."""
        values = asdict(self)
        further = {f"further[{name!r}]": value for name, value in sorted(values.pop("further").items())}
        return {name: json.dumps(value) for name, value in {**values, **further}.items()}


_TYPES: dict[str, list[type]] = {"str": [str], "str | None": [str, type(None)], "int": [int], "bool": [bool]}
"""The permitted types of an annotation: a truth value is no number."""


def _refuse(constant: str) -> None:
    raise ValueError(f"it contains {constant}")


def _check(name: str, kind: str, value: Any) -> None:
    """Checks the type of a value, which an annotation names."""
    if name == "further":
        if not isinstance(value, dict):
            raise ValueError("further is not an object")
        wrong = [key for key, one in value.items() if not (one is None or isinstance(one, (str, bool, int)) or _is_finite(one))]
        if wrong:
            raise ValueError(f"further[{wrong[0]!r}] is neither a text nor a number")
    elif type(value) not in _TYPES[kind]:
        raise ValueError(f"{name} has the type {type(value).__name__}, and not {kind}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
