"""A typed function is a command: its options, its help."""

import dataclasses
import importlib
import inspect
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import pytest
from helpers import save_image
from jsonargparse import ActionConfigFile, ArgumentParser

from captioning.cli import OTHER_COMMANDS
from captioning.cli.build import parse_training
from captioning.cli.caption import caption
from captioning.cli.parser import command_parser, run_command
from captioning.decoding import DecodingOptions
from captioning.errors import InputError

ROOT = Path(__file__).resolve().parent.parent

FUNCTIONS = {}
for name in OTHER_COMMANDS:
    command = getattr(importlib.import_module(f"captioning.cli.{name}"), name)
    commands = command if isinstance(command, Mapping) else {"": command}
    FUNCTIONS |= {f"{name} {word}".strip(): function for word, function in commands.items()}


def toast(
    *breads: str,
    topping: list[float],
    side: Literal["top", "bottom"] = "top",
    plate: Path | None = None,
    slices: int = 2,
    burnt: bool = False,
    overrides: Sequence[str] = (),
) -> dict:
    """Toast bread.

    Slowly.

    Args:
        *breads: What is
            toasted.
        topping: What is on it, in grams.
        side: Which side.
        plate: Where it lies.
        slices: How many.
        burnt: Whether it is black.

    Examples:
        captioning toast rye
    """
    calls.append((breads, topping, side, plate, slices, burnt, overrides))


calls: list[tuple] = []


def parsed(words: str) -> tuple:
    run_command("captioning toast", toast, words.split())
    return calls.pop()


def test_words_flags_repeated_options_and_defaults_reach_the_function():
    assert parsed("rye --topping 3") == (("rye",), [3.0], "top", None, 2, False, ())
    everything = "rye oat --topping 3 --topping 4.5 --side bottom --plate a/b --slices 5 --burnt --model.x y"
    assert parsed(everything) == (("rye", "oat"), [3.0, 4.5], "bottom", Path("a/b"), 5, True, ["--model.x", "y"])
    assert parsed("--topping=3 --plate=x rye")[3] == Path("x")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--topping 3", "arguments are required: BREADS, as in captioning toast rye (see captioning toast --help)"),
        ("rye", "the following arguments are required: --topping"),
        ("rye --topping x", "argument --topping: invalid float value: 'x'"),
        ("rye --topping", "argument --topping: expected 1 argument"),
        ("rye --topping 3 --slices x", "argument --slices: invalid int value: 'x'"),
        ("rye --topping 3 --side left", "argument --side: invalid choice: 'left' (choose from"),
    ],
)
def test_a_mistake_is_one_line(words, message):
    with pytest.raises(InputError) as error:
        parsed(words)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_docstring_is_the_help(capsys):
    with pytest.raises(SystemExit) as end:
        run_command("captioning toast", toast, ["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and text.startswith("usage: captioning toast BREADS [BREADS ...] --topping X [options]")
    for words in (
        "Slowly.",
        "What is toasted.",
        "--plate PATH",
        "How many. Default: 2.",
        "examples:\n  captioning toast",
    ):
        assert words in text
    assert "overrides" not in text


def test_without_words_a_list_takes_several_values():
    def add(*, number: list[int]) -> None:
        """Add.

        Args:
            number: A number.
        """
        calls.append(number)

    run_command("captioning add", add, "--number 1 2 --number 3".split())
    assert calls.pop() == [1, 2, 3]


def test_one_of_several_commands_is_chosen_by_its_word(capsys):
    run_command("captioning kitchen", {"toast": toast}, ["toast", "rye", "--topping", "1"])
    assert calls.pop()[0] == ("rye",)
    run_command("captioning kitchen", {"toast": toast}, [])
    assert "toast  Toast bread." in capsys.readouterr().out
    with pytest.raises(InputError, match="captioning kitchen toats: no such command; did you mean toast"):
        run_command("captioning kitchen", {"toast": toast}, ["toats"])
    with pytest.raises(InputError, match=r"captioning kitchen : no such command$"):
        run_command("captioning kitchen", {"toast": toast}, [""])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_command_documents_every_argument_in_a_sentence(name):
    function = FUNCTIONS[name]
    helps = {action.dest: action.help for action in command_parser(function, name)._actions}
    arguments = set(inspect.signature(function).parameters) - {"overrides", "decoding"}
    assert set(helps) - {"help"} >= arguments
    assert all(re.match(r"[A-Z].*\.$|auto, |train, ", text) for name, text in helps.items() if name != "help")
    assert len(inspect.getdoc(function).splitlines()[0]) < 110


def test_caption_has_every_option_of_the_search():
    fields = {field.name for field in dataclasses.fields(DecodingOptions)}
    options = {action.dest for action in command_parser(caption, "caption")._actions}
    assert options - {"help", *inspect.signature(caption).parameters} == fields - {"method"}  # --sample


class Recorder:
    options = DecodingOptions(beam_size=3, no_repeat_content=True)

    def stream(self, paths, options, **_):
        calls.append(options)
        return iter(())


def test_options_of_the_search_replace_those_of_the_training_and_can_turn_one_off(tmp_path, monkeypatch):
    monkeypatch.setattr("captioning.inference.load", lambda *_: Recorder())
    image = save_image(tmp_path / "a.png")
    run_command("captioning caption", caption, [str(image)])
    assert calls.pop() == Recorder.options
    words = "--no_repeat_content false --max_length 7 --min_length 0".split()
    run_command("captioning caption", caption, [str(image), *words])
    assert calls.pop() == dataclasses.replace(Recorder.options, no_repeat_content=False, max_length=7, min_length=0)
    with pytest.raises(InputError, match="--no_repeat_content: must be true or false, got 'no'"):
        run_command("captioning caption", caption, [str(image), "--no_repeat_content", "no"])
    caption(str(image), no_repeat_content=True, sample=True)
    assert calls.pop() == dataclasses.replace(Recorder.options, method="sample")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_page_that_a_command_names_has_the_section(name):
    for page, section in re.findall(r"docs/(\S+?\.md)(?:#([\w-]+))?", inspect.getdoc(FUNCTIONS[name])):
        titles = re.findall(r"^#+ (.+)", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert section in {title.lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_examples_of_a_command_can_be_parsed(name):
    parser = command_parser(FUNCTIONS[name], name)
    text = re.sub(r" *\\\n *", " ", parser.epilog or "")
    for line in re.findall(r"^ +captioning (.+?)(?: {3,}.*| > .*)?$", text, re.MULTILINE):
        assert line.startswith(name)
        parser.parse_args(shlex.split(line)[len(name.split()) :])


def test_options_win_over_configurations_that_are_named_after_them(tmp_path):
    (tmp_path / "first.yaml").write_text("a: 1\nb: 1\nc: 1\n")
    (tmp_path / "last.yaml").write_text("a: 2\nb: 2\n")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    for name in "abc":
        parser.add_argument(f"--{name}", type=int)
    for option in ("-c", "--config"):
        words = ["--a=3", option, str(tmp_path / "first.yaml"), f"--config={tmp_path / 'last.yaml'}"]
        settings = parse_training(parser, words)
        assert (settings.a, settings.b, settings.c) == (3, 2, 1)
