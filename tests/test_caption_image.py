"""`captioning caption` prints captions, draws overlays and writes JSON, for files, folders and standard input."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import SCRIPTS, save_image
from helpers_faults import command
from helpers_runs import COLUMNS, ROWS, WORDS, save_checkpoint
from matplotlib import rc_context
from PIL import Image, features

from captioning.attention import HardAttention, SoftAttention
from captioning.inference import ImageCaptioner, load
from captioning.model import SummedOutput

CAPTION_IMAGE = SCRIPTS / "caption_image.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    search = {"max_length": 6}
    return str(save_checkpoint(tmp_path_factory.mktemp("run") / "best.ckpt", search=search))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with three images, one of them in a subfolder, and a file that is no image."""
    (tmp_path / "images" / "more").mkdir(parents=True)
    for number, name in enumerate(["b.png", "a.JPG", "more/b.png"]):
        save_image(tmp_path / "images" / name, number)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    (tmp_path / "images" / ".hidden.png").write_text("no image either")
    return tmp_path / "images"


def run(capsys, *arguments: object, code: int | None = None) -> tuple[list[str], str]:
    """Return the lines on stdout and the text on stderr."""
    if code is None:
        command("caption", *arguments)
    else:
        with pytest.raises(SystemExit) as ended:
            command("caption", *arguments)
        assert ended.value.code == code
    out, err = capsys.readouterr()
    return out.splitlines(), err


def test_an_image_prints_its_caption_alone_and_several_a_path_a_tab_and_a_caption_each(capsys, checkpoint, folder):
    paths = [str(folder / "b.png"), str(folder / "a.JPG")]
    lines, err = run(capsys, *paths, "--model", checkpoint, "--batch_size", 1)
    alone = [run(capsys, path, "--model", checkpoint)[0][0] for path in paths]
    assert [tuple(line.split("\t")) for line in lines] == list(zip(paths, alone, strict=True)) and err == ""
    assert set(" ".join(alone).split()) <= set(WORDS)


def test_a_folder_gives_all_images_below_it_in_order(capsys, checkpoint, folder):
    lines, _ = run(capsys, folder, "--model", checkpoint)
    assert [line.split("\t")[0] for line in lines] == [str(folder / name) for name in ("a.JPG", "b.png", "more/b.png")]


def test_paths_can_come_from_standard_input(capsys, checkpoint, folder, monkeypatch):
    lines = f"{folder / 'b.png'}\n\n{folder / 'more' / 'b.png'}\r\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    lines, _ = run(capsys, "-", "--model", checkpoint)
    assert [line.split("\t")[0] for line in lines] == [str(folder / "b.png"), str(folder / "more" / "b.png")]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{folder / 'b.png'}\0".encode())))  # -print0
    assert run(capsys, "-", "--model", checkpoint)[0][0].split("\t")[0] == str(folder / "b.png")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    assert "name an image or a folder of images" in run(capsys, "-", "--model", checkpoint, code=2)[1]


def test_an_unreadable_image_is_one_line_and_exit_code_2(capsys, checkpoint, folder, tmp_path):
    broken, none = folder / "broken.png", folder / "none.png"
    broken.write_bytes(b"nothing")
    lines, err = run(capsys, folder, none, "--model", checkpoint, "--json", tmp_path / "x.jsonl", code=2)
    entries = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [line.split("\t")[0] for line in lines] == [entry["image"] for entry in entries] and len(lines) == 3
    _, first, second, _, last = err.splitlines()
    assert first.startswith(f"error: {broken}: cannot be read as an image")
    assert second == f"error: {none}: no such image file"
    assert last == "error: 2 of 5 images unreadable"
    assert run(capsys, none, "--model", checkpoint, code=2) == ([], second + "\n")


@pytest.mark.parametrize("name", ["attention.png", "attention.pdf"])
def test_the_overlay_of_a_single_image_is_a_file(capsys, checkpoint, folder, tmp_path, name):
    target = tmp_path / "out" / name
    _, err = run(capsys, folder / "b.png", "--model", checkpoint, "--overlay", target)
    assert err == f"written to {target}\n"
    assert target.read_bytes()[:4] in (b"\x89PNG", b"%PDF")
    assert list(target.parent.iterdir()) == [target]


def test_the_style_of_an_overlay_can_be_the_papers(capsys, checkpoint, folder, tmp_path):
    for style in ("color", "paper"):
        arguments = ["--overlay", tmp_path / f"{style}.png", "--style", style]
        run(capsys, folder / "b.png", "--model", checkpoint, *arguments)
    color, paper = (np.asarray(Image.open(tmp_path / f"{style}.png").convert("RGB")) for style in ("color", "paper"))
    assert color.shape == paper.shape and (color != paper).any()


