"""Options that cannot be used end in one line with exit code 2, before work starts, and leave no folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from helpers import load_script
from helpers_faults import Fault, ends, faults, proves
from helpers_runs import tiny_config

from captioning.cli.checks import while_restoring
from captioning.cli.fit import main
from captioning.cli.usage import COMMANDS, first_line
from captioning.errors import InputError, exits_on_input_error
from captioning.inference import DecodingOptions
from captioning.run_folder import RunFolder


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    from captioning.data.shapes import ShapesSource

    root = tmp_path_factory.mktemp("data") / "shapes"
    ShapesSource(str(root), train=4, val=2, test=2, image_size=48).prepare()
    return root


@pytest.fixture
def workdir(shapes, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["captioning"])
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny_config(shapes)))
    return tmp_path


ADAM = ["--model.optimizer", "Adam", "--model.optimizer.lr"]
DECODER = "--model.decoder.init_args."
LIKELIHOOD = ["--model.objective", "Likelihood"]
OPTIONS = {
    Fault("an option that does not exist", "no such option; did you mean --model.bound_samples?"): [
        "--model.bound_sample",
        "3",
    ],
    Fault("an option of the objective", "no such option; did you mean --model.objective.attention_penalty?"): [
        "--model.attention_penalty",
        "0.5",
    ],
    Fault("a class that does not exist", "model.encoder: Nope is no class that can stand"): ["--model.encoder", "Nope"],
    Fault("`--seed_everything -1`", "seed_everything must be in 0 .. 4294967295, got -1"): ["--seed_everything", "-1"],
    Fault("`--data.num_workers -1`", "num_workers must be in 0 .. 1024, got -1"): ["--data.num_workers", "-1"],
    Fault("`--data.num_workers 99999`", "num_workers must be in 0 .. 1024"): ["--data.num_workers", "99999"],
    Fault("`--data.batch_size 0`", "batch_size must be at least 1, got 0"): ["--data.batch_size", "0"],
    Fault("`--data.eval_batch_size -3`", "eval_batch_size must be at least 1"): ["--data.eval_batch_size", "-3"],
    Fault("`--data.vocabulary.max_words -5`", "max_words must be at least 1, got -5"): [
        "--data.vocabulary.max_words",
        "-5",
    ],
    Fault("`--data.vocabulary.min_count 0`", "min_count must be at least 1"): ["--data.vocabulary.min_count", "0"],
    Fault("`--data.limit_images 0`", "limit_images must be at least 1"): ["--data.limit_images", "0"],
    Fault("`--data.test_split x`", "test_split must be one of train, val, test"): ["--data.test_split", "x"],
    Fault("`--data.augmentation.flip 2`", "flip must be a probability, got 2.0"): ["--data.augmentation.flip", "2"],
    Fault("a vocabulary file that does not exist", "nope.json: cannot be read (No such file"): [
        "--data.vocabulary.file",
        "nope.json",
    ],
    Fault("`hidden_dim 0`", "hidden_dim must be in 1 .. 65536, got 0"): [f"{DECODER}hidden_dim", "0"],
    Fault("`hidden_dim 1000000000`", "hidden_dim must be in 1 .. 65536"): [f"{DECODER}hidden_dim", "1000000000"],
    Fault("`embedding_dim -1`", "embedding_dim must be in 1 .. 65536"): [f"{DECODER}embedding_dim", "-1"],
    Fault("`init_layers 0`", "init_layers must be in 1 .. 64"): [f"{DECODER}init_layers", "0"],
    Fault("`dropout 1.5`", "dropout must be in 0 .. 0.99, got 1.5"): [f"{DECODER}dropout", "1.5"],
    Fault("`dropout` NaN", "dropout must be in 0 .. 0.99, got nan"): [f"{DECODER}dropout", ".nan"],
    Fault("an attention's `dropout 3`", "dropout must be in 0 .. 0.99, got 3.0"): [
        f"{DECODER}attention.init_args.dropout",
        "3",
    ],
    Fault("an estimator of 0 draws", "samples: LeaveOneOut compares at least 2 draws of a caption, got 0"): [
        *(*LIKELIHOOD, "--model.objective.estimator", "captioning.objective.LeaveOneOut"),
        *("--model.objective.estimator.samples", "0"),
    ],
    Fault("a callback that refuses its argument", "WeightAverage: decay must be at least 0 and below 1, got 7.0"): [
        *("--trainer.callbacks+", "captioning.training.WeightAverage"),
        *("--trainer.callbacks.decay", "7"),
    ],
    Fault("Lightning's callback with a mode that does not exist", "EarlyStopping: `mode` can be min, max, got bogus"): [
        *("--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "val/nll"),
        *("--trainer.callbacks.mode", "bogus"),
    ],
    Fault(
        "a checkpoint where settings are taken",
        "--checkpoint best.ckpt: takes settings; a checkpoint is given by --ckpt_path best.ckpt",
    ): ["--checkpoint", "best.ckpt"],
    Fault("validations farther apart than an epoch is long", "--trainer.val_check_interval: "): [
        "--trainer.val_check_interval",
        "100",
    ],
    Fault("a folder to begin with", ": is a folder; give a .ckpt file in it"): ["--init_from", "."],
    Fault("an empty path in a file of settings", "init_from: has an empty value; give one, or null"): [
        "--init_from",
        "",
    ],
    Fault("a label smoothing of 2", "label_smoothing must be in 0 .. 0.99"): [
        *(*LIKELIHOOD, "--model.objective.label_smoothing", "2"),
    ],
    Fault("an attention penalty of -1", "attention_penalty must be at least 0, got -1.0"): [
        *(*LIKELIHOOD, "--model.objective.attention_penalty", "-1"),
    ],
    Fault("an infinite attention penalty", "attention_penalty must be at least 0, got inf"): [
        *(*LIKELIHOOD, "--model.objective.attention_penalty", ".inf"),
    ],
    Fault("a caption decoded 0 times", "samples must be at least 1"): [
        *(*LIKELIHOOD, "--model.objective.samples", "0"),
    ],
    Fault("`--model.bound_samples -1`", "bound_samples must be in 0 .. 100000"): ["--model.bound_samples", "-1"],
    Fault("a beam of 0", "beam_size must be in 1 .. 1000, got 0"): ["--model.search.beam_size", "0"],
    Fault("captions of 0 words", "max_length must be in 1 .. 1000, got 0"): ["--model.search.max_length", "0"],
    Fault("`min_length` above `max_length`", "min_length must be in 0 .. 7"): ["--model.search.min_length", "8"],
    Fault("length normalisation NaN", "length_normalization must be in -10 .. 10, got nan"): [
        "--model.search.length_normalization",
        ".nan",
    ],
    Fault("learning rate -1", "model.optimizer: Invalid learning rate: -1.0"): [*ADAM, "-1"],
    Fault("learning rate NaN", "model.optimizer: Invalid learning rate: nan"): [*ADAM, ".nan"],
    Fault("learning rate infinite", "learning rate of group 1 must be at least 0, got inf"): [*ADAM, ".inf"],
    Fault("`warmup_steps -1`", "warmup_steps must be at least 0"): [
        *("--model.scheduler", "captioning.training.WarmupCosine"),
        *("--model.scheduler.init_args.warmup_steps", "-1"),
    ],
    Fault("an accelerator that does not exist", "trainer: You selected an invalid accelerator name"): [
        "--trainer.accelerator",
        "toaster",
    ],
    Fault("a strategy that does not exist", "trainer: You selected an invalid strategy name"): [
        "--trainer.strategy",
        "nope",
    ],
    Fault("`--trainer.devices 99` on a CPU", "--trainer.devices 99: "): ["--trainer.devices", "99"],
    Fault("`--trainer.precision 17`", "trainer.precision: must be one of"): ["--trainer.precision", "17"],
    Fault("`--trainer.max_epochs -5`", "`max_epochs` must be a non-negative integer or -1"): [
        "--trainer.max_epochs",
        "-5",
    ],
    Fault("`--trainer.overfit_batches 1`", "--trainer.overfit_batches: give --data.limit_images"): [
        "--trainer.overfit_batches",
        "1",
    ],
    Fault(
        "`--trainer.reload_dataloaders_every_n_epochs 1`", "--trainer.reload_dataloaders_every_n_epochs: would begin"
    ): ["--trainer.reload_dataloaders_every_n_epochs", "1"],
    Fault("`--checkpoint.save_top_k 3`", "--checkpoint.save_top_k 3: all would be best.ckpt"): [
        "--checkpoint.save_top_k",
        "3",
    ],
    Fault("`--trainer.accumulate_grad_batches 0`", "--trainer.accumulate_grad_batches must be at least 1"): [
        "--trainer.accumulate_grad_batches",
        "0",
    ],
    Fault("`--trainer.val_check_interval 0`", "--trainer.val_check_interval must be at least"): [
        "--trainer.val_check_interval",
        "0",
    ],
    Fault("`--trainer.check_val_every_n_epoch 0`", "--trainer.check_val_every_n_epoch must be at least 1"): [
        "--trainer.check_val_every_n_epoch",
        "0",
    ],
    Fault("an option of 400 digits", "a whole number beyond 1.8e308"): ["--data.augmentation.flip", "9" * 400],
    Fault("`--trainer.gradient_clip_val -1`", "--trainer.gradient_clip_val must be at least 0"): [
        "--trainer.gradient_clip_val",
        "-1",
    ],
    Fault("`--early_stopping.patience -1`", "--early_stopping.patience must be at least 0"): [
        "--early_stopping.patience",
        "-1",
    ],
    Fault("`--trainer.limit_val_batches 0`", "--trainer.limit_val_batches 0: validation chooses"): [
        "--trainer.limit_val_batches",
        "0",
    ],
    Fault("the highest NLL taken for the best", "--checkpoint.monitor val/nll: the lowest is best; add --checkp"): [
        "--checkpoint.monitor",
        "val/nll",
    ],
    Fault("early stopping when the NLL falls", "--early_stopping.monitor val/nll: the lowest is best; add"): [
        "--early_stopping.monitor",
        "val/nll",
    ],
    Fault("a schedule whose first number is another", "model.scheduler: StepLR does not follow the length"): [
        *("--model.scheduler", "torch.optim.lr_scheduler.StepLR"),
    ],
    Fault("random crops where an encoder squashes", "data.augmentation.random_crop: this encoder sees"): [
        *("--data.augmentation.random_crop", "true"),
    ],
    Fault("images of 0 pixels for VGG", "image_size must be at least 1, got 0"): [
        *("--model.encoder", "captioning.encoders.TorchvisionEncoder"),
        *("--model.encoder.name", "vgg19", "--model.encoder.image_size", "0"),
    ],
    Fault("cached features with weights in bfloat16", "--trainer.precision bf16-true: changes the encoder"): [
        *("--trainer.precision", "bf16-true", "--data.features", "features"),
    ],
    Fault("a misspelt monitor", "--checkpoint.monitor val/blue4: no validation logs that; near: val/bleu4"): [
        "--checkpoint.monitor",
        "val/blue4",
    ],
    Fault("a monitor without its stage", "--early_stopping.monitor bleu4: no validation logs that"): [
        "--early_stopping.monitor",
        "bleu4",
    ],
    Fault("a run's name of 300 characters", "cannot be written (File name too long)"): ["--name", "x" * 300],
    Fault("a NUL character in a name", "control characters are not allowed"): ["--name", "a\0b"],
    Fault("`--runs` is a file", "--name tiny.yaml/tiny: cannot be written (Not a directory)"): ["--runs", "tiny.yaml"],
    Fault("a checkpoint that does not exist", "nope.ckpt: no such checkpoint"): ["--ckpt_path", "nope.ckpt"],
    Fault("data drawn into a file", "exists, but without a readable shapes.json"): [
        "--data.source.init_args.root",
        "tiny.yaml",
    ],
}


@pytest.mark.parametrize("words", [["--init_from", ""], ["--data.features=", "--init_from="], ["--init_from", " "]])
@pytest.mark.parametrize("command", COMMANDS)
@proves(Fault("an empty value of any option of any command", ": has an empty value; give one, or leave it out"))
def test_no_option_takes_an_empty_value(capsys, command, words, fault):
    """Of the other commands: ``test_no_option_of_a_command_takes_an_empty_value``."""
    assert words[0].rstrip("=") in ends(capsys, fault, first_line, [command, *words])


@faults(OPTIONS)
def test_an_option_that_cannot_be_used_is_one_line_and_takes_no_name(workdir, capsys, fault, case):
    ends(capsys, fault, main, ["fit", "--config", "tiny.yaml", *case])
    assert not any(RunFolder(folder).is_trained() for folder in Path().glob("runs/*"))


def constant(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, steps)


def test_a_schedule_may_be_a_function(workdir):
    cli = main(["fit", "--config", "tiny.yaml", "--model.scheduler", f"{__name__}.constant"])
    assert type(cli.trainer.lr_scheduler_configs[0].scheduler).__name__ == "ConstantLR"


class Chains(pl.Callback):
    """Of somebody's own module: one refusal in the words of what it reads, one in its own."""

    def __init__(self, number: int) -> None:
        try:
            {}["a"]
        except KeyError as error:
            kind = InputError if number == 1 else ValueError
            raise kind(f"{number}: choose another") from error


