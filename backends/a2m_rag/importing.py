"""Imports what a command line names: an object of the user's module, or a library that is an extra of this package."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from a2m_rag.service import CannotStart, starting


def named(reference: str) -> Any:
    """Return the object at `module:attribute`. The current folder is searched for the module first.

    Raises:
        CannotStart: the module cannot be imported, or has no such attribute.
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise CannotStart(f"{reference!r}: expected MODULE:NAME, such as handbook:search")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found = _module(module_name, here)
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise CannotStart(f"{reference}: there is no {name!r} in {_name_of(found)}") from None
    return found


def _module(name: str, here: str) -> Any:
    with starting(f"{name} cannot be imported"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as problem:
            if problem.name is not None and (name == problem.name or name.startswith(problem.name + ".")):
                raise CannotStart(f"there is no module {problem.name!r}, neither in {here} nor installed") from None
            raise


def _name_of(found: Any) -> str:
    return str(getattr(found, "__name__", type(found).__name__))


def made(reference: str) -> Any:
    """Return the object at a reference; if that is a function or a class, the result of a call without arguments.

    Raises:
        CannotStart: the object cannot be imported, or the call raised an exception.
    """
    found = named(reference)
    if not callable(found) or not (isinstance(found, type) or hasattr(found, "__code__")):
        return found
    with starting(f"the call {reference}() failed"):
        return found()


def library(module: str, extra: str) -> Any:
    """Return a module of an optional library. If it is missing, raises CannotStart with the command to install it."""
    root = module.partition(".")[0]
    if importlib.util.find_spec(root) is None:
        raise CannotStart(f"{root} is not installed; in the folder of a2m-router: pip install '.[{extra}]'")
    with starting(f"{module} cannot be imported"):
        return importlib.import_module(module)
