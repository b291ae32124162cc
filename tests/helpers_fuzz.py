"""Files that are damaged at random: a few changes of their bytes, of their text, or of the values that they hold."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import random
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import yaml

DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
# What readers stumble over: kinds, sizes, texts that lead elsewhere. Nothing here does anything if it is used.
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400, -(10**400)),
    *(0.5, -0.5, 1e-320, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", " ", "x", "0", "-1", "nan", "\0", "\n", "a\udc80b", "..", "../../x", "/nowhere/x", "~", "\u202e", "\x1b[2J"),
    *("a" * 600, "a " * 600, "%s", "{}", "[", "&a [*a]", "train", "val", "1.jpg", "2024-13-45", "1_000", "0x1F", "1e5"),
    *(
        "{epoch}-{step}",
        "1e400",
        "\u00e9\u732b",
        "a.b",
        "1.5",
        "[1",
        "{a: b",
        "!!python/name:os.system",
        "cuda:99",
        "é" * 99,
    ),
    *([], {}, [[]], [None], {"": None}, {"class_path": "x"}, {"class_path": 3}, {"class_path": "captioning.errors.P"}),
    {"class_path": "captioning.attention.SoftAttention"},
    {"class_path": "captioning.attention.AdditiveScore", "init_args": {"attention_dim": 3}},
    {"class_path": "captioning.encoders.ConvEncoder", "init_args": {"channels": [], "strides": []}},
    {"size": [8, 9], "counts": "0"},
    DEEP,
]
TOKENS = [
    *(bytes([byte]) for byte in b"\0\n\r\t \"'{}[]:,.-+&*!|>%@`#~\\/<?\x1b\x7f\x80\xff0123456789eEnN"),
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"999999999999",
]
PROTECTED = {"devices", "num_nodes", "strategy", "max_time", "num_workers"}  # other processes, and waiting


def damage(name: str, content: bytes, draw: random.Random) -> bytes:
    """Return another content of a file; its name says what kind of file it is."""
    kind = name.rpartition(".")[2]
    if draw.random() < 0.35 and kind in _KINDS:
        return _KINDS[kind](content, draw) if draw.random() < 0.8 else damaged_bytes(_KINDS[kind](content, draw), draw)
    if kind in _KINDS and draw.random() < 0.6:
        return _KINDS[kind](content, draw)
    return damaged_bytes(content, draw)


OTHER_FILES = (
    b"",
    b"hello\n",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n",
    b"<!DOCTYPE html><html>404</html>",
    b"\x89PNG\r\n\x1a\n" + bytes(40),
    b"PK\x03\x04" + bytes(40),
    b"\x80\x02}q\x00.",
    b"{}",
    b"[]",
)


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.02:
        return draw.choice(OTHER_FILES)
    found = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        at = draw.randrange(len(found) + 1)
        size = draw.choice((1, 1, 2, 4, 30))
        what = draw.randrange(7)
        if what == 0 and at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            found[at : at + size] = draw.randbytes(size)
        elif what == 2:
            del found[at : at + size]
        elif what == 3:
            found[at:at] = draw.choice(TOKENS)
        elif what == 4:
            found[at:at] = found[at : at + draw.choice((4, 40, 400))]
        elif what == 5 and draw.random() < 0.3:
            del found[at:]
        else:
            other = draw.randrange(len(found) + 1)
            found[at : at + size] = found[other : other + size]
    return bytes(found)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container with every key of it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if key not in PROTECTED:
            yield value, key
            yield from _places(inner)


def copied(value: Any) -> Any:
    """Return a copy of lists and dicts; what they hold stays the same."""
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def damaged_value(value: Any, draw: random.Random, odd: list[Any] = ODD) -> Any:
    """Return plain data, or a copy of it, with a few values changed, moved or gone."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places or draw.random() < 0.02:
            value = copied(draw.choice(odd))
            continue
        container, key = draw.choice(places)
        old = container[key]
        what = draw.randrange(9)
        if what <= 2:
            container[key] = copied(draw.choice(odd))
        elif what == 3:
            del container[key]
        elif what == 4:
            container[key] = copied(draw.choice([other[name] for other, name in places]))
        elif what == 5:
            container[key] = draw.choice(([old], {"a": old}, [old, old], str(old)))
        elif what == 6 and isinstance(container, dict):
            container[draw.choice(("", "a.b", "x", 3, *container))] = container.pop(key)
        elif type(old) in (int, float):
            whole = (-old, old + 1, old - 1, old * 1000, 10**9)
            container[key] = draw.choice(whole if abs(old) > 2**64 else (*whole, old / 3, float(old)))
        elif isinstance(old, str):
            at = draw.randrange(len(old) + 1)
            container[key] = old[:at] + draw.choice(("", "\0", "é", "\ud800", ".", "/", " ", "\n", "'")) + old[at + 1 :]
        elif isinstance(old, list):
            container[key] = old * draw.choice((0, 2, 30))
        else:
            container[key] = copied(draw.choice(odd))
    return value


