"""The words of captions that name one of COCO's 80 object categories, and the phrases that only seem to.

The idea of matching by synonyms is that of the "weak supervision" of Liu et al. (AAAI 2017) and of CHAIR (Rohrbach et
al., "Object hallucination in image captioning", EMNLP 2018); the table is our own. It leaves out words for several
categories, or that often mean something else ("bag", "glass", "computer", "chicken", "baseball"): a missed noun loses
one measurement, a misread noun adds a wrong one.
"""

from __future__ import annotations

import functools

# Category -> other names of it in the singular, words as Penn Treebank rules cut them ("catcher 's mitt").
_SINGULAR = {
    "person": (
        "man, woman, boy, girl, child, kid, baby, toddler, infant, teenager, teen, adult, guy, gentleman, lady, gal, "
        "human, mother, mom, father, dad, parent, son, daughter, brother, sister, grandmother, "
        "grandfather, husband, wife, bride, groom, friend, player, baseball player, tennis player, soccer player, "
        "football player, batter, pitcher, catcher, umpire, referee, hitter, goalie, coach, athlete, skier, "
        "snowboarder, skateboarder, skater, surfer, swimmer, biker, bicyclist, cyclist, motorcyclist, rider, jockey, "
        "driver, passenger, pedestrian, commuter, worker, employee, chef, baker, waiter, waitress, bartender, "
        "vendor, customer, shopper, tourist, traveler, hiker, student, teacher, doctor, nurse, soldier, officer, "
        "police officer, policeman, policewoman, cop, firefighter, fireman, businessman, businesswoman, cowboy, "
        "farmer, fisherman, spectator, bystander, onlooker, musician, guitarist, ball player, "
        "frisbee player, kite surfer, kite boarder, snow boarder, "
        "skate boarder, climber, runner, dancer, performer, train conductor, dog walker, crowd, family, couple, team"
    ),
    "bicycle": "bike, cycle, mountain bike, tricycle, unicycle",
    "car": "automobile, sedan, suv, minivan, van, taxi, cab, taxi cab, taxicab, limousine, jeep, hatchback, police car",
    "motorcycle": "motorbike, motor bike, motor cycle, dirt bike, moped, scooter, motor scooter, motorscooter, harley",
    "airplane": "plane, aeroplane, air plane, jet, jetliner, airliner, jumbo jet, jet plane, passenger jet, "
    "fighter jet, aircraft, biplane, seaplane",
    "bus": "minibus, double decker, double decker bus, double-decker bus, city bus, school bus, tour bus, trolley bus",
    "train": "locomotive, passenger train, freight train, steam engine, train engine, subway train, commuter train, "
    "train car, tram, railcar",
    "truck": "pickup, pickup truck, pick-up truck, fire truck, firetruck, dump truck, tow truck, garbage truck, "
    "food truck, semi, semi truck, tractor trailer, lorry",
    "boat": "ship, sailboat, sail boat, motorboat, motor boat, speedboat, speed boat, rowboat, row boat, canoe, kayak, "
    "yacht, ferry, raft, gondola, barge, tugboat, fishing boat, dinghy",
    "traffic light": "traffic signal, stoplight, stop light, street signal",
    "fire hydrant": "hydrant, fireplug, fire plug",
    "stop sign": "stopsign",
    "parking meter": "meter",
    "bench": "park bench, pew",
    "bird": "seagull, sea gull, gull, pigeon, duck, duckling, goose, swan, parrot, parakeet, cockatoo, macaw, owl, "
    "eagle, hawk, falcon, vulture, crow, raven, sparrow, robin, finch, hummingbird, woodpecker, heron, egret, "
    "stork, pelican, flamingo, ostrich, emu, peacock, rooster, chick, hen, penguin, dove",
    "cat": "kitten, kitty, feline, tabby, kitty cat",
    "dog": "puppy, pup, doggy, doggie, canine, puppy dog, terrier, poodle, labrador, retriever, golden retriever, "
    "bulldog, dachshund, chihuahua, beagle, collie, corgi, hound, greyhound, husky, german shepherd, pug, sheepdog, "
    "sheep dog, bull dog, pit bull, pitbull, dalmatian, mutt",
    "horse": "pony, stallion, mare, foal, colt, racehorse, race horse",
    "sheep": "lamb, ram, ewe",
    "cow": "bull, calf, ox, cattle, heifer, longhorn",
    "elephant": "baby elephant",
    "bear": "polar bear, grizzly, grizzly bear, brown bear, black bear, panda, panda bear, bear cub",
    "zebra": "",
    "giraffe": "",
    "backpack": "back pack, knapsack, rucksack, bookbag, book bag",
    "umbrella": "parasol",
    "handbag": "purse, hand bag, pocketbook, tote, tote bag",
    "tie": "necktie, neck tie, bow tie, bowtie",
    "suitcase": "luggage, suit case, baggage",
    "frisbee": "frisby, flying disc, flying disk",
    "skis": "",
    "snowboard": "snow board",
    "sports ball": "ball, tennis ball, soccer ball, beach ball, soccerball",
    "kite": "",
    "baseball bat": "bat",
    "baseball glove": "glove, mitt, catchers mitt, catcher 's mitt, baseball mitt",
    "skateboard": "skate board, longboard",
    "surfboard": "surf board, surfing board, boogie board, bodyboard, paddle board, paddleboard",
    "tennis racket": "racket, racquet, tennis racquet",
    "bottle": "wine bottle, beer bottle, water bottle",
    "wine glass": "wineglass, champagne glass, goblet",
    "cup": "mug, coffee cup, coffee mug, teacup, tea cup, tumbler",
    "fork": "",
    "knife": "butter knife, steak knife",
    "spoon": "teaspoon, tablespoon, ladle",
    "bowl": "soup bowl",
    "banana": "",
    "apple": "",
    "sandwich": "burger, hamburger, cheeseburger, sub sandwich, panini, grilled cheese",
    "orange": "tangerine, clementine, mandarin",
    "broccoli": "broccoli floret",
    "carrot": "baby carrot, carrot stick",
    "hot dog": "hotdog, frankfurter, corn dog, chili dog",
    "pizza": "pizza pie, pepperoni pizza, cheese pizza",
    "donut": "doughnut, do-nut",
    "cake": "cupcake, cup cake, birthday cake, wedding cake, chocolate cake, carrot cake, cheesecake, cheese cake",
    "chair": "armchair, arm chair, recliner, rocking chair, office chair, lawn chair, folding chair, beach chair, "
    "stool, highchair, high chair",
    "couch": "sofa, loveseat, love seat, futon, settee, sectional",
    "potted plant": "plant, houseplant, house plant",
    "bed": "mattress, bunk bed, bunkbed",
    "dining table": "table, dinner table, kitchen table, coffee table, dining room table, picnic table",
    "toilet": "commode, urinal, toilet bowl",
    "tv": "television, tv set, television set, flat screen, flatscreen, flat screen tv, "
    "flat screen television, flat screen monitor, tv screen, television screen, monitor, "
    "computer monitor, computer screen",
    "laptop": "laptop computer, notebook computer, macbook, netbook",
    "mouse": "computer mouse",
    "remote": "remote control, wii remote, wii controller, game controller, controller, wiimote",
    "keyboard": "computer keyboard",
    "cell phone": "cellphone, phone, mobile phone, smartphone, smart phone, telephone, iphone, flip phone",
    "microwave": "microwave oven",
    "oven": "stove, stovetop, stove top, cooker, toaster oven",
    "toaster": "",
    "sink": "washbasin, basin, wash basin, bathroom sink, kitchen sink",
    "refrigerator": "fridge, freezer, refridgerator, mini fridge",
    "book": "textbook, paperback, novel",
    "clock": "alarm clock, wall clock",
    "vase": "",
    "scissors": "shears",
    "teddy bear": "teddy, stuffed bear, stuffed teddy bear, stuffed animal bear",
    "hair drier": "hairdryer, hair dryer, blow dryer, blow drier, blowdryer",
    "toothbrush": "tooth brush, electric toothbrush",
}

