"""The ``captioning`` command. ``--help`` is answered here, because importing what training needs takes seconds."""

from __future__ import annotations

import sys

from captioning.errors import exits_on_input_error

HELP = """usage: captioning {fit,validate,test,predict} [--config CONFIG.yaml ...] [options]

Image captioning with visual attention (Show, Attend and Tell).

commands:
  fit        train; validates by free-running decoding and keeps the best checkpoint by val/bleu4
  validate   score a checkpoint on the validation split
  test       score a checkpoint on the test split
  predict    caption the test split, into RUNS/NAME/predictions.jsonl and the COCO server's predict_results.json

options of every command:
  --config FILE       a YAML file; several are merged, the later ones win
  --name NAME         the run's name; its folder is RUNS/NAME
  --runs RUNS         folder of all runs (default: runs)
  --ckpt_path FILE    the checkpoint to evaluate, or to resume from with fit; best and last name the run's own
  --init_from FILE    fit: begin with the weights of a checkpoint, and a new optimizer (a second stage)
  --import MODULE     import a module of your own whose classes the config or the run names; it is looked for in the
                      working directory and the first config's folder
  --debug             show the traceback of an error
  --print_config      print the full configuration and stop
  --model.* --data.* --trainer.* --checkpoint.* --early_stopping.*
                      any setting of the YAML, such as --trainer.max_epochs 3

examples:
  captioning fit --config configs/shapes_soft.yaml
  captioning fit --config configs/shapes_soft.yaml --config configs/overlays/debug.yaml
  captioning test --ckpt_path runs/shapes_soft/checkpoints/best.ckpt
  captioning fit --ckpt_path runs/shapes_soft/checkpoints/last.ckpt     (resume)
  captioning fit --config configs/shapes_soft.yaml --config configs/overlays/self_critical.yaml \\
      --init_from runs/shapes_soft/checkpoints/best.ckpt --name shapes_soft_scst

Every option, with its meaning and default: captioning fit --help
"""


@exits_on_input_error
def main() -> None:
    args = sys.argv[1:]
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP)
        return
    if args[0] == "--version":
        from captioning import __version__

        print(f"captioning {__version__}")
        return
    from captioning.training.cli import main as run

    run(args)


if __name__ == "__main__":
    main()
