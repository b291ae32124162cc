"""The tables of captions and of grounding: every metric with its interval, and the test against the first run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from captioning.comparison.measures import Measure
from captioning.comparison.result import Cell, Comparison, Row, Table
from captioning.comparison.verdicts import ONE_SEED
from captioning.evaluation.resampling import LEVEL, Difference, Floats, Interval, differences, holm, intervals

CORRECTED = (
    " Bold: interval and test agree on a difference. The p-values are corrected for the tests in this table (Holm); "
    "the intervals are not."
)
_GROUNDING = (
    "Over the nouns that name an object with a known mask, percent. Pointing accuracy: the strongest location "
    "touches the object; attention correctness: the fraction of attention on it. Beneath each: what attention "
    "that ignores the caption gets at the same nouns."
)


class ScoreTables:
    """Adds tables to a comparison, with intervals and tests by the same resampled images.

    Args:
        result: The comparison.
        compared: The runs that are tested against the first one by one.
        resamples: Number of times that the images are drawn again.
        seed: Seed of the resampling.
    """

    def __init__(self, result: Comparison, compared: Sequence[str], *, resamples: int, seed: int) -> None:
        self.result, self.compared, self.resamples, self.seed = result, compared, resamples, seed

    def add_captions(self, measures: Sequence[Measure]) -> None:
        images = f"{self.result.images} images" if self.result.images else "each run's own images"
        change = (
            " and the difference from the first run with its 95 % interval (paired bootstrap) "
            "and p-value (randomization test)"
        )
        note = (
            "Percent; BLEU with brevity penalty, CIDEr-D times 100. Below each score its 95 % interval (bootstrap over "
            f"images){change * bool(self.compared)}, {self.resamples} resamples."
        )
        self._add(measures, f"Captions of {images}", note)
        bleu = measures[0].counts
        ratios = [_length_ratio(bleu[run]) if run in bleu else None for run in self.result.runs]
        row = Row("Words per reference word", [Cell.plain(ratio, "{:.3f}") for ratio in ratios])
        self.result.tables[-1].rows.append(row)

    def add_grounding(self, measures: Sequence[Measure]) -> None:
        self._add(measures, "Grounding", _GROUNDING)

    def _add(self, measures: Sequence[Measure], title: str, note: str) -> None:
        """Add a table, and the intervals and tests behind it. The tests are corrected for their number."""
        first = self.result.runs[0]
        tests: dict[tuple[str, str], Difference] = {}
        for measure in [measure for measure in measures if first in measure.counts and not measure.baseline]:
            for run in [run for run in self.compared if run in measure.counts]:
                counts = measure.counts[first], measure.counts[run]
                tested = differences(*counts, measure.values, resamples=self.resamples, seed=self.seed)
                tests |= {(run, key): test for key, test in zip(measure.keys, tested, strict=True)}
        for (run, key), corrected in zip(tests, holm(list(tests.values())), strict=True):
            self.result.tests.setdefault(run, {})[key] = corrected
        if len(tests) / (self.resamples + 1) >= LEVEL:
            self.result.notices.append(
                f"{self.resamples} resamples are too few for {len(tests)} tests: no corrected p-value can be below "
                f"{LEVEL}; take at least {round(len(tests) / LEVEL)}."
            )
        rows = [row for measure in measures for row in self._rows(measure)]
        note += f"{CORRECTED} The tests are over images; {ONE_SEED}." * bool(tests)
        self.result.tables.append(Table(title, rows, note))

    def _rows(self, measure: Measure) -> Iterator[Row]:
        if measure.baseline:
            values = {run: float(measure.values(counts.sum(axis=0))) for run, counts in measure.counts.items()}
            cells = [Cell.plain(values.get(run), "{:.1f}") for run in self.result.runs]
            yield Row(measure.titles[0], cells, baseline=True)
            return
        for run, counts in measure.counts.items():
            found = intervals(counts, measure.values, resamples=self.resamples, seed=self.seed)
            for key, ends in zip(measure.keys, found.reshape(3, -1).T, strict=True):
                self.result.scores.setdefault(run, {})[key] = Interval(*map(float, ends))
        for key, title in zip(measure.keys, measure.titles, strict=True):
            yield Row(title, [self._cell(measure, key, run) for run in self.result.runs])

    def _cell(self, measure: Measure, key: str, run: str) -> Cell:
        interval = self.result.scores.get(run, {}).get(key)
        if interval is None:
            return Cell("")
        of = f", {int(measure.counts[run][:, 1].sum())} {measure.unit}" if measure.unit else ""
        detail = f"{interval.low:.1f} to {interval.high:.1f}{of}"
        return Cell.measured(interval.value, detail, self.result.tests.get(run, {}).get(key))


def _length_ratio(counts: Floats) -> float | None:
    hypothesis, reference = counts[:, -2:].sum(axis=0)
    return float(hypothesis / reference) if reference else None
