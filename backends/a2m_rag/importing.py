"""What a command line names: an object in a module of the user's, or a library that is an extra of this package."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from a2m_rag.service import CannotStart, starting


def named(reference: str) -> Any:
    """The object that `module:attribute` means; modules are looked for in the current folder first.

    Raises CannotStart for what cannot be imported, and for what is not in it.
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
    """What `named` gives, or, where that is a function, what it makes when it is called without arguments.

    Raises CannotStart, also for what the function raises.
    """
    found = named(reference)
    if not callable(found) or not (isinstance(found, type) or hasattr(found, "__code__")):
        return found
    with starting(f"{reference}() cannot make it"):
        return found()


def library(module: str, extra: str) -> Any:
    """A module of a library that is an extra of this package. Raises CannotStart that says how to get it."""
    root = module.partition(".")[0]
    if importlib.util.find_spec(root) is None:
        raise CannotStart(f"{root} is not installed; in the folder of a2m-router: pip install '.[{extra}]'")
    with starting(f"{module} cannot be imported"):
        return importlib.import_module(module)
