"""Verdicts, tables and charts of a comparison are true of its captions; no text can break out of the page's HTML."""

import base64
import dataclasses
import html
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers_runs import captioned_image, make_captions, run_of

from captioning.cli.compare import compare
from captioning.comparison.compare import compare_runs
from captioning.comparison.page import _line_chart, comparison_page
from captioning.comparison.result import ONE_SEED, Comparison, TableCell, conclusion
from captioning.errors import InputError
from captioning.metrics.resampling import Difference, Interval, holm
from captioning.metrics.table import caption_metrics

ROOT = Path(__file__).resolve().parent.parent


def cells(comparison: Comparison, title: str, row: str) -> list[TableCell]:
    (table,) = [table for table in comparison.tables if table.title.startswith(title)]
    return next(line.cells for line in table.rows if line.name == row)


def numbers(cell: TableCell) -> list[float]:
    return [float(text) for text in re.findall(r"-?\d+\.\d+", f"{cell.text} {cell.detail} {cell.change}")]


@pytest.fixture(scope="module")
def pair() -> Comparison:
    soft, hard = run_of("soft", make_captions(40, 0.5)), run_of("hard", make_captions(40, 0.8, seed=1))
    return compare_runs([soft, hard], resamples=200)


def metrics_of(images) -> dict[str, float]:
    references = [[reference.split() for reference in image.references] for image in images]
    return caption_metrics([image.caption.split() for image in images], references, meteor=False)


def test_metrics_are_corpus_bleu_with_interval_and_difference(pair):
    expected = [metrics_of(make_captions(40, skill, seed=i).values()) for i, skill in enumerate((0.5, 0.8))]
    for n in range(1, 5):
        soft, hard = cells(pair, "Captions of 40 images", f"BLEU-{n}")
        assert soft.text == f"{expected[0][f'bleu{n}']:.2f}"
        value, low, high, change, change_low, change_high, p_value = numbers(hard)
        assert value == pytest.approx(expected[1][f"bleu{n}"], abs=0.005)
        assert low < value < high
        assert change == pytest.approx(expected[1][f"bleu{n}"] - expected[0][f"bleu{n}"], abs=0.006)
        assert 0 < change_low < change < change_high and p_value < 0.05
        assert hard.is_clear and soft.change == ""


def test_the_verdict_on_one_seed_each_gives_numbers_and_no_conclusion(pair):
    verdict = pair.verdicts["hard"]
    values = [pair.intervals[run]["bleu4"].value for run in ("hard", "soft")]
    assert verdict.startswith("BLEU-4: hard {:.1f}, soft {:.1f} on these 40 images, +".format(*values))
    assert verdict.endswith("; one seed each, so nothing follows about the method.")
    assert conclusion(pair.tests["hard"]["bleu4"]) == "Clear difference"
    runs = [run_of("a", make_captions(9, 0.6)), run_of("b", make_captions(9, 0.6, seed=2))]
    other = compare_runs(runs, metric="bleu1", resamples=200)
    assert other.verdicts["b"].startswith("BLEU-1: b ")
    same = compare_runs([run_of("a", make_captions(9)), run_of("b", make_captions(9))], resamples=20)
    value = same.intervals["a"]["bleu4"].value
    assert same.verdicts["b"] == (
        f"BLEU-4: b {value:.1f}, a {value:.1f} on these 9 images, equal (+0.00 to +0.00), p = 1.000; {ONE_SEED}."
    )
    assert {cell.change for cell in cells(same, "Captions", "BLEU-4")} == {"", "equal (+0.00 to +0.00), p = 1.000"}
    assert same.disagreements == []