@pytest.mark.parametrize(("number", "message"), [(1, "1: choose another"), (2, "Chains: 2: choose another")])
def test_a_refusal_is_in_the_words_that_are_meant_for_the_user(workdir, number, message):
    options = ["--trainer.callbacks+", f"{__name__}.Chains", "--trainer.callbacks.number", str(number)]
    with pytest.raises(InputError) as refused:
        main(["fit", "--config", "tiny.yaml", *options])
    assert str(refused.value) == message


@proves(
    Fault(
        "early stopping by a score that this run's validations do not log",
        "--early_stopping.monitor: Early stopping conditioned on metric `val/posterior_pointing_accuracy`",
        kept="last.ckpt, after the first epoch",
    )
)
def test_early_stopping_by_a_score_that_is_not_logged_is_one_line(workdir, capsys, fault):
    ends(
        capsys,
        fault,
        main,
        ["fit", "--config", "tiny.yaml", "--early_stopping.monitor", "val/posterior_pointing_accuracy"],
    )
    assert RunFolder(Path("runs/tiny")).checkpoint("last").is_file()


@proves(Fault("an image where settings are taken", "a file of settings is not text; give a YAML file"))
def test_a_file_that_is_no_text_is_no_settings(workdir, capsys, fault):
    Path("photo.png").write_bytes(b"\x89PNG\r\n")
    ends(capsys, fault, main, ["fit", "--config", "tiny.yaml", "--data", "photo.png"])


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
CONFIGS = {
    Fault("a config that does not exist", "--config bad.yaml: cannot be read (No such file"): None,
    Fault("a config in Latin-1", "--config bad.yaml: not a YAML file ('utf-8' codec"): "name: Straße".encode("latin-1"),
    Fault("a config that is no YAML", "--config bad.yaml: not a YAML file (while parsing"): b"a: [",
    Fault("a config that is a list", "--config bad.yaml: not a configuration"): b"- a",
    Fault("YAML aliases of 30 billion values", "aliases stand for more than 100,000 values"): BOMB.encode(),
    Fault("a YAML alias of itself", "aliases stand for more than 100,000 values"): b"a: &a [*a]",
    Fault(
        "a YAML tag whose value is none of its kind", "--config bad.yaml: not a YAML file (a value does not fit its tag"
    ): (b"a: !!timestamp x"),
    Fault("YAML nested 100,000 deep", "not a YAML file (nested too deeply)"): b"[" * 100_000,
}


