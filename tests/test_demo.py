"""The demo ends with the comparison of its runs; training them is in test_end_to_end.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from helpers import load_script

from captioning.errors import InputError
from captioning.settings import read_config

ROOT = Path(__file__).resolve().parent.parent


def test_the_demo_ends_with_the_comparison_of_its_runs_and_prints_where_it_is(tested_pair, capsys):
    runs = tested_pair[0].parent
    page = load_script("demo").compare(runs, ["soft", "hard"])
    out = capsys.readouterr().out
    assert f"$ captioning compare {runs}/soft {runs}/hard --output {runs}/comparison.html" in out
    assert re.search(r": hard has .* and soft .* BLEU-4|Equal: hard and soft both have", out)
    assert "explorer-data" in page.read_text()


@pytest.fixture
def entry() -> dict:
    """The entry of a model in the summary."""
    names = ("bleu1", "bleu2", "bleu3", "bleu4", "pointing_accuracy", "seconds")
    return dict.fromkeys(names, 1.0) | {
        "examples": {"a.png": {"caption": "two cats", "expected": "a cat left of a dog"}},
        "overlay": "a-overlay.png",
        "checkpoint": "best.ckpt",
    }


def test_the_summary_says_where_the_comparison_is(tmp_path, entry, capsys):
    load_script("demo").report(tmp_path, {"soft": entry}, tmp_path / "comparison.html")
    assert f"{tmp_path}/comparison.html" in capsys.readouterr().out


def test_the_report_says_what_was_expected(tmp_path, entry, capsys):
    load_script("demo").report(tmp_path, {"soft": entry, "hard": entry}, tmp_path / "c.html")
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("hard, drawn: two cats")
    assert lines[at + 1] == "  expected    a cat left of a dog   (one of five references)"


def test_the_demo_begins_with_a_photograph_and_names_its_overlay(tmp_path, monkeypatch, capsys):
    load, photographs = Captioner(), []
    monkeypatch.setattr("captioning.inference.load", lambda: load)
    load.caption = lambda images: photographs.extend(images) or [load]
    load_script("demo").caption_a_photograph(tmp_path / "runs")
    out = capsys.readouterr().out
    assert photographs[0].is_file() and photographs[0].name == "grace_hopper.jpg"
    assert "caption     a woman in uniform" in out and f"overlay     {tmp_path}/runs/photograph.png" in out
    assert (tmp_path / "runs/photograph.png").read_bytes() == b"a figure"


def test_a_demo_without_the_pretrained_captioner_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    def missing():
        raise InputError("this installation has no pretrained captioner")

    monkeypatch.setattr("captioning.inference.load", missing)
    load_script("demo").caption_a_photograph(tmp_path)
    assert "no caption: this installation has no pretrained captioner" in capsys.readouterr().out


class Captioner:
    """Stands for a captioner, and for its caption and the caption's figure."""

    text = "a woman in uniform"

    def figure(self):
        return self

    def savefig(self, path, **options):
        Path(path).write_bytes(b"a figure")


def test_the_readme_shows_the_captions_of_the_measured_demo():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    entry = json.loads((ROOT / "docs/measurements/demo.json").read_text())["soft"]
    assert load_script("demo").with_captions(readme, entry) == readme
    captions = [example["caption"] for example in entry["examples"].values()]
    assert re.search(r"caption(?:_image\.py)? data/\S+ .*\n.*\n" + re.escape(captions[1]), readme)


def test_captions_and_what_was_expected_are_written_where_the_readme_shows_them(entry):
    command = "$ captioning caption a.png \\\n  --model runs/demo/soft/x.ckpt\n"
    text = f"intro\n{command}old\n{{}}end\n"
    expected = f"intro\n{command}two cats\n{{}}end\n"
    write = load_script("demo").with_captions
    assert write(text.format(""), entry) == expected.format("")
    assert write(text.format("# expected: old\n"), entry) == expected.format("# expected: a cat left of a dog\n")
    with pytest.raises(InputError, match=r"a\.png is none of b\.png"):
        write(text, entry | {"examples": {"b.png": entry["examples"]["a.png"]}})


