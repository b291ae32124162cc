"""A study: its file is checked, every command runs once, and its tables have the measured scores alone."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import study
import yaml
from commands import Commands
from helpers_runs import edit_checkpoint, make_captions, make_run, save_checkpoint, tiny_config
from measurements import read_scores, score_name, write_measurements
from study_file import read_study

from captioning.comparison.compare import compare_runs
from captioning.comparison.runs import read_run
from captioning.errors import InputError
from captioning.metrics.bleu import bleu_counts, bleu_from_counts, bleu_metrics
from captioning.metrics.resampling import holm
from captioning.metrics.seeds import RULE, seed_differences

ROOT = Path(__file__).resolve().parent.parent
STUDIES = sorted((ROOT / "configs/studies").glob("*.yaml"))
SHARED = {"name": "tiny", "seeds": [1, 2, 3], "fit": ["--trainer.max_epochs=1"], "evaluate": ["--split=val"]}
VARIANTS = {
    "soft": {"config": "shapes_soft", "label": "soft | attention"},
    "hard": {"config": "shapes_hard", "fit": ["--x=1"], "evaluations": {"argmax": ["--context_mode=argmax"]}},
    "none": {"config": "shapes_uniform", "label": "no attention"},
}
MEASURED = Path("measured/tiny.json")
STUDY = SHARED | {"references": ["soft", "hard"], "variants": VARIANTS}


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(STUDY)
    Path("results.md").write_text("# Results\n\n<!-- study tiny -->\nthe tables of before\n<!-- end -->\n\nAfter.\n")
    return tmp_path


def main(*argv: str) -> None:
    study.main(["tiny.yaml", "--measurements", "measured", *argv])


def write(content: dict) -> None:
    Path("tiny.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def measure(variant: str, seed: int, skill: float, *, evaluation: str = "") -> None:
    """Write the files of a trained and scored run."""
    captions = make_captions(30, skill, seed=seed)
    counted = bleu_counts([c.words for c in captions.values()], [c.reference_words for c in captions.values()])
    scores = {name: round(value, 4) for name, value in bleu_metrics(counted.sum(axis=0)).items()}
    scores |= {"cider_d": 40.0 + seed, "nll": 3 + seed / 100}
    if not evaluation:
        entries = [
            {"image_id": i, "caption": image.caption, "references": image.references} for i, image in captions.items()
        ]
        settings = {"seed_everything": seed, "model": {"kind": variant}}
        folder = make_run(Path("runs", f"tiny_{variant}_{seed}"), captions=entries, settings=settings)
        tested = {f"test/{name}": value for name, value in scores.items()} | {"conditions": {}}
        (folder / "test_metrics.json").write_text(json.dumps(tested))
    content = {"values": scores, "split": "val", "images": 30, "training": {"captions_per_second": 300.0 + seed}}
    write_measurements(MEASURED, scores=read_scores(MEASURED) | {score_name(variant, seed, evaluation): content})


def measured_scores() -> dict:
    return read_scores(MEASURED)


def forget(name: str) -> None:
    """Delete a score from the study's file."""
    content = json.loads(MEASURED.read_text())
    del content["scores"][name]
    MEASURED.write_text(json.dumps(content))


def written_tests() -> list[dict]:
    return json.loads(MEASURED.read_text())["comparisons"]["tiny"]["tests"]


def table(page: str, corner: str) -> dict[str, list[str]]:
    """Return the rows of a table by their first cell."""
    lines = page[page.index(f"| {corner}") :].partition("\n\n")[0].splitlines()
    return {cells[1]: cells[2:-1] for cells in ([c.strip() for c in re.split(r"(?<!\\)\|", line)] for line in lines)}


# The file


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_shipped_study_is_read_and_its_table_in_the_page_of_results_has_every_variant(path):
    study = read_study(path)
    assert study.name == path.stem and study.references
    assert len(study.seeds) >= 3 or "One seed each" in path.read_text(encoding="utf-8")
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    block = page.partition(f"<!-- study {study.name} -->")[2].partition("<!-- end -->")[0]
    assert not block or [study.label(name) for name in study.variants if study.label(name) not in block] == []


