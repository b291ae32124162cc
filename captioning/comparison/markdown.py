"""A table of a comparison as Markdown, for reports and for pages of the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from captioning.comparison.result import Cell, Table


def markdown(table: Table, columns: Sequence[str], corner: str = "") -> str:
    """Return a table as Markdown, with its note below. The best cells, or the clear differences, are bold.

    Args:
        table: The table.
        columns: The names of its columns.
        corner: What stands above the names of the rows.
    """

    def content(cell: Cell) -> str:
        text = f"**{cell.text}**" if cell.best else cell.text or "-"
        return ", ".join(_escaped(line) for line in (text, cell.detail, cell.change) if line)

    lines = [[_escaped(name) for name in (corner, *columns)], ["---"] * (len(columns) + 1)]
    lines += [[_escaped(row.name), *map(content, row.cells)] for row in table.rows]
    drawn = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{drawn}\n\n{table.note}" if table.note else drawn


def _escaped(text: str) -> str:
    """Return text that does not end the cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")
