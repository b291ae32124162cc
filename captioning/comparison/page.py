"""Runs side by side, in one HTML file that needs nothing else: verdict, scores, where they look, curves, settings.

The page's body is page.html, its style page.css; page.js reads values off the curves.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from string import Template

from captioning.comparison.charts import interval_bar, line_chart
from captioning.comparison.result import Cell, Comparison, Disagreement, Table, metric_title
from captioning.views.page import asset, page

# Okabe and Ito's colours, told apart by colour-blind readers; further runs begin anew with a dashed line.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")

_OPEN_CHARTS = 6  # the others are folded away


def comparison_page(comparison: Comparison, *, explorer: str = "", footer: Sequence[str] = ()) -> str:
    """Return a complete HTML document that opens from disk and asks nothing of a network.

    Args:
        comparison: what to show.
        explorer: ``explorer_fragment`` of the images where the runs disagree; each image's name is its id. Without it
            the captions stand there as text.
        footer: lines about where the page comes from.
    """
    sections = [
        _section("Result", _verdicts(comparison) + _notices(comparison)),
        _tables(comparison),
        _disagreements(comparison, explorer),
        _curves(comparison),
        _section(comparison.settings.title, _settings(comparison.settings, comparison.runs)),
    ]
    body = Template(asset("page.html", __package__)).substitute(
        runs=_legend(comparison.runs),
        sections="\n".join(section for section in sections if section),
        footer="".join(f"<p>{html.escape(line)}</p>" for line in footer),
        script=asset("page.js", __package__),
    )
    return page(" · ".join(comparison.runs), asset("page.css", __package__), body)


def color_of(number: int) -> str:
    """Return the colour of the run at this place, from 0."""
    return COLORS[number % len(COLORS)]


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{html.escape(title)}</h2>\n{content}\n</section>" if content else ""


def _chip(number: int, name: str) -> str:
    return f'<span class="chip" style="--run: {color_of(number)}">{html.escape(name)}</span>'


def _legend(runs: Sequence[str]) -> str:
    return "".join(_chip(number, name) for number, name in enumerate(runs))


def _verdicts(comparison: Comparison) -> str:
    lines = []
    for verdict, (run, tests) in zip(comparison.verdicts, comparison.tests.items(), strict=False):
        clear = "clear" if tests[comparison.metric].clear else "open"
        lines.append(
            f'<p class="verdict {clear}" style="--run: {color_of(comparison.runs.index(run))}">'
            f"{html.escape(verdict)}</p>"
        )
    return "\n".join(lines)


def _notices(comparison: Comparison) -> str:
    return "\n".join(f'<p class="notice">{html.escape(notice)}</p>' for notice in comparison.notices)


def _tables(comparison: Comparison) -> str:
    """Side by side where there is room."""
    sections = [_section(table.title, _table(table, comparison.runs)) for table in comparison.tables]
    return f'<div class="tables">{"".join(sections)}</div>'


def _table(table: Table, runs: Sequence[str]) -> str:
    header = "".join(f'<th scope="col">{_chip(number, name)}</th>' for number, name in enumerate(runs))
    rows = []
    for row in table.rows:
        bounds = [end for cell in row.cells if cell.between is not None for end in cell.between]
        cells = "".join(_cell(cell, bounds, color_of(number)) for number, cell in enumerate(row.cells))
        kind = ' class="baseline"' if row.baseline else ""
        rows.append(f'<tr{kind}><th scope="row">{html.escape(row.name)}</th>{cells}</tr>')
    note = f'<p class="note">{html.escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr><td></td>{header}</tr></thead>\n'
        f"<tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


def _cell(cell: Cell, bounds: Sequence[float], color: str) -> str:
    if not cell.text:
        return '<td class="none">&ndash;</td>'
    parts = [f"<b>{html.escape(cell.text)}</b>" if cell.best else html.escape(cell.text)]
    if cell.between is not None and cell.value is not None:
        parts.append(interval_bar(cell.value, cell.between, (min(bounds), max(bounds)), color))
    if cell.detail:
        parts.append(f'<span class="detail">{html.escape(cell.detail)}</span>')
    if cell.change:
        parts.append(f'<span class="change{" clear" if cell.clear else ""}">{html.escape(cell.change)}</span>')
    return f"<td>{''.join(parts)}</td>"


def _settings(table: Table, runs: Sequence[str]) -> str:
    if not table.rows:
        return f'<p class="note">{html.escape(table.note or "None.")}</p>'
    return _table(table, runs)


def _curves(comparison: Comparison) -> str:
    drawn = []
    for key, curves in comparison.curves.items():
        numbers = {name: comparison.runs.index(name) for name in curves}
        chart = line_chart(
            key,
            curves,
            colors={name: color_of(number) for name, number in numbers.items()},
            dashed={name for name, number in numbers.items() if number >= len(COLORS)},
        )
        drawn.append(f"<figure><figcaption>{html.escape(key)}</figcaption>{chart}</figure>")
    if not drawn:
        return ""
    content = f'<div class="charts">{"".join(drawn[:_OPEN_CHARTS])}</div>'
    if rest := drawn[_OPEN_CHARTS:]:
        more = f'<summary>{len(rest)} more</summary><div class="charts">{"".join(rest)}</div>'
        content += f'<details class="more">{more}</details>'
    return _section("Curves over optimizer steps", content)


def _disagreements(comparison: Comparison, explorer: str) -> str:
    if not comparison.disagreements:
        return ""
    note = (
        f'<p class="note">The images with the largest difference of the sentence {metric_title(comparison.metric)} '
        "(smoothed by adding one to the counts of longer n-grams).</p>"
    )
    cases = "".join(_case(item, comparison.runs, linked=bool(explorer)) for item in comparison.disagreements)
    texts = f'<ol class="cases">{cases}</ol>'
    if explorer:
        summary = "<summary>The same captions as text, with references</summary>"
        texts = f'<details class="more">{summary}{texts}</details>'
    return _section("Where the runs disagree most", f"{note}{explorer}{texts}")


def _case(item: Disagreement, runs: Sequence[str], *, linked: bool) -> str:
    name = html.escape(str(item.image_id))
    heading = f'<button type="button" data-explore="{name}">Image {name}</button>' if linked else f"Image {name}"
    known = {word for reference in item.references for word in reference.split()}
    told = "".join(
        f'<p>{_chip(runs.index(run), run)} <span class="score">{item.scores[run]:.1f}</span> '
        f"{_marked(caption.split(), known)}</p>"
        for run, caption in item.captions.items()
    )
    references = "".join(f"<li>{html.escape(reference)}</li>" for reference in item.references)
    return f"<li><h3>{heading}</h3>{told}<ul>{references}</ul></li>"


def _marked(words: Iterable[str], known: set[str]) -> str:
    """The caption, with a mark at words that nobody used for the image."""
    return " ".join(
        html.escape(word) if word in known else f'<span class="alone">{html.escape(word)}</span>' for word in words
    )