@pytest.mark.parametrize(
    ("change", "argv", "message"),
    [
        ({"name": "lite2"}, (), "tiny.yaml: name is lite2, and names folders of runs; give it the file's, tiny"),
        ({"varants": {}}, (), "tiny.yaml: .*unknown field `varants`"),
        ({"variants": {"soft": {"label": "x"}}}, (), "tiny.yaml: variants.soft: needs either a config or an average"),
        ({"variants": {"soft": {"config": "shape_soft"}}}, (), "variants.soft: there is no .*shape_soft.yaml"),
        ({"references": ["sift"]}, (), r"references: sift is no variant; did you mean soft\?"),
        ({"seeds": [1, "a"]}, (), r"Expected `int`, got `str` - at `\$.seeds"),
        ({"variants": {"a": {"config": "shapes_soft", "after": "b"}}}, (), "variants.a: b is no variant above it"),
        ({}, ("--only", "sift"), "--only: sift is not in tiny.yaml; there are soft, hard, none"),
        (
            {},
            ("--report", "page.md"),
            "has no place for the study; add two lines, <!-- study tiny --> and <!-- end -->",
        ),
    ],
)
def test_a_study_and_options_that_cannot_be_used_are_one_line(workdir, capsys, change, argv, message):
    Path("page.md").write_text("# Results\n")
    write(STUDY | {"references": []} | change)
    with pytest.raises(SystemExit) as left:
        main("--dry_run", *argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and line.startswith("error: ") and re.search(message, line)


def test_a_study_says_each_thing_once(workdir):
    Path("tiny.yaml").write_text("name: a\nseeds: [1]\nname: b\n")
    with pytest.raises(InputError, match=r"^tiny\.yaml: line 3: name is there twice, first in line 1$"):
        read_study(Path("tiny.yaml"))


def test_reproducing_begins_anew_whatever_was_measured_before():
    """Otherwise the scores in the repository would count as finished runs."""
    target = (ROOT / "Makefile").read_text().partition("reproduce-flickr8k: ")[2].partition("\n\n")[0]
    assert target.count("--measurements runs/reproduced") == target.count("scripts/study.py") == 2


# What is left


@pytest.fixture
def command_log(workdir, monkeypatch) -> list[list[str]]:
    """The commands that the study starts. Each writes the files of the real one."""
    commands: list[list[str]] = []

    def run(self, name, arguments):
        commands.append([name, *arguments])
        options = dict(word.split("=", 1) for word in arguments if word.startswith("--") and "=" in word)
        if arguments[0] == "fit":
            if name == "tiny_none_2":
                raise InputError(f"{name} failed: no luck")
            checkpoints = Path("runs", name, "checkpoints")
            checkpoints.mkdir(parents=True, exist_ok=True)
            (checkpoints / "best.ckpt").touch()
        elif arguments[0] == "test":
            folder = Path(options["--results"])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "test_metrics.json").write_text('{"test/bleu4": 1.0, "conditions": {"split": "val"}}')
        return 1.0

    monkeypatch.setattr(Commands, "run", run)
    source = {"class_path": "captioning.data.ShapesSource", "init_args": {"root": str(workdir / "data"), "train": 1}}
    source["init_args"] |= {"val": 1, "test": 1, "image_size": 48}
    sizes = [f"--data.source.init_args.{name}={value}" for name, value in source["init_args"].items()]
    write(STUDY | {"fit": sizes})
    return commands