@pytest.mark.slow
def test_an_overlay_of_two_models_has_a_row_for_each_of_the_same_words(capsys, folder, tmp_path):
    soft, hard = (
        save_checkpoint(tmp_path / f"{name}.ckpt", attention=attention, search={"max_length": 4})
        for name, attention in (("its_weights", SoftAttention), ("its_cells", HardAttention))
    )
    both, one, target = ["--model", soft, "--model", hard], ["--model", soft], tmp_path / "x.svg"
    with rc_context({"svg.fonttype": "none"}):
        (line,), _ = run(capsys, folder / "b.png", *both, "--overlay", target)
        shown = target.read_text()
        run(capsys, folder / "b.png", *one, "--overlay", target)
    words = len(line.split())
    assert shown.count(">its_weights</text>") == shown.count(">its_cells</text>") >= 1
    assert shown.count("<image ") == 2 + 2 * words and "its_weights" not in target.read_text()


def test_a_summed_outputs_evidence_is_drawn_and_explored(capsys, folder, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "summed.ckpt", output=SummedOutput(), search={"max_length": 4})
    targets = {name: tmp_path / f"x.{name}" for name in ("png", "svg", "html", "json")}
    for name in ("png", "svg"):
        run(capsys, folder / "b.png", "--model", checkpoint, "--overlay", targets[name])
    plain = targets["svg"].read_text()
    run(capsys, folder / "b.png", "--model", checkpoint, "--overlay", targets["svg"], "--details")
    detailed = targets["svg"].read_text()
    assert len(detailed) > len(plain)
    arguments = ["--explorer", targets["html"], "--json", targets["json"]]
    run(capsys, folder / "b.png", "--model", checkpoint, *arguments)
    (image,) = explorer_data(targets["html"])["images"]
    evidence = json.loads(targets["json"].read_text())["evidence"]
    for shown in image["runs"][0]["captions"]:  # of every caption of the beam
        assert len(shown["attention"]["evidence"]["peaks"]) == len(shown["words"])
    np.testing.assert_allclose(
        image["runs"][0]["captions"][0]["attention"]["evidence"]["peaks"], np.max(evidence, axis=1), rtol=1e-3
    )


def test_the_overlays_of_several_images_are_files_in_a_folder(capsys, checkpoint, folder, tmp_path):
    target = tmp_path / "2024.07.03"  # which is no suffix
    save_image(folder / f"{'猫' * 82}.png")  # as long as a name may be
    run(capsys, folder, "--model", checkpoint, "--overlay", target, "--max_length", 2)
    names = sorted(path.name for path in target.iterdir())
    assert names == ["001_a.png", "002_b.png", "003_b.png", f"004_{'猫' * 50}.png"]