@faults(CONFIGS)
def test_a_config_that_cannot_be_used_is_one_line(workdir, capsys, fault, case):
    if case is not None:
        Path("bad.yaml").write_bytes(case)
    ends(capsys, fault, main, ["fit", "--config", "tiny.yaml", "--config", "bad.yaml"])
    assert not Path("runs").exists()


def test_an_alias_may_be_used_within_reason(workdir):
    Path("more.yaml").write_text("data: {batch_size: &size 7, eval_batch_size: *size}\n")
    cli = main(["fit", "--config", "tiny.yaml", "--config", "more.yaml", "--trainer.fast_dev_run", "true"])
    assert cli.datamodule.eval_batch_size == 7


def fails(error: BaseException) -> Any:
    @exits_on_input_error
    def command() -> None:
        raise error

    return command


SYSTEM = {
    Fault("a full disk, wherever it shows", "x.json: No space left on device"): OSError(
        28, "No space left on device", "x.json"
    ),
    Fault("a folder that may not be read", "data: Permission denied"): PermissionError(13, "Permission denied", "data"),
    Fault("too little memory", "out of memory"): MemoryError(),
}


@faults(SYSTEM)
def test_errors_of_the_system_are_one_line(capsys, fault, case):
    ends(capsys, fault, fails(case))


