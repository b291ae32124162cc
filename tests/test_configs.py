"""Every shipped YAML is instantiated: trainer, model and data module, without data and without the network."""

import importlib
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from helpers import quick_if
from measurements import read_scores
from pytorch_lightning.callbacks import EMAWeightAveraging
from study_file import read_study

from captioning.checkpoint.load import read_model
from captioning.cli.build import restrict_imports
from captioning.cli.fit import Fit
from captioning.vocabulary import Vocabulary

CONFIGS = Path(__file__).parent.parent / "configs"
EXPERIMENTS = sorted(CONFIGS.glob("*.yaml"))
OVERLAYS = sorted(CONFIGS.glob("overlays/*.yaml"))


STUDIES = [read_study(path) for path in sorted(CONFIGS.glob("studies/*.yaml"))]
VARIANTS = [
    quick_if(name in list(study.variants)[:1], study, name, id=f"{study.name}-{name}")
    for study in STUDIES
    for name, variant in study.variants.items()
    if variant.config
]


@pytest.fixture(autouse=True)
def _without_weights():
    """Read no weights, which would take most of the time of these tests."""
    with torch.device("meta"):
        yield


class Instantiated(Fit):
    """The command line, without reading data."""

    def read_data_and_initial_model(self) -> None:
        return None


def instantiate(*configs: Path, options: Sequence[str] = ()) -> Fit:
    """As ``captioning fit`` does, with random encoder weights, which need no download."""
    path = ""
    for config in configs:
        encoder = yaml.safe_load(config.read_text()).get("model", {}).get("encoder", {})
        path = encoder.get("class_path", path)
    args = [f"--config={config}" for config in configs]
    args += options
    if "ConvEncoder" not in path:
        args.append("--model.encoder.init_args.weights=null")
    args += [
        f"--runs={tempfile.mkdtemp()}",
        "--trainer.logger=false",
        "--trainer.precision=32-true",
        "--trainer.accelerator=cpu",
    ]
    return Instantiated(args)


@pytest.mark.parametrize("config", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_configuration_is_instantiated_and_its_model_assembled(config):
    cli = instantiate(config)
    captioner = cli.model.assemble(Vocabulary(["a", "dog", "runs"]))
    optimizer = cli.model.optimizer([{"params": list(captioner.decoder.parameters())}])
    if cli.model.scheduler is not None:
        assert cli.model.scheduler(optimizer, 100).get_last_lr()[0] > 0
    assert captioner.decoder.annotation_dim == cli.model.encoder.annotation_dim


@pytest.mark.slow
def test_own_photos_starts_from_the_captioner_in_the_package():
    with torch.device("cpu"):
        packaged = read_model("pretrained").captioner
    captioner = instantiate(CONFIGS / "own_photos.yaml").model.assemble(Vocabulary(["a"]))
    assert captioner.decoder.to_config() == packaged.decoder.to_config()
    assert captioner.encoder.grid_size == packaged.encoder.grid_size
    assert captioner.decoder.annotation_dim == packaged.decoder.annotation_dim


@pytest.mark.parametrize(("study", "name"), VARIANTS)
def test_every_variant_of_a_study_is_instantiated_with_its_options(study, name, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    variant, options = study.variants[name], [*study.fit, *study.variants[name].fit]
    modules = [option.removeprefix("--import=") for option in options if option.startswith("--import=")]
    monkeypatch.setattr("captioning.cli.build.IMPORTED_MODULES", modules)
    for module in modules:
        importlib.import_module(module)
    restrict_imports()  # an earlier test may have, without these modules
    options = [option for option in options if not option.startswith("--import=")]
    cli = instantiate(CONFIGS / f"{variant.config}.yaml", options=options)
    cli.model.assemble(Vocabulary(["a", "dog", "runs"]))


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_fits_the_configuration_that_its_header_names(overlay):
    experiment = re.search(r"configs/(\w+)\.yaml", overlay.read_text()).group(1)
    cli = instantiate(CONFIGS / f"{experiment}.yaml", overlay)
    assert cli.model.assemble(Vocabulary(["a"])).encoder.grid_size == cli.model.encoder.grid_size


@pytest.mark.parametrize(
    "config", [quick_if(path.stem in ("coco_vgg19_soft", "shapes_soft"), path, id=path.stem) for path in EXPERIMENTS]
)
def test_overlays_for_any_configuration_fit_every_configuration(config):
    cli = instantiate(config, *(CONFIGS / f"overlays/{name}.yaml" for name in ("debug", "overfit", "ema")))
    assert cli.trainer.max_epochs == 80 and cli.datamodule.limit_images == 50
    assert cli.model.scheduler is not None and any(isinstance(c, EMAWeightAveraging) for c in cli.trainer.callbacks)


@pytest.mark.parametrize("config", EXPERIMENTS + OVERLAYS, ids=lambda path: path.stem)
def test_a_configuration_begins_with_its_command(config):
    header = "".join(line for line in config.read_text().splitlines(True) if line.startswith("#"))
    assert "captioning fit" in header and f"configs/{config.relative_to(CONFIGS)}" in header


@pytest.mark.parametrize(
    "config",
    [path for path in EXPERIMENTS + OVERLAYS if path.stem != "debug"],  # which shows that everything runs
    ids=lambda path: path.stem,
)
def test_a_configuration_has_its_measured_metric_or_says_not_yet_measured(config):
    header = " ".join(line[1:].strip() for line in config.read_text().splitlines() if line.startswith("#"))
    measured = re.findall(r"BLEU-4 (\d+\.\d\d) \((docs/measurements/\w+\.json): (\w+)\)", header)
    assert bool(measured) != ("Not yet measured." in header)
    for bleu4, file, name in measured:
        assert f"{read_scores(CONFIGS.parent / file)[name]['values']['bleu4']:.2f}" == bleu4


@pytest.mark.parametrize("config", OVERLAYS, ids=lambda path: path.stem)
def test_overlay_is_short(config):
    assert len(config.read_text().splitlines()) < 15


def test_every_setting_of_the_paper_is_in_its_coco_config():
    cli = instantiate(CONFIGS / "coco_vgg19_soft.yaml")
    captioner = cli.model.assemble(Vocabulary(["a"]))
    encoder, decoder = captioner.encoder, captioner.decoder
    assert (encoder.grid_size, encoder.annotation_dim, encoder.frozen) == ((14, 14), 512, True)
    assert (decoder.embedding_dim, decoder.hidden_dim, decoder.gated) == (512, 1800, True)
    words = cli.settings["data"]["vocabulary"]["max_words"]
    assert (cli.datamodule.batch_size, words, cli.model.objective.attention_penalty) == (64, 10000, 1.0)
    assert isinstance(cli.model.optimizer([torch.nn.Parameter(torch.zeros(1))]), torch.optim.Adam)
