"""A captioner as a folder: the same captions, no code, a card with data, settings and metrics."""

import json
import shutil

import pytest
import torch
import yaml
from helpers import save_image
from helpers_faults import command, refusal
from helpers_runs import edit_checkpoint, make_captions, save_checkpoint
from safetensors import safe_open

from captioning.errors import InputError
from captioning.evaluation.caption_files import write_evaluation
from captioning.inference import load
from captioning.metrics.table import caption_metrics
from captioning.run_folder import checksum

TEST = "20 images; beam_size 2, context_mode argmax"
SETTINGS = {
    "seed_everything": 7,
    "trainer": {"max_epochs": 4, "precision": "32-true"},
    "data": {"source": {"class_path": "captioning.data.ShapesSource", "init_args": {"train": 5}}, "batch_size": 12},
    "model": {"optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.25}}, "search": {"beam_size": 2}},
}


@pytest.fixture
def run(tmp_path):
    """A tested run."""
    folder = tmp_path / "runs" / "mine"
    (folder / "checkpoints").mkdir(parents=True)
    save_checkpoint(folder / "checkpoints/best.ckpt", settings=SETTINGS)
    images = list(make_captions(20).values())
    scores = caption_metrics([image.words for image in images], [image.reference_words for image in images])
    conditions = {"beam_size": 2, "context_mode": "argmax"}
    write_evaluation(folder, "test", scores | {"nll": 1.25}, images, conditions=conditions)
    return folder


def export(run, *options):
    target = run.parent.parent / "exported"
    command("export", "--model", run / "checkpoints/best.ckpt", "--output", target, *options)
    return target


def test_the_folder_captions_as_the_checkpoint_does(run, tmp_path, capsys):
    images = [save_image(tmp_path / f"{n}.png", n, (30 + n, 20)) for n in range(4)]
    folder = export(run)
    expected, exported = load(run / "checkpoints/best.ckpt"), load(folder)
    assert exported.encoder.known_cells == expected.encoder.cells  # the file has them, so that loading measures none
    assert exported.options == expected.options and exported.vocabulary == expected.vocabulary
    assert exported.settings == SETTINGS and exported.encoder.preprocessing == expected.encoder.preprocessing
    for caption, other in zip(exported(images, max_length=6), expected(images, max_length=6), strict=True):
        assert (caption.text, caption.log_probs) == (other.text, other.log_probs)
    (folder / "note.txt").write_text("mine")
    export(run)
    assert capsys.readouterr().out.count(": README.md, config.json, model.safetensors, vocabulary.json\n") == 2
    (folder / "note.txt").unlink()
    weights = expected.model.state_dict()
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(weights)
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in weights.items())
    exported.export(tmp_path / "again", "# card\n")
    assert load(tmp_path / "again").model.decoder.hidden_dim == 7
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert set(modes.values()) == {modes["config.json"]}, modes  # whom the folder is passed on to can read all files


