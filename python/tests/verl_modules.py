"""verl's base class of checkpoint engines and its registry, of the wheel, without the rest of verl and what that imports."""

import abc
import sys
import types
from collections.abc import AsyncGenerator, Generator
from typing import Any

import torch

import frameworks

VERSION = "0.9.1"
NAMES = ["CheckpointEngineRegistry", "CheckpointEngine"]


def install() -> Any:
    """Makes verl.checkpoint_engine.base importable, and returns it."""
    text = frameworks.source("verl", VERSION, "verl/checkpoint_engine/base.py")
    names = dict(ABC=abc.ABC, abstractmethod=abc.abstractmethod, Any=Any, Generator=Generator, AsyncGenerator=AsyncGenerator)
    base: Any = types.ModuleType("verl.checkpoint_engine.base")
    vars(base).update(frameworks.run(frameworks.definitions(text, *NAMES), torch=torch, **names))
    for name in ["verl", "verl.checkpoint_engine"]:
        package = types.ModuleType(name)
        package.__path__ = []
        sys.modules[name] = package
    sys.modules["verl.checkpoint_engine.base"] = base
    return base


def remove() -> None:
    """Undoes ``install``."""
    for name in ["verl", "verl.checkpoint_engine", "verl.checkpoint_engine.base", "device_ipc.verl_backend"]:
        sys.modules.pop(name, None)
