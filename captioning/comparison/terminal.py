"""A comparison of runs as tables in a terminal."""

import sys

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from captioning.comparison.result import Comparison, Table
from captioning.errors import printable


def print_comparison(comparison: Comparison) -> None:
    """Print verdicts, notices and tables, as wide as the terminal. In a file, the width grows with the runs."""
    console = Console(width=None if sys.stdout.isatty() else 40 + 44 * len(comparison.runs), highlight=False)
    for line in comparison.verdicts.values():
        console.print(Text(f"\n{printable(line)}", style="bold"))
    for line in comparison.notices:
        console.print(Text(f"note: {printable(line)}"), soft_wrap=True)
    for table in comparison.tables:
        if table.rows:
            console.print()
            console.print(_table(table))
            if table.note:
                console.print(Text(printable(table.note), style="dim"))


def _table(table: Table) -> RichTable:
    rich_table = RichTable(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in ("", *table.columns):
        rich_table.add_column(Text(printable(name)), overflow="fold")
    for row in table.rows:
        contents = [Text(("  " if row.is_baseline else "") + printable(row.name))]
        for cell in row.cells:
            contents.append(text := Text(printable(cell.text or "-")))
            if cell.detail:
                text.append(f"  {printable(cell.detail)}", style="dim")
            if cell.change:
                text.append(f"\n{printable(cell.change)}", style="bold" if cell.is_clear else "dim")
        rich_table.add_row(*contents)
    return rich_table