def test_every_run_is_trained_and_scored_once_and_failed_runs_are_named_and_repeated(command_log, capsys):
    killed = Path("runs/tiny_hard_1/config.yaml")  # before it saved a checkpoint: the run begins anew in its folder
    killed.parent.mkdir(parents=True)
    killed.touch()
    with pytest.raises(SystemExit):
        main("--seeds", "1", "2")
    captured = capsys.readouterr()
    assert "error: tiny_none_2 failed: no luck" in captured.out  # at once, and again at the end
    assert "error: 1 of 6 runs failed: tiny_none_2 failed: no luck" in captured.err
    assert not killed.exists()
    fits = [command for command in command_log if "fit" in command]
    assert [command[0] for command in fits] == [f"tiny_{v}_{s}" for s in (1, 2) for v in VARIANTS]
    hard = fits[1]
    assert hard[hard.index("--config") + 1].endswith("configs/shapes_hard.yaml") and "--x=1" in hard
    assert "--seed_everything=1" in hard and not any("ckpt_path" in word for word in hard)
    (argmax,) = [
        command for command in command_log if command[0] == "tiny_hard_1" and "--context_mode=argmax" in command
    ]
    assert argmax[-1] == "--results=runs/tiny_hard_1/argmax" and "--split=val" in argmax
    assert (Path("data") / "shapes.json").is_file()  # the data were prepared
    assert measured_scores()["hard_1_argmax"]["values"] == {"bleu4": 1.0}
    command_log.clear()
    forget("hard_1_argmax")
    last = Path("runs/tiny_none_2/checkpoints/last.ckpt")
    last.parent.mkdir(parents=True)
    last.touch()
    with pytest.raises(SystemExit):
        main("--seeds", "1", "2")
    assert [command[0] for command in command_log] == ["tiny_hard_1", "tiny_none_2"]
    assert command_log[1][-1] == f"--ckpt_path={last}" and "fit" not in command_log[0]


def test_an_average_is_made_of_the_best_checkpoints_of_the_same_seed_and_scored(command_log):
    content = yaml.safe_load(Path("tiny.yaml").read_text())
    variants = {name: {"config": "shapes_soft"} for name in ("none", "soft")}
    write(content | {"references": [], "variants": variants | {"mean": {"average": ["none", "soft"]}}})
    main("--seeds", "1")
    none, soft, mean = (f"runs/tiny_{variant}_1/checkpoints/best.ckpt" for variant in ("none", "soft", "mean"))
    average, test = (command[1:] for command in command_log if command[0] == "tiny_mean_1")
    assert average == ["average", "--model", none, "--model", soft, "--output", mean]
    assert test[:2] == ["test", f"--ckpt_path={mean}"]


def test_a_run_that_was_trained_further_is_scored_again_and_so_is_its_average(command_log, capsys):
    content = yaml.safe_load(Path("tiny.yaml").read_text())
    variants = {name: {"config": "shapes_soft"} for name in ("none", "soft")}
    write(content | {"references": [], "variants": variants | {"mean": {"average": ["none", "soft"]}}})
    names = [f"tiny_{variant}_1" for variant in ("none", "soft", "mean")]
    for name in names:
        save_checkpoint(make_run(Path("runs", name)) / "checkpoints/best.ckpt")
    main("--seeds", "1")
    command_log.clear()
    main("--seeds", "1")
    assert command_log == []
    edit_checkpoint("runs/tiny_soft_1/checkpoints/best.ckpt", lambda saved: saved["state_dict"].popitem())
    main("--report", "results.md")
    assert "note: tiny_soft_1 was scored before its weights changed; score it again" in capsys.readouterr().out
    main("--seeds", "1")
    assert [(name, command) for name, command, *_ in command_log] == [
        *(("tiny_soft_1", command) for command in ("fit", "test")),
        *(("tiny_mean_1", command) for command in ("average", "test")),
    ]


