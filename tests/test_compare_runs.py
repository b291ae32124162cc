"""Runs are read from folders, wandb's files and its server; the script prints, writes and reports what it cannot do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from captioning.comparison.wandb_runs import find_run, find_runs, report_command
from helpers import SCRIPTS
from helpers_runs import CAPTION, CSV, make_run, save_checkpoint

from captioning.attention import HardAttention
from captioning.cli import compare as compare_command
from captioning.comparison.attention_explorer import _image_files, explore, load_models
from captioning.comparison.compare import compare
from captioning.comparison.result import Comparison, Disagreement
from captioning.comparison.runs import Run, WandbPlace, common_folder, name_runs, read_run
from captioning.comparison.verdicts import ONE_SEED
from captioning.errors import InputError
from captioning.evaluation.metrics import NAMES
from captioning.inference import load
from captioning.model import SummedOutput


def number_of(image: dict) -> int:
    """The number of an image that the explorer shows."""
    return int(image["name"].rpartition(" ")[2])


def read_tested(folder: Path) -> list[dict]:
    return json.loads((folder / "test_captions.json").read_text())


def test_two_runs_become_a_table_a_page_and_numbers(tested_pair, capsys):
    soft, hard = map(str, tested_pair)
    numbers = tested_pair[0].parent / "numbers.json"
    compare_command.main([soft, hard, "--resamples", "50", "--json", str(numbers), "--metric", "bleu1"])
    out = capsys.readouterr().out
    for expected in (
        ONE_SEED,
        "Captions of 4 images",
        "Pointing accuracy",
        "Parameters, decoder",
    ):
        assert expected in " ".join(out.split())
    assert "beam_size" not in out and "wandb sync" not in out
    content = json.loads(numbers.read_text())
    assert ONE_SEED in content["verdicts"][0]
    assert content["provenance"]["command"].startswith("captioning compare ")
    assert content["tables"]["Speed, size and decoding"]["Parameters, decoder"]["soft"] > 100
    page = (tested_pair[0].parent / "comparison.html").read_text()
    explored = json.loads(re.search(r'class="explorer-data">(.*?)</script>', page, flags=re.S)[1])
    assert explored["runs"] == ["soft", "hard"] and len(explored["images"]) == 4
    assert "longer n-grams). The captions are those that were tested; teacher forcing gives" in page
    tested = {path.name: {entry["image_id"]: entry["caption"] for entry in read_tested(path)} for path in tested_pair}
    for image in explored["images"]:
        assert [run["run"] for run in image["runs"]] == ["soft", "hard"]
        for run in image["runs"]:  # the tested caption, and no other
            assert [" ".join(shown["words"]) for shown in run["captions"]] == [tested[run["run"]][number_of(image)]]
    names = {image["name"] for image in explored["images"]}
    assert set(re.findall(r'data-explore="(.*?)"', page)) == names
    for item in content["disagreements"]:  # the name of the file, a thumbnail on the page alone
        assert item["file"].endswith(".png") and "thumbnail" not in item
        assert f"{item['file']}, image {item['image_id']}" in names
    assert len(re.findall(r'<img src="data:image/(?:png|jpeg);base64,', page)) == 4 and ONE_SEED in page
    assert not list(tested_pair[0].parent.glob("*.part"))


def test_one_run_stands_beside_the_paper(tested_pair, tmp_path, capsys):
    compare_command.main(
        [str(tested_pair[0]), "--paper", "coco", "--resamples", "9", "--output", str(tmp_path / "x.html")]
    )
    out = capsys.readouterr().out
    assert "25.0" in out and "24.3" in out  # hard's and soft's BLEU-4 in Table 1
    assert "explorer-data" not in (tmp_path / "x.html").read_text()  # nothing that two runs could disagree on


def test_without_image_files_the_page_has_the_texts_and_says_why(tested_pair, tmp_path, capsys):
    for folder in tested_pair:
        settings = yaml.safe_load((folder / "config.yaml").read_text())
        settings["data"]["source"]["init_args"]["root"] = str(tmp_path / "gone")
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    compare_command.main([*map(str, tested_pair), "--resamples", "9", "--output", str(tmp_path / "x.html")])
    page = (tmp_path / "x.html").read_text()
    assert "explorer-data" not in page and "a shape number 1" in re.sub(r"<[^>]*>", "", page)
    assert "The page shows no images: " in capsys.readouterr().out and "gone" in page


def test_images_are_found_in_a_data_set_without_a_test_split(tested_pair, tmp_path):
    run = read_run(tested_pair[0])
    image = {"imgid": 7, "filename": "a.jpg", "split": "val", "sentences": [{"tokens": ["a", "dog"]}]}
    (tmp_path / "dataset.json").write_text(json.dumps({"images": [image]}))
    (tmp_path / "a.jpg").write_bytes(b"")
    source = {"json_path": str(tmp_path / "dataset.json"), "image_dir": str(tmp_path)}
    run.settings["data"]["source"] = {"class_path": "captioning.data.KarpathySource", "init_args": source}
    assert _image_files([run], [7]) == ({7: tmp_path / "a.jpg"}, "")
    files, reason = _image_files([run], [8])
    assert not files and "soft's data do not have them" in reason and "only val" in reason


def test_without_checkpoints_the_page_has_the_texts_and_says_why(tested_pair, tmp_path, capsys):
    (tested_pair[0] / "checkpoints/best.ckpt").unlink()
    (tested_pair[1] / "checkpoints/best.ckpt").write_bytes(b"damaged")
    compare_command.main([*map(str, tested_pair), "--resamples", "9"])
    out = capsys.readouterr().out
    assert "No attention of soft: its checkpoint is missing." in out
    assert "No attention of hard: its checkpoint cannot be loaded." in out
    assert "hard/checkpoints/best.ckpt: not a checkpoint" in out
    assert "explorer-data" not in (tested_pair[0].parent / "comparison.html").read_text()


def test_the_attention_is_that_of_the_checkpoint_that_was_tested(tested_pair, tmp_path, capsys):
    checkpoints, metrics = tested_pair[0] / "checkpoints", tested_pair[0] / "test_metrics.json"
    content = json.loads(metrics.read_text())
    metrics.write_text(json.dumps(content | {"search": content["search"] | {"checkpoint": "last.ckpt"}}))
    assert read_run(tested_pair[0]).checkpoint.name == "best.ckpt"
    compare_command.main([*map(str, tested_pair), "--output", str(tmp_path / "x.html")])
    out = capsys.readouterr().out
    assert "soft was tested with last.ckpt, which is gone; the attention shown is best.ckpt's." in out
    assert "Checkpoint of the test" in out
    (checkpoints / "last.ckpt").write_bytes((checkpoints / "best.ckpt").read_bytes())
    assert read_run(tested_pair[0]).checkpoint == checkpoints / "last.ckpt"


def test_runs_that_cut_their_images_differently_share_no_view(tested_pair):
    runs = [read_run(folder) for folder in tested_pair]
    models, _ = load_models(runs)
    object.__setattr__(models["hard"].encoder.preprocessing, "crop", None)
    object.__setattr__(models["hard"].encoder.preprocessing, "resize", 12)
    page, _ = explore(runs, models, compare(runs, resamples=9), seed=0)
    names = [
        image["name"]
        for image in json.loads(re.search(r'explorer-data">(.*?)</script>', page, flags=re.S)[1])["images"]
    ]
    assert len(names) == 8 and sum(name.endswith(", as hard cuts it") for name in names) == 4


def explored_by(folders, seed: int = 0) -> tuple[str, list[str]]:
    runs = [read_run(folder) for folder in folders]
    models, _ = load_models(runs)
    return explore(runs, models, compare(runs, resamples=9), seed=seed)


def test_the_attention_shown_is_that_along_the_tested_caption(tested_pair, shapes_settings):
    source, _ = shapes_settings
    index = source.index("test")
    page, _ = explored_by(tested_pair)
    images = json.loads(re.search(r'explorer-data">(.*?)</script>', page, flags=re.S)[1])["images"]
    soft = load(tested_pair[0] / "checkpoints/best.ckpt")
    rows = {image_id: row for row, image_id in enumerate(index.image_ids.tolist())}
    for image in images:
        path = index.image_path(rows[number_of(image)])
        (shown,) = image["runs"][0]["captions"]
        caption = soft.force_decode([path], [shown["words"]])[0]
        np.testing.assert_allclose(shown["attention"]["prior"]["peaks"], caption.alphas.max(axis=1), rtol=1e-3)


def test_the_attention_starts_at_the_first_word_that_differs(tested_pair):
    entries = {"soft": "a red dog sits", "hard": "a red cat sits"}
    for folder, caption in zip(tested_pair, entries.values(), strict=True):
        content = [entry | {"caption": caption} for entry in read_tested(folder)]
        (folder / "test_captions.json").write_text(json.dumps(content))
    page, _ = explored_by(tested_pair)
    images = json.loads(re.search(r'explorer-data">(.*?)</script>', page, flags=re.S)[1])["images"]
    assert [run["start"] for image in images for run in image["runs"]] == [2] * 8


@pytest.mark.parametrize(
    ("captions", "place"), [(("a b c", "a b d"), 2), (("a b c", "a b"), 2), (("b", "a"), 0), (("a", "a b", "a c"), 1)]
)
def test_captions_differ_first_where_words_do_or_one_ends(captions, place):
    assert Disagreement(1, dict(zip("xyz", captions, strict=False)), {}, []).first_difference == place


def test_a_summed_outputs_posterior_is_shown_beside_the_alphas(tested_pair):
    save_checkpoint(tested_pair[1] / "checkpoints/best.ckpt", output=SummedOutput())
    page, _ = explored_by(tested_pair)
    images = json.loads(re.search(r'explorer-data">(.*?)</script>', page, flags=re.S)[1])["images"]
    for image in images:
        soft, marginal = (run["captions"][0] for run in image["runs"])
        assert "posterior" not in soft["attention"]
        assert len(marginal["attention"]["posterior"]["peaks"]) == len(marginal["words"])


def test_a_checkpoint_that_cannot_have_said_the_tested_captions_is_named(tested_pair):
    _, notices = explored_by(tested_pair)
    assert " ".join(notices) == (
        "4 of the 4 captions of soft shown have words that its checkpoint does not know: another checkpoint was "
        "tested, and the attention shown is not its attention; test the run again."
    )
    entries = read_tested(tested_pair[0])
    for entry in entries:
        entry["caption"] = "a <unk> cat"
    (tested_pair[0] / "test_captions.json").write_text(json.dumps(entries))
    assert explored_by(tested_pair)[1] == []


def test_sampled_contexts_repeat_with_the_seed_and_change_no_global_state(tested_pair):
    save_checkpoint(tested_pair[1] / "checkpoints/best.ckpt", attention=HardAttention)
    runs = [read_run(folder) for folder in tested_pair]
    runs[1].search["inference"] = "sample"
    models, _ = load_models(runs)
    comparison = compare(runs, resamples=9)
    before = torch.get_rng_state()
    (first, notices), (again, _), (other, _) = (explore(runs, models, comparison, seed=seed) for seed in (1, 1, 2))
    assert first == again and first != other
    assert notices[-1] == "The contexts of hard were sampled in the test; the attention shown comes from other draws."
    assert torch.equal(torch.get_rng_state(), before)
    assert models["hard"].model.decoder.attention.inference == "expected"


def test_a_data_source_outside_the_package_is_not_imported(tested_pair):
    runs = [read_run(folder) for folder in tested_pair]
    for run, path in zip(runs, ["evil.Source", "captioning.errors.InputError"], strict=True):
        run.settings = {"data": {"source": {"class_path": path}}}
    models, _ = load_models(runs)
    page, notices = explore(runs, models, compare(runs, resamples=9), seed=0)
    assert page == "" and "InputError is not a known CaptionSource" in notices[-1] and "evil" not in sys.modules


def test_settings_missing_beside_a_checkpoint_are_taken_from_it(tested_pair):
    (tested_pair[0] / "config.yaml").unlink()
    run = read_run(tested_pair[0])
    models, troubles = load_models([run])
    assert run.settings["model"]["search"]["beam_size"] == 2 and not troubles
    decoder = sum(p.numel() for p in models["soft"].model.decoder.parameters())
    assert run.parameters == {"decoder": decoder, "encoder": 1366}


def test_an_untested_run_is_named_with_its_command(tested_pair, capsys):
    (tested_pair[1] / "test_captions.json").unlink()
    compare_command.main([*map(str, tested_pair), "--resamples", "9", "--images", "0"])
    out = capsys.readouterr().out
    assert f"hard has no captions of its test split; to make them: captioning test --ckpt_path {tested_pair[1]}" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{soft}"], "give two or more runs"),
        (["{soft}", "nowhere"], "nowhere: no such folder; give a run's folder, or ENTITY/PROJECT/RUN_ID"),
        (["{runs}/soft"], "give two or more runs"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tested_pair, capsys, argv, message):
    with pytest.raises(SystemExit) as left:
        compare_command.main([text.format(soft=tested_pair[0], runs=tested_pair[0].parent) for text in argv])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    "argv", [["--resamples", "0"], ["--images", "-1"], ["--resamples", "x"], ["--metric", "cider"]]
)
def test_options_out_of_range_are_refused(capsys, argv):
    with pytest.raises(SystemExit) as left:
        compare_command.main(["a", "b", *argv])
    assert left.value.code == 2 and argv[0] in capsys.readouterr().err


def test_help_is_quick():
    program = (
        "import sys, runpy; sys.argv = ['compare_runs.py', '--help']\n"
        "try: runpy.run_path(r'" + str(SCRIPTS / "compare_runs.py") + "', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'wandb', 'rich', 'nltk'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--metric" in done.stdout, done.stderr


def test_runs_of_one_name_get_distinct_names(tmp_path):
    runs = [
        Run("soft", "x", tmp_path / "a/soft"),
        Run("hard", "x"),
        Run("soft", "x", tmp_path / "b/soft"),
        Run("hard", "x"),
    ]
    name_runs(runs)
    assert [run.name for run in runs] == ["a/soft", "hard (1)", "b/soft", "hard (2)"]
    same = [Run("soft", "x", tmp_path / "a/soft"), Run("soft", "x", tmp_path / "a/soft")]
    name_runs(same)
    assert [run.name for run in same] == ["a/soft (1)", "a/soft (2)"]


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("marginal", "summed"),
        ("marginal_1", "summed 1"),
        ("shapes_summed-2", "shapes summed 2"),
        ("marginals", "marginals"),
        ("soft", "soft"),
    ],
)
def test_a_summed_likelihood_is_called_what_it_is(name, called):
    summed = {"model": {"decoder": {"class_path": "x.D", "init_args": {"output": {"class_path": "x.SummedOutput"}}}}}
    runs = [Run(name, "x", settings=summed), Run("marginal ", "x")]
    name_runs(runs)
    assert [run.name for run in runs] == [called, "marginal "]  # the second has no such output


def test_the_page_lies_beside_the_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [Run("a", "", Path("runs/demo/a")), Run("b", "", tmp_path / "runs/demo/b")]
    assert common_folder(runs) == Path("runs/demo")
    assert common_folder([*runs, Run("c", "", Path("runs/c"))]) == Path("runs")
    assert common_folder([Run("d", "")]) == Path()


# wandb, offline


@pytest.fixture(scope="module")
def offline(tmp_path_factory) -> list[Path]:
    """The folders of one run that wandb logged in two parts, offline, inside the folder of a run."""
    import wandb

    folder = make_run(tmp_path_factory.mktemp("runs") / "logged", captions=[CAPTION], csv=CSV)
    for part in (0, 1):
        config = {"model": {"dropout": 0.5}, "trainer": {"max_epochs": 2}}
        with wandb.init(
            mode="offline", dir=folder, project="shapes", name="shown", id="abc123", resume="allow", config=config
        ) as run:
            for step in (10 + 20 * part, 20 + 20 * part):
                run.log({"train/loss": 5 - step / 10, "trainer/global_step": step, "epoch": part})
            run.log({"val/bleu4": 7.0 + part, "val/note": "no number", "trainer/global_step": 20 + 20 * part})
            run.log({"after": 1.0})
    (folder / "wandb_run.json").write_text(
        json.dumps({"id": "abc123", "entity": "", "project": "shapes", "name": "shown", "step": 8})
    )
    return sorted((folder / "wandb").glob("offline-run-*"))


@pytest.mark.slow
def test_an_offline_wandb_folder_is_read_with_what_lies_in_its_runs_folder(offline):
    first, second = offline
    folder = first.parent.parent
    run = find_run(str(first))
    assert run.name == "shown" and run.settings["model"] == {"dropout": 0.5}
    assert run.curves["train/loss"] == [(10, 4.0), (20, 3.0)] and run.curves["val/bleu4"] == [(20, 7.0)]
    assert "after" not in run.curves and "val/note" not in run.curves and "_runtime" not in run.curves
    assert run.captions[7].caption == "a red dog" and run.folder == folder
    assert run.wandb == WandbPlace("", "shapes", "abc123", (first,)) and run.seconds >= 0
    for name in (first.parent, next(second.glob("*.wandb"))):
        assert find_run(str(name)).curves["val/bleu4"][-1] == (40, 8.0)
    assert [step for step, _ in find_run(str(first.parent)).curves["train/loss"]] == [10, 20, 30, 40]


@pytest.mark.slow
def test_a_runs_folder_knows_its_wandb_run_and_the_command_that_makes_the_report(offline, monkeypatch):
    folder = offline[0].parent.parent
    monkeypatch.chdir(folder.parent)
    run = find_run("logged")
    assert run.name == "logged" and run.curves["val/bleu4"] == [(4, 10.5), (9, 11)]  # the folder's own
    assert run.wandb.run_id == "abc123" and [path.name for path in run.wandb.offline] == [path.name for path in offline]
    assert run.seconds is not None
    command = report_command([run], "captioning compare logged logged")
    places = " ".join(f"logged/wandb/{path.name}" for path in offline)
    assert command == f"wandb sync {places} && captioning compare logged logged --report"
    assert report_command([run, Run("b", "b")], "x") == ""


def test_a_damaged_wandb_file_is_named(tmp_path):
    folder = tmp_path / "offline-run-1"
    folder.mkdir()
    (folder / "run-abc.wandb").write_bytes(b"not a log")
    with pytest.raises(InputError, match=r"run-abc\.wandb: wandb cannot read it"):
        find_run(str(folder))


def test_a_wandb_file_that_was_hardly_begun_does_not_keep_a_run_from_being_compared(tested_pair):
    log = tested_pair[0] / "wandb/offline-run-1/run-abc.wandb"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"")
    run = find_run(str(tested_pair[0]))
    assert run.captions and run.seconds is None and run.wandb is None
    (tested_pair[0] / "wandb_run.json").write_text('{"id": "abc", "project": "shapes"}')
    assert find_run(str(tested_pair[0])).wandb.run_id == "abc"


def test_a_folder_that_is_not_there_is_not_looked_for_online(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/demo").mkdir(parents=True)
    with pytest.raises(InputError, match="runs/demo/sofft: no such folder"):
        find_run("runs/demo/sofft")


@pytest.mark.parametrize("content", ["{", "[1]", '{"id": "abc"}'])
def test_a_damaged_note_of_the_wandb_run_is_named(tested_pair, content):
    (tested_pair[0] / "wandb_run.json").write_text(content)
    with pytest.raises(InputError, match=r"soft/wandb_run\.json: (cannot be read|does not name a wandb run)"):
        find_run(str(tested_pair[0]))


# wandb, online


class FakeApi:
    """Holds one run, as ``wandb.Api`` gives it."""

    default_entity = "me"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def run(self, path: str) -> SimpleNamespace:
        import wandb

        self.asked.append(path)
        if path != "team/shapes/abc123":
            raise wandb.errors.CommError(f"run {path} not found")
        rows = [
            {"_step": 0, "trainer/global_step": 10, "train/loss": 4.0, "val/bleu4": None},
            {"_step": 1, "trainer/global_step": 20, "train/loss": "NaN", "val/bleu4": 7.5},
            {"_step": 2, "val/samples": {"_type": "table-file"}},
        ]
        return SimpleNamespace(
            name="shown",
            id="abc123",
            entity="team",
            project="shapes",
            config={"trainer": {"default_root_dir": "runs/logged"}, "_wandb": {}},
            summary={"_runtime": 65.0, "val/bleu4": {"max": 7.5}},
            scan_history=lambda: iter(rows),
        )


@pytest.fixture
def api(monkeypatch) -> FakeApi:
    import wandb

    fake = FakeApi()
    monkeypatch.setattr(wandb, "Api", lambda: fake)
    return fake


@pytest.mark.parametrize("name", ["team/shapes/abc123", "https://wandb.ai/team/shapes/runs/abc123"])
def test_an_online_run_is_read_through_the_api(api, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    run = find_run(name)
    assert api.asked == ["team/shapes/abc123"]
    assert run.name == "shown" and run.curves == {"train/loss": [(10, 4.0)], "val/bleu4": [(20, 7.5)]}
    assert run.seconds == 65 and run.wandb == WandbPlace("team", "shapes", "abc123")
    assert "_wandb" not in run.settings and run.captions is None


def test_an_online_runs_captions_come_from_its_folder_and_never_from_a_namesakes(api, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_run(tmp_path / "runs/logged", captions=[CAPTION], csv=CSV)
    (folder / "wandb_run.json").write_text(json.dumps({"id": "another", "project": "shapes"}))
    assert find_run("team/shapes/abc123").captions is None
    (folder / "wandb_run.json").write_text(json.dumps({"id": "abc123", "project": "shapes"}))
    run = find_run("team/shapes/abc123")
    assert run.captions is not None and run.name == "shown" and "val/bleu4" in run.curves
    assert run.curves["val/bleu4"] == [(20, 7.5)]  # the server's


def test_an_unknown_online_run_is_named(api):
    with pytest.raises(InputError, match=r"me/x/y: no such folder here, and W&B returned no such run \(run me/x/y not"):
        find_run("me/x/y")


def test_a_folder_stands_for_its_runs_in_order_and_the_first_one_given_is_not_there_twice(tested_pair, capsys):
    soft, hard = tested_pair
    assert [run.name for run in find_runs(str(soft.parent))] == ["hard", "soft"]
    assert [run.name for run in find_runs(str(hard))] == ["hard"]
    page = soft.parent.parent / "folder.html"
    numbers = page.with_suffix(".json")
    compare_command.main(
        [
            str(soft),
            str(soft.parent),
            "--resamples",
            "9",
            "--images",
            "0",
            "--output",
            str(page),
            "--json",
            str(numbers),
        ]
    )
    assert json.loads(numbers.read_text())["runs"] == ["soft", "hard"]


def test_runs_without_captions_are_tested_first_if_that_is_asked_for(tested_pair, monkeypatch, capsys):
    captions = tested_pair[1] / "test_captions.json"
    content, commands = captions.read_text(), []
    captions.unlink()

    def run(self, name, arguments):
        commands.append((name, arguments))
        captions.write_text(content)

    monkeypatch.setattr("captioning.cli.commands.Commands.run", run)
    compare_command.main([*map(str, tested_pair), "--resamples", "9", "--images", "0", "--test"])
    best = str(tested_pair[1] / "checkpoints" / "best.ckpt")
    assert commands == [("hard", ["-m", "captioning", "test", "--ckpt_path", best])]
    assert "has no captions" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["team/shapes/sweeps/s1", "https://wandb.ai/team/shapes/sweeps/s1"])
def test_a_sweep_online_stands_for_its_runs(api, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    runs = [SimpleNamespace(name="b", id="abc123"), SimpleNamespace(name="a", id="abc123")]
    monkeypatch.setattr(api, "sweep", lambda address: SimpleNamespace(runs=runs, address=address), raising=False)
    assert [run.wandb for run in find_runs(name)] == [WandbPlace("team", "shapes", "abc123")] * 2


def test_an_unknown_sweep_is_named(api, monkeypatch):
    def sweep(address):
        raise ValueError(f"Could not find sweep {address}")

    monkeypatch.setattr(api, "sweep", sweep, raising=False)
    with pytest.raises(InputError, match="me/x/sweeps/y: W&B returned no such sweep"):
        find_runs("me/x/sweeps/y")


# Report


@pytest.fixture
def spec(monkeypatch):
    """Turns a report into its specification without the server, which is asked for the projects' numbers."""
    interface = pytest.importorskip("wandb_workspaces.reports.v2.interface")
    monkeypatch.setattr(interface, "_get_api", lambda: None)
    monkeypatch.setattr(interface, "execute_graphql", lambda *args: {"project": {"internalId": "42"}})
    return lambda report: report._to_model().spec.model_dump(by_alias=True, exclude_none=True, mode="json")


