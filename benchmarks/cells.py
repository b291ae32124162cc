"""Where the cells of the usual encoders lie on the pixels, and how long it takes to find out.

Untrained encoders show what the architecture says; those of checkpoints show where trained weights look.

examples:
  python -m benchmarks.cells --checkpoint runs/shapes_soft/checkpoints/best.ckpt
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from captioning.captioner import load
from captioning.cells import CellGrid
from captioning.cli.arguments import script_parser
from captioning.encoders import ConvEncoder, Encoder, TimmEncoder, TorchvisionEncoder
from captioning.encoders.cells import measure_cells, measure_geometry
from captioning.errors import exits_on_input_error
from captioning.files import write_json
from captioning.provenance import provenance

ENCODERS: dict[str, Callable[[], Encoder]] = {
    "ConvEncoder of the shapes configs": lambda: ConvEncoder((48, 96, 128), (4, 2, 2)),
    "ResNet-50, layer3": lambda: TorchvisionEncoder("resnet50", "layer3", weights=None),
    "VGG-19, conv5_4": lambda: TorchvisionEncoder("vgg19", weights=None),
    "MobileNetV1 (timm)": lambda: TimmEncoder("mobilenetv1_100", weights=None),
    "MobileNetV1 (timm), pad_type same": lambda: TimmEncoder(
        "mobilenetv1_100", weights=None, model_args={"pad_type": "same"}
    ),
    "MobileNet-V3 large, features.12": lambda: TorchvisionEncoder("mobilenet_v3_large", "features.12", weights=None),
    "ViT-B/16": lambda: TorchvisionEncoder("vit_b_16", "encoder.ln", weights=None),
}


def _encoder_of(checkpoint: Path) -> Encoder:
    return load(checkpoint).encoder


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, nargs="+", default=[], help="whose encoders are measured, too")
    parser.add_argument("--measurement", type=Path, metavar="FILE", help="write everything, with its provenance")
    args = parser.parse_args(argv)
    values = {}
    print(f"{'encoder':36} {'grid':>8} {'offset':>14} {'stride':>14} {'regular':>14} {'seconds':>8}")
    trained = {f"trained: {path.parent.parent.name}": partial(_encoder_of, path) for path in args.checkpoint}
    for name, make in (ENCODERS | trained).items():
        encoder = make()
        started = time.perf_counter()
        cells = encoder._measured_cells(measure_cells if name in trained else measure_geometry)
        seconds = time.perf_counter() - started
        regular = CellGrid.regular(cells.grid_size, cells.size)
        values[name] = {
            "grid_size": cells.grid_size,
            "view_size": cells.size,
            "offset": cells.offset,
            "stride": cells.stride,
            "regular_offset": regular.offset,
            "seconds": round(seconds, 3),
        }
        rows, columns = cells.grid_size
        pairs = ("{:.1f}, {:.1f}".format(*pair) for pair in (cells.offset, cells.stride, regular.offset))
        print(f"{name:36} {rows:>3} x {columns:<2}", *(f"{pair:>14}" for pair in pairs), f"{seconds:8.2f}")
    if args.measurement is not None:
        command = f"python -m benchmarks.cells {shlex.join(sys.argv[1:] if argv is None else argv)}".rstrip()
        write_json(args.measurement, {"values": values, **provenance(command=command, seed=None)})
        print(f"wrote {args.measurement}")


if __name__ == "__main__":
    main()
