"""Progress: of a long task, and of a run, whose epochs are counted from 1 wherever they are shown."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
from helpers_training import make_data, make_module, make_shapes, make_trainer, run_stage
from pytorch_lightning.callbacks import ModelSummary, RichModelSummary, RichProgressBar, TQDMProgressBar
from pytorch_lightning.loggers import CSVLogger

from captioning.progress import Progress
from captioning.training.callbacks import CaptionSamples
from captioning.training.progress import EpochBar, LogLines, PartSizes, with_own_displays


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_now_and_then_in_a_log_and_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr("captioning.progress._SECONDS_BETWEEN_LINES", -1.0)
    log, terminal, unseen = io.StringIO(), Terminal(), Terminal()
    with Progress("a.zip", 3_000_000, 1_000_000, unit="bytes", stream=log) as progress:
        progress.update(2_000_000)
    assert log.getvalue().startswith("a.zip: 2.0 MB of 3.0 MB, ")
    for stream, shown in ((terminal, True), (unseen, False)):
        with Progress("train", 5, stream=stream, shown=shown) as progress:
            progress.update(4)
            progress.say("[a] line")
    assert "4 of 5 images" in terminal.getvalue() and "[a] line" in terminal.getvalue()
    assert unseen.getvalue() == "[a] line\n"


def test_lines_in_a_log_say_the_time_left_and_grow_rarer(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("captioning.progress.time.monotonic", lambda: now[0])
    log = io.StringIO()
    progress = Progress("epoch 1/6", 7300, 100, unit="steps", stream=log)  # 100 before: resumed
    for second in range(1, 3601):
        now[0] = float(second)
        progress.update(100 + second)
    lines = log.getvalue().splitlines()
    assert lines[0] == "epoch 1/6: 111 of 7,300 steps, 1.0 steps/s, 1:59:49 left"
    assert lines[-1].endswith(" left") and 50 < len(lines) < 100
    seconds = [int(re.search(r": ([\d,]+) of", line)[1].replace(",", "")) - 100 for line in lines]
    assert seconds[:3] == [11, 22, 33]
    assert seconds[-1] - seconds[-2] > 120


def test_training_and_test_tell_a_log_how_far_they_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("captioning.progress._SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setattr("captioning.progress._LINES_OF_A_LONG_TASK", 0.0)
    module, source = make_module(), make_shapes(tmp_path, train=4, val=3, test=2)
    run_stage(make_trainer(tmp_path, callbacks=[LogLines()], max_epochs=2).fit, module, make_data(source))
    lines = re.findall(
        r"^epoch (\d)/2: (\d+) of (\d+) steps, .* steps/s, \d+:\d\d left$", capsys.readouterr().out, re.M
    )
    steps = int(lines[0][2])
    assert [int(done) for _, done, _ in lines] == list(range(1, steps + 1))
    assert [epoch for epoch, _, _ in lines] == ["1"] * (steps // 2) + ["2"] * (steps // 2)
    run_stage(make_trainer(tmp_path, callbacks=[LogLines()]).test, module, make_data(source))
    assert re.search(r"^test: 2 of 2 images, .* images/s, 0:00 left$", capsys.readouterr().out, re.M)


def test_progress_counts_its_rate_without_what_was_done_before(monkeypatch):
    clock = iter([0.0, 2.0])
    monkeypatch.setattr("captioning.progress.time.monotonic", lambda: next(clock))
    progress = Progress("train", 20, 10)
    progress.done = 16
    assert progress.rate() == "3.0 images/s"


def test_lightnings_displays_are_replaced_and_others_kept():
    tqdm, samples = TQDMProgressBar(), CaptionSamples()
    found = with_own_displays([RichProgressBar(), tqdm, ModelSummary(), RichModelSummary(), samples])
    assert [type(callback) for callback in found] == [EpochBar, TQDMProgressBar, PartSizes, PartSizes, CaptionSamples]
    assert found[1] is tqdm and found[4] is samples


@pytest.mark.parametrize(("last", "shown"), [(3, "epoch 2/3"), (-1, "epoch 2"), (None, "epoch 2")])
def test_the_bar_counts_epochs_from_one(last, shown):
    bar = EpochBar()
    bar._trainer = SimpleNamespace(max_epochs=last)
    assert bar._get_train_description(1).strip() == shown


def test_line_samples_and_metrics_count_epochs_alike_and_sizes_are_the_parameters(tmp_path, capsys):
    module, source = make_module(), make_shapes(tmp_path, train=4, val=3, test=1)
    logger = CSVLogger(str(tmp_path), name="metrics", version=0)
    callbacks = with_own_displays([LogLines(), RichProgressBar(), ModelSummary(), CaptionSamples(images=1)])
    displays = {"enable_progress_bar": True, "enable_model_summary": True}
    trainer = make_trainer(tmp_path, logger=logger, callbacks=callbacks, max_epochs=2, **displays)
    run_stage(trainer.fit, module, make_data(source))
    shown = capsys.readouterr().out
    assert re.findall(r"^epoch (\d+), step", shown, re.MULTILINE) == ["1", "2"]
    assert "epoch 2/2" in shown and "Epoch" not in shown and "v_num" not in shown
    assert sorted(path.name[-8:] for path in (tmp_path / "samples").iterdir()) == ["_001.png", "_002.png"]
    rows = (tmp_path / "metrics/version_0/metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("epoch")
    assert {float(row.split(",")[column]) for row in rows[1:]} == {1.0, 2.0}

    decoder = module.captioner.decoder
    counts = {
        "encoder": sum(p.numel() for p in module.captioner.encoder.parameters()),
        "attention": sum(p.numel() for name, p in decoder.named_parameters() if name.startswith("attention.")),
        "decoder": sum(p.numel() for name, p in decoder.named_parameters() if not name.startswith("attention.")),
    }
    total = sum(p.numel() for p in module.parameters())
    sizes = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    assert f"parameters: {sizes}; {total:,} of {total:,} are trained\n" in shown
