"""The command ``export``: a trained captioner as a folder for others."""

from pathlib import Path
from typing import Literal

from captioning.cli import model_name
from captioning.files import check_output, read_text


def export(
    *,
    model: str,
    output: Path,
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    license: str | None = None,
    notes: Path | None = None,
) -> None:
    """Write a trained captioner as a folder for others: weights, settings, vocabulary, model card.

    The weights are stored as safetensors, and opening the folder runs no code. The card has the metrics
    that `captioning test` wrote to the run's folder. `caption` and `app` take the folder as --model, `test`
    as --ckpt_path, `fit` as --init_from.

    Args:
        model: A FILE.ckpt, exported folder, hf:owner/name or pretrained.
        output: The folder to write.
        dtype: Type of the weights; float16 and bfloat16 take half the space.
        license: License of the weights, such as cc-by-4.0; the card names it.
        notes: A Markdown file for the card; its sections replace those of the same title, or follow the others.

    Examples:
        captioning export --model runs/shapes_soft/checkpoints/best.ckpt --output exported/shapes_soft
        captioning export --model best.ckpt --output exported/mine --license cc-by-4.0 --dtype float16
    """
    check_output(output, "--output", inputs=[model])
    text = read_text(notes) if notes else ""
    from captioning.checkpoint.export import CARD, CONFIG, VOCABULARY, WEIGHTS
    from captioning.checkpoint.model_card import model_card
    from captioning.inference import load

    captioner = load(model)
    content = (captioner.model, captioner.vocabulary, captioner.settings, model_name(model))
    card = model_card(*content, checkpoint=Path(model), license=license, notes=text)
    captioner.export(output, card, dtype=dtype)
    files = [output / name for name in (CARD, CONFIG, WEIGHTS, VOCABULARY)]
    size = sum(file.stat().st_size for file in files) / 1e6
    print(f"written to {output} ({size:.1f} MB): {', '.join(file.name for file in files)}")
