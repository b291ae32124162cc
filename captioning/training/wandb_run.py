"""A training run in wandb: its summary, samples, checkpoints and tests. A resumed run continues it."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only, rank_zero_warn
from torch import Tensor

from captioning.evaluation.bleu import bleu_counts, sentence_bleu
from captioning.evaluation.cider import cider_d
from captioning.evaluation.records import CaptionedImage
from captioning.files import read_bytes, write_json
from captioning.run_folder import RunFolder

# Metrics whose best value the wandb summary keeps beside the last.
_BEST = {
    **{f"val/bleu{n}": "max" for n in range(1, 5)},
    "val/rouge_l": "max",
    "val/cider_d": "max",
    "val/nll": "min",
    "val/pointing_accuracy": "max",
    "val/attention_correctness": "max",
}

_NAMES = ("entity", "project", "name", "group", "job_type")  # attributes of a run that its note in the run folder has


class WandbRun(WandbLogger):
    """Lightning's wandb logger, set up for captioning. The command line uses it in place of Lightning's.

    The summary keeps the best value of every validation score. When training is resumed in the run's folder, or one of
    its checkpoints is tested, the run keeps its id (``wandb_run.json``), offline too. Files for upload are staged in
    the run's folder, where a later ``wandb sync`` finds them.

    With ``log_model`` the best and the last checkpoint become versions of one artifact with the aliases "best" and
    "last". (Lightning's logger calls the last one "best" too, and refuses the option offline.) The data become an
    artifact too: the numbers of images and captions and their hash, not the data themselves.

    Args:
        log_model: Whether to log checkpoints: True at the end of the run, "all" every time one is written.
        offline: Whether to log offline, as with ``WANDB_MODE=offline``.
        **kwargs: Arguments of Lightning's logger, which passes on those of ``wandb.init``.
    """

    def __init__(self, *, log_model: Literal["all"] | bool = False, offline: bool = False, **kwargs: Any) -> None:
        super().__init__(log_model=False, offline=offline, **kwargs)
        self._log_model = log_model
        self._saved: dict[str, float] = {}
        self._data: dict[str, Any] = {}
        # The command line passes every option, None for unset ones, which undoes Lightning's default.
        self._wandb_init["resume"] = self._wandb_init.get("resume") or "allow"
        self._wandb_init.pop("anonymous", None)  # wandb warns about any value of it

    @classmethod
    def of_folder(cls, folder: RunFolder) -> WandbRun | None:
        """Return the run that the training in a folder was logged to, to continue it; None if there is none."""
        note = _read_note(folder)
        if not note:
            return None
        names = {name: note[name] for name in _NAMES if isinstance(note.get(name), str)}
        tags = [tag for tag in note.get("tags", ()) if isinstance(tag, str)]
        return cls(save_dir=str(folder.path), tags=tags, **names)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            self._start()
        return self._experiment

    def _start(self) -> None:
        offline = self._offline or os.environ.get("WANDB_MODE") in ("offline", "dryrun")
        if offline and "WANDB_DATA_DIR" not in os.environ:  # otherwise the user has chosen
            os.environ["WANDB_DATA_DIR"] = self._staging
        earlier = self._read()
        if self._wandb_init.get("id") is None:
            self._wandb_init["id"] = earlier.get("id")
        run = super().experiment
        for name, summary in _BEST.items():
            run.define_metric(name, step_metric="trainer/global_step", summary=f"{summary},last")
        if earlier.get("id") == run.id and run.offline:
            run.log({}, step=earlier["step"])  # online, wandb asks its server for the last step
        self._write()

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(Path(self.save_dir or "."))

    @property
    def _staging(self) -> str:
        return str((self._folder.path / "wandb" / "data").resolve())

    def _read(self) -> dict[str, Any]:
        return _read_note(self._folder)

    def _write(self) -> None:
        run = self._experiment
        if run is not None and not run.disabled:
            content = {name: getattr(run, name) for name in ("id", *_NAMES)}
            write_json(self._folder.wandb_run, content | {"tags": list(run.tags or ()), "step": run.step}, follow=False)

    @rank_zero_only
    def save_file(self, path: Path, name: str) -> None:
        """Save a copy of a file with the run, under ``name``."""
        run = self.experiment
        if not run.disabled:
            copy = Path(run.dir) / name  # in its place already: wandb would make a link, which breaks elsewhere
            shutil.copyfile(path, copy)
            run.save(str(copy), base_path=run.dir, policy="now")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers, except those that are not finite, which charts and summaries cannot show."""
        finite = {
            name: value
            for name, value in metrics.items()
            if not isinstance(value, (float, Tensor)) or math.isfinite(value)  # images and tables are logged here too
        }
        super().log_metrics(finite, step)

    @rank_zero_only
    def log_data(self, name: str, splits: Mapping[str, Mapping[str, Any]]) -> None:
        """With ``log_model``, log the training data as an artifact that the run uses. Checkpoints name its hash.

        Args:
            name: Name of the data source.
            splits: Images, captions and hash of every split.
        """
        if not self._log_model:
            return
        import wandb

        self._data = {split: dict(facts) for split, facts in splits.items()}
        artifact = wandb.Artifact(name=f"data-{name}", type="dataset", metadata=self._data)
        with artifact.new_file("splits.json", encoding="utf-8") as file:
            json.dump(self._data, file, indent=2)
        if self.experiment.offline:  # wandb cannot note offline that a run uses an artifact
            self.experiment.log_artifact(artifact)
        else:
            self.experiment.use_artifact(artifact)

    @rank_zero_only
    def log_samples(self, images: list[CaptionedImage], overlays: list[Path], *, epoch: int, step: int) -> None:
        """Log captioned images as one table, and every overlay under its own key.

        Scores are sentence BLEU in percent. wandb expects the images of one key to have one size.
        """
        import wandb

        columns = ["epoch", "image_id", "overlay", "caption", "references", "bleu1", "bleu4", "log_prob"]
        rows = []
        for number, (image, path) in enumerate(zip(images, overlays, strict=True), 1):
            self.log_image(f"val/sample_{number}", [str(path)], caption=[image.text], step=step)
            (counts,) = bleu_counts([image.words], [image.reference_words])
            scores = [round(float(sentence_bleu(counts, n)), 2) for n in (1, 4)]
            references = "\n".join(image.references)
            picture = wandb.Image(str(path))
            rows.append([epoch, image.image_id, picture, image.text, references, *scores, image.log_prob])
        self.log_table("val/samples", columns=columns, data=rows, step=step)

    @rank_zero_only
    def log_test(
        self,
        scores: Mapping[str, float],
        images: Sequence[CaptionedImage],
        overlays: Sequence[tuple[str, Path]],
        *,
        conditions: Mapping[str, str | float],
        step: int,
    ) -> None:
        """Log a test of one of the run's checkpoints. A failure of wandb is only a warning: the scores are on disk.

        Args:
            scores: Scores by their names in the logs, ``test/bleu4`` ..
            images: All images of the split, the rows of the table ``test/captions``, with sentence BLEU and CIDEr-D.
            overlays: Captions and overlay files of some images.
            conditions: Conditions that the scores depend on, for the run's summary.
            step: Optimizer step at which the checkpoint was saved.
        """
        import wandb

        hypotheses, references = [image.words for image in images], [image.reference_words for image in images]
        bleu, cider = bleu_counts(hypotheses, references), 100 * cider_d(hypotheses, references)
        columns = ["image_id", "caption", "references", "bleu1", "bleu4", "cider_d", "log_prob", "finished"]
        scored = zip(images, sentence_bleu(bleu, 1), sentence_bleu(bleu, 4), cider, strict=True)
        rows = [
            [image.image_id, image.text, "\n".join(image.references)]
            + [round(float(score), 2) for score in scores_of_image]
            + [image.log_prob, image.finished]
            for image, *scores_of_image in scored
        ]
        try:
            for number, (caption, path) in enumerate(overlays, 1):
                self.log_image(f"test/sample_{number}", [str(path)], caption=[caption], step=step)
            self.log_table("test/captions", columns=columns, data=rows, step=step)
            self.log_metrics(dict(scores), step=step)
            self.experiment.summary.update(dict(conditions))
        except (wandb.Error, OSError) as error:
            rank_zero_warn(f"wandb: the test is not logged ({' '.join(str(error).split())[:160]})")

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self._write()
        if self._log_model:
            self._checkpoint_callbacks[id(checkpoint_callback)] = checkpoint_callback
        if self._log_model == "all":
            self._log_checkpoint(checkpoint_callback, policy="mutable")  # a copy: the file will be written over

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Log the checkpoints, also of an interrupted run."""
        if self._experiment is not None:
            for checkpoint_callback in self._checkpoint_callbacks.values():
                self._log_checkpoint(checkpoint_callback, policy="immutable")
            self._write()

    def _log_checkpoint(self, callback: ModelCheckpoint, *, policy: Literal["mutable", "immutable"]) -> None:
        path = Path(callback.best_model_path)
        if not path.is_file() or self._saved.get(str(path)) == path.stat().st_mtime:
            return
        import wandb

        score = callback.current_score if callback.best_model_score is None else callback.best_model_score
        metadata = {
            "monitor": callback.monitor,
            "mode": callback.mode,
            "score": None if score is None else float(score),
            "original_filename": path.name,
            "data": self._data,
        }
        artifact = wandb.Artifact(name=f"model-{self.experiment.id}", type="model", metadata=metadata)
        # An absolute path, since `wandb sync` may be run from elsewhere.
        artifact.add_file(str(path.resolve()), name="model.ckpt", policy=policy)
        self.experiment.log_artifact(artifact, aliases=["best" if callback.monitor else "last"])
        self._saved[str(path)] = path.stat().st_mtime

    @rank_zero_only
    def finish(self) -> None:
        """Close the run, so that the process can start another."""
        if self._experiment is not None:
            self._write()
            self._experiment.finish()
            self._experiment = None
            if os.environ.get("WANDB_DATA_DIR") == self._staging:
                del os.environ["WANDB_DATA_DIR"]


def _read_note(folder: RunFolder) -> dict[str, Any]:
    """Return the content of a folder's ``wandb_run.json``; {} if it is missing or damaged."""
    try:
        note = json.loads(read_bytes(folder.wandb_run))
    except (OSError, ValueError, RecursionError):
        return {}
    valid = isinstance(note, dict) and isinstance(note.get("id"), str) and isinstance(note.get("step"), int)
    return note if valid and isinstance(note.get("tags", []), list) else {}
