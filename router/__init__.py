"""a2m-router: the federated memory of AI agents."""

from importlib.metadata import version

__version__ = version("a2m-router")