@pytest.mark.parametrize(
    ("low", "corrected", "expected"),
    [
        (0.5, 0.01, "Clear difference"),
        (0.5, 0.2, "Weak evidence of a difference (interval and test disagree)"),
        (-0.5, 0.01, "Weak evidence of a difference (interval and test disagree)"),
        (-0.5, 0.2, "No clear difference"),
    ],
)
def test_a_difference_is_clear_if_interval_and_test_agree(low, corrected, expected):
    assert conclusion(Difference(Interval(1.0, low, 2.5), corrected, corrected)) == expected


def test_p_values_are_corrected_for_all_tests_of_a_table():
    runs = [run_of(name, make_captions(30, 0.5 + i / 10, seed=i)) for i, name in enumerate("abc")]
    comparison = compare_runs(runs, resamples=400)
    metrics = ("bleu1", "bleu2", "bleu3", "bleu4", "rouge_l", "cider_d")
    for measures in (metrics, ("pointing_accuracy", "attention_correctness")):
        tests = [comparison.tests[name][measure] for name in "bc" for measure in measures]
        p_values, corrected = zip(*((test.p_value, test.corrected_p_value) for test in tests), strict=True)
        assert [*corrected] == [test.corrected_p_value for test in holm(tests)]
        assert len({*p_values}) > 1 and all(new >= old for old, new in zip(p_values, corrected, strict=True))
    shown = cells(comparison, "Captions", "BLEU-1")[2].change
    assert f"p = {comparison.tests['c']['bleu1'].corrected_p_value:.3f}" in shown
    assert all("(Holm)" in table.note for table in comparison.tables[:2]) and comparison.notices == []
    (notice,) = compare_runs([run_of(name, make_captions(8, hits=False)) for name in "ab"], resamples=79).notices
    assert notice.startswith("Captions of 8 images: 79 resamples are too few for 6 tests;")
    assert notice.endswith("Take at least 120.")


def test_runs_on_different_images_are_compared_on_the_common_ones_and_say_so():
    long, short = make_captions(30, 0.6), make_captions(12, 0.8, first=120)
    comparison = compare_runs([run_of("a", long), run_of("b", short)], resamples=50)
    assert comparison.image_count == 10
    assert "(a 30, b 12); they are compared on the 10 in common" in comparison.notices[0]
    common = [long[i] for i in range(120, 130)]
    assert cells(comparison, "Captions of 10 images", "BLEU-2")[0].text == f"{metrics_of(common)['bleu2']:.2f}"
    nouns = sum(len(image.hits) for image in common)
    assert f"{nouns} nouns" in cells(comparison, "Grounding", "Pointing accuracy")[0].detail


def test_references_that_differ_between_the_runs_are_mentioned():
    other = make_captions(8)
    other[103] = dataclasses.replace(other[103], references=[other[103].references[0], "a dog 's tail"])
    comparison = compare_runs([run_of("a", make_captions(8)), run_of("b", other)], resamples=50)
    assert comparison.image_count == 8 and comparison.notices[0].startswith("The references of 1 common images differ")


@pytest.mark.parametrize("other_data_set", [False, True])
def test_runs_without_a_common_image_are_refused(other_data_set):
    other = make_captions(9, first=500)
    if other_data_set:  # other images under the same numbers
        other = {i: dataclasses.replace(image, references=["nothing alike"]) for i, image in make_captions(9).items()}
    runs = [run_of("a", make_captions(8)), run_of("b", other), run_of("c", make_captions(8, 0.9))]
    with pytest.raises(InputError, match=r"no image in common \(a 8, b 9, c 8\)"):
        compare_runs(runs, resamples=50)


def test_a_notice_names_hard_attention_that_never_drew_in_training():
    settings = {
        "model": {"decoder": {"class_path": "x.D", "init_args": {"attention": {"class_path": "x.HardAttention"}}}}
    }
    logged = {"short": [(49, 0.0), (99, 0.0)], "long": [(49, 0.0), (99, 0.5)], "between": [(49, 0.0), (99, 0.0)]}
    curves = {name: {"train/sample_probability": curve} for name, curve in logged.items()}
    curves["between"]["train/reward"] = [(99, -3.0)]  # it drew between two logged batches
    runs = [run_of(name, make_captions(8), settings=settings, curves=curves[name]) for name in logged]
    comparison = compare_runs(runs, resamples=240)
    assert [notice.partition(" (")[0] for notice in comparison.notices] == ["short drew no location in training"]