def explorer_data(path: Path) -> dict:
    (text,) = re.findall(r'explorer-data">(.*?)</script>', path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return json.loads(text)


def test_the_explorer_is_one_page_of_all_images_and_their_beams(capsys, checkpoint, folder, tmp_path):
    target = tmp_path / "new" / "explorer.html"
    lines, _ = run(capsys, folder, "--model", checkpoint, "--explorer", target, "--batch_size", 2)
    assert list(target.parent.iterdir()) == [target]
    images = explorer_data(target)["images"]
    assert [image["name"] for image in images] == ["a.JPG", "b.png", "b.png"]
    for line, image in zip(lines, images, strict=True):
        (captions,) = image["runs"]
        assert " ".join(captions["captions"][0]["words"]) == line.split("\t")[1]
        assert len(captions["captions"]) == 3


def test_the_explorer_names_the_run_by_its_folder(capsys, folder, tmp_path):
    (tmp_path / "my_run" / "checkpoints").mkdir(parents=True)
    checkpoint = save_checkpoint(tmp_path / "my_run" / "checkpoints" / "best.ckpt", search={"max_length": 3})
    run(capsys, folder / "b.png", "--model", checkpoint, "--explorer", tmp_path / "explorer.html")
    assert explorer_data(tmp_path / "explorer.html")["runs"] == ["my_run"]
    assert "<title>Where the model looked: my_run</title>" in (tmp_path / "explorer.html").read_text(encoding="utf-8")


def test_the_explorer_has_the_images_that_could_be_read_and_is_not_written_without_any(
    capsys, checkpoint, folder, tmp_path
):
    target = tmp_path / "explorer.html"
    run(capsys, folder / "none.png", "--model", checkpoint, "--explorer", target, code=2)
    assert not target.exists()
    run(capsys, folder / "none.png", folder / "b.png", "--model", checkpoint, "--explorer", target, code=2)
    assert [image["name"] for image in explorer_data(target)["images"]] == ["b.png"]


def test_json_of_a_single_image_is_one_object(capsys, checkpoint, folder, tmp_path):
    target = tmp_path / "new" / "caption.json"
    (line,), _ = run(capsys, folder / "b.png", "--model", checkpoint, "--json", target, "--overlay", tmp_path / "x.png")
    content = json.loads(target.read_text())
    assert content["caption"] == line == " ".join(content["words"])
    assert content["image"] == str(folder / "b.png")
    assert content["overlay"] == str(tmp_path / "x.png")
    assert np.shape(content["alphas"]) == (len(content["words"]), ROWS * COLUMNS)
    assert len(content["betas"]) == len(content["words"])
    assert len(content["log_probs"]) == len(content["words"]) + content["finished"]
    assert content["grid_size"] == [ROWS, COLUMNS]
    assert list(target.parent.iterdir()) == [target]


def test_an_interrupted_command_keeps_the_lines_so_far(capsys, checkpoint, folder, tmp_path, monkeypatch):
    def stream(self, paths, options, **rest):
        yield from list(whole(self, paths, options, **rest))[:2]
        raise KeyboardInterrupt

    target = tmp_path / "captions.jsonl"
    whole = ImageCaptioner.stream
    monkeypatch.setattr(ImageCaptioner, "stream", stream)
    run(capsys, folder, "--model", checkpoint, "--json", target, code=130)
    lines = target.read_text().splitlines()
    assert [Path(json.loads(line)["image"]).name for line in lines] == ["a.JPG", "b.png"]


def test_json_on_standard_output_takes_the_captions_place(capsys, checkpoint, folder):
    lines, _ = run(capsys, folder, "--model", checkpoint, "--json", "-")
    assert [Path(json.loads(line)["image"]).name for line in lines] == ["a.JPG", "b.png", "b.png"]


def test_search_options_reach_the_search(capsys, checkpoint, folder):
    arguments = ["--beam_size", 2, "--length_normalization", 1, "--min_length", 4, "--max_length", 5, "--json", "-"]
    (line,), _ = run(capsys, folder / "b.png", "--model", checkpoint, *arguments)
    content = json.loads(line)
    assert 4 <= len(content["words"]) <= 5
    assert len(content["alternatives"]) == 1
    assert content["log_prob"] == pytest.approx(np.mean(content["log_probs"]), rel=1e-5)


def test_sampling_is_repeatable_with_a_seed(capsys, checkpoint, folder):
    arguments = [*[folder / "b.png"] * 6, "--model", checkpoint, "--sample", "--temperature", 9]
    first, again, other = (run(capsys, *arguments, "--seed", seed)[0] for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.png", "y.png", "--overlay", "o.png"], "--overlay o.png: there may be several images"),
        (["x.png", "--overlay", "o.jpg"], "--overlay o.jpg: must end in .png, .pdf, .svg"),
        (["x.png", "--overlay", "x.png"], "--overlay x.png: would replace x.png, which is an input"),
        (
            ["x.png", "--model", "empty", "--overlay", "empty"],
            "--overlay empty: would replace empty, which is",
        ),
        (["x.png", "y.png", "--overlay", "."], "--overlay .: contains input images; give another folder"),
        (["x.png", "--json", "./x.png"], "--json x.png: would replace x.png, which is an input"),
        (["x.png", "notes", "--json", "o.json"], "--json o.json: must end in .jsonl"),
    ],
)
def test_a_wrong_command_line_is_named_before_any_work(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("x.png", "notes"):
        (tmp_path / name).touch()
    lines, err = run(capsys, *arguments, code=2)
    assert lines == []
    assert message in err
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "notes", "x.png"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beam_size", 0], "beam_size must be in 1 .. 1000, got 0"),
        (["--batch_size", 0], "batch_size must be at least 1, got 0"),
        (["--top_k", 3], "top_k=3 has an effect only with method sample"),
        (["--explorer", "b.png/x.html"], "error: --explorer b.png/x.html: cannot be written ("),
    ],
)
def test_a_refused_option_is_named_and_keeps_the_file_of_an_earlier_command(
    capsys, checkpoint, folder, monkeypatch, options, message
):
    monkeypatch.chdir(folder)
    Path("c.json").write_text("before")
    _, err = run(capsys, "b.png", "--model", checkpoint, "--json", "c.json", *options, code=2)
    assert message in err and (Path("c.json").read_text() == "before" or "--explorer" in options)


