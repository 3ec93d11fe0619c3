"""The files of synthetic images: parquet that `datasets` opens, sealed so that every changed bit is found."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedprior import store

SEAL = b"sha256:" + b"0" * 64  # of a file, in its metadata


def schema(classes: Sequence[str], domains: bool) -> Any:
    """The Arrow schema of a file, with the features that `datasets` reads: PIL images, named classes."""
    import pyarrow as pa

    plain = {
        "class": "string",
        "prompt": "string",
        "template": "string",
        "index": "int64",
        "client": "int64",
        "seed": "int64",
        "model": "string",
        "revision": "string",
        "scheduler": "string",
        "steps": "int64",
        "guidance": "float64",
        "attempts": "int64",
        "ok": "bool",
        "sha256": "string",
        **({"domain": "string"} if domains else {}),
    }
    features: dict[str, Any] = {
        "image": {"_type": "Image"},
        "label": {"names": list(classes), "_type": "ClassLabel"},
        **{name: {"dtype": kind, "_type": "Value"} for name, kind in plain.items()},
    }
    kinds = {"bool": pa.bool_(), "float64": pa.float64(), "int64": pa.int64(), "string": pa.string()}
    columns = [
        ("image", pa.struct({"bytes": pa.binary(), "path": pa.string()})),
        ("label", pa.int64()),
        *((name, kinds[kind]) for name, kind in plain.items()),
    ]
    return pa.schema(columns, metadata={"huggingface": json.dumps({"info": {"features": features}}), "seal": SEAL})


def packed(path: Path, rows: list[dict[str, Any]], schema: Any) -> bytes:
    """The bytes of a file that is to lie at `path`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema), out)
    return sealed(path, out.getvalue())


def read(path: Path) -> Any:
    """The Arrow table in a file of ours. Raises ValueError or OSError when any bit of it is not as it was written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = path.read_bytes()
    if data != sealed(path, data):
        raise ValueError(f"{path} is damaged")
    try:
        return pq.ParquetFile(pa.BufferReader(data)).read()
    except pa.ArrowException as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def sealed(path: Path, data: bytes) -> bytes:
    """A file's bytes with the digest of the others, and of the place of the file, in the room that `SEAL` keeps for it.
    So a renamed or copied file is found out too."""
    start = data.rfind(SEAL[:7])
    blank = data[:start] + SEAL + data[start + len(SEAL) :]
    digest = store.digest(path.parent.name, path.name, blank)
    return data[:start] + SEAL[:7] + digest.encode() + data[start + len(SEAL) :]


def png(image: Tensor) -> bytes:
    """uint8 [3, H, W] -> the bytes of a PNG file."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(out, format="PNG")
    return out.getvalue()


def pixels(png: bytes) -> NDArray[np.uint8]:
    """The bytes of a PNG file -> uint8 [H, W, 3]."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB"))