def test_a_run_without_captions_is_named_with_the_command_that_makes_them():
    untested = run_of("b", checkpoint=Path("my b/checkpoints/best.ckpt"))
    tested = [run_of("a", make_captions(8)), run_of("c", make_captions(8, 0.9, seed=1))]
    comparison = compare_runs([tested[0], untested, tested[1], run_of("d")], resamples=20)
    assert "to test it: captioning test --ckpt_path 'my b/checkpoints/best.ckpt'" in comparison.notices[0]
    assert comparison.notices[1] == "d has no captions; it has no checkpoint"
    assert [bool(cell.text) for cell in cells(comparison, "Captions", "BLEU-1")] == [True, False, True, False]
    assert list(comparison.tests) == ["c"]
    nothing = compare_runs([run_of("a"), run_of("b")], resamples=20)
    assert [table.note for table in nothing.tables] == ["The settings of a, b are not known."]
    first_untested = compare_runs([untested, *tested], resamples=20)
    assert first_untested.verdicts == {} and first_untested.tests == {}


def test_grounding_is_over_nouns_and_has_its_baselines_beneath(pair):
    soft, hard = make_captions(40, 0.5), make_captions(40, 0.8, seed=1)
    judged = [hit for image in hard.values() for hit in image.hits]
    cell = cells(pair, "Grounding", "Pointing accuracy")[1]
    assert cell.text == f"{100 * np.mean([hit.hit for hit in judged]):.2f}"
    assert cell.detail.endswith(f"{len(judged)} nouns") and "p " in cell.change
    assert [cell.text for cell in cells(pair, "Grounding", "Pointing, by chance")] == ["25.0", "25.0"]
    assert [cell.text for cell in cells(pair, "Grounding", "Pointing, always the center")] == ["50.0", "50.0"]
    correctness = cells(pair, "Grounding", "Attention correctness")
    assert [cell.text for cell in correctness] == ["25.00", "40.00"] and correctness[1].is_clear
    assert [cell.text for cell in cells(pair, "Grounding", "Correctness, spread evenly")] == ["20.0", "20.0"]
    assert "attention_correctness" in pair.tests["hard"]
    assert any(image.hits for image in soft.values())


def test_the_most_important_curves_come_first_and_controls_are_left_out():
    soft = run_of(
        "soft", curves={"val/bleu4": [(10, 5.0)], "val/nll": [(10, 3.0)], "val_controls/length_ratio": [(1, 1.0)]}
    )
    hard = run_of("hard", curves={"train/loss": [(1, 2.0)], "val/nll": [(10, 2.5), (30, 2.5)]})
    comparison = compare_runs([soft, hard], resamples=20)
    assert list(comparison.curves) == ["val/bleu4", "val/nll", "train/loss"]
    assert list(comparison.curves["val/nll"]) == ["soft", "hard"]


