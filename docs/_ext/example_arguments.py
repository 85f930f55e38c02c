"""What an example of the gallery finds in ``sys.argv[1:]``: less work than a reader's run takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ARGUMENTS = {
    "train_on_dask.py": ["--blocks", "16", "--rows", "2048", "--batch", "4", "--quiet"],
}


def of(gallery_conf: dict[str, Any], script_vars: dict[str, Any]) -> list[str]:
    return ARGUMENTS.get(Path(script_vars["src_file"]).name, [])