def test_debug_shows_the_traceback_and_faults_of_the_program_keep_theirs(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["captioning", "--debug", "fit"])
    with pytest.raises(SystemExit):
        fails(InputError("x"))()
    err = capsys.readouterr().err
    assert "Traceback" in err and err.endswith("error: x\n") and sys.argv == ["captioning", "fit"]
    with pytest.raises(KeyError):
        fails(KeyError("a bug"))()


def test_an_output_that_nobody_reads_ends_the_command():
    code = "import sys; from captioning.errors import exits_on_input_error as e\n"
    code += "e(lambda: [print('x' * 9999, flush=True) for _ in range(999)])()"
    command = f'{sys.executable} -c "{code}" | head -c 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


RANGES = {
    Fault("temperature NaN", "temperature must be in 1e-06 .. 1000000.0, got nan"): {"temperature": float("nan")},
    Fault("temperature infinite", "temperature must be in"): {"temperature": float("inf")},
    Fault("`--top_k 0`", "top_k must be at least 1"): {"top_k": 0},
    Fault("`--top_p 2`", "top_p must be in"): {"top_p": 2.0},
    Fault("a sampling seed below 0", "seed must be in"): {"seed": -1},
}


@faults(RANGES)
def test_options_of_sampling_have_their_ranges(fault, case):
    with pytest.raises(InputError) as caught:
        DecodingOptions(method="sample", **case)
    assert fault.sees in str(caught.value)


