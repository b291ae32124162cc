"""The embedded data set: drawn and described locally from a seed, kept on disk as COCO files.

Under ``root``: ``{train,val,test}/000001.png`` and so on, ``annotations/captions_{split}.json``,
``annotations/instances_{split}.json`` and ``shapes.json`` with the parameters. Beyond what COCO has, an instance
carries ``attributes``. Instances list an image's objects from left to right; masks are run lengths of the visible
pixels.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from captioning.data.coco import CocoSource
from captioning.data.records import SPLITS
from captioning.data.shape_world.drawing import paint
from captioning.data.shape_world.grammar import STYLES, SYNONYMS, describe
from captioning.data.shape_world.scene import NOUNS, sample_scene
from captioning.errors import InputError, check_range
from captioning.files import read_json
from captioning.progress import Progress

FORMAT = 3  # changes whenever the same parameters give other files
SMALLEST_CANVAS = 48  # pixels; on smaller ones textures and small shapes cannot be told apart
_ID_STRIDE = 1_000_000  # image ids of the splits start this far apart, so that they never meet


class ShapesSource(CocoSource):
    """Images of one to four shapes with five captions each, generated on first use.

    The same arguments give the same files, and a larger split begins with the images of a smaller one. The splits draw
    from separate random streams.

    Args:
        root: The folder of the data set.
        train, val, test: Images per split.
        seed: Seed of all randomness.
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
        check_range(1, _ID_STRIDE - 1, **{f"shapes: images of {split}": count for split, count in self.images.items()})
        check_range(SMALLEST_CANVAS, **{"shapes: image_size": image_size})
        check_range(0, **{"shapes: seed": seed})
        self.seed = seed
        self.image_size = image_size

    def files(self, split: str) -> tuple[Path, str]:
        """Return the captions file of a split, and its image folder relative to the root."""
        return self.root / "annotations" / f"captions_{split}.json", split

    def remedy(self) -> str:
        return f"run captioning prepare shapes --root {self.root}"

    def synonyms(self, word: str) -> frozenset[str]:
        """Return the other words that captions use for a noun, a size or a texture."""
        return frozenset({SYNONYMS[word]} if word in SYNONYMS else ())

    def prepare(self) -> None:
        """Generate the data set unless it exists.

        It is written to a folder beside ``root`` and renamed when complete.

        Raises:
            InputError: ``root`` holds something else, or shapes made with other arguments.
        """
        if self._is_complete():
            return
        root = Path(os.path.realpath(self.root))  # it may be a link to another disk
        part = root.with_name(f"{root.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # of an interrupted run
        self._generate(part)
        os.replace(part, root)

    def _is_complete(self) -> bool:
        """Return whether ``root`` holds these shapes; raise if it holds anything else."""
        if not self.root.exists() or not any(self.root.iterdir()):
            return False
        path = self.root / "shapes.json"
        there, wanted = read_json(path, "choose another root or delete the folder"), self._header()
        differ = [f"{key} {there.get(key)} instead of {wanted[key]}" for key in wanted if there.get(key) != wanted[key]]
        if differ:
            raise InputError(
                f"{path}: these shapes were made with {', '.join(differ)}; "
                "use those values, choose another root, or delete the folder to regenerate it"
            )
        return True

    def _header(self) -> dict[str, Any]:
        return {"format": FORMAT, "seed": self.seed, "image_size": self.image_size, "images": self.images}

    def _generate(self, folder: Path) -> None:
        (folder / "annotations").mkdir(parents=True)
        with Progress("drawing shapes", sum(self.images.values())) as progress:
            for split, count in self.images.items():
                (folder / split).mkdir()
                images, captions, instances = [], [], []
                for number in range(1, count + 1):
                    image, of_image, objects = self._draw(folder, split, number)
                    images.append(image)
                    captions += of_image
                    instances += objects
                    progress.update(progress.done + 1)
                common = {"info": {"description": f"shapes, {split}, made from seed {self.seed}"}, "images": images}
                categories = [{"id": i, "name": noun, "supercategory": "shape"} for i, noun in enumerate(NOUNS, 1)]
                _write_json(folder / f"annotations/captions_{split}.json", common | {"annotations": captions})
                instances_file = common | {"annotations": instances, "categories": categories}
                _write_json(folder / f"annotations/instances_{split}.json", instances_file)
        _write_json(folder / "shapes.json", self._header())

    def _draw(self, folder: Path, split: str, number: int) -> tuple[dict[str, Any], list[Any], list[Any]]:
        """Write image ``number`` of a split; return its COCO records (image, captions, instances)."""
        # Each image has its own random stream, so that it does not depend on the size of the split.
        key = (SPLITS.index(split), number)
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key))
        painted = None
        while painted is None:
            scene = sample_scene(rng)
            painted = paint(scene, rng, self.image_size)
        image, masks = painted
        name = f"{number:06d}.png"
        image.save(folder / split / name, compress_level=0)
        image_id = SPLITS.index(split) * _ID_STRIDE + number
        instances = [
            {
                "id": image_id * 10 + i,
                "image_id": image_id,
                "category_id": NOUNS.index(shape.noun) + 1,
                "attributes": [shape.size, shape.colour, *([shape.texture] if shape.texture != "plain" else [])],
                **_mask_fields(mask),
            }
            for i, (shape, mask) in enumerate(zip(scene.shapes, masks, strict=True), 1)
        ]
        captions = [
            {"id": image_id * 10 + i, "image_id": image_id, "caption": " ".join(describe(scene.shapes, style))}
            for i, style in enumerate(rng.permutation(STYLES).tolist(), 1)
        ]
        size = {"height": self.image_size, "width": self.image_size}
        return {"id": image_id, "file_name": name, **size}, captions, instances


def _mask_fields(mask: np.ndarray) -> dict[str, Any]:
    """Return the COCO fields for a (height, width) mask. ``counts`` are plain run lengths down the columns."""
    pixels = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(pixels, prepend=False)).tolist()  # the first run is one of unset pixels
    ys, xs = np.flatnonzero(mask.any(axis=1)).tolist(), np.flatnonzero(mask.any(axis=0)).tolist()
    return {
        "segmentation": {"size": list(mask.shape), "counts": np.diff([0, *changes, pixels.size]).tolist()},
        "area": int(mask.sum()),
        "bbox": [xs[0], ys[0], xs[-1] - xs[0] + 1, ys[-1] - ys[0] + 1],
        "iscrowd": 0,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
