"""The command ``extract``: a frozen encoder's annotations, computed once."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from captioning.errors import InputError, check_whole, one_line
from captioning.settings import Split, read_config


def extract(
    *,
    config: list[Path],
    output: Path,
    split: list[Split] | None = None,
    init_from: str | None = None,
    flipped: bool = False,
    device: str = "auto",
    batch_size: int = 32,
    num_workers: int | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Compute features (the encoder's annotations) once; training reads them from disk with --data.features.

    Encoder and data come from a training configuration. Options of `captioning fit` that set them, such as
    --data.source.root DIR, work here, too. After an interruption, run the same command again to continue.

    Args:
        config: The training configuration; of several, the later ones win.
        output: Folder of the features.
        split: Splits to extract: train, val or test; by default train and val.
        init_from: A model to take the encoder's weights from.
        flipped: Also extract the mirrored training images, for --data.augmentation.flip.
        device: auto, cpu, cuda or cuda:N.
        batch_size: Images per batch.
        num_workers: Processes that decode images; by default one per processor, at most 8.

    Examples:
        captioning extract --config configs/flickr8k_lite2_soft.yaml --output data/features --flipped
    """
    splits = split or ["train", "val"]
    check_whole(1, batch_size=batch_size)
    check_whole(0, num_workers=num_workers)
    if flipped and "train" not in splits:
        raise InputError("--flipped: mirrors the training images; add train to --split")
    from captioning.checkpoint.load import usable_device
    from captioning.cli.build import build
    from captioning.data import CaptionSource
    from captioning.data.extraction import extract_features
    from captioning.data.loading import SplitData, worker_count
    from captioning.encoders import Encoder
    from captioning.inference import load
    from captioning.tokenizers import Tokenizer

    types: dict[str, Any] = {"model.encoder": Encoder, "data.source": CaptionSource}
    types |= {"data.vocabulary.tokenizer": Tokenizer | None, "data.limit_images": int | None}
    built, _ = build(types, [read_config(path, "--config") for path in config], overrides)
    encoder, source = built["model.encoder"], built["data.source"]
    source.tokenizer = built["data.vocabulary.tokenizer"] or source.tokenizer  # images without words are left out
    if init_from:
        try:
            encoder.load_state_dict(load(init_from).encoder.state_dict())
        except RuntimeError as error:
            raise InputError(f"--init_from {init_from}: its encoder is not the config's ({one_line(error)})") from error
    else:
        encoder.load_published_weights()
    source.prepare()
    torch_device = usable_device(device)
    extract_features(
        encoder.to(torch_device).eval(),
        {name: SplitData(source, name, limit_images=built["data.limit_images"]).index for name in splits},
        output,
        device=torch_device,
        batch_size=batch_size,
        num_workers=worker_count(num_workers, cached=False),
        mirrored=flipped,
    )
    options = " --data.augmentation.flip 0.5" if flipped else ""
    options += f" --init_from {shlex.quote(init_from)}" if init_from else ""
    features = shlex.quote(str(output))
    print(f"To train from these features, add to the training command:  --data.features {features}{options}")