CATEGORIES = tuple(_SINGULAR)
"""COCO's 80 categories, lower case, in the order of its files."""

_IRREGULAR = {
    "person": "people",
    "child": "children",
    "wife": "wives",
    "knife": "knives",
    "calf": "calves",
    "ox": "oxen",
    "goose": "geese",
    "mouse": "mice",
    **{f"{name}man": f"{name}men" for name in ("", "wo", "gentle", "police", "fire", "fisher", "business")},
    **{f"{name}woman": f"{name}women" for name in ("police", "business")},
    **{name: name for name in "skis scissors shears luggage baggage cattle sheep aircraft broccoli".split()},
}
_MORE = {"person": "persons", "bus": "busses", "mouse": "mouses", "scissors": "scissor"}

_ANIMALS = ("bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe")
_RIDDEN = ("bicycle", "car", "motorcycle", "bus", "train", "truck", "boat", "horse", "skateboard")
_RIDERS = "driver drivers rider riders racer racers owner owners passenger passengers"

# Category -> words that make something else of any of its names when they follow it, and when they stand before it.
_FOLLOWED_BY = {
    "person": "of mitt made hat hats boots carrots carriage stroller crib seat side jet jets plane planes train trains "
    "bus buses car cars piano costume skis bats statue statues",
    "bicycle": "rack racks path lane lanes helmet helmets shop store trail race tire tires",
    "car": "seat park door window show wash dealership keys",
    "motorcycle": "helmet helmets jacket rally race show gear club",
    "airplane": "ski skis ticket engine engines stream runway hangar",
    "bus": "stop stops station stations terminal shelter depot lane",
    "train": "station stations track tracks platform platforms yard depot bridge crossing terminal",
    "truck": "bed stop",
    "boat": "dock docks ramp house houses slip yard launch",
    "bench": "press",
    "bird": "house houses cage cages feeder feeders bath nest nests seed tape",
    "cat": "food bed toy toys carrier litter tree house",
    "dog": "food bed beds house toy toys bowl bowls collar leash park show sled carrier kennel door treats",
    "horse": "race races track trailer trailers farm stable barn stall",
    "sheep": "skin",
    "cow": "boy girl bell hide dog dogs",
    "elephant": "ear ears",
    "zebra": "crossing print stripe stripes striped",
    "umbrella": "stand hat",
    "tie": "dye dyed clip up down",
    "suitcase": "cart carts carousel rack racks claim tag tags belt trolley handler handlers",
    "skis": "lift",
    "frisbee": "golf game team match tournament",
    "snowboard": "ramp slope gear jump park",
    "sports ball": "cap caps park game field player players room gown pit court boy boys",
    "kite": "surfing boarding surfer surfers boarder boarders board boards string strings festival",
    "skateboard": "park ramp ramps trick tricks competition",
    "cup": "holder holders cake cakes",
    "fork": "lift in",
    "knife": "block holder rack",
    "bottle": "opener cap caps",
    "bowl": "cut game",
    "banana": "tree trees split splits bread peel peels leaf leaves stand pudding muffin muffins",
    "apple": "tree trees juice pie pies laptop laptops computer computers logo sauce cider product products store "
    "macbook iphone mouse keyboard",
    "sandwich": "shop bag bags",
    "orange": "juice peel peels tree trees and shirt shirts jacket jackets vest vests hat hats cone cones sauce light "
    "lights flower flowers color colored striped walls wall hair fur paint sign signs soda drink dress",
    "carrot": "cake cakes juice top tops",
    "hot dog": "bun buns stand cart vendor",
    "pizza": "box boxes place shop parlor restaurant cutter pan pans oven ovens dough sauce chef",
    "donut": "shop store box hole holes",
    "cake": "pan stand plate mix batter knife topper",
    "chair": "lift lifts",
    "couch": "cushion cushions",
    "potted plant": "pot pots stand life",
    "bed": "room rooms side spread spreads frame sheet sheets post posts linens cover covers of",
    "dining table": "cloth cloths top tops tennis lamp lamps setting settings runner salt",
    "toilet": "paper brush roll rolls tissue stall stalls room plunger",
    "tv": "stand stands show shows tray remote remotes cabinet console program studio camera cameras",
    "laptop": "bag bags case",
    "mouse": "pad pads",
    "remote": "area location field road place beach island hillside hill car plane airplane helicopter",
    "keyboard": "player",
    "cell phone": "booth booths pole poles call box number line lines case charger",
    "oven": "mitt mitts",
    "sink": "hole",
    "refrigerator": "magnet magnets",
    "book": "shelf shelves case cases store stores bag bags stand",
    "clock": "tower towers radio",
    "toothbrush": "holder",
}
_PRECEDED_BY = {
    "person": "snow gingerbread dvd cd record cassette screw flower",
    "bicycle": "exercise motor dirt stationary",
    "car": "train box subway trolley cable street rail passenger dining cattle",
    "airplane": "paper remote-controlled",
    "bus": "magic",
    "train": "wagon",
    "truck": "hand",
    "boat": "gravy banana",
    "bench": "work",
    "dog": "hot corn chili prairie",
    "horse": "rocking sea saw carousel",
    "cow": "pit",
    "bear": "teddy stuffed gummy care",
    "tie": "zip railroad",
    "sports ball": "disco meat cheese wrecking",
    "mouse": "mickey minnie",
    "keyboard": "piano music",
    "cake": "crab rice pan",
    "chair": "wheel",
    "potted plant": "power",
    "bed": "flower truck dog cat pet garden river",
    "dining table": "pool side end night bedside changing ping-pong pong billiard",
    "bowl": "toilet super",
    "cup": "world",
}
# Young animals are no human babies: "baby elephant" names an elephant.
_OF_ANIMALS = ("baby", "adult", "mother", "father", "parent")


