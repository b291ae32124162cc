# ruff: noqa: RUF001 - full-width forms are what some of these tests are about
"""Languages: a tokenizer chosen in YAML makes the words of vocabulary, sources and scores, and writes captions."""

import csv
import json
import sys
from pathlib import Path

import pytest
import yaml
from helpers import save_image
from helpers_faults import command
from helpers_runs import TINY, save_checkpoint

from captioning.data import FolderSource
from captioning.errors import InputError
from captioning.evaluation.caption_files import read_results
from captioning.inference import load
from captioning.metrics.table import caption_metrics
from captioning.tokenizers import Characters, PennTreebank, Tokenizer, Whitespace
from captioning.vocabulary import Vocabulary, tokenizer_from

# matplotlib brings no Chinese font for the figures of training.
pytestmark = pytest.mark.filterwarnings("ignore:Glyph")

CHINESE = ["一只红色的猫坐在垫子上。", "两只猫在睡觉", "猫和狗。", "一只狗在草地上跑"]


@pytest.mark.parametrize(
    ("text", "words", "written"),
    [
        ("一只猫。", "一 只 猫", "一只猫"),
        ("猫がマットの上で、ねている", "猫 が マ ッ ト の 上 で ね て い る", "猫がマットの上でねている"),
        ("コーヒーを飲む時々", "コ ー ヒ ー を 飲 む 時 々", "コーヒーを飲む時々"),
        ("iPhone １５ を持つ Café Noir", "iphone 15 を 持 つ café noir", "iphone 15を持つcafé noir"),
        ("ｶﾞｰﾃﾞﾝ", "ガ ー デ ン", "ガーデン"),
        ("  。！？ ", "", ""),
        ("\U00020bb7野家", "\U00020bb7 野 家", "\U00020bb7野家"),
    ],
)
def test_characters_are_words_and_words_of_alphabets_stay_whole(text, words, written):
    tokenizer = Characters()
    assert tokenizer.tokenize(text) == words.split()
    assert tokenizer.join(words.split()) == written
    assert tokenizer.tokenize(written) == words.split()


def test_white_space_changes_nothing():
    assert Whitespace().tokenize(" Die  Katze, die\tschläft. ") == ["Die", "Katze,", "die", "schläft."]
    assert Whitespace().join(["Die", "Katze"]) == "Die Katze"


@pytest.mark.parametrize("tokenizer", [PennTreebank(), Whitespace(), Characters()])
def test_a_tokenizer_is_saved_by_its_class(tokenizer):
    config = {"class_path": f"captioning.tokenizers.{type(tokenizer).__name__}", "init_args": {}}
    assert tokenizer_from(config) == tokenizer == tokenizer_from(type(tokenizer).__name__)
    others = {PennTreebank(), Whitespace(), Characters()} - {tokenizer}
    assert len(others) == 2 and Vocabulary(["a"], tokenizer) not in [Vocabulary(["a"], other) for other in others]


@pytest.mark.parametrize("config", ["os.system", "Nobody", {"class_path": "torch.nn.Linear"}])
def test_a_file_names_known_tokenizers_alone(config, tmp_path):
    with pytest.raises(InputError, match="is not a known Tokenizer"):
        load(save_checkpoint(tmp_path / "best.ckpt", tokenizer=config))


class Syllables(Tokenizer):
    def tokenize(self, text: str) -> list[str]:
        return [text[i : i + 2] for i in range(0, len(text), 2)]


def test_a_module_that_the_user_imported_may_define_one():
    assert tokenizer_from("Syllables") == tokenizer_from(f"{__name__}.Syllables") == Syllables()


def test_captions_are_scored_with_a_tokenizer_that_does_not_describe_itself(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("said.json").write_text('[{"image_id": 1, "caption": "abab"}, {"image_id": 2, "caption": "cd"}]')
    true = [{"id": 1, "image_id": 1, "caption": "abcd"}, {"id": 2, "image_id": 2, "caption": "cd"}]
    Path("true.json").write_text(json.dumps({"images": [{"id": 1}, {"id": 2}], "annotations": true}))
    options = ["--captions", "said.json", "--references", "true.json", "--tokenizer", "Syllables"]
    command("evaluate", *options)
    assert "Tokens: split by a user's tokenizer." in capsys.readouterr().out


def test_a_source_uses_the_tokenizer(tmp_path):
    rows = [{"image": f"{i % 2}.jpg", "caption": text, "split": "train"} for i, text in enumerate(CHINESE)]
    (tmp_path / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = FolderSource(str(tmp_path))
    assert "".join(source.index("train").references(1)).count(" ") == 0  # English rules see one word
    source.tokenizer = Characters()
    assert source.index("train").references(1) == ["两 只 猫 在 睡 觉", "一 只 狗 在 草 地 上 跑"]


BEST = "runs/tiny/checkpoints/best.ckpt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with photos, Chinese captions, and a run that was trained on them."""
    folder = tmp_path_factory.mktemp("chinese")
    with (folder / "captions.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "caption", "split"])
        for number, text in enumerate(CHINESE):
            for split in ("train", "val", "test"):
                save_image(folder / f"{split}{number}.png", number)
                writer.writerow([f"{split}{number}.png", text, split])
    source = {"class_path": "FolderSource", "init_args": {"root": str(folder), "captions": "captions.csv"}}
    data = {"source": source, "batch_size": 4, "num_workers": 0}
    data["vocabulary"] = {"tokenizer": {"class_path": "Characters"}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(yaml.safe_load(yaml.safe_dump(TINY)) | {"data": data}))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "argv", ["captioning"])
        command("fit", "--config", "tiny.yaml", "--trainer.max_epochs", "2")
        command("test", "--ckpt_path", BEST)
    return folder


@pytest.mark.slow
def test_chinese_from_photos_to_scores(trained, monkeypatch):
    monkeypatch.chdir(trained)
    captioner = load(BEST)
    assert set(captioner.vocabulary.words) == set("".join(CHINESE).replace("。", ""))
    caption = captioner("test0.png")
    assert len(caption.words) > 1 and caption.text == "".join(caption.words)
    captioner.export("out")
    assert load("out")("test0.png").text == caption.text
    results = read_results(Path("runs/tiny/test_results.json"))
    assert caption.text in results.values() and not any(" " in text for text in results.values())
    metrics = json.loads(Path("runs/tiny/test_metrics.json").read_text())
    assert metrics["conditions"]["tokenizer"] == "Characters"
    captions = [Characters().tokenize(results[i]) for i in sorted(results)]
    expected = caption_metrics(captions, [[list(text.rstrip("。"))] for text in CHINESE], meteor=False)
    for name in ("bleu1", "bleu4", "rouge_l", "cider_d"):
        assert metrics[f"test/{name}"] == pytest.approx(expected[name])
    written = json.loads(Path("runs/tiny/test_captions.json").read_text())
    assert all(entry["written"] == entry["caption"].replace(" ", "") for entry in written)
