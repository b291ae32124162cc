"""Checkpoints that are damaged, foreign or of another model; saves that fail. What was good stays as it was."""

from __future__ import annotations

import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_view
from helpers_faults import Fault, ends, faults, proves
from helpers_runs import edit_checkpoint, save_checkpoint, tiny_config
from helpers_training import enter_copy, trained_folder

from captioning.cli.fit import main
from captioning.errors import InputError
from captioning.inference import load
from captioning.run_folder import RunFolder
from captioning.training.checkpoint_io import AtomicCheckpointIO

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")
RUN = Path("runs/tiny")
LAST = RUN / "checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a run of one epoch."""
    folder = tmp_path_factory.mktemp("trained")
    return trained_folder(folder, tiny_config(folder / "shapes"))


@pytest.fixture
def workdir(trained, tmp_path, monkeypatch) -> Path:
    """A copy of it, entered."""
    return enter_copy(trained, tmp_path / "work", monkeypatch)


def cut(share: float) -> Callable[[bytes], bytes]:
    return lambda whole: whole[: int(len(whole) * share)]


def flipped(seed: int) -> Callable[[bytes], bytes]:
    def flip(whole: bytes) -> bytes:
        """Change 64 bytes of the weights, which lie in the middle of the file."""
        draw, changed = random.Random(seed), bytearray(whole)
        for _ in range(64):
            changed[draw.randrange(len(whole) // 4, len(whole) // 2)] ^= draw.randrange(1, 256)
        return bytes(changed)

    return flip


def edited(edit: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def change(whole: bytes) -> bytes:
        Path("edited").write_bytes(whole)
        edit_checkpoint("edited", edit)
        return Path("edited").read_bytes()

    return change


def in_format(number: Any) -> Callable[[bytes], bytes]:
    return edited(lambda content: content["captioning"].update(format=number))


DAMAGED = {
    Fault("a checkpoint cut short by a byte", "the end of the checkpoint is missing"): lambda whole: whole[:-1],
    Fault("half a checkpoint", "the end of the checkpoint is missing"): cut(0.5),
    Fault("an empty checkpoint", "not a checkpoint of this project"): cut(0.0),
    Fault("a text in place of a checkpoint", "not a checkpoint of this project"): lambda whole: b"hello",
    Fault("64 flipped bytes in a checkpoint", "not what was written; copy it again"): flipped(0),
    Fault("64 other flipped bytes", "not what was written; copy it again"): flipped(1),
    Fault("a checkpoint of another project", "not a checkpoint of this project"): edited(
        lambda content: content.pop("captioning")
    ),
    Fault("a checkpoint without weights", "not a checkpoint of this project"): edited(
        lambda content: content.pop("state_dict")
    ),
    Fault("checkpoint format 0", "has checkpoint format 0, which there never was"): in_format(0),
    Fault("checkpoint format -1", "has checkpoint format -1, which there never was"): in_format(-1),
    Fault("checkpoint format 99", "has checkpoint format 99, this version reads up to 1; update"): in_format(99),
    Fault("checkpoint format true", "has checkpoint format True, which there never was"): in_format(True),
}


@faults(DAMAGED)
def test_a_damaged_checkpoint_is_refused_everywhere(workdir, capsys, fault, case):
    config = (RUN / "config.yaml").read_bytes()
    path = RUN / "checkpoints/damaged.ckpt"
    path.write_bytes(case(LAST.read_bytes()))
    whole = LAST.read_bytes()
    with pytest.raises(InputError) as caught:
        load(path)
    assert fault.sees in str(caught.value)
    for command in ("fit", "test"):
        assert "damaged.ckpt" in ends(
            capsys, fault, main, [command, "--ckpt_path", str(path), "--trainer.max_epochs", "2"]
        )
    assert LAST.read_bytes() == whole and (RUN / "config.yaml").read_bytes() == config


LOADED = {
    Fault("a checkpoint whose `hidden_dim` is 100,000", "hidden_dim must be in 1 .. 65536, got 100000"): edited(
        lambda content: content["captioning"]["decoder"]["init_args"].update(hidden_dim=100_000)
    ),
    Fault("a checkpoint whose encoder's argument is a tensor", "channels is a Tensor, no plain data"): edited(
        lambda content: content["captioning"]["encoder"]["init_args"].update(channels=[4, torch.ones(1)])
    ),
    Fault("a checkpoint whose images are 8.0 pixels wide", "resize and crop are whole pixels, got 8.0"): edited(
        lambda content: content["captioning"]["preprocessing"].update(resize=8.0)
    ),
    Fault("a checkpoint whose images are 10^400 pixels wide", "preprocessing: resize must be in 1 .. 10000"): edited(
        lambda content: content["captioning"]["preprocessing"].update(resize=10**400)
    ),
}


@faults(LOADED)
def test_settings_that_are_no_plain_data_are_refused(workdir, fault, case):
    LAST.write_bytes(case(LAST.read_bytes()))
    with pytest.raises(InputError) as caught:
        load(LAST)
    assert fault.sees in str(caught.value)


@proves(Fault("weights so large that sums of them are not finite", "gives no word a finite probability"))
def test_a_model_without_probabilities_says_so(workdir, fault):
    captioner = load(LAST)
    captioner.model.decoder.output.L_o.bias.fill_(float("inf"))  # as such sums are
    with pytest.raises(InputError) as caught:
        captioner(random_view(30, 20))
    assert fault.sees in str(caught.value)


@pytest.mark.parametrize("seed", range(20))
def test_no_flipped_bytes_of_the_weights_pass(tmp_path, seed):
    path = save_checkpoint(tmp_path / "best.ckpt")
    path.write_bytes(flipped(seed)(path.read_bytes()))
    with pytest.raises(InputError, match=r"best\.ckpt: "):
        load(path)


BESIDE: dict[Fault, tuple[Callable[[bytes], bytes], bool]] = {
    Fault("a damaged checkpoint beside a sound one", "or use last.ckpt, which is sound"): (flipped(0), True),
    Fault("a checkpoint cut short beside a sound one", "or use last.ckpt, which is sound"): (cut(0.7), True),
    Fault("an empty checkpoint beside a sound one", "give last.ckpt, which is sound"): (cut(0.0), True),
    Fault("a damaged checkpoint beside another damaged one", "copy it again, or use another one"): (cut(0.7), False),
}


@faults(BESIDE)
def test_a_damaged_checkpoint_names_a_sound_one_beside_it(tmp_path, monkeypatch, fault, case):
    monkeypatch.chdir(tmp_path)
    damage, sound = case
    other, path = save_checkpoint(Path("last.ckpt")), save_checkpoint(Path("best.ckpt"))
    path.write_bytes(damage(path.read_bytes()))
    if not sound:
        other.write_bytes(flipped(1)(other.read_bytes()))
    with pytest.raises(InputError) as caught:
        load(path)
    assert fault.sees in str(caught.value)


GO_ON = ["fit", "--config", "tiny.yaml", "--ckpt_path", "last", "--trainer.max_epochs", "2"]


@faults(
    {
        Fault(
            "`fit --ckpt_path last` with a damaged last.ckpt",
            "damaged (",
            0,
            "best.ckpt, from which training goes on",
        ): flipped(0),
        Fault("the same, cut short", "damaged (", 0, "best.ckpt, from which training goes on"): cut(0.5),
        Fault("the same, empty", "damaged (", 0, "best.ckpt, from which training goes on"): cut(0.0),
    }
)
def test_training_goes_on_from_the_sound_checkpoint_before_a_damaged_one(workdir, capsys, fault, case):
    LAST.write_bytes(case(LAST.read_bytes()))
    cli = main(GO_ON)
    line = next(line for line in capsys.readouterr().err.splitlines() if "going on from" in line)
    assert line.startswith(f"{LAST}: {fault.sees}") and line.endswith(f"{LAST.with_name('best.ckpt')}, which is sound")
    assert cli.trainer.current_epoch == 2 and torch.load(LAST, weights_only=True)["global_step"] == 4


@proves(Fault("the same, where best.ckpt is damaged too", "last.ckpt: damaged: "))
def test_without_a_sound_checkpoint_training_does_not_go_on(workdir, capsys, fault):
    for path in (LAST, LAST.with_name("best.ckpt")):
        path.write_bytes(flipped(0)(path.read_bytes()))
    ends(capsys, fault, main, GO_ON)


@proves(Fault("`test` of a run whose best.ckpt is damaged", "last.ckpt, which is sound"))
def test_a_test_scores_no_other_checkpoint_than_was_asked_for(workdir, capsys, fault):
    best = LAST.with_name("best.ckpt")
    best.write_bytes(flipped(0)(best.read_bytes()))
    assert "best.ckpt: damaged" in ends(capsys, fault, main, ["test", "--config", "tiny.yaml"])


def test_a_checkpoint_without_checksums_loads(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = save_checkpoint(tmp_path / "best.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert load(path).vocabulary.words


RESUMED = {
    Fault(
        "a resumed run whose training data's position is damaged", "position in the training data is damaged"
    ): edited(lambda content: content.update(CaptionDataModule={"epoch": "x"})),
    Fault("a resumed run without an optimizer's state", "holds the model alone"): edited(
        lambda content: content.pop("optimizer_states")
    ),
    Fault("a resumed run with an empty list of optimizers' states", "holds the model alone"): edited(
        lambda content: content["optimizer_states"].clear()
    ),
    Fault("a resumed run with the states of two optimizers", "has the states of 2 optimizers; a run has one"): edited(
        lambda content: content["optimizer_states"].append(content["optimizer_states"][0])
    ),
    Fault("a resumed run with another optimizer's state", "param_groups has 0 entries, not 2"): edited(
        lambda content: content["optimizer_states"][0].update(param_groups=[])
    ),
    Fault("a resumed run whose state is a list", "its callbacks is no dict"): edited(
        lambda content: content.update(callbacks=[1])
    ),
}


@faults(RESUMED)
def test_what_training_cannot_go_on_from_replaces_nothing(workdir, capsys, fault, case):
    LAST.write_bytes(case(LAST.read_bytes()))
    files = {path: path.read_bytes() for path in (LAST, RUN / "config.yaml")}
    ends(capsys, fault, main, ["fit", "--ckpt_path", str(LAST), "--trainer.max_epochs", "3"])
    assert files == {path: path.read_bytes() for path in files}


@proves(Fault("weights that are not finite in a checkpoint", "are not finite"))
def test_weights_that_are_not_finite_are_refused(workdir, capsys, fault):
    def spoil(content: dict[str, Any]) -> None:
        content["state_dict"]["captioner.decoder.output.L_o.weight"][0, 0] = float("nan")

    edit_checkpoint(LAST, spoil)
    for command in ("test", "predict", "fit"):
        ends(capsys, fault, main, [command, "--ckpt_path", str(LAST), "--trainer.max_epochs", "3"])
    with pytest.raises(InputError, match="are not finite"):
        load(LAST)


OTHERS = {
    Fault("resume with another `hidden_dim`", "of another model: captioner.decoder.", kept="config.yaml too"): [
        "--model.decoder.init_args.hidden_dim",
        "9",
    ],
    Fault("resume with another vocabulary", "vocabulary (", kept="config.yaml too"): [
        "--data.vocabulary.max_words",
        "3",
    ],
    Fault(
        "resume with another class of optimizer",
        "model.optimizer: torch.optim.SGD cannot go on from the state of torch.optim.Adam",
        kept="config.yaml too",
    ): ["--model.optimizer", "SGD", "--model.optimizer.lr", "0.1"],
    Fault(
        "resume with an option of the optimizer that is now true",
        "model.optimizer.init_args.amsgrad: was False in the checkpoint",
        kept="config.yaml too",
    ): ["--model.optimizer.init_args.amsgrad", "true"],
}


SAID = {
    "data.batch_size": "7",
    "data.group": "image",
    "seed_everything": "3",
    "trainer.precision": "bf16-mixed",
    "model.optimizer.init_args.lr": "0.01",
}


@proves(
    Fault(
        f"resume with other settings, such as {', '.join(SAID)}",
        "from here on; it was",
        0,
        "the run, which goes on with them; a line for each",
    )
)
def test_every_setting_that_a_resumed_run_changes_is_said(workdir, capsys, caplog, fault):
    resume = ["fit", "--ckpt_path", str(LAST), "--trainer.max_epochs"]

    def said(*options: str) -> list[str]:
        caplog.clear()
        main([*resume, *options])
        return [record.getMessage() for record in caplog.records if fault.sees in record.getMessage()]

    with caplog.at_level("INFO", "pytorch_lightning.utilities.rank_zero"):
        assert said("2") == ["trainer.max_epochs: 2 from here on; it was 1"]
        assert said("2") == []
        lines = said("3", *(word for place, now in SAID.items() for word in (f"--{place}", now)))
    changed = SAID | {"trainer.max_epochs": "3"}
    expected = [f"{place}: {now} {fault.sees}" for place, now in changed.items()]
    assert sorted(line.rpartition(" ")[0] for line in lines) == sorted(expected)


def test_a_weight_that_one_of_two_models_lacks_is_missing_there_alone(workdir):
    attention = "--model.decoder.init_args.attention"
    options = [attention, "HardAttention", f"{attention}.score", "AdditiveScore"]
    with pytest.raises(InputError, match=r"of another model: .* is missing there and \(\) here"):
        main(["fit", "--ckpt_path", str(LAST), "--trainer.max_epochs", "2", *options])


@faults(OTHERS)
def test_a_resume_with_other_sizes_leaves_the_run_as_it_was(workdir, capsys, fault, case):
    config = (RUN / "config.yaml").read_bytes()
    resume = ["fit", "--ckpt_path", str(LAST), "--trainer.max_epochs", "2"]
    ends(capsys, fault, main, [*resume, *case])
    assert (RUN / "config.yaml").read_bytes() == config
    assert main(resume).trainer.current_epoch == 2
    assert (RUN / "config.yaml").read_bytes() != config


@proves(Fault("resume one run under the name of another", "runs/other: holds another run than"))
def test_a_resumed_run_does_not_write_over_another(workdir, capsys, fault):
    shutil.copytree(RUN, "runs/other")
    before = Path("runs/other/checkpoints/last.ckpt").stat().st_mtime_ns
    ends(capsys, fault, main, ["fit", "--ckpt_path", str(LAST), "--name", "other", "--trainer.max_epochs", "2"])
    assert Path("runs/other/checkpoints/last.ckpt").stat().st_mtime_ns == before


@proves(Fault("resume a run that is being trained", "another `captioning fit` is at work in this folder"))
def test_a_run_is_not_resumed_twice_at_once(workdir, capsys, fault):
    held = RunFolder(RUN).claim()
    assert held is not None
    ends(capsys, fault, main, ["fit", "--ckpt_path", str(LAST), "--trainer.max_epochs", "2"])
    held.release()


@proves(Fault("`--ckpt_path` is a run's folder", "runs/tiny: is a folder; give runs/tiny/checkpoints/best.ckpt"))
def test_a_folder_is_no_checkpoint(workdir, capsys, fault):
    ends(capsys, fault, main, ["test", "--ckpt_path", str(RUN)])


@pytest.mark.filterwarnings("ignore:coroutine")
@proves(Fault("`--ckpt_path` is a pipe", "cannot be read (is no regular file)"))
def test_a_pipe_is_no_checkpoint(workdir, capsys, fault):
    os.mkfifo("pipe.ckpt")
    ends(capsys, fault, main, ["test", "--ckpt_path", "pipe.ckpt"])
    with pytest.raises(InputError, match="no regular file"):
        load("pipe.ckpt")


# Saves


@proves(Fault("a disk that is full during a save", "cannot be written (File too large); the one before is kept"))
def test_a_save_that_finds_no_room_leaves_the_old_file(tmp_path, fault):
    path = tmp_path / "x.ckpt"
    AtomicCheckpointIO().save_checkpoint({"a": torch.zeros(10)}, path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(InputError) as caught:
            AtomicCheckpointIO().save_checkpoint({"a": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert fault.sees in str(caught.value)
    assert torch.load(path, weights_only=True)["a"].shape == (10,) and os.listdir(tmp_path) == ["x.ckpt"]


@proves(Fault("a folder that cannot be written to during a save", "cannot be written ("))
def test_a_save_without_permission_says_so(tmp_path, fault):
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(InputError) as caught:
        AtomicCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "folder" / "x.ckpt")
    assert fault.sees in str(caught.value)


@proves(
    Fault("a disk that returns other bytes than were written", "not what was written (", kept="the checkpoint before")
)
def test_a_save_is_read_back_before_it_replaces_the_old_file(tmp_path, monkeypatch, fault):
    path = tmp_path / "x.ckpt"
    AtomicCheckpointIO().save_checkpoint({"a": torch.zeros(10)}, path)
    honest = Path.write_bytes

    def bad_disk(file, content):
        changed = bytearray(content)
        changed[len(changed) // 2] ^= 1
        return honest(file, changed)

    monkeypatch.setattr(Path, "write_bytes", bad_disk)
    with pytest.raises(InputError, match="the one before is kept") as caught:
        AtomicCheckpointIO().save_checkpoint({"a": torch.ones(5000)}, path)
    assert fault.sees in str(caught.value)
    assert torch.load(path, weights_only=True)["a"].shape == (10,) and os.listdir(tmp_path) == ["x.ckpt"]
