"""Captions of shapes are read back and judged by the scene: every reference is right, and a wrong word is found."""

from __future__ import annotations

import json

import numpy as np
import pytest
from captioning.evaluation.attributes import attribute_scores, attribute_table, count_attributes
from helpers_training import make_shapes

from captioning.data.attributes import JudgedAttribute
from captioning.data.records import CaptionSource
from captioning.data.shape_world.grammar import STYLES, SYNONYMS, describe
from captioning.data.shape_world.judging import judge
from captioning.data.shape_world.reading import Mention, read
from captioning.data.shape_world.scene import RELATED, Described, relation, sample_scene
from captioning.errors import InputError


def thing(noun: str, colour: str, x: float, y: float, size: str = "small", texture: str = "plain") -> Described:
    return Described(noun, colour, texture, size, x, y)


TWO = (thing("diamond", "yellow", 30, 60, texture="striped"), thing("heart", "orange", 80, 62, "large", "striped"))
THREE = (thing("circle", "red", 20, 30), thing("square", "blue", 60, 40), thing("star", "orange", 75, 80))


def verdicts(scene, caption: str) -> dict[str, list[tuple[str | None, bool]]]:
    found: dict[str, list[tuple[str | None, bool]]] = {}
    for item in judge(scene, caption.split()):
        found.setdefault(item.attribute, []).append((item.said, item.right))
    return found


def wrong(scene, caption: str) -> list[tuple[str, str | None]]:
    return [(item.attribute, item.said) for item in judge(scene, caption.split()) if not item.right]


@pytest.fixture(scope="module")
def scenes() -> list:
    rng = np.random.default_rng(12)
    return [sample_scene(rng).shapes for _ in range(200)]


# Reading


@pytest.mark.parametrize("style", range(STYLES))
def test_reading_is_the_inverse_of_describing(scenes, style):
    for shapes in scenes:
        text = describe(shapes, style)
        reading = read(text.words)
        sized = len(shapes) < 3
        assert reading.mentions == [
            Mention(
                item.noun, item.colour, None if item.texture == "plain" else item.texture, item.size if sized else None
            )
            for item in (shapes[phrase.shape] for phrase in text.phrases)
        ]
        stated = {
            frozenset((text.phrases[subject].shape, text.phrases[other].shape)): (
                text.phrases[subject].shape,
                direction,
            )
            for subject, direction, other in reading.relations
        }
        if reading.ordered:
            assert (len(shapes), stated) == (4, {})
            continue
        assert stated.keys() == {frozenset(pair) for pair in RELATED[len(shapes)]}
        for pair, (subject, direction) in stated.items():
            (other,) = pair - {subject}
            assert direction == relation(shapes[subject], shapes[other])


def test_words_that_say_nothing_are_skipped():
    assert read("a a dog runs of the".split()).mentions == []
    assert read("a small red and a circle".split()).mentions == [Mention(colour="red", size="small"), Mention("circle")]


# Judging


@pytest.mark.parametrize("style", range(STYLES))
def test_every_reference_is_right_and_leaves_nothing_out(scenes, style):
    for shapes in scenes:
        judged = judge(shapes, describe(shapes, style).words)
        assert all(item.right for item in judged), describe(shapes, style).words
        assert {item.attribute for item in judged} >= {"colour", "shape"}


def test_a_wrong_word_of_each_kind_is_the_only_thing_wrong():
    right = "a small striped yellow diamond left of a large striped orange heart"
    assert wrong(TWO, right) == []
    for attribute, word, other in [
        ("colour", "yellow", "green"),
        ("shape", "heart", "ring"),
        ("size", "large", "small"),
        ("pattern", "striped", "dotted"),
        ("relation", "left", "right"),
    ]:
        assert wrong(TWO, right.replace(word, other, 1)) == [(attribute, other)]


def test_objects_may_come_in_any_order_and_with_any_synonym():
    for caption in (
        "to the left of a big striped orange heart is a little striped yellow diamond",
        "a large striped orange heart with a little striped yellow diamond to its left",
    ):
        assert wrong(TWO, caption) == []
    main = "a small dotted red circle below a large checkered black cross"
    scene = (
        thing("circle", "red", 30, 80, texture="dotted"),
        thing("cross", "black", 45, 30, "large", texture="checkered"),
    )
    synonyms = " ".join(SYNONYMS.get(word, word) for word in main.split())
    assert synonyms == "a little spotted red disc under a big checked black plus"
    assert wrong(scene, main) == wrong(scene, synonyms) == []


@pytest.mark.parametrize("direction", ["left", "right"])
def test_of_two_objects_that_look_alike_the_relation_says_which_is_meant(direction):
    scene = [thing("circle", "red", 20, 50), thing("circle", "red", 80, 50)]
    caption = f"a small red circle {direction} of a small red circle"
    assert verdicts(scene, caption)["relation"] == [(direction, True)] and wrong(scene, caption) == []


