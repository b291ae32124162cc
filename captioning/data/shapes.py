"""The synthetic data set, drawn and described from a seed, and kept on disk as COCO files.

Under ``root``: ``{train,val,test}/000001.png``, ``annotations/{captions,instances}_{split}.json`` and ``shapes.json``
with the parameters. Unlike in COCO, instances have ``attributes``; masks cover the visible pixels.
"""

import shlex
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from captioning.data.coco import CocoSource
from captioning.data.records import SPLITS
from captioning.data.shape_world.drawing import paint
from captioning.data.shape_world.scene import NOUNS, STYLES, SYNONYMS, describe, sample_scene
from captioning.errors import InputError, check_whole
from captioning.files import read_json
from captioning.progress import Progress

FORMAT = 3  # increases when the same parameters give other files
SMALLEST_CANVAS = 48  # pixels; smaller images hide textures and small shapes
_ID_STRIDE = 1_000_000  # distance of the splits' first image ids, so that ids are unique


class ShapesSource(CocoSource):
    """Images of one to four shapes with five captions each, generated on first use.

    The same arguments give the same files, and a larger split begins with the images of a smaller one.

    Args:
        root: The folder of the data set.
        train, val, test: Images per split.
        seed: Seed of all randomness; splits draw from separate streams.
        image_size: Side of the square images in pixels.
    """

    def __init__(
        self,
        root: str = "data/shapes",
        *,
        train: int = 6000,
        val: int = 500,
        test: int = 500,
        seed: int = 0,
        image_size: int = 112,
    ) -> None:
        super().__init__(root)
        self.images = {"train": train, "val": val, "test": test}
        self.seed, self.image_size = seed, image_size
        check_whole(1, _ID_STRIDE - 1, **{f"shapes: images of {split}": count for split, count in self.images.items()})
        check_whole(SMALLEST_CANVAS, **{"shapes: image_size": image_size})
        check_whole(0, **{"shapes: seed": seed})

    def files(self, split: str) -> tuple[Path, str]:
        return self.root / "annotations" / f"captions_{split}.json", split

    def remedy(self) -> str:
        return f"run captioning prepare shapes --root {shlex.quote(str(self.root))}"

    def synonyms(self, word: str) -> frozenset[str]:
        return frozenset({SYNONYMS[word]} if word in SYNONYMS else ())

    def prepare(self) -> None:
        """Generate the data set unless it exists. Raises InputError if ``root`` holds other shapes or other files."""
        parameters = {"format": FORMAT, "seed": self.seed, "image_size": self.image_size, "images": self.images}
        if self.root.exists() and any(self.root.iterdir()):
            path = self.root / "shapes.json"
            old = read_json(path, "choose another root or delete the folder")
            if old != parameters:
                raise InputError(f"{path}: made with {old}, not {parameters}; choose another root or delete the folder")
            return
        root = self.root.resolve()  # it may be a link to another disk
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent) as temporary:  # several runs may draw at once
            staging = Path(temporary, root.name)
            (staging / "annotations").mkdir(parents=True)
            with Progress("drawing shapes", sum(self.images.values())) as progress:
                for split in self.images:
                    self._generate(staging, split, progress)
            (staging / "shapes.json").write_bytes(msgspec.json.encode(parameters))
            if not (root / "shapes.json").exists():
                staging.replace(root)

    def _generate(self, folder: Path, split: str, progress: Progress) -> None:
        (folder / split).mkdir()
        images, captions, instances = [], [], []
        for number in range(1, self.images[split] + 1):
            # Each image has its own random stream, so that the image does not depend on the size of the split.
            rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(SPLITS.index(split), number)))
            painted = None
            while painted is None:
                shapes, order = sample_scene(rng)
                painted = paint(shapes, order, rng, self.image_size)
            image, masks = painted
            name = f"{number:06d}.png"
            image.save(folder / split / name, compress_level=0)
            image_id = SPLITS.index(split) * _ID_STRIDE + number
            images.append({"id": image_id, "file_name": name, "height": self.image_size, "width": self.image_size})
            for i, (shape, mask) in enumerate(zip(shapes, masks, strict=True), 1):
                adjectives = [shape.size, shape.color, *([shape.texture] if shape.texture != "plain" else [])]
                fields = {"category_id": NOUNS.index(shape.noun) + 1, "attributes": adjectives, **_mask_fields(mask)}
                instances.append({"id": image_id * 10 + i, "image_id": image_id, **fields})
            for i, style in enumerate(rng.permutation(STYLES).tolist(), 1):
                text = " ".join(describe(shapes, style))
                captions.append({"id": image_id * 10 + i, "image_id": image_id, "caption": text})
            progress.update()
        common = {"info": {"description": f"shapes, {split}, made from seed {self.seed}"}, "images": images}
        categories = [{"id": i, "name": noun, "supercategory": "shape"} for i, noun in enumerate(NOUNS, 1)]
        objects = {"annotations": instances, "categories": categories}
        for kind, content in (("captions", {"annotations": captions}), ("instances", objects)):
            (folder / f"annotations/{kind}_{split}.json").write_bytes(msgspec.json.encode(common | content))


def _mask_fields(mask: np.ndarray) -> dict[str, Any]:
    """Return the COCO fields for a (height, width) mask. ``counts`` are plain run lengths down the columns."""
    pixels = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(pixels, prepend=False)).tolist()  # the first run is one of unset pixels
    ys, xs = (np.flatnonzero(mask.any(axis=axis)).tolist() for axis in (1, 0))
    return {
        "segmentation": {"size": list(mask.shape), "counts": np.diff([0, *changes, pixels.size]).tolist()},
        "area": int(mask.sum()),
        "bbox": [xs[0], ys[0], xs[-1] - xs[0] + 1, ys[-1] - ys[0] + 1],
        "iscrowd": 0,
    }
