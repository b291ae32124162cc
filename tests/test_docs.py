"""The documentation: links work, every page is in the navigation, and what pages say about the code is true."""

import importlib.util
import inspect
import json
import re
import runpy
import shlex
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from PIL import Image

from captioning.cli import OTHER_COMMANDS
from captioning.cli.parser import command_parser

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES_OUTSIDE_DOCS = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "data/README.md"}
PAGES = sorted([*(ROOT / name for name in PAGES_OUTSIDE_DOCS), *DOCS.rglob("*.md")])
GENERATED_PAGES = {
    "index.md",
    "pretrained.md",
    "data.md",
    "contributing.md",
    "changelog.md",
    "notebooks/caption_and_look.md",
}  # by _site/hooks.py


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchor of every heading, which is the same on GitHub and on the site."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), f"{name_of(page)}: {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(page)}: {link}"


def test_every_page_is_in_the_navigation_once_and_every_entry_is_a_page():
    def entries(nav):
        for item in nav:
            for value in item.values() if isinstance(item, dict) else [item]:
                yield from entries(value) if isinstance(value, list) else [value]

    listed = list(entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert len(listed) == len(set(listed))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | GENERATED_PAGES
    pages.remove("README.md")  # the index on GitHub
    modules = re.findall(r"\(\.\./captioning/([\w/]+?)(?:/__init__)?\.py\)", (DOCS / "reference.md").read_text())
    assert len(modules) > 8
    assert set(listed) == pages | {f"reference/{module}.md" for module in modules}


class FetchedAddresses(HTMLParser):
    """The addresses of scripts, styles, fonts and images that a page fetches from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attributes) -> None:
        named = dict(attributes)
        address = named.get("href") if tag == "link" else named.get("src")
        if address and "//" in address and named.get("rel") != "canonical":
            self.addresses.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site. With --strict, a dead link, a missing heading and a page outside of the navigation are errors."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs mkdocs: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_fetches_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= len(PAGES)
    for page in pages:
        fetched = FetchedAddresses()
        fetched.feed(page.read_text(encoding="utf-8"))
        assert not fetched.addresses, page
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.search(r"url\(['\"]?(?:https?:)?//", styles)
    reference = (site / "reference/inference.html").read_text(encoding="utf-8")
    assert "Return the pretrained captioner, or a saved one" in reference
    hard = (site / "hard-attention.html").read_text(encoding="utf-8")
    assert (
        hard.count("<svg role=") > 15
        and "```" not in hard
        and "$" not in re.sub(r"<[^>]*>", "", hard.split("</main")[0].split("<main")[1])
    )
    attention = (site / "reference/attention.html").read_text(encoding="utf-8")
    assert "AdditiveScore" in attention and "HardAttention" in attention


@pytest.mark.slow
@pytest.mark.browser
def test_the_site_is_searched_and_its_tables_are_sorted_when_it_is_opened_from_disk(site, browser):
    problems: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((site / "tutorials/own_photos.html").as_uri())
    page.locator(".md-search__input").click()  # it shows beside the title of a desktop
    page.keyboard.type("REINFORCE")
    page.locator(".md-search-result__item").first.wait_for()
    page.goto((site / "attention.html").as_uri())
    page.locator("th button").first.wait_for()
    table = page.locator("table", has=page.locator("th button")).first
    names = table.locator("tbody td:first-child")
    before = names.all_inner_texts()
    for falling in (True, False):
        table.locator("th button").first.click()
        assert names.all_inner_texts() == sorted(before, key=str.lower, reverse=falling)
    page.close()
    assert problems == []


def test_the_table_of_the_configurations_is_the_one_that_the_configurations_give():
    generator = runpy.run_path(str(DOCS / "_site/models_table.py"))
    page = generator["PAGE"].read_text(encoding="utf-8")
    assert generator["filled"](page) == page, "run python docs/_site/models_table.py"
    assert all(f"`{path.stem}`" in page for path in (ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("page", ["results.md", "performance.md", "scale.md", "hard-attention.md", "reliability.md"])
def test_every_measurement_that_a_page_names_is_there(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    named = re.findall(r"`(?:docs/measurements/)?([a-z0-9_]+\.json)(?:: ([a-z0-9_]+))?`", text)
    run_files = {
        "test_metrics.json",
        "test_captions.json",
        "test_results.json",
        "summary.json",
        "predict_results.json",
    }
    for file, name in named:
        if file not in run_files:
            content = json.loads((DOCS / "measurements" / file).read_text(encoding="utf-8"))
            assert not name or name in content["scores"] or name in content["comparisons"], f"{file}: {name}"


def test_every_file_of_the_repository_that_code_names_is_there():
    pattern = r"(?<![\w/])(?:scripts|docs|configs|benchmarks|captioning)/[a-z0-9_/]+\.(?:py|md|json|yaml)"
    for folder in ("captioning", "scripts", "benchmarks", "configs", "docs/_site"):
        for file in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.yaml")]:
            missing = [path for path in re.findall(pattern, file.read_text("utf-8")) if not (ROOT / path).exists()]
            assert not missing, f"{name_of(file)}: {missing}"


def test_a_page_names_every_measurement():
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "configs").rglob("*.yaml")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert not [file.name for file in (DOCS / "measurements").glob("*.json") if file.name not in text]


def means_over_seeds(
    metrics: tuple[str, ...] = ("bleu4", "cider_d", "pointing_accuracy", "reference_pointing_accuracy"),
) -> set[str]:
    """Return the mean and the standard deviation over seeds of every measured variant, as pages write them."""
    shown = set()
    for file in (DOCS / "measurements").glob("*.json"):
        runs: dict[tuple[str, str, str], list[float]] = {}
        for name, entry in json.loads(file.read_text(encoding="utf-8")).get("scores", {}).items():
            variant, evaluation = re.fullmatch(r"(.+?)(?:_\d+(?:_([a-z]\w*))?)?", name).groups(default="")
            for metric in metrics:
                if metric in entry["values"]:
                    runs.setdefault((variant, evaluation, metric), []).append(entry["values"][metric])
        several = [values for values in runs.values() if len(values) > 1]
        shown |= {f"{statistics.fmean(values):.1f} ({statistics.stdev(values):.1f})" for values in several}
    return shown


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "results.md"], ids=name_of)
def test_every_mean_with_a_deviation_is_one_of_measured_seeds(page):
    named = set(re.findall(r"\b\d+\.\d \(\d+\.\d\)", page.read_text(encoding="utf-8")))
    assert len(named) > 6 and named <= means_over_seeds()


def test_the_pages_load_and_call_a_captioner_in_one_way():
    pages = [*PAGES, *DOCS.rglob("*.ipynb"), *ROOT.glob("captioning/pretrained/*/README.md")]
    shown = {name_of(page): page.read_text(encoding="utf-8") for page in pages if page.name != "CHANGELOG.md"}
    assert sum("captioning.load(" in text for text in shown.values()) >= 6
    assert not [name for name, text in shown.items() if re.search(r"inference import load|captioner\.caption\(", text)]


def test_the_pages_are_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 600
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in DOCS.rglob("*.md")) <= 16_500


def options_named() -> set[tuple[str, str]]:
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES if page.name != "CHANGELOG.md")
    return set(re.findall(r"--(model|data|trainer)\.(\w+)", texts))


def test_every_option_of_the_first_level_that_a_page_names_is_one():
    import pytorch_lightning as pl

    from captioning.training.datamodule import CaptionDataModule
    from captioning.training.module import CaptioningModule

    classes = {"model": CaptioningModule, "data": CaptionDataModule, "trainer": pl.Trainer}
    options = {(key, name) for key, cls in classes.items() for name in inspect.signature(cls.__init__).parameters}
    scoring = {("model", "inference"), ("model", "ensemble")}  # of test, validate and predict
    named = options_named() - {("data", "seed"), ("model", "help"), ("data", "help")}
    assert len(named) > 15
    assert named <= options | scoring


def commands_in_blocks() -> list[tuple[str, list[str]]]:
    """Return the name and the words of every command in a block of a page, without Lightning's."""
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES if page.name != "CHANGELOG.md")
    blocks = "\n".join(re.findall(r"^ *```.*?\n(.*?)^ *```", texts, re.DOTALL | re.MULTILINE)).replace("\\\n", " ")
    commands = re.findall(r"^[ $]*captioning (\w+)((?: +(?:'[^']*'|[^\s#>|&]+))*)", blocks, re.MULTILINE)
    return [(name, shlex.split(words)) for name, words in commands if name in OTHER_COMMANDS]


