"""Nothing heavy is imported before it is needed: captioning an image does without compiler, Lightning and wandb."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch._dynamo", "sympy", "pytorch_lightning", "wandb", "matplotlib", "nltk")

PROGRAM = """
import sys
import torch
from captioning.encoders import ConvEncoder, TimmEncoder, TorchvisionEncoder
from captioning import captioner
encoder = {encoder}
with torch.inference_mode():
    encoder.eval()(torch.zeros(1, 3, *encoder.preprocessing.size))
imported = [name for name in {heavy} if name in sys.modules]
assert not imported, imported
{after}
"""

ENCODERS = {
    "conv": "ConvEncoder((4, 6), (2, 2), image_size=12)",
    "torchvision": "TorchvisionEncoder('squeezenet1_1', 'features.4', weights=None, image_size=48)",
    "batch norm": "TorchvisionEncoder('mobilenet_v3_small', 'features.3', weights=None, image_size=32)",
    "timm": "TimmEncoder('mobilenetv3_small_050', 1, weights=None, image_size=32)",
}

# What was put off still works when it is asked for.
AFTER = """
import torchvision
from torchvision.ops import roi_align
assert roi_align(torch.rand(1, 2, 8, 8), torch.tensor([[0, 0, 0, 4, 4.0]]), 2).shape == (1, 2, 2, 2)
assert torch.compiler.disable.__module__ == "torch.compiler"
import torch._dynamo
assert torch._dynamo.OptimizedModule and torch._dynamo.utils.is_compile_supported("cpu") in (True, False)
import pytorch_lightning
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_encoder_brings_nothing_heavy_with_it():
    run(PROGRAM.format(encoder=ENCODERS["batch norm"], heavy=HEAVY, after=""))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv", "torchvision", "timm"])
def test_what_was_put_off_is_there_when_it_is_asked_for(name):
    if name == "timm":
        pytest.importorskip("timm")
    run(PROGRAM.format(encoder=ENCODERS[name], heavy=HEAVY, after=AFTER))


@pytest.mark.slow
def test_a_compiler_that_is_there_already_is_left_alone():
    run(
        "import torch, torch._dynamo as before\n"
        "from captioning.encoders.imports import lean_imports\n"
        "with lean_imports():\n"
        "    import torchvision, torch._dynamo\n"
        "    assert torch._dynamo is before\n"
        "import torch._dynamo\n"
        "assert torch._dynamo is before and torch._dynamo.OptimizedModule\n"
    )


@pytest.mark.slow
def test_other_names_of_the_compiler_are_real_within_lean_imports():
    run(
        "import torch\n"
        "from captioning.encoders.imports import lean_imports\n"
        "with lean_imports():\n"
        "    from torch._dynamo import OptimizedModule\n"
        "assert OptimizedModule.__module__ == 'torch._dynamo.eval_frame', OptimizedModule\n"
    )


@pytest.mark.slow
def test_a_function_kept_from_the_compiler_runs_with_and_without_one():
    run(
        "import torch\n"
        "from captioning.encoders.imports import lean_imports\n"
        "with lean_imports():\n"
        "    @torch.compiler.disable\n"
        "    def double(x):\n"
        "        return 2 * x\n"
        "    @torch.compiler.disable(recursive=False)\n"
        "    def triple(x):\n"
        "        return 3 * x\n"
        "assert (double(2), triple(2), double.__name__) == (4, 6, 'double')\n"
        "import torch._dynamo\n"
        "assert (double(2), triple(2)) == (4, 6)\n"
    )