def test_a_second_stage_begins_when_the_first_is_done_with_its_best_checkpoint_of_the_same_seed(command_log, capsys):
    content = yaml.safe_load(Path("tiny.yaml").read_text())
    variants = {name: {"config": "shapes_soft"} for name in ("none", "soft")}
    variants["again"] = {"config": "shapes_soft", "after": "none"}
    variants["third"] = {"config": "shapes_soft", "after": "again"}
    write(content | {"references": [], "variants": variants})
    with pytest.raises(SystemExit):
        main("--only", "third", "again", "none", "soft", "--seeds", "1", "2", "--jobs", "2")
    error = capsys.readouterr().err  # none_2 fails, and what would begin with it
    assert "3 of 8 runs failed" in error and "tiny_none_2 failed: no luck" in error
    assert "tiny_third_2: starts from tiny_again_2, which is not trained and scored" in error
    words = [(command[0], word.partition("=")) for command in command_log for word in command]
    begun = {name: value for name, (option, _, value) in words if option == "--init_from"}
    assert begun == {
        "tiny_again_1": "runs/tiny_none_1/checkpoints/best.ckpt",
        "tiny_third_1": "runs/tiny_again_1/checkpoints/best.ckpt",
    }
    fits = [command[0] for command in command_log if "fit" in command]
    assert {*fits[:4]} == {"tiny_none_1", "tiny_none_2", "tiny_soft_1", "tiny_soft_2"}
    assert fits[4:] == ["tiny_again_1", "tiny_third_1"]


def test_a_dry_run_lists_what_is_done_and_left_and_does_nothing(command_log, capsys):
    main("--only", "soft", "hard", "--seeds", "1")
    command_log.clear()
    capsys.readouterr()
    forget("hard_1_argmax")
    Path("runs/tiny_hard_2/checkpoints").mkdir(parents=True)
    Path("runs/tiny_hard_2/checkpoints/last.ckpt").touch()
    main("--only", "hard", "soft", "--seeds", "1", "2", "--dry_run")
    assert [re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines()] == [
        ["tiny_hard_1", "left: score argmax"],
        ["tiny_soft_1", "done"],
        ["tiny_hard_2", "left: train on from its last checkpoint, score, score argmax"],
        ["tiny_soft_2", "left: train, score"],
    ]
    assert command_log == []


# The report


@pytest.fixture
def measured_study(workdir) -> Path:
    for seed in (1, 2, 3):
        measure("soft", seed, 0.5)
        measure("hard", seed, 0.8 + seed / 100)
    measure("hard", 1, 0.6, evaluation="argmax")
    measure("hard", 2, 0.7, evaluation="argmax")
    return workdir


def counts(variant: str) -> np.ndarray:
    runs = []
    for seed in (1, 2, 3):
        entries = json.loads(Path(f"runs/tiny_{variant}_{seed}/test_captions.json").read_text())
        references = [[reference.split() for reference in entry["references"]] for entry in entries]
        runs.append(bleu_counts([entry["caption"].split() for entry in entries], references))
    return np.stack(runs)


def bleu4_of(summed: np.ndarray) -> np.ndarray:
    return bleu_from_counts(summed)[..., 3]


def test_the_tables_are_of_the_files_and_the_rest_of_the_page_stays(measured_study, capsys):
    main("--report", "results.md")
    page = Path("results.md").read_text()
    assert page.startswith("# Results\n\n<!-- study tiny -->\nMade by `python scripts/study.py tiny.yaml ")
    assert page.endswith("<!-- end -->\n\nAfter.\n") and "of before" not in page
    scores = table(page, "val, 30 images")
    bleu4 = bleu4_of(counts("hard").sum(axis=1))
    assert scores["hard"][:2] == ["1,2,3", f"{np.mean(bleu4):.2f} ({np.std(bleu4, ddof=1):.2f})"]
    assert scores["soft \\| attention"][2:4] == ["42.00 (1.00)", "3.020 (0.010)"]
    assert scores["no attention"] == ["-"] * 5
    argmax = [measured_scores()[f"hard_{seed}_argmax"]["values"]["bleu4"] for seed in (1, 2)]
    evaluated = table(page, "BLEU-4 by evaluation")
    assert list(evaluated) == ["BLEU-4 by evaluation", "---", "hard"]
    assert evaluated["hard"] == [scores["hard"][1], f"{np.mean(argmax):.2f} ({np.std(argmax, ddof=1):.2f}), seed 1, 2"]


def test_a_missing_page_is_created(measured_study):
    main("--report", "new.md")
    assert "hard" in table(Path("new.md").read_text(), "val, 30 images")


