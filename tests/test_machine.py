"""What this machine computes best in: levels of instructions, the measured precision, and what a run says of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import yaml
from helpers_runs import edit_checkpoint, tiny_config

from captioning.cli.fit import main
from captioning.cli.precision import settled_precision
from captioning.errors import InputError
from captioning.files import cache_folder
from captioning.kernels import machine

ROOT = Path(__file__).resolve().parent.parent
KERNEL_TESTS = ("test_native.py", "test_linear.py", "test_mixture_rows.py")
ENVIRONMENT = dict(os.environ)  # with the user's cache, which holds kernels that were compiled before

needs_x86 = pytest.mark.skipif(not machine.available_levels(), reason="needs an x86 processor")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder, and nothing measured before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine.bfloat16_time.cache_clear()
    yield tmp_path / "cache"
    machine.bfloat16_time.cache_clear()


@pytest.fixture
def processor(monkeypatch):
    """Return a function that makes this processor one with given capabilities and a given time of bfloat16."""

    def make(*capabilities: str, bfloat16: float) -> None:
        monkeypatch.delenv(machine.LIMIT, raising=False)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(capabilities, True))
        monkeypatch.setattr(machine, "_measured_bfloat16_time", lambda: bfloat16)

    return make


# Levels


@needs_x86
@pytest.mark.parametrize("level", machine.available_levels())
def test_the_kernels_agree_with_their_formulas_at_every_level_of_this_processor(level):
    tests = [str(ROOT / "tests" / name) for name in KERNEL_TESTS]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not compiler and not fewer",
        *tests,
    ]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT | {machine.LIMIT: level}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.skipif("avx2" not in machine.available_levels(), reason="needs a processor with AVX2")
def test_a_level_limits_pytorch_and_excludes_bfloat16_products():
    program = (
        "from captioning.kernels import machine; machine.limit_instructions()\n"
        "import torch; print(torch.backends.cpu.get_cpu_capability(), machine.has_bfloat16_products())"
    )
    environment = os.environ | {machine.LIMIT: "avx2"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["AVX2", "False"]


@pytest.mark.parametrize("level", ["avx3", "AVX2 "])
def test_a_level_that_there_is_not_is_refused(level, monkeypatch):
    monkeypatch.setenv(machine.LIMIT, level)
    with pytest.raises(InputError, match=f"CAPTIONING_ISA={level}: must be a level that this processor has"):
        machine.limit_instructions()


def test_a_level_that_this_processor_does_not_have_is_refused(monkeypatch):
    monkeypatch.setattr(machine, "processor_flags", lambda: "flags : avx2 fma bmi2")
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    assert machine.available_levels() == ["avx2"]
    monkeypatch.setenv(machine.LIMIT, "avx512")
    with pytest.raises(InputError, match=r"must be a level that this processor has \(avx2\)"):
        machine.instruction_limit()


# The measured machine


def test_the_time_of_bfloat16_is_measured_once_and_quickly(own_cache, monkeypatch):
    machine._measured_bfloat16_time()  # the first product of a process prepares the library
    started = time.process_time()  # the processor may be busy with others
    ratio = machine._measured_bfloat16_time()
    assert ratio > 0 and time.process_time() - started < 0.05
    measured = machine.bfloat16_time()
    machine.bfloat16_time.cache_clear()
    monkeypatch.setattr(machine, "_measured_bfloat16_time", lambda: pytest.fail("measured again"))
    assert machine.bfloat16_time() == measured and list(cache_folder().glob("bfloat16-*.json"))


def test_another_limit_or_version_is_another_measurement(processor, monkeypatch):
    processor("avx512_bf16", bfloat16=0.5)
    assert machine.bfloat16_time() == 0.5
    machine.bfloat16_time.cache_clear()
    processor("avx512_bf16", bfloat16=7.0)
    assert machine.bfloat16_time() == 0.5
    machine.bfloat16_time.cache_clear()
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert machine.bfloat16_time() == 7.0


@pytest.mark.parametrize("damage", ["", "[]", '{"times_float32": "x"}', '{"times_float32": -1}'])
def test_a_damaged_measurement_is_made_again(processor, damage):
    processor("avx512_bf16", bfloat16=0.5)
    machine.bfloat16_time()
    (path,) = cache_folder().glob("bfloat16-*.json")
    path.write_text(damage)
    machine.bfloat16_time.cache_clear()
    processor("avx512_bf16", bfloat16=3.0)
    assert machine.bfloat16_time() == 3.0


def test_a_cache_that_cannot_be_written_costs_the_measurement_alone(own_cache, processor):
    own_cache.write_text("a file where the folder would be")
    processor("avx512_bf16", bfloat16=0.5)
    assert machine.best_precision("cpu") == "bf16-mixed"


# Precision


@pytest.mark.parametrize(
    ("capabilities", "bfloat16", "precision"),
    [
        (["avx2"], 0.5, "32-true"),
        (["avx2", "avx512_bf16"], 0.5, "bf16-mixed"),
        (["avx2", "avx512_bf16"], 1.4, "32-true"),  # the flags say yes, the clock says no
        (["amx_bf16"], 0.2, "bf16-mixed"),
        (["neon", "bf16"], 0.8, "bf16-mixed"),
    ],
)
def test_auto_follows_the_processor(processor, capabilities, bfloat16, precision):
    processor(*capabilities, bfloat16=bfloat16)
    chosen, line = settled_precision(Namespace(accelerator="cpu", precision="auto"))
    assert chosen == precision and line.startswith(f"precision: {precision} (")


@pytest.mark.parametrize(
    ("capability", "precision"), [((7, 5), "16-mixed"), ((8, 0), "bf16-mixed"), ((9, 0), "bf16-mixed")]
)
def test_auto_follows_the_gpu(monkeypatch, capability, precision):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capability)
    for accelerator in ("auto", "gpu", "cuda"):
        assert settled_precision(Namespace(accelerator=accelerator, precision="auto"))[0] == precision
    _, line = settled_precision(Namespace(accelerator="gpu", precision="bf16-mixed"))
    assert (line is None) == (precision == "bf16-mixed")


def test_a_precision_that_is_asked_for_is_taken_and_its_cost_said_where_it_is_slow(processor):
    processor("avx2", bfloat16=5.0)
    for precision in ("bf16-mixed", "bf16-true", "16-mixed", 16):
        taken, line = settled_precision(Namespace(accelerator="cpu", precision=precision))
        assert taken == precision and "takes 5.0 times float32's time" in line and "\n" not in line
    assert settled_precision(Namespace(accelerator="cpu", precision="32-true")) == ("32-true", None)


def test_a_precision_that_is_fast_here_needs_no_line(processor):
    processor("avx512_bf16", bfloat16=0.5)
    assert settled_precision(Namespace(accelerator="cpu", precision="bf16-mixed")) == ("bf16-mixed", None)


# Runs


@pytest.fixture
def config(tmp_path, monkeypatch) -> dict:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["captioning"])
    settings = tiny_config(tmp_path / "shapes")
    del settings["trainer"]["precision"]
    Path("tiny.yaml").write_text(yaml.safe_dump(settings))
    return settings


def kept() -> str:
    return yaml.safe_load(Path("runs/tiny/config.yaml").read_text())["trainer"]["precision"]


def test_a_run_keeps_and_says_what_auto_was_and_is_scored_in_what_is_best_where_it_is_scored(config, processor, capsys):
    processor("avx512_bf16", bfloat16=0.5)
    main(["fit", "--config", "tiny.yaml"])
    assert "\nprecision: bf16-mixed (" in capsys.readouterr().out and kept() == "bf16-mixed"
    machine.bfloat16_time.cache_clear()
    processor("avx2", bfloat16=0.5)  # another machine
    cli = main(["test", "--ckpt_path", "runs/tiny/checkpoints/best.ckpt"])
    assert cli.trainer.precision == "32-true" and "precision: 32-true (this processor" in capsys.readouterr().out
    cli = main(["fit", "--ckpt_path", "runs/tiny/checkpoints/last.ckpt", "--trainer.max_epochs", "2"])
    assert cli.trainer.precision == "bf16-mixed" and kept() == "bf16-mixed"
    assert "precision: bf16-mixed was asked for, but this processor" in capsys.readouterr().out


def test_weights_of_bfloat16_are_scored_and_captioned_with_in_float32(config, processor, capsys):
    from captioning.inference import load

    processor("avx2", bfloat16=0.5)
    main(["fit", "--config", "tiny.yaml"])
    best = "runs/tiny/checkpoints/best.ckpt"

    def to_bfloat16(content: dict) -> None:
        weights = content["state_dict"]
        weights |= {name: tensor.bfloat16() for name, tensor in weights.items() if tensor.is_floating_point()}

    edit_checkpoint(best, to_bfloat16)
    capsys.readouterr()
    assert main(["test", "--ckpt_path", best]).trainer.precision == "32-true"
    assert capsys.readouterr().out.count("precision: ") == 1
    assert next(load(best).captioner.parameters()).dtype == torch.float32


def test_training_weights_of_16_bits_is_refused_in_one_line(config):
    with pytest.raises(InputError, match=r"--trainer.precision bf16-true: such weights are too coarse"):
        main(["fit", "--config", "tiny.yaml", "--trainer.precision", "bf16-true"])


def test_a_precision_that_there_is_not_is_refused_in_one_line(config):
    with pytest.raises(InputError, match=r"trainer.precision: must be one of .*auto.*, got float"):
        main(["fit", "--config", "tiny.yaml", "--trainer.precision", "float"])
