"""The HTML document around every view: complete in itself, and forbidden to ask anything of a network (page.html)."""

from __future__ import annotations

import html
from importlib.resources import files
from string import Template


def page(title: str, style: str, body: str) -> str:
    """Return the document; ``title`` is text, ``style`` is CSS and ``body`` is HTML."""
    return Template(asset("page.html")).substitute(title=html.escape(title), style=style, body=body)


def asset(name: str, package: str = "captioning.views") -> str:
    """Return the text of a file in a package."""
    return (files(package) / name).read_text(encoding="utf-8")
