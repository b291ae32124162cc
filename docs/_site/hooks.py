"""Adds to the site what docs/ lacks: pages made of other files (PAGES), the reference, the notebook, formulas.

Pages link to files of the repository, so that links also work on GitHub. On the site, a link to a file outside of docs/
leads to the page made of that file: of a module to its reference, of any other file to a copy. A formula
between dollar signs, or in a block of ``math``, which GitHub renders, becomes an outline drawn by matplotlib.
"""

import base64
import html
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "data/README.md": "data.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "captioning/pretrained/photos_lite2/README.md": "pretrained.md",
}
NOTEBOOK = "notebooks/caption_and_look.ipynb"
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
_COMMANDS = dict(zip((Outline.MOVETO, Outline.LINETO, Outline.CURVE3, Outline.CURVE4), "MLQC", strict=True))
_FORMULA = re.compile(  # a block of math; code, which stays; a formula within a line
    r"^```math\n(?P<block>.*?)\n```$|^ *```.*?^ *```$|`[^`\n]+`|"
    r"(?<![\\\w$])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$])?)\$(?!\w)",
    re.DOTALL | re.MULTILINE,
)


def on_files(files: Files, *, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    notebook = json.loads((ROOT / "docs" / NOTEBOOK).read_text(encoding="utf-8"))
    page, pictures = notebook_page(notebook)
    files.append(File.generated(config, NOTEBOOK.replace(".ipynb", ".md"), content=page))
    for name, picture in pictures.items():
        files.append(File.generated(config, f"{posixpath.dirname(NOTEBOOK)}/{name}", content=picture))
    for target in sorted(set(_outgoing(files))):
        page = _site_path(target)
        if page.startswith("reference/"):
            module = target.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            files.append(File.generated(config, page, content=f"# {module}\n\n::: {module}\n"))
        else:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    here = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        target = _target(here, link[1])
        return link[1] if target is None else posixpath.relpath(_site_path(target), posixpath.dirname(here) or ".")

    return _LINK.sub(moved, _FORMULA.sub(_with_picture, markdown))


def _with_picture(match: re.Match[str]) -> str:
    """Return the picture of a formula, as high as the text around it, and code unchanged."""
    if match["inline"]:
        return _picture(match["inline"])
    return f'<p class="formula">{_picture(match["block"])}</p>' if match["block"] else match[0]


def _picture(formula: str) -> str:
    size, text = FontProperties(size=100, math_fontfamily="cm"), f"${formula}$"
    width, height, depth, *_ = MathTextParser("path").parse(text, dpi=72, prop=size)
    outline = "".join(
        _COMMANDS[code] + " ".join(f"{number:.0f}" for number in points)
        for points, code in TextPath((0, 0), text, prop=size).iter_segments(simplify=False)
        if code in _COMMANDS  # a fill closes itself
    )
    style = f"width: {width / 100}em; height: {height / 100}em; vertical-align: {-depth / 100}em"
    return (
        f'<svg role="img" aria-label="{html.escape(formula)}" style="{style}" viewBox="0 0 {width:.0f} {height:.0f}">'
        f'<path fill="currentColor" transform="matrix(1 0 0 -1 0 {height - depth:.0f})" d="{outline}"/></svg>'
    )


def notebook_page(notebook: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """Return a notebook's cells and outputs as Markdown, and its pictures by their names in the Markdown."""
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text'])}```")
            for kind, data in output.get("data", {}).items():
                if kind.startswith("image/"):
                    name = f"output-{len(pictures) + 1}.{kind.removeprefix('image/')}"
                    pictures[name] = base64.b64decode(data)
                    parts.append(f"![what the cell draws]({name})")
    return "\n\n".join(parts) + "\n", pictures


def _outgoing(files: Files) -> Iterator[str]:
    """Yield the linked files that the site lacks, as paths from the repository's root."""
    for file in list(files.documentation_pages()):
        for link in _LINK.findall(file.content_string):
            target = _target(file.src_uri, link)
            if target is not None and target not in PAGES and not target.startswith("docs/"):
                yield target


def _target(page: str, link: str) -> str | None:
    """Return the file that a page of the site links to; None for an address, and for a file that is not there."""
    if "://" in link or link.startswith("mailto:"):
        return None
    source = next((source for source, made in PAGES.items() if made == page), f"docs/{page}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return target if (ROOT / target).is_file() else None


def _site_path(target: str) -> str:
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target.startswith("captioning/") and not target.startswith("captioning/pretrained/"):
        return "reference/" + target.removeprefix("captioning/").removesuffix(".py").removesuffix("/__init__") + ".md"
    return f"repository/{target}"