def test_speed_size_and_decoding_stand_side_by_side():
    attention = {
        "class_path": "captioning.attention.HardAttention",
        "init_args": {"score": {"class_path": "captioning.attention.DotScore"}},
    }
    arguments = {"attention": attention, "output": {"class_path": "captioning.model.SummedOutput"}}
    hard = run_of(
        "hard",
        settings={"model": {"decoder": {"class_path": "x.D", "init_args": arguments}}},
        curves={"train/captions_per_second": [(1, 10.0), (2, 1600.0), (3, 1500.0)]},
        conditions={"context_mode": "argmax", "beam_size": 3},
        metrics_by_context={"expected": {"bleu4": 12.345}},
        parameters={"decoder": 1234567, "encoder": 89},
    )
    comparison = compare_runs([run_of("soft"), hard], resamples=20)
    for row, text in {
        "Training, captions per second": "1,500",  # the median
        "Parameters, decoder": "1,234,567",
        "Attention": "summed",
        "Context in the test": "argmax",
        "BLEU-4, expected context": "12.35",
    }.items():
        soft, cell = cells(comparison, "Speed", row)
        assert (soft.text, cell.text) == ("", text)
    assert cells(comparison, "Speed", "Attention")[1].detail == "HardAttention, DotScore, SummedOutput"
    own = {"class_path": "x.D", "init_args": {"attention": {"class_path": "mine.WideAttention"}}}
    again = compare_runs([run_of("a", settings={"model": {"decoder": own}}), hard], resamples=9)
    assert cells(again, "Speed", "Attention")[0].text == "wide"


def test_only_settings_that_differ_are_shown_and_not_where_a_run_lies():
    common = {"name": "a", "runs": "x", "trainer": {"default_root_dir": "x/a", "max_epochs": 3, "devices": 1}}
    other = {"name": "b", "runs": "x", "trainer": {"default_root_dir": "x/b", "max_epochs": 5, "devices": 1.0}}
    runs = [run_of("a", settings=common), run_of("b", settings={**other, "data": {"seed": None}}), run_of("c")]
    (table,) = compare_runs(runs, resamples=20).tables
    assert [(row.name, [cell.text for cell in row.cells]) for row in table.rows] == [
        ("trainer.max_epochs", ["3", "5", ""])
    ]
    assert "The settings of c are not known" in table.note


def test_images_with_the_largest_difference_in_the_metric_come_first():
    references = ["a red dog sits on the mat"]
    soft = {i: captioned_image(i, "a red dog sits on the mat", references) for i in (3, 5, 8, 9)}
    told = {3: "a red dog sits on a mat", 5: "two green cats", 8: "a red dog sits on the mat", 9: "the dog sits"}
    hard = {i: captioned_image(i, text, references) for i, text in told.items()}
    comparison = compare_runs([run_of("soft", soft), run_of("hard", hard)], resamples=20)
    assert [item.image_id for item in comparison.disagreements] == [5, 9, 3]  # 8: both say the same
    first = comparison.disagreements[0]
    assert first.captions == {"soft": references[0], "hard": "two green cats"} and first.references == references
    assert first.metrics["soft"] == pytest.approx(100) and first.metrics["hard"] == 0
    assert len(compare_runs([run_of("soft", soft), run_of("hard", hard)], resamples=20, images=2).disagreements) == 2


def test_numbers_go_into_json(pair):
    content = json.loads(json.dumps(pair.to_dict()))
    assert content["runs"] == ["soft", "hard"] and content["images"] == 40
    assert set(content["differences"]["hard"]["bleu4"]) == {"value", "low", "high", "p_value", "corrected_p_value"}
    low, value, high = (content["intervals"]["soft"]["bleu1"][key] for key in ("low", "value", "high"))
    assert low < value < high
    assert len(content["disagreements"]) == 12


# The page


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<style.*?</style>|<[^>]*>", "", page, flags=re.S))


def test_the_page_has_all_tables_and_needs_no_network(pair):
    pair = dataclasses.replace(pair, curves={"val/bleu4": {"soft": [(1, 2.0), (5, 3.0)], "hard": [(2, 4.0)]}})
    text = comparison_page(pair, footer=["made by hand"])
    shown = " ".join(text_of(text).split())
    for expected in (*pair.verdicts.values(), "Captions of 40 images", "Grounding", "val/bleu4", "made by hand"):
        assert expected in shown
    for item in pair.disagreements:
        assert f"image {item.image_id}" in shown
        assert all(caption in shown for caption in item.references)
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text) and "://" not in text.replace("http://www.w3.org", "")
    assert text.count("<img ") == text.count('src="data:image/svg+xml;base64,') == 1