def test_the_card_has_the_model_its_data_and_its_metrics(run):
    text = (export(run, "--license", "cc-by-4.0") / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: captioning\n") and "license: cc-by-4.0" in text
    for part in ("# mine", "## Model", "## Training", "## Metrics", "## Limits", "## License"):
        assert f"\n{part}\n" in text
    assert "\nData: ShapesSource. All settings are in `config.json`.\n" in text
    assert "| attention | SoftAttention |" in text and "| vocabulary | 7 words; tokens: Penn Treebank" in text
    metrics = json.loads((run / "test_metrics.json").read_text())
    assert f"| bleu4 | {metrics['test/bleu4']:.2f} |" in text and "| nll | 1.25 |" in text
    assert f"Split test; {TEST}." in text
    edit_checkpoint(run / "checkpoints/best.ckpt", lambda saved: saved["captioning"]["settings"].update(init_from="x"))
    card = (export(run) / "README.md").read_text()
    assert "ShapesSource. It began with the weights of `x`, whose license holds, too. All settings" in card
    metrics["conditions"]["checkpoint"] = "last.ckpt"  # those of another checkpoint are not this one's
    (run / "test_metrics.json").write_text(json.dumps(metrics))
    assert "It was not tested" in (export(run) / "README.md").read_text()


def test_the_card_has_the_conditions_of_a_test_of_0_2(run):
    content = json.loads((run / "test_metrics.json").read_text())
    del content["conditions"]
    content["search"] = {"beam_size": 2, "inference": "argmax", "checkpoint": "best.ckpt"}
    (run / "test_metrics.json").write_text(json.dumps(content))
    card = (export(run) / "README.md").read_text()
    assert f"Split test; {TEST}." in card and "| nll | 1.25 |" in card


def test_the_card_leaves_out_the_metrics_of_weights_that_were_trained_on_since(run):
    best, metrics = run / "checkpoints/best.ckpt", run / "test_metrics.json"
    content = json.loads(metrics.read_text())
    content["conditions"] |= {"checkpoint": "best.ckpt", "weights": checksum(best)}
    metrics.write_text(json.dumps(content))
    shutil.copytree(run, run.parent / "copy")  # whose files have other times
    for tested in (run, run.parent / "copy"):
        assert "| nll | 1.25 |" in (export(tested) / "README.md").read_text()
    edit_checkpoint(best, lambda saved: next(iter(saved["state_dict"].values())).add_(1))
    assert "It was not tested" in (export(run) / "README.md").read_text()


def test_the_head_of_the_card_is_yaml_for_any_license_name(run):
    head = (export(run, "--license", "CC BY: 4.0") / "README.md").read_text().split("---")[1]
    assert yaml.safe_load(head)["license"] == "CC BY: 4.0"


def test_notes_replace_the_sections_of_the_card_that_they_have_and_add_the_others(run, tmp_path):
    notes = tmp_path / "notes.md"
    notes.write_text("# Mine\n\nA captioner.\n\n## Limits\n\nIt has seen no cat.\n\n## Thanks\n\nTo all.\n")
    text = (export(run, "--license", "other", "--notes", str(notes)) / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: captioning\n")
    assert "license: other\n---\n\n# Mine\n\nA captioner.\n" in text
    assert "# mine" not in text and text.count("## Limits\n\nIt has seen no cat.\n\n## License") == 1
    assert text.endswith("## Thanks\n\nTo all.\n") and "## Metrics\n\nSplit test" in text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_but_small_parameters_are_stored_in_half_the_bytes_and_computed_with_in_float32(run, dtype):
    captioner = load(run / "checkpoints/best.ckpt").model
    expected, parameters = captioner.state_dict(), dict(captioner.named_parameters())
    folder = export(run, "--dtype", dtype)
    with safe_open(folder / "model.safetensors", "pt") as file:
        types = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118 - no mapping
    small = [parameters[name].numel() for name in parameters if types[name] == torch.float32]
    large = [parameters[name].numel() for name in parameters if types[name] == getattr(torch, dtype)]
    assert len(small) + len(large) == len(parameters)
    assert max(small) < 0.0015 * sum(small + large) <= min(large)
    assert all(types[name] == expected[name].dtype for name in types.keys() - parameters.keys())  # statistics
    for name, tensor in load(folder).model.state_dict().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name].to(types[name]).to(tensor.dtype))


def test_a_weight_beyond_float16_is_refused_before_anything_is_written(run, tmp_path):
    captioner = load(run / "checkpoints/best.ckpt")
    with torch.no_grad():
        captioner.model.decoder.embedding.weight[2, 3] = -7e4
    with pytest.raises(InputError, match=r"--dtype float16: decoder.embedding.weight is beyond its range; take bf"):
        captioner.export(tmp_path / "new", dtype="float16")
    assert not (tmp_path / "new").exists()


def test_an_exported_folder_has_no_paths_of_the_machine(tmp_path):
    settings = {"data": {"source": {"json_path": "/mnt/me/data.json"}, "files": ["/a/b", "c/d"]}, "scale": 0.5}
    load(save_checkpoint(tmp_path / "best.ckpt", settings=settings)).export(tmp_path / "new")
    source = {"source": {"json_path": "data.json"}, "files": ["b", "c/d"]}
    assert load(tmp_path / "new").settings == {"data": source, "scale": 0.5}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocabulary.json", None, r"vocabulary\.json: cannot be read"),
        ("vocabulary.json", '{"words": ["a"]}', "does not describe the model of its weights"),
        ("config.json", "[", r"config\.json: cannot be read as JSON"),
        ("config.json", "[]", "damaged, or does not describe"),
        ("model.safetensors", "cut", "damaged, or .*SafetensorError"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_line(run, name, content, message):
    path = export(run) / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(InputError, match=message):
        load(path.parent)


def test_a_folder_of_something_else_keeps_its_files(run, tmp_path, capsys):
    (tmp_path / "exported").mkdir()
    for name in ("README.md", "config.json", "model.safetensors"):  # as a clone from a hub
        (tmp_path / "exported" / name).write_text("mine")
    line = refusal(capsys, "export", "--model", run / "checkpoints/best.ckpt", "--output", tmp_path / "exported")
    assert "another program's README.md; choose an empty folder" in line
    assert {path.read_text() for path in (tmp_path / "exported").iterdir()} == {"mine"}


def test_an_ensemble_is_not_exported(run, tmp_path):
    ensemble = load([run / "checkpoints/best.ckpt"] * 2)
    with pytest.raises(InputError, match="an ensemble is not exported as one; export its members"):
        ensemble.export(tmp_path / "exported")
