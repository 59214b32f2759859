"""Give the site of docs/ the pages that lie beside docs/: README as its first one, CONTRIBUTING and so on (mkdocs)."""

import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT: Final = Path(__file__).parent.parent
_BESIDE: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for name, page in _BESIDE.items():
        files.append(File.generated(config, page, content=(_ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links between docs/ and the folder above it to where the pages are on the site."""
    for name, target in _BESIDE.items():
        markdown = markdown.replace(f"](../{name}", f"]({target}").replace(f"]({name}", f"]({target}")
    return re.sub(r"\]\(docs/", "](", markdown)