def test_an_image_that_cannot_be_read_keeps_the_file_of_an_earlier_command(capsys, checkpoint, folder):
    kept = folder / "c.json"
    kept.write_text("before")
    run(capsys, folder / "notes.txt", "--model", checkpoint, "--json", kept, code=2)
    assert kept.read_text() == "before"


def test_max_length_of_one_gives_one_word(capsys, checkpoint, folder):
    for options in ([], ["--sample", "--seed", 1]):
        (line,), _ = run(capsys, folder / "b.png", "--model", checkpoint, "--max_length", 1, *options)
        assert len(line.split()) == 1


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(checkpoint, folder):
    command = f"{sys.executable} {CAPTION_IMAGE} {folder} --model {checkpoint} --batch_size 1 | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr.endswith("images: 1 skipped: no image, or unreadable\n")
    assert done.stdout.startswith(f"{folder / 'a.JPG'}\t")


def test_all_readable_formats_of_a_folder_are_captioned_and_other_files_are_counted(capsys, checkpoint, tmp_path):
    modes = {"P": ["few.gif"], "L": ["g.pgm"], "RGB": ["a.JFIF", "b.jpe", "c.ppm", "d.pnm", "e.jp2", "f.webp", "h.bmp"]}
    modes["RGB"] += ["i.avif"] * features.check("avif")
    for mode, names in modes.items():
        for name in names:
            Image.new(mode, (17, 23), 100).save(tmp_path / name)
    names = sorted(str(tmp_path / name) for names in modes.values() for name in names)
    (tmp_path / ".thumbnails").mkdir()
    Image.new("RGB", (17, 23)).save(tmp_path / ".thumbnails/a.png")
    for name in ("1.heic", "2.HEIC", "notes.txt", "README", ".hidden"):
        (tmp_path / name).write_bytes(b"\0\0\0\x18ftypheic" + bytes(99))
    lines, err = run(capsys, tmp_path, "--model", checkpoint)
    assert [line.partition("\t")[0] for line in lines] == names
    left_out = "4 skipped: no image, or unreadable (HEIC: pip install pillow-heif"
    assert left_out in err and err.count("\n") == 1
    _, err = run(capsys, tmp_path / "1.heic", "--model", checkpoint, code=2)
    assert "1.heic: cannot be read as an image (HEIC: pip install pillow-heif and add --import pillow_heif.Heif" in err


def test_links_to_folders_are_counted_and_not_followed(capsys, checkpoint, tmp_path):
    for folder in ("all/own", "disk"):
        (tmp_path / folder).mkdir(parents=True)
    for place in ("all/a.png", "disk/b.png"):
        Image.new("RGB", (17, 23)).save(tmp_path / place)
    for link, target in {"all/2023": "../disk", "all/own/up": "..", "all/also.png": "a.png"}.items():
        (tmp_path / link).symlink_to(target)
    lines, err = run(capsys, tmp_path / "all", "--model", checkpoint)
    names = ["a.png", "also.png"]
    assert [line.partition("\t")[0] for line in lines] == [str(tmp_path / "all" / name) for name in names]
    assert err.count("\n") == 1 and "2 skipped: no image" in err


def test_images_of_every_mode_are_captioned(capsys, checkpoint, tmp_path):
    for mode, name in [("L", "grey.png"), ("RGBA", "clear.png"), ("CMYK", "print.jpg"), ("P", "few.gif")]:
        Image.new(mode, (17, 23), 100).save(tmp_path / name)
    lines, err = run(capsys, tmp_path, "--model", checkpoint)
    assert (len(lines), err) == (4, "")


def test_several_checkpoints_caption_together(capsys, checkpoint, folder, tmp_path):
    other = save_checkpoint(tmp_path / "other.ckpt", attention=HardAttention)
    files = [folder / "b.png", "--model", checkpoint, "--model", other]
    (line,), _ = run(capsys, *files, "--json", tmp_path / "b.json", "--explorer", tmp_path / "page.html")
    caption = load([checkpoint, other]).caption(folder / "b.png")
    assert line == caption.text
    assert json.loads((tmp_path / "b.json").read_text())["log_prob"] == pytest.approx(caption.log_prob)
    assert "best + other" in (tmp_path / "page.html").read_text()
    _, err = run(capsys, *files, "--overlay", other, code=2)
    assert "other.ckpt" in err
