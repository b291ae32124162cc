from collections import Counter

import pytest

from captioning.data.coco_nouns import _SINGULAR, CATEGORIES, decoys, plural, synonyms
from captioning.tokenizers import tokenize

# As COCO's instances files list them.
COCO = (
    "person bicycle car motorcycle airplane bus train truck boat traffic_light fire_hydrant stop_sign parking_meter "
    "bench bird cat dog horse sheep cow elephant bear zebra giraffe backpack umbrella handbag tie suitcase frisbee "
    "skis snowboard sports_ball kite baseball_bat baseball_glove skateboard surfboard tennis_racket bottle wine_glass "
    "cup fork knife spoon bowl banana apple sandwich orange broccoli carrot hot_dog pizza donut cake chair couch "
    "potted_plant bed dining_table toilet tv laptop mouse remote keyboard cell_phone microwave oven toaster sink "
    "refrigerator book clock vase scissors teddy_bear hair_drier toothbrush"
).split()


def test_every_category_of_coco_is_there():
    assert [name.replace(" ", "_") for name in CATEGORIES] == COCO


def test_no_name_belongs_to_two_categories():
    names = Counter(name for category in CATEGORIES for name in {category, *synonyms(category)})
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("category", CATEGORIES)
def test_plurals_of_all_names_are_names(category):
    singular = {category, *filter(None, _SINGULAR[category].split(", "))}
    assert {plural(name) for name in singular} <= {category, *synonyms(category)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("teddy bear", "teddy bears"),
        ("tennis racket", "tennis rackets"),
        ("bench", "benches"),
        ("bus", "buses"),
        ("lady", "ladies"),
        ("boy", "boys"),
        ("knife", "knives"),
        ("police officer", "police officers"),
        ("policeman", "policemen"),
        ("computer mouse", "computer mice"),
        ("sheep", "sheep"),
        ("toothbrush", "toothbrushes"),
        ("wine glass", "wine glasses"),
        ("couch", "couches"),
    ],
)
def test_plurals_follow_english(name, expected):
    assert plural(name) == expected


@pytest.mark.parametrize(
    ("word", "category"),
    [
        *[(w, "person") for w in "man men woman women boy girls people guy player players skier child kids".split()],
        *[("bike", "bicycle"), ("plane", "airplane"), ("jets", "airplane"), ("motorbike", "motorcycle")],
        *[("television", "tv"), ("sofa", "couch"), ("puppies", "dog"), ("kitten", "cat"), ("geese", "bird")],
        *[("fridge", "refrigerator"), ("stove", "oven"), ("phone", "cell phone"), ("table", "dining table")],
        *[("purse", "handbag"), ("luggage", "suitcase"), ("racquet", "tennis racket"), ("doughnuts", "donut")],
        *[("mug", "cup"), ("plants", "potted plant"), ("teddy", "teddy bear"), ("baby elephant", "elephant")],
        *[
            ("bus driver", "person"),
            ("stoplight", "traffic light"),
            ("hydrant", "fire hydrant"),
            ("ball", "sports ball"),
        ],
    ],
)
def test_usual_words_name_their_category(word, category):
    assert word in synonyms(category)


@pytest.mark.parametrize(
    ("phrase", "category"),
    [
        ("hot dog", "dog"),
        ("teddy bear", "bear"),
        ("bus stop", "bus"),
        ("train tracks", "train"),
        ("toilet paper", "toilet"),
        ("baby elephant", "person"),
        ("bike rider", "bicycle"),
        ("orange cat", "orange"),
        ("man skis", "person"),
        ("couple of", "person"),
        ("clock tower", "clock"),
        ("cup cake", "cup"),
    ],
)
def test_phrases_that_mean_something_else_are_known(phrase, category):
    assert phrase in decoys(category)


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_decoy_holds_a_name_and_is_none(category):
    names = {category, *synonyms(category)}
    for phrase in decoys(category):
        assert phrase not in names
        words = phrase.split()
        assert any(" ".join(words[a:b]) in names for a in range(len(words)) for b in range(a + 1, len(words) + 1))


def test_names_are_tokens_as_captions_have_them():
    names = [name for category in CATEGORIES for name in (category, *synonyms(category), *decoys(category))]
    assert [name for name in names if name != " ".join(tokenize(name))] == []


def test_another_data_sets_category_has_its_plural_alone():
    assert synonyms("wind turbine") == {"wind turbines"}
    assert decoys("wind turbine") == frozenset()
