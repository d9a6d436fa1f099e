# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a bug report needs."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from typing import Any, Optional

import numpy as np

from . import _c


def config() -> dict[str, Any]:
    """Versions, compiler, instruction sets and where the library was found."""

    def version(package: str) -> Optional[str]:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "library": json.loads(_c.lib().opd_config().decode()),
        "path": _c.library_path(),
        "package": version("opd"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "numpy": np.__version__,
        "ml_dtypes": version("ml_dtypes"),
        "torch": version("torch"),
    }


def show_config() -> None:
    print(json.dumps(config(), indent=2))
