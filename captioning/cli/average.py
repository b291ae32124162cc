"""The command ``average``: the mean of several checkpoints' weights."""

from pathlib import Path

from captioning.files import check_output


def average(*, model: list[Path], output: Path, fraction: list[float] | None = None) -> None:
    """Write a checkpoint with the mean weights of several, such as two stages of training.

    Use the result like any checkpoint: to caption, to score, to export, or to start training from it
    (--init_from). The mean is useful if one run started from the weights of the other, or all from
    the same weights. If their random weights differed, use an ensemble (docs/recipes.md#ensembles).

    Args:
        model: The checkpoints.
        output: The checkpoint to write.
        fraction: Weight of each checkpoint in the mean; by default, all weigh the same.

    Examples:
        captioning average --model runs/a/checkpoints/best.ckpt runs/b/checkpoints/best.ckpt --output mean.ckpt
        captioning average --model a.ckpt b.ckpt --fraction 0.3 0.7 --output mean.ckpt
    """
    check_output(output, "--output", inputs=model)
    from captioning.checkpoint.average import average_checkpoints
    from captioning.checkpoint.format import write_checkpoint

    checkpoint = average_checkpoints(model, fraction)
    write_checkpoint(checkpoint, output, "--output")
    averaged = checkpoint["captioning"]["settings"]["averaged"]
    members = ", ".join(f"{member['fraction']:.3g} of {member['checkpoint']}" for member in averaged)
    print(f"written to {output}: {members}")