def test_names_and_captions_are_escaped():
    evil = "<script>alert(1)</script>"
    images = {1: captioned_image(1, f"a {evil}", [f"the {evil}"]), 2: captioned_image(2, "a dog", ["a dog"])}
    other = {i: captioned_image(i, "nothing", image.references) for i, image in images.items()}
    runs = [
        run_of(f'"{evil}', images, settings={"a": evil}, curves={f"val/{evil}": [(1, 2.0), (2, 3.0)]}),
        run_of("b & c", other),
    ]
    runs[1].settings = {"a": "'"}
    page = comparison_page(compare_runs(runs, resamples=9), footer=[evil])
    assert "<script" not in page
    assert text_of(page).count(evil) > 4 and "b & c" in text_of(page)


def test_a_caption_marks_the_words_that_no_reference_has():
    images = {1: captioned_image(1, "a blue dog", ["a dog"])}
    other = {1: captioned_image(1, "a dog", ["a dog"])}
    text = comparison_page(compare_runs([run_of("a", images), run_of("b", other)], resamples=9))
    assert re.findall(r'class="no-match">(.*?)<', text) == ["blue"]


@pytest.mark.parametrize("style", ["comparison/page.css", "views/explorer.css"])
def test_text_has_the_contrast_of_wcag_2(style):
    def luminance(color: str) -> float:
        color = color if len(color) == 6 else "".join(2 * digit for digit in color)
        channels = [int(color[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in channels]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    colors = re.findall(r"--(paper|ground|ink|muted): #(\w+)", (ROOT / "captioning" / style).read_text())
    for scheme in (dict(colors[:4]), dict(colors[4:])):  # light and dark
        for text, behind in itertools.product(("ink", "muted"), ("paper", "ground")):
            dark, light = sorted(luminance(scheme[name]) for name in (text, behind))
            assert (light + 0.05) / (dark + 0.05) >= 4.5


@pytest.mark.parametrize(("steps", "charts"), [(1, 0), (2, 1)])
def test_a_page_has_no_empty_table_and_no_chart_of_single_points(steps, charts):
    curves = {"val/bleu4": {"a": [(9, 5.0)], "b": [(9, 6.0), (18, 7.0)][:steps]}}
    page = comparison_page(Comparison([["a"], ["b"]], "bleu4", curves=curves))
    assert "Settings that differ" not in page and "Where the runs" not in page
    drawn = [base64.b64decode(svg).decode() for svg in re.findall(r"svg\+xml;base64,([^\"]*)", page)]
    assert len(drawn) == charts
    for svg in drawn:
        texts = re.findall(r"<text[^>]*>([^<]*)<", svg)
        assert {"optimizer steps", "BLEU-4, percent"} <= set(texts)
        assert all(text.isdigit() for text in texts[: texts.index("optimizer steps")])  # ticks of the steps


def test_a_metric_that_cannot_be_computed_is_refused():
    runs = [run_of("a", make_captions(8)), run_of("b", make_captions(8, seed=1))]
    with pytest.raises(InputError, match=r"^metric: METEOR cannot be computed here; it needs Java"):
        compare_runs(runs, metric="meteor", resamples=9)
    with pytest.raises(InputError, match=r"^--metric must be one of bleu1, .* got 'bleu'; did you mean bleu"):
        compare(".", metric="bleu")
    with pytest.raises(InputError, match=r"^--metric must be one of bleu1, .* cider_d, meteor, got 'nll'"):
        compare(".", metric="nll")


def test_the_chart_of_many_runs_has_room_for_its_curves():
    runs = [f"soft_{number}" for number in range(24)]
    chart = _line_chart("val/bleu4", {run: [(0, 1.0), (9, 2.0)] for run in runs}, dict.fromkeys(runs, "#123456"))
    assert chart.startswith("data:image/svg")  # a chart without room warns