def test_what_is_not_said_is_counted_apart_from_what_is_wrong():
    found = verdicts(TWO, "a yellow diamond and a small striped orange heart")
    assert found["colour"] == [("yellow", True), ("orange", True)]
    assert found["size"] == [(None, False), ("small", False)]
    assert found["pattern"] == [(None, False), ("striped", True)]
    assert found["relation"] == [(None, False)]
    assert "place" not in found  # the references of two objects say none


def test_references_of_three_objects_say_no_size_and_a_plain_object_has_no_pattern_to_say():
    found = verdicts(THREE, "a red circle left of a blue square above an orange star")
    assert "size" not in found and "pattern" not in found
    assert wrong(THREE, "a dotted red circle left of a small blue square above a large orange star") == [
        ("pattern", "dotted"),
        ("size", "large"),
    ]


def test_an_object_too_many_is_wrong_in_all_that_is_said_of_it_and_one_too_few_is_not_said():
    caption = "a red circle left of a blue square above an orange star and a dotted pink ring"
    assert judge(THREE, caption.split())[-5:-2] == [
        JudgedAttribute("colour", "pink", None, False),
        JudgedAttribute("shape", "ring", None, False),
        JudgedAttribute("pattern", "dotted", None, False),
    ]
    assert wrong(THREE, "a red circle left of a blue square") == [
        ("colour", None),
        ("shape", None),
        ("relation", None),
    ]


def test_a_place_is_judged_of_a_single_object():
    one = (thing("ring", "pink", 92, 50, "large"),)
    assert verdicts(one, "on the right is a large pink ring")["place"] == [("right", True)]
    assert verdicts(one, "a large pink ring at the top")["place"] == [("top", False)]
    assert verdicts(one, "a large pink ring")["place"] == [(None, False)]


def test_an_order_from_left_to_right_is_a_relation_of_every_two_neighbours():
    four = (*THREE, thing("heart", "purple", 95, 40))
    right = "from left to right we see a red circle a blue square an orange star a purple heart"
    assert verdicts(four, right)["relation"] == [("left", True)] * 3
    swapped = "from left to right we see a blue square a red circle an orange star a purple heart"
    assert verdicts(four, swapped)["relation"] == [("left", False), ("left", True), ("left", True)]


def test_a_relation_that_no_reference_states_may_be_either_of_two_that_hold():
    diagonal = (thing("circle", "red", 20, 20), thing("square", "blue", 60, 58))
    for direction, right in {"left of": True, "above": True, "right of": False, "below": False}.items():
        assert (wrong(diagonal, f"a small red circle {direction} a small blue square") == []) == right


def test_a_relation_without_an_object_is_wrong():
    assert ("relation", "above") in wrong(TWO, "a small striped yellow diamond above")
    assert ("relation", "left") in wrong(TWO, "a small striped yellow diamond to its left")


@pytest.mark.parametrize("caption", ["", "a a a", "red " * 30, "a red circle " * 12, "left of " * 15, "it is above it"])
def test_no_caption_is_too_odd_to_be_judged(caption):
    assert {item.attribute for item in judge(THREE, caption.split())} >= {"colour", "shape", "relation"}


# The data set


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp("data"), train=2, val=12, test=2)


def test_the_data_set_judges_its_own_references_as_right(source):
    index, judge_of_split = source.index("val"), source.attributes("val")
    for row, image_id in enumerate(index.image_ids.tolist()):
        for reference in index.references(row):
            assert all(item.right for item in judge_of_split(image_id, reference.split())), reference
    assert judge_of_split(10**9, ["a"]) == []
    assert CaptionSource().attributes("val") is None


@pytest.mark.parametrize("damage", [{"attributes": ["small"]}, {"bbox": [1, 2]}, {"bbox": "xxxx"}])
def test_damaged_instances_are_refused_by_their_file(tmp_path, damage):
    broken = make_shapes(tmp_path, train=1, val=1, test=1)
    path = broken.root / "annotations/instances_val.json"
    content = json.loads(path.read_text())
    content["annotations"][0] |= damage
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"instances_val\.json: not as it was generated"):
        broken.attributes("val")


# Scores


def test_scores_are_of_what_is_said_and_state_what_is_not():
    judged = [item for caption in ("a red circle", "a small dotted ring") for item in judge(THREE, caption.split())]
    counts = count_attributes(judged)
    assert counts["shape"] == (1, 2, 4)
    scores = attribute_scores(judged)
    assert scores["attribute_shape"] == 50
    assert scores["attribute_shape_unsaid"] == pytest.approx(100 * 4 / 6)
    assert scores["attribute_pattern"] == 0
    line = next(line for line in attribute_table(judged) if line.startswith("shape"))
    assert line.split() == ["shape", "50.00", "1", "of", "2", "4"]
    assert attribute_scores([]) == {} and attribute_table([]) == []
