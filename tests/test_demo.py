"""The demo: its plan for a fast and a slow processor, how it resumes, and what it prints."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import demo
import pytest
import torch
from commands import Commands

from captioning.errors import InputError
from captioning.settings import read_config

ROOT = Path(__file__).resolve().parent.parent


def fits_of(runs: Path, monkeypatch, step: float) -> dict[str, list[str]]:
    """Return the options of every training of a demo on a machine whose steps take ``step`` seconds."""
    commands = []
    monkeypatch.setattr(demo, "seconds_of_a_step", lambda images, captions: step)
    monkeypatch.setattr("captioning.data.ShapesSource.prepare", lambda self: None)  # draws 7,000 images
    monkeypatch.setattr(Commands, "run", lambda self, name, arguments: commands.append((name, arguments)) or 1.0)
    demo.train(runs, None)
    return {name: words for name, words in commands if "fit" in words}


@pytest.mark.parametrize(
    ("step", "small_step", "epochs", "has_small_batches"),
    [(0.2, 0.0, 6, False), (0.3, 0.0, 6, False), (0.4, 0.1, 9, True), (0.4, 0.2, 4, True), (9, 9, 4, True)],
)
def test_a_slow_processor_trains_small_batches(monkeypatch, step, small_step, epochs, has_small_batches):
    monkeypatch.setattr(demo, "seconds_of_a_step", lambda *sizes: {(32, 5): step, (16, 2): small_step}[sizes])
    plan, training_seconds = demo.affordable_plan()
    assert plan == (epochs, has_small_batches)
    assert training_seconds == pytest.approx(epochs * (375 * small_step if has_small_batches else 188 * step))


def test_a_step_of_the_demo_is_timed_with_half_of_the_cores():
    threads = torch.get_num_threads()
    assert 0 < demo.seconds_of_a_step(2, 5) < 60 and torch.get_num_threads() == threads


def test_the_demo_says_what_it_trains_and_how_long_it_will_take(tmp_path, monkeypatch, capsys):
    fits = fits_of(tmp_path, monkeypatch, 0.5)
    out = capsys.readouterr().out
    assert "2 models, 4 epochs of 2 captions per image, because this processor is slow; scores may be lower" in out
    assert "about 14 minutes on this machine, with drawing and scoring\n" in out
    wanted = {"--trainer.max_epochs=4", "--data.captions_per_image=2", "--data.batch_size=32"}
    assert all(wanted <= set(words) for words in fits.values())
    assert "--model.decoder.init_args.attention.init_args.ramp=[0.8333, 0.875]" in fits["hard"]
    assert not any("ramp" in word for word in fits["soft"])


def test_hard_attention_draws_in_the_last_third_of_the_demo_as_in_its_config(tmp_path, monkeypatch):
    fits = fits_of(tmp_path, monkeypatch, 0.1)
    attention = read_config(ROOT / "configs/shapes_hard.yaml")["model"]["decoder"]["init_args"]["attention"]
    assert attention["init_args"]["ramp"][0] == pytest.approx(2 / 3, abs=1e-3)
    assert not any("ramp" in word for words in fits.values() for word in words)
    for words in fits.values():
        options = dict(word.removeprefix("--trainer.").split("=") for word in words if word.startswith("--trainer."))
        assert int(options["max_epochs"]) % int(options["check_val_every_n_epoch"]) == 0  # the last epoch is validated


def test_a_resumed_demo_keeps_its_plan(tmp_path, monkeypatch, capsys):
    last = [tmp_path / name / "checkpoints/last.ckpt" for name in ("soft", "hard")]
    for path in last:
        path.parent.mkdir(parents=True)
        path.touch()
    fits = fits_of(tmp_path, monkeypatch, 0.5).values()
    assert sorted(fits) == sorted(["fit", "--ckpt_path", str(path)] for path in last)
    assert "minutes" not in capsys.readouterr().out  # nothing was measured


def test_the_demo_begins_with_a_photo_and_names_its_overlay(tmp_path, capsys):
    demo.caption_a_photo(tmp_path)
    out = capsys.readouterr().out
    assert re.search(r"image       .*cows.jpg\n  caption     a \w+", out)
    assert f"overlay     {tmp_path}/photo.png" in out and (tmp_path / "photo.png").stat().st_size > 10_000


def test_the_demo_ends_with_the_comparison_of_its_runs_and_says_where_it_is(tested_pair, capfd):
    runs = tested_pair[0].parent
    entry = dict.fromkeys(("bleu1", "bleu2", "bleu3", "bleu4", "bleu4_expected", "pointing_accuracy", "seconds"), 1.0)
    entry |= {"examples": {"a.png": {"caption": "two cats", "expected": "a cat left of a dog"}}}
    entry |= {"overlay": "a-overlay.png", "checkpoint": "best.ckpt"}
    demo.report(runs, {"soft": entry, "hard": entry})
    out = capfd.readouterr().out
    assert f"$ captioning compare {runs}/soft {runs}/hard --output {runs}/comparison.html" in out
    assert re.search(r"BLEU-4: hard .*, soft .* on these \d+ images, .*one seed each", out)
    assert "hard: two cats\n  expected    a cat left of a dog   (one of five references)" in out
    assert "explorer-data" in (runs / "comparison.html").read_text()


# Commands side by side


def test_a_failed_command_is_one_line_with_its_reason_and_the_others_finish(capsys):
    commands = Commands(2, "usage")
    results = commands.side_by_side(lambda words: commands.run(words[0], words) and words, [["--help"], ["fti"]])
    assert results[0] == ["--help"] and isinstance(results[1], InputError)
    assert re.fullmatch(r"fti failed: .*fti: no such command; did you mean fit\?.*", str(results[1]))
    lines = capsys.readouterr().out.splitlines()
    assert "--help  $ captioning --help" in lines and any(line.startswith("--help  usage: ") for line in lines)


def test_ctrl_c_waits_until_all_commands_have_saved_and_starts_no_other(tmp_path):
    """In place of Python, a program runs that saves when it is interrupted."""
    child = tmp_path / "python"
    child.write_text(
        f"#!{sys.executable}\nimport sys, time\nfrom pathlib import Path\nprint('epoch', flush=True)\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    time.sleep(0.5)\n"
        "    Path(sys.argv[-1]).write_text('saved')\n"
    )
    child.chmod(0o755)
    program = (
        "import sys\nfrom pathlib import Path\nfrom commands import Commands\n"
        "from captioning.errors import exits_on_input_error\n"
        f"sys.executable, commands = {str(child)!r}, Commands(2, 'epoch')\n"
        "def task(name):\n    commands.run(name, [name])\n    Path(name + '.next').touch()\n"
        "exits_on_input_error(lambda: commands.side_by_side(task, ['a', 'b', 'c']))()\n"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": paths},
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=30)
    assert sorted(line.split("  ")[1][:5] for line in lines) == ["$ cap", "$ cap", "epoch", "epoch"]
    assert process.returncode == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "python"]