SCRIPT_OPTIONS = {
    Fault("`compare_runs.py --resamples 1000000000`", "must be a whole number in 1 .. 1000000"): (
        "compare_runs",
        ["a", "b", "--resamples", "1000000000"],
    ),
    Fault("`compare_runs.py --images -1`", "argument --images: must be a whole number"): (
        "compare_runs",
        ["a", "b", "--images", "-1"],
    ),
    Fault("`caption_image.py --beam_size 0`", "argument --beam_size: must be a whole number of at least 1"): (
        "caption_image",
        ["x.png", "--model", "x.ckpt", "--beam_size", "0"],
    ),
    Fault("a script's option that does not exist", "unrecognized arguments: --beams 3"): (
        "caption_image",
        ["x.png", "--model", "x.ckpt", "--beams", "3"],
    ),
}


@faults(SCRIPT_OPTIONS)
def test_options_of_scripts_are_refused_in_one_line(workdir, capsys, fault, case):
    script, arguments = case
    ends(capsys, fault, load_script(script).main, arguments)


# Folders of runs


@proves(Fault("two `fit` of one name at once", "", 0, "both: the second takes NAME-2"))
def test_runs_that_start_together_share_no_folder(workdir, capsys, fault):
    held = RunFolder(Path("runs/tiny")).claim()
    assert held is not None and RunFolder(Path("runs/tiny")).claim() is None
    assert main(["fit", "--config", "tiny.yaml", "--trainer.fast_dev_run", "true"]).run_dir == Path("runs/tiny-2")
    held.release()
    assert not Path("runs/tiny").exists()  # nothing was written there


def test_a_claim_ends_with_its_process(workdir):
    code = "import sys, os; from pathlib import Path; from captioning.run_folder import RunFolder as R\n"
    code += "c = R(Path('runs/x')).claim(); print('held', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    assert RunFolder(Path("runs/x")).claim() is None
    process.kill()
    process.communicate()
    again = RunFolder(Path("runs/x")).claim()
    assert again is not None
    again.release()


def test_tracebacks_are_found_in_restoring_alone():
    with pytest.raises(KeyError) as caught:
        fails(KeyError("x"))()
    assert not while_restoring(caught.value)