def blocks(content: dict, kind: str) -> list[dict]:
    return [block for block in content["blocks"] if block["type"] == kind]


def test_the_report_has_the_comparisons_content(tested_pair, spec):
    from captioning.comparison.wandb_report import Address, build_report

    runs = [read_run(folder) for folder in tested_pair]
    comparison = compare(runs, resamples=20)
    addresses = {"soft": Address("me", "shapes", "id1"), "hard": Address("team", "other", "id2")}
    report = build_report(comparison, addresses, Address("me", "shapes", "page1"))
    assert (report.entity, report.project, report.title) == ("me", "shapes", "Comparison: soft, hard")
    content = spec(report)
    text = json.dumps(content)
    assert comparison.verdicts["hard"] in text and ONE_SEED in text
    tables = [
        block["content"] if isinstance(block["content"], str) else "\n".join(block["content"])
        for block in blocks(content, "markdown-block")
    ]
    assert tables[0].splitlines()[0] == "|  | soft | hard |"
    assert any(line.startswith("| BLEU-4 | ") for line in tables[0].splitlines())
    curves, looks = blocks(content, "panel-grid")
    sets = curves["metadata"]["runSets"]
    assert [(entry["project"]["entityName"], entry["project"]["name"]) for entry in sets] == [
        ("me", "shapes"),
        ("team", "other"),
    ]
    assert "id1" in json.dumps(sets[0]["filters"]) and "id2" in json.dumps(sets[1]["filters"])
    assert "#0072b2" in json.dumps(curves) and "#d55e00" in json.dumps(curves)
    assert "val/bleu4" in json.dumps(curves) and "trainer/global_step" in json.dumps(curves)
    assert "page1" in json.dumps(looks) and '"comparison"' in json.dumps(looks)