def _json(content: bytes, draw: random.Random) -> bytes:
    text = json.dumps(damaged_value(json.loads(content), draw), ensure_ascii=draw.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


def _json_lines(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines()
    at = draw.randrange(len(lines))
    lines[at] = _json(lines[at], draw)
    return b"\n".join(lines)


def _yaml(content: bytes, draw: random.Random) -> bytes:
    value = damaged_value(yaml.load(content, yaml.CSafeLoader), draw)
    try:
        try:
            return yaml.dump(value, Dumper=yaml.CSafeDumper).encode("utf-8", "surrogatepass")
        except RecursionError:  # nested too deep for the writer; the readers get JSON, which is YAML, too
            return b"[" * draw.randrange(100, 100_000)
    except RecursionError:  # nested too deep for both writers
        return b"[" * draw.randrange(100, 100_000)
    except (yaml.YAMLError, UnicodeError, ValueError, OverflowError):
        return json.dumps(value).encode()


def _csv(content: bytes, draw: random.Random) -> bytes:
    rows: Any = damaged_value(list(csv.reader(io.StringIO(content.decode()))), draw)
    out = io.StringIO()
    for row in rows if isinstance(rows, list) else [rows]:
        csv.writer(out).writerow(row if isinstance(row, list) else [row])
    return out.getvalue().encode("utf-8", "surrogatepass")


TENSORS: list[Any] = [
    torch.zeros(0),
    torch.zeros(3, 4),
    torch.tensor(float("nan")),
    torch.tensor(3),
    torch.ones(2, dtype=torch.bool),
    torch.ones(2, dtype=torch.complex64),
    torch.zeros(1).expand(10**12),
    torch.zeros(2, 2).to_sparse(),
    torch.zeros(2, device="meta"),
    torch.zeros(2, dtype=torch.bfloat16),
]
_loaded: dict[bytes, Any] = {}


def _checkpoint(content: bytes, draw: random.Random) -> bytes:
    if content not in _loaded:
        _loaded[content] = torch.load(io.BytesIO(content), weights_only=True)
    value = damaged_value(copied(_loaded[content]), draw, [*ODD, *TENSORS, *TENSORS])
    out = io.BytesIO()
    try:
        torch.save(value, out)
    except (UnicodeError, RuntimeError):  # what cannot be saved cannot be sent
        return content
    return out.getvalue()


def _safetensors(content: bytes, draw: random.Random) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header = _json(content[8 : 8 + size], draw)
    return (len(header) if draw.random() < 0.9 else 2**40).to_bytes(8, "little") + header + content[8 + size :]


def _zip(content: bytes, draw: random.Random) -> bytes:
    """Return an archive that is sound, with a member of another name or content, or without it."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        members = [(name, file.read(name)) for name in file.namelist()]
    at = draw.randrange(len(members))
    name, inner = members[at]
    odd = draw.choice([value for value in ODD if isinstance(value, str)])
    members[at : at + 1] = draw.choice(([(odd, inner)], [(name, damage(name, inner, draw))], [(name + odd, inner)], []))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as file:
        for name, inner in members:
            with contextlib.suppress(UnicodeError, IndexError):  # zipfile writes no such name
                file.writestr(zipfile.ZipInfo(name), inner)
    return out.getvalue()


_KINDS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "json": _json,
    "jsonl": _json_lines,
    "yaml": _yaml,
    "csv": _csv,
    "ckpt": _checkpoint,
    "safetensors": _safetensors,
    "zip": _zip,
}
