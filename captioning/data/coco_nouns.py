"""The words of captions that name one of COCO's 80 object categories; ``coco_nouns.txt`` has them in the singular.

Liu et al. (AAAI 2017, "weak supervision") and CHAIR (Rohrbach et al., "Object hallucination in image captioning", EMNLP
2018) match synonyms, too. The table is our own.
"""

import functools
import re
from pathlib import Path

CATEGORIES = {
    category: [name for name in names.strip().split(", ") if name]
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for category, _, names in [line.partition(":")]
}
"""COCO's 80 categories, lower case, in the order of its files, with their other names."""

_PLURALS = (  # the first pattern that matches is replaced
    (r"\b(skis|scissors|shears|luggage|baggage|cattle|sheep|aircraft|broccoli)$", r"\1"),
    (r"\bperson$", "people"),
    (r"\bhuman$", "humans"),
    (r"\bchild$", "children"),
    (r"\b(wi|kni)fe$", r"\1ves"),
    (r"\bcalf$", "calves"),
    (r"\box$", "oxen"),
    (r"\bgoose$", "geese"),
    (r"\bmouse$", "mice"),
    (r"man$", "men"),
    (r"(s|x|ch|sh)$", r"\1es"),
    (r"([^aeiou])y$", r"\1ies"),
    (r"$", "s"),
)
_IRREGULAR = {"person": ["persons"], "bus": ["busses"], "mouse": ["mouses"], "scissors": ["scissor"]}

# "A baby elephant" names an elephant and no human baby, "a bus driver" a person and no bus.
_ANIMALS = ("bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe")
_ANIMAL_ROLES = ("baby", "adult", "mother", "father", "parent")
_VEHICLES = ("bicycle", "car", "motorcycle", "bus", "train", "truck", "boat", "horse", "skateboard")
_RIDERS = "driver drivers rider riders racer racers owner owners passenger passengers".split()


def plural(name: str) -> str:
    """Return a noun phrase with its last word in the plural."""
    return next(re.sub(pattern, ending, name) for pattern, ending in _PLURALS if re.search(pattern, name))


@functools.cache
def synonyms(category: str) -> frozenset[str]:
    """Return the other names of a category, with plurals. A noun that is no category of COCO has only its plural."""
    singular = {category, *CATEGORIES.get(category, [])}
    names = singular | {plural(name) for name in singular} | {*_IRREGULAR.get(category, [])}
    if category in _ANIMALS:
        names |= {f"{word} {name}" for word in _ANIMAL_ROLES for name in names}
    if category == "person":
        vehicles = [name for vehicle in _VEHICLES for name in (vehicle, *CATEGORIES[vehicle])]
        names |= {f"{vehicle} {rider}" for vehicle in vehicles for rider in _RIDERS}
    return frozenset(names - {category})


@functools.cache
def long_names() -> tuple[frozenset[str], int]:
    """Return the categories' names of several words, and the number of words of the longest name."""
    names = frozenset(name for category in CATEGORIES for name in {category, *synonyms(category)} if " " in name)
    return names, max(len(name.split()) for name in names)