def test_differences_are_tested_over_images_and_seeds_and_written_to_a_file(measured_study):
    for seed in (1, 2, 3):
        measure("none", seed, 0.52)
    main("--report", "results.md")
    pairs = [("hard", "soft"), ("none", "soft"), ("none", "hard")]
    expected = holm([seed_differences(counts(of), counts(variant), bleu4_of)[0] for variant, of in pairs])
    content = json.loads(MEASURED.read_text())["comparisons"]["tiny"]
    assert [(test["variant"], test["reference"]) for test in content["tests"]] == pairs
    for test, difference in zip(content["tests"], expected, strict=True):
        assert test["value"] == pytest.approx(difference.interval.value)
        assert (test["low"], test["high"]) == pytest.approx((difference.interval.low, difference.interval.high))
        assert test["corrected_p_value"] == pytest.approx(difference.corrected_p_value)
        assert test["variant_seeds"] == test["reference_seeds"] == [1, 2, 3]
    assert content["command"].endswith("--report results.md") and content["machine"]
    rows = table(Path("results.md").read_text(), "val, ")
    titles = [f"BLEU-4, difference from {label}" for label in ("soft \\| attention", "hard")]
    assert rows["val, 30 images"][-2:] == titles
    assert rows["hard"][-1] == "-"
    assert re.fullmatch(r"(\*\*)?\+\d+\.\d\d \(.+ to \+.+\), p (=|≤) 0.\d+(\*\*)?", rows["hard"][-2])
    assert rows["no attention"][-2].startswith(f"{expected[1].interval.value:+.2f} (")


def test_a_report_and_the_comparison_of_its_runs_have_the_same_tests(measured_study):
    """One engine: what a study says of its variants is what `captioning compare` says of their runs."""
    write(STUDY | {"references": ["soft"]})
    main("--report", "results.md")
    (test,) = written_tests()
    runs = [read_run(Path(f"runs/tiny_{variant}_{seed}")) for variant in ("soft", "hard") for seed in (1, 2, 3)]
    comparison = compare_runs(runs, resamples=50)
    difference = comparison.variant_tests["tiny_hard"]["bleu4"]
    assert test.items() >= (vars(difference.interval) | {"p_value": difference.p_value}).items()
    soft, hard = comparison.variants
    row = table(Path("results.md").read_text(), "val, ")["hard"]
    assert row[1] == f"{hard.mean('bleu4'):.2f} ({hard.deviation('bleu4'):.2f})"
    assert test["value"] == pytest.approx(hard.mean("bleu4") - soft.mean("bleu4"))


def test_runs_that_start_from_the_reference_are_tested_in_pairs(measured_study):
    for seed in (1, 2, 3):
        measure("again", seed, 0.52)
        measure("mean", seed, 0.55)
    again, mean = {"config": "shapes_soft", "after": "soft"}, {"average": ["hard", "again"]}
    write(STUDY | {"references": ["soft"], "variants": VARIANTS | {"again": again, "mean": mean}})
    main("--report", "results.md")
    tests = written_tests()
    assert {test["variant"]: test["paired"] for test in tests} == {"hard": False, "again": True, "mean": True}
    (expected,) = seed_differences(counts("soft"), counts("mean"), bleu4_of, paired=True)
    assert (tests[2]["low"], tests[2]["high"]) == pytest.approx((expected.interval.low, expected.interval.high))
    page = Path("results.md").read_text()
    rows = table(page, "val, ")
    assert rows["mean"][-1].endswith(", *paired*") and not rows["hard"][-1].endswith("*paired*")
    assert "*Paired*: the runs of a seed are compared, because one of the two started" in page
    shutil.rmtree("runs")
    main("--report", "results.md")  # The tests are those of the last report.
    assert table(Path("results.md").read_text(), "val, ") == rows