@pytest.mark.parametrize(
    ("step", "small_step", "models", "epochs", "small"),
    [
        (0.14, 0.0, 3, 6, False),
        (0.2, 0.0, 2, 6, False),
        (0.3, 0.0, 2, 6, False),
        (0.4, 0.1, 2, 9, True),
        (0.4, 0.2, 2, 4, True),
        (9, 9, 2, 4, True),
    ],
)
def test_a_quick_processor_trains_a_third_model_and_a_slow_one_small_batches(
    monkeypatch, step, small_step, models, epochs, small
):
    demo = load_script("demo")
    monkeypatch.setattr(demo, "seconds_of_a_step", lambda *sizes: {(32, 5): step, (16, 2): small_step}[sizes])
    plan, seconds = demo.affordable()
    assert plan == (["soft", "hard", "summed"][:models], epochs, small)
    assert seconds == pytest.approx(
        epochs * (375 * small_step if small else 188 * step * (1 if models == 2 else 1.5 * demo.CROWDED))
    )


def test_a_step_of_the_demo_is_measured_with_its_share_of_the_cores():
    threads = torch.get_num_threads()
    assert 0 < load_script("demo").seconds_of_a_step(2, 5) < 60 and torch.get_num_threads() == threads


def fits_of(demo, tmp_path, monkeypatch, step: float) -> dict[str, list[str]]:
    """Return the options of every training of a demo on a machine whose steps take so long."""
    commands = []
    monkeypatch.setattr(demo, "seconds_of_a_step", lambda images, captions: step)
    monkeypatch.setattr(demo.Commands, "run", lambda self, name, arguments: commands.append(arguments) or 1.0)
    demo.train(tmp_path, None)
    return {words[words.index("--name") + 1]: words for words in commands if "fit" in words}


def test_the_demo_says_what_it_trains_and_how_long_it_will_take(tmp_path, monkeypatch, capsys):
    fits = fits_of(load_script("demo"), tmp_path, monkeypatch, 0.5)
    out = capsys.readouterr().out
    assert "2 models, 4 epochs of 2 captions per image, because this processor is slow; scores may be lower" in out
    assert "about 14 minutes on this machine, with drawing and scoring\n" in out
    wanted = {"--trainer.max_epochs=4", "--data.captions_per_image=2", "--data.batch_size=32"}
    assert all(wanted <= set(words) for words in fits.values())
    assert "--model.decoder.init_args.attention.init_args.ramp=[1250, 1312]" in fits["hard"]
    assert not any("ramp" in word for word in fits["soft"])


def test_hard_attention_draws_in_the_last_third_of_the_demo_as_in_its_config(tmp_path, monkeypatch):
    fits = fits_of(load_script("demo"), tmp_path, monkeypatch, 0.1)
    attention = read_config(ROOT / "configs/shapes_hard.yaml")["model"]["decoder"]["init_args"]["attention"]
    assert fits["hard"][-1].endswith(f"ramp={attention['init_args']['ramp']}")
    assert not any(word.startswith("--data") for words in fits.values() for word in words)


@pytest.mark.parametrize("plan", ['[["soft", "hard"], 6]', '[["soft", "hard"], 3, 16]', "{"])
def test_a_plan_of_another_version_is_refused(tmp_path, plan):
    (tmp_path / "plan.json").write_text(plan)
    with pytest.raises(
        InputError, match=r"plan\.json: written by another version of the demo; delete .* to start over"
    ):
        load_script("demo").train(tmp_path, None)


@pytest.mark.parametrize("step", [0.1, 0.3, 0.14, 0.2, 0.5])
def test_the_demo_validates_its_last_epoch(tmp_path, monkeypatch, step):
    for words in fits_of(load_script("demo"), tmp_path, monkeypatch, step).values():
        given = dict(word.removeprefix("--trainer.").split("=") for word in words if word.startswith("--trainer."))
        assert int(given["max_epochs"]) % int(given["check_val_every_n_epoch"]) == 0


@pytest.mark.parametrize(("step", "models", "minutes"), [(0.1, 3, 5), (0.5, 2, 14)])
def test_a_demo_that_goes_on_trains_what_it_began_with(tmp_path, monkeypatch, capsys, step, models, minutes):
    demo = load_script("demo")
    fits = fits_of(demo, tmp_path, monkeypatch, step)
    assert len(fits) == models and f"about {minutes} minutes" in capsys.readouterr().out
    assert fits_of(demo, tmp_path, monkeypatch, 0.6 - step) == fits  # the machine has more, or less, to do now