def test_the_report_is_saved_with_the_page_logged_to_its_project(api, monkeypatch, tmp_path):
    import wandb

    pytest.importorskip("wandb_workspaces.reports.v2")
    from captioning.comparison import wandb_report as module

    logged: list = []
    calls: list[dict] = []

    class Logger:
        entity, project, id = "me", "shapes", "page1"

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def log(self, content):
            logged.append(content)

    monkeypatch.setattr(wandb, "init", lambda **options: calls.append(options) or Logger())
    monkeypatch.setattr(module.wr.Report, "save", lambda report: logged.append(report))
    monkeypatch.setattr(module.wr.Report, "url", property(lambda report: f"saved/{report.entity}/{report.project}"))
    page = tmp_path / "page.html"
    page.write_text("<p>both attentions</p>")
    runs = [Run("soft", "", wandb=WandbPlace("", "shapes", "id1")), Run("hard", "")]
    assert module.publish(runs, Comparison(["soft", "hard"], "bleu4"), page) == "saved/me/shapes"
    assert (calls[0]["project"], calls[0]["job_type"], calls[0]["mode"]) == ("shapes", "comparison", "online")
    assert isinstance(logged[0]["comparison"], wandb.Html) and "both attentions" in logged[0]["comparison"].html
    with pytest.raises(InputError, match="none of the runs was logged to wandb"):
        module.publish([Run("a", "")], Comparison(["a"], "bleu4"), page)


def test_without_a_login_the_report_says_so(tmp_path, monkeypatch):
    import wandb

    pytest.importorskip("wandb_workspaces.reports.v2")

    from captioning.comparison.wandb_report import publish

    def refuse():
        raise wandb.errors.UsageError("api_key not configured")

    monkeypatch.setattr(wandb, "Api", refuse)
    runs = [Run("soft", "", wandb=WandbPlace("", "shapes", "id1"))]
    with pytest.raises(InputError, match=r"api_key not configured.*wandb login"):
        publish(runs, Comparison(["soft"], "bleu4"), tmp_path / "page.html")


def test_without_the_library_the_option_says_what_to_install(tested_pair, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    monkeypatch.delitem(sys.modules, "captioning.comparison.wandb_report", raising=False)
    with pytest.raises(SystemExit):
        compare_command.main([*map(str, tested_pair), "--report"])
    assert "pip install -e '.[reports]'" in capsys.readouterr().err


def test_every_score_may_be_the_metric():
    (metric,) = [action for action in compare_command.parser()._actions if action.dest == "metric"]
    assert metric.choices == NAMES