def test_every_command_in_a_block_is_one_that_its_tool_takes():
    commands = commands_in_blocks()
    assert len(commands) > 20
    for name, words in commands:
        module = importlib.import_module(f"captioning.cli.{name}")
        if name == "prepare":  # a command of its own for each data set
            name, *words = words
        _, others = command_parser(getattr(module, name), name).parse_known_args(words)
        options = [word for word in others if word.startswith("-")]
        assert all(re.match(r"--(import$|(data|model|trainer)\.)", option) for option in options), (name, words)


def test_troubleshooting_quotes_messages_that_the_code_has():
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "captioning").rglob("*.py"))
    joined = re.sub(r'"\s*f?"', "", source)
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    for message in (
        "attention has collapsed:",
        "out of memory",
        "import the module that defines it first (--import)",
        "features of another encoder",
    ):
        assert message in page and message in joined, message
    for name in ("step_kl", "attention_entropy", "max_alpha", "beta", "gradient_norm", "captions_per_second"):
        assert f"`train/{name}`" in page and name in source


def test_the_recipe_of_a_source_reads_its_folder(tmp_path, monkeypatch):
    recipe = (DOCS / "recipes.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"`my_source\.py`:\n\n```python\n(.*?)^```$", recipe, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_source.py").write_text(code, encoding="utf-8")
    source = runpy.run_path(str(tmp_path / "my_source.py"))["TextFiles"](str(tmp_path / "scans"))
    with pytest.raises(ValueError, match=r"no \.txt files"):
        source.prepare()
    for number in range(5):
        (tmp_path / "scans" / "a").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "scans" / "a" / f"{number}.jpg")
        (tmp_path / "scans" / "a" / f"{number}.txt").write_text(f"A dog, number {number}.\nOne dog\n")
    source.prepare()
    splits = {split: source.index(split) for split in ("train", "val", "test")}
    ids = [image_id for index in splits.values() for image_id in index.image_ids.tolist()]
    assert sorted(ids) == list(range(5))
    train = splits["train"]
    assert len(train) > len(splits["val"]) > 0
    assert train.captions[0].startswith("a dog number") and train.captions[1] == "one dog"
    train.check_images()
