"""What the site has beside the pages of docs/: files of the repository that pages link to, and notebooks as pages.

Links in the sources lead to files of the repository, so that they work there too; here they are turned into links of
the site.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
HOME = {"README.md": "index.md"}  # whose text is another
PLACES = {  # path in the repository -> page of the site
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changes.md",
    "benchmarks/results/bench.md": "measured/bench.md",
    "benchmarks/results/peers.md": "measured/peers.md",
}
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that do not lie in docs/."""
    for path, place in PLACES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    for notebook in NOTEBOOKS:
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=notebook_page(notebook)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files of the repository into links of the site."""
    here = page.file.src_uri
    origin = next((path for path, place in PLACES.items() if place == here), f"docs/{here}")

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link[1]))
        place = (HOME | PLACES).get(path, path.removeprefix("docs/"))
        if (ROOT / "docs" / "notebooks" / posixpath.basename(place)) in NOTEBOOKS:
            place = place.replace(".ipynb", ".md")
        return f"]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{link[2] or ''})"

    return re.sub(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)", moved, markdown)


def notebook_page(path: Path) -> str:
    """A notebook's text and code as Markdown."""
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    download = f'<a href="{path.name}" download>download it</a>'
    parts.insert(1, f"*This page is a notebook: {download} and run it with Jupyter.*")
    return "\n\n".join(parts) + "\n"
