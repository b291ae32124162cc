"""Runs that differ in their seed alone are one variant: mean, deviation, and a test over images and seeds."""

import json
import re
import statistics

import numpy as np
import pytest
from helpers_runs import make_captions, run_of

from captioning.comparison.compare import compare_runs
from captioning.comparison.page import comparison_page
from captioning.comparison.result import ONE_SEED, Comparison
from captioning.comparison.terminal import print_comparison
from captioning.comparison.variants import group_variants
from captioning.metrics.bleu import bleu_counts, bleu_from_counts
from captioning.metrics.resampling import holm
from captioning.metrics.seeds import seed_differences


def run(name: str, seed: int, *, skill: float = 0.6, rate: float = 0.1, images: int = 40, **changes):
    trainer = {"default_root_dir": f"runs/{name}", "logger": [{"class_path": "x.CSV", "init_args": {"dir": name}}]}
    settings = {"seed_everything": seed, "name": name, "trainer": trainer}
    settings |= {"model": {"rate": rate}, "data": {"seed": seed}}
    captions = make_captions(images, skill, seed=seed)
    metrics = {"nll": 2 + seed / 10, "bleu4": 1.0}
    return run_of(name, captions, **{"settings": settings, "metrics": metrics} | changes)


SOFT = [run(f"study_soft_{seed}", seed) for seed in (1, 2, 10)]
HARD = [run(f"study_hard_{seed}", seed, skill=0.97, rate=0.2) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def study() -> Comparison:
    return compare_runs([SOFT[0], HARD[0], *SOFT[1:], *HARD[1:]], resamples=200)


def words(runs):
    return [
        bleu_counts([c.words for c in run.captions.values()], [c.reference_words for c in run.captions.values()])
        for run in runs
    ]


def of_checkpoints(checkpoint: str):
    return [run(f"b_{n}", n, conditions={"checkpoint": checkpoint.format(n)}) for n in (1, 2)]


def attending(*paths: str):
    """Two seeds, each with a class of its own."""
    runs = [run(f"b_{n}", n) for n in (1, 2)]
    for each, path in zip(runs, paths, strict=True):
        each.settings["model"] = {"attention": {"class_path": path}}
    return runs


def changed(section: str, **options):
    """The second seed, with other settings."""
    other = run("b_2", 2)
    other.settings[section] = other.settings.get(section, {}) | options
    return other


@pytest.mark.parametrize(
    ("other", "grouped"),
    [
        (run("b_2", 2, rate=0.3), False),
        (run("b_1", 1), False),  # the same seed again counts once
        (run("b_2", 2, conditions={"beam_size": 3}), False),
        (run("b_2", 2, conditions={"split": "val"}), False),
        (run("b_2", 2, settings={}), False),  # nothing is known
        (changed("data", flip=0.5), False),
        (changed("data", feature_shares=1), True),
        (changed("trainer", default_root_dir="elsewhere"), True),
    ],
)
def test_other_seeds_of_the_same_settings_and_decoding_options_are_one_variant(other, grouped):
    variants = [variant.runs for variant in group_variants([run("b_0", 1), other])]
    assert variants == ([["b_0", other.name]] if grouped else [["b_0"], [other.name]])


@pytest.mark.parametrize(
    ("runs", "grouped"),
    [
        (of_checkpoints("best-epoch={}.ckpt"), True),  # the best epochs of seeds differ
        ([of_checkpoints("best.ckpt")[0], of_checkpoints("last.ckpt")[1]], False),
        (attending("mine_v1.MyAttention", "mine_v2.MyAttention"), False),  # two classes of one name
    ],
)
def test_runs_of_one_variant_have_the_same_kind_of_checkpoint_and_the_same_classes(runs, grouped):
    assert len(group_variants(runs)) == (1 if grouped else 2)


def test_means_of_weights_are_a_variant_apart_from_their_members():
    runs = [run(f"mean_{seed}", seed) for seed in (1, 2)]
    for each, seed in zip(runs, (1, 2), strict=True):
        parts = [{"checkpoint": f"runs/{name}_{seed}/checkpoints/best.ckpt", "fraction": 0.5} for name in ("a", "b")]
        each.settings["averaged"] = parts
    last = run("b_3", 3)
    assert [variant.runs for variant in group_variants([*runs, last])] == [["mean_1", "mean_2"], ["b_3"]]
    runs[1].settings["averaged"][0]["fraction"] = 0.4
    assert [variant.runs for variant in group_variants(runs)] == [["mean_1"], ["mean_2"]]


@pytest.mark.parametrize(
    ("begins", "grouped"),
    [
        ([f"runs/first_{seed}/checkpoints/best.ckpt" for seed in (1, 2)], True),  # each seed's own first stage
        ([f"/data2/stage1/first_{seed}/checkpoints/best.ckpt" for seed in (1, 2)], True),
        (["runs/first_1/checkpoints/best.ckpt"] * 2, True),  # one for all
        (["runs/first_1/checkpoints/best.ckpt", "runs/other_2/checkpoints/best.ckpt"], False),
        (["runs/first_1/checkpoints/best.ckpt", "runs/first_12/checkpoints/best.ckpt"], False),
        (["runs/first_1/checkpoints/best.ckpt", None], False),
    ],
)
def test_second_stages_are_seeds_of_one_variant_where_their_first_stages_are(begins, grouped):
    runs = [run(f"second_{seed}", seed) for seed in (1, 2)]
    for each, begin in zip(runs, begins, strict=True):
        each.settings["init_from"] = begin
    variants = [variant.runs for variant in group_variants(runs)]
    assert variants == ([["second_1", "second_2"]] if grouped else [["second_1"], ["second_2"]])


def test_mean_and_deviation_are_over_the_seeds_of_every_metric(study):
    soft, hard = study.variants
    for variant, runs in ((soft, SOFT), (hard, HARD)):
        values = [bleu_from_counts(counts.sum(axis=0))[3] for counts in words(runs)]
        assert variant.metrics["bleu4"] == pytest.approx(values)
        assert variant.mean("bleu4") == pytest.approx(np.mean(values))
        assert variant.deviation("bleu4") == pytest.approx(np.std(values, ddof=1))
    assert soft.metrics["nll"] == pytest.approx([2.1, 2.2, 3.0])
    assert {"bleu1", "rouge_l", "cider_d", "pointing_accuracy"} <= soft.metrics.keys()
    table = study.tables[0]
    assert table.title == "Variants over seeds" and table.columns == ["study_soft", "study_hard"]
    row = next(row for row in table.rows if row.name == "NLL, nats per word")
    assert row.cells[0][:2] == ("2.43", f"deviation {statistics.stdev([2.1, 2.2, 3.0]):.2f} of 3 seeds")


def test_variants_are_tested_over_seeds_and_images_and_their_seeds_are_not_tested_by_themselves(study):
    expected = seed_differences(np.stack(words(SOFT)), np.stack(words(HARD)), bleu_from_counts)
    tests = study.variant_tests["study_hard"]
    assert [tests[f"bleu{n}"].interval for n in range(1, 5)] == [test.interval for test in expected]
    assert list(tests.values()) == holm(list(tests.values()))
    assert study.tests == {} and list(study.verdicts) == ["study_hard"]
    verdict = study.verdicts["study_hard"]
    means = [variant.mean("bleu4") for variant in study.variants[::-1]]
    assert verdict.startswith("Clear difference: study_hard has {:.1f} and study_soft {:.1f} BLEU-4, +".format(*means))
    assert "; 40 images, 3 + 3 seeds." in verdict and ONE_SEED not in verdict


def test_the_runs_of_a_variant_stand_together(study):
    assert [(variant.name, variant.runs, variant.seeds) for variant in study.variants] == [
        ("study_soft", ["study_soft_1", "study_soft_2", "study_soft_10"], ["1", "2", "10"]),
        ("study_hard", ["study_hard_1", "study_hard_2", "study_hard_3"], ["1", "2", "3"]),
    ]
    assert study.variant_runs == [variant.runs for variant in study.variants]
    assert study.runs == list(study.disagreements[0].captions) == [*study.variant_runs[0], *study.variant_runs[1]]


def test_two_seeds_of_one_variant_are_never_a_clear_difference():
    comparison = compare_runs([run("a_1", 1, skill=0.3), run("a_2", 2, skill=0.9)], resamples=50)
    assert comparison.tests == comparison.verdicts == comparison.variant_tests == {}
    assert [cell.change for table in comparison.tables for row in table.rows for cell in row.cells if cell.change] == []
    assert comparison.variants[0].deviation("bleu4") > 5


def test_a_variant_of_one_seed_is_compared_over_images_alone_and_that_is_said():
    alone = run("other", 1, skill=0.8, rate=0.5)
    comparison = compare_runs([SOFT[0], SOFT[1], alone], resamples=200)
    assert list(comparison.tests) == ["other"] and comparison.variant_tests == {}
    assert comparison.verdicts["other"].endswith(f"; {ONE_SEED}.")
    assert comparison.variants[1].deviation("bleu4") is None


def test_runs_are_compared_with_a_first_variant_of_one_seed_over_images_alone():
    comparison = compare_runs([run("other", 1, skill=0.8, rate=0.5), *SOFT[:2]], resamples=50)
    assert list(comparison.tests) == [SOFT[0].name, SOFT[1].name] and comparison.variant_tests == {}


def test_a_variant_has_the_nll_only_if_its_tests_had_the_common_images_alone():
    fewer_images = [run(f"hard_{seed}", seed, rate=0.2, images=20) for seed in (1, 2)]
    soft, hard = compare_runs([*SOFT, *fewer_images], resamples=50).variants
    assert "bleu4" in soft.metrics and "nll" not in soft.metrics and "nll" in hard.metrics


def test_terminal_page_and_json_have_the_variants(study, capsys):
    print_comparison(study)
    out = capsys.readouterr().out
    assert "Variants over seeds" in out and "Clear difference: study_hard has" in out
    page = comparison_page(study)
    assert re.search(r'class="verdict clear" style="--run: #\w+"><b>Clear difference</b>: study_hard has', page)
    content = json.loads(json.dumps(study.to_dict()))
    variants = content["variants"]
    assert variants["study_soft"]["seeds"] == ["1", "2", "10"]
    assert variants["study_hard"]["metrics"]["bleu4"]["mean"] == pytest.approx(study.variants[1].mean("bleu4"))
    test = content["variant_differences"]["study_hard"]["bleu4"]
    assert test["low"] < test["value"] < test["high"] and test["p_value"] <= test["corrected_p_value"]
