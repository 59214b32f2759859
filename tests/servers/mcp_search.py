"""An MCP server of the official SDK with search tools of many shapes: `mcp_search.py [--http PORT] [--marks FOLDER]`.

It writes to stderr at its start. In FOLDER it leaves a file for each start. `search` misbehaves once for each file
there that has the name of a misbehaviour.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, EmbeddedResource, TextContent, TextResourceContents
from pydantic import Field

PAGES = [
    {"id": "pay", "content": "Expenses are paid on the 15th.", "created_at": "2024-05-01", "score": 0.9},
    {"id": "doors", "content": "The office opens at eight.", "created_at": "2023-11-20", "score": 0.4},
    {"id": "tea", "content": "Tea is in the kitchen.", "score": 0.2},
]

parser = argparse.ArgumentParser()
parser.add_argument("--http", type=int)
parser.add_argument("--marks", type=Path)
options = parser.parse_args()
server = MCPServer("handbook")


def there(mark: str) -> bool:
    """Return whether a mark is there, and remove it."""
    if options.marks is None or not (options.marks / mark).exists():
        return False
    (options.marks / mark).unlink()
    return True


@server.tool()
def search(query: str, limit: int = 5) -> list[dict[str, Any]]:
    """What is structured."""
    if there("die"):
        os._exit(3)
    if there("hang"):
        (options.marks / "hanging").write_bytes(b"")
        time.sleep(10**6)
    if there("print"):
        os.write(2, b"noise on stderr\n")
        print("noise on stdout", flush=True)
    if there("fail"):
        raise ValueError(f"no index for {query}\nand more")
    return PAGES[:limit]


@server.tool()
def echo(text: str, top_k: Annotated[int, Field(ge=2, le=20)] = 5, lang: str = "en") -> list[str]:
    """What it was asked."""
    return [f"{text} {top_k} {lang}"]


@server.tool()
def envelope(q: str) -> dict[str, Any]:
    """A list in an object."""
    return {"hits": PAGES, "took": 3}


@server.tool()
def listed(queries: list[str], collection: str, n: int | None = None) -> list[str]:
    """Arguments that are not named as usual."""
    return [f"{queries} {collection} {n}"]


@server.tool(structured_output=False)
def as_json(query: str) -> str:
    """JSON in one text."""
    return json.dumps({"data": {"hits": [*PAGES, {"content": "long", "n": 1}]}})


@server.tool()
def wrapped_json(query: str) -> str:
    """JSON in one text, which the SDK wraps."""
    return json.dumps(PAGES)


@server.tool(structured_output=False)
def each_json(query: str) -> list[Any]:
    """A text for each page, which is JSON."""
    return [json.dumps(page) for page in PAGES]


@server.tool(structured_output=False)
def texts(query: str) -> list[Any]:
    """A text for each page."""
    return [*(page["content"] for page in PAGES), " \n"]


@server.tool()
def prose(query: str) -> str:
    """One text."""
    return "Expenses are paid on the 15th."


@server.tool()
def nothing(query: str) -> list[str]:
    """Nothing."""
    return []


@server.tool(structured_output=False)
def silent(query: str) -> list[Any]:
    """Not even a text."""
    return []


@server.tool()
def resources(query: str) -> CallToolResult:
    """Texts and resources."""
    page = TextResourceContents(uri="file:///handbook.md", text="Tea is in the kitchen.")
    return CallToolResult(
        content=[TextContent(type="text", text="Two pages:"), EmbeddedResource(type="resource", resource=page)]
    )


if options.marks is not None:
    (options.marks / f"started-{os.getpid()}").touch()
print("the handbook starts", file=sys.stderr, flush=True)
if options.http is None:
    server.run("stdio")
else:
    server.run("streamable-http", host="127.0.0.1", port=options.http)