def plural(name: str) -> str:
    """Return the plural of a noun phrase: of its last word."""
    first, space, last = name.rpartition(" ")
    if last in _IRREGULAR:
        last = _IRREGULAR[last]
    elif last.endswith(("s", "x", "ch", "sh")):
        last += "es"
    elif last.endswith("y") and last[-2] not in "aeiou":
        last = last[:-1] + "ies"
    else:
        last += "s"
    return first + space + last


@functools.cache
def synonyms(category: str) -> frozenset[str]:
    """Return the other names of a category, plurals included; no name belongs to two categories.

    A category that is not COCO's has only its plural.
    """
    singular = {category, *filter(None, _SINGULAR.get(category, "").split(", "))}
    names = singular | {plural(name) for name in singular} | set(_MORE.get(category, "").split())
    if category in _ANIMALS:
        names |= {f"{word} {name}" for word in _OF_ANIMALS for name in names}
    if category == "person":
        names |= {
            f"{vehicle} {rider}"
            for ridden in _RIDDEN
            for vehicle in (ridden, *_SINGULAR[ridden].split(", "))
            for rider in _RIDERS.split()
        }
    return frozenset(names - {category})


@functools.cache
def decoys(category: str) -> frozenset[str]:
    """Return phrases that hold a name of the category and mean something else; [] for one that is not COCO's."""
    if category not in CATEGORIES:
        return frozenset()
    names = {category, *synonyms(category)}
    following, preceding = _FOLLOWED_BY.get(category, "").split(), _PRECEDED_BY.get(category, "").split()
    if category in _ANIMALS:
        following += "statue statues sculpture sculptures enclosure exhibit costume figurine figurines".split()
        preceding += ["stuffed", "toy"]
    if category in _RIDDEN:
        following += _RIDERS.split()
    phrases = {f"{name} {word}" for name in names for word in following}
    phrases |= {f"{word} {name}" for name in names for word in preceding}
    if category == "person":
        phrases |= {
            f"{word} {name}" for animal in _ANIMALS for name in (animal, plural(animal)) for word in _OF_ANIMALS
        }
    if category == "orange":  # more often a colour
        for noun in CATEGORIES:
            if noun != category:
                phrases |= {f"orange {name}" for name in (noun, *synonyms(noun))}
    return frozenset(phrases - names)