def test_without_run_folders_the_earlier_tests_stay_if_the_scores_are_equal(measured_study, capsys):
    main("--report", "results.md")
    before = table(Path("results.md").read_text(), "val, ")["hard"]
    Path("runs").rename("elsewhere")
    main("--report", "results.md")
    assert "6 runs have no captions with these scores, such as runs/tiny_soft_1" in capsys.readouterr().out
    assert table(Path("results.md").read_text(), "val, ")["hard"] == before and ", p " in before[-1]
    for rule, more in (("another rule", 0), (RULE, 1)):
        content = json.loads(MEASURED.read_text())
        content["comparisons"]["tiny"]["rule"] = rule
        content["scores"]["hard_1"]["values"]["bleu4"] += more
        MEASURED.write_text(json.dumps(content))
        main("--report", "results.md")
        assert "difference from" not in Path("results.md").read_text()


# The file of the measurements


def test_every_score_takes_one_line(workdir):
    scores = {f"soft_{seed}": {"values": {"bleu4": 1.0}, "machine": {"cores": 2}} for seed in (1, 2, 3)}
    write_measurements(MEASURED, scores=scores)
    assert measured_scores() == scores
    assert sum(line.startswith('  "soft_') for line in MEASURED.read_text().splitlines()) == 3


def test_the_scores_of_a_run_have_the_statistics_of_its_training(command_log):
    main("--only", "soft", "--seeds", "1", "--dry_run")
    folder = Path("runs/tiny_soft_1/metrics/version_0")
    folder.mkdir(parents=True)
    rows = "".join(f"{step},{step / 3},-{step},300\n" for step in range(9, 100, 10))
    (folder / "metrics.csv").write_text("step,train/beta,train/baseline,train/captions_per_second\n" + rows)
    main("--only", "soft", "--seeds", "1")
    training = measured_scores()["soft_1"]["training"]
    assert training == {
        "captions_per_second": 300,
        "beta": [3, 6.333, 9.667, 13, 16.33, 19.67, 23, 26.33, 29.67, 33],
        "baseline": [-9, -19, -29, -39, -49, -59, -69, -79, -89, -99],
    }


def test_a_study_of_drawn_locations_tabulates_how_training_went(measured_study, capsys):
    main("--report", "results.md")
    assert "While training" not in Path("results.md").read_text()
    content = json.loads(MEASURED.read_text())
    for seed, beta in ((1, 0.2), (2, 0.4)):
        entry = content["scores"][f"soft_{seed}"].setdefault("training", {})
        entry["beta"] = [beta, *[0] * 3, 0.5, *[0] * 4, beta / 2]
        entry["support_size"] = [9.0, *[0] * 3, 5.0, *[0] * 4, 3.0]
    MEASURED.write_text(json.dumps(content))
    main("--report", "results.md")
    assert "While training" not in Path("results.md").read_text()  # nothing was drawn
    for seed in (1, 2):
        content["scores"][f"soft_{seed}"]["training"]["baseline"] = [*[None] * 4, -20.0, *[None] * 4, -8.0]
    MEASURED.write_text(json.dumps(content))
    main("--report", "results.md")
    titles, _, *rows = table(Path("results.md").read_text(), "While training").items()
    assert titles == ("While training", ["locations in the support", "beta", "baseline"])  # nothing else was logged
    assert rows == [("soft \\| attention", ["9.00, 3.00", "0.30, 0.15", "-, -8.00"])]


@pytest.mark.slow
def test_a_study_from_nothing_to_its_table(workdir, capsys):
    overlay = tiny_config(workdir / "shapes")
    overlay["model"] = {"encoder": {"init_args": overlay["model"]["encoder"]["init_args"]}}
    Path("overlay.yaml").write_text(yaml.safe_dump(overlay))
    content = {"name": "tiny", "seeds": [1], "fit": ["--config=overlay.yaml"], "evaluate": ["--split=val"]}
    write(content | {"variants": {"soft": {"config": "shapes_soft"}}})
    main()
    main("--dry_run")
    assert "tiny_soft_1" + " " * 22 + "done" in capsys.readouterr().out.splitlines()
    main("--report", "results.md")
    assert "soft" in table(Path("results.md").read_text(), "val, 2 images")
    captions = json.loads(Path("runs/tiny_soft_1/test_captions.json").read_text())
    assert len(captions) == 2  # those of the validation split, for the tests
