"""`python -m documentation` writes node.toml, the pages of settings, APIs and metrics, and the tables of docs/scale.md.

A test keeps each equal to the code.
"""

from __future__ import annotations

from pathlib import Path

from documentation.config import config_page
from documentation.http_api import http_page
from documentation.metrics import metrics_page
from documentation.python_api import python_page
from documentation.scale import scale_page
from p2pnode.config.toml import template

DOCS = Path(__file__).resolve().parent.parent / "docs"

(DOCS.parent / "node.toml").write_text(template(), encoding="utf-8")
(DOCS / "config.md").write_text(config_page(), encoding="utf-8")
(DOCS / "http-api.md").write_text(http_page(), encoding="utf-8")
(DOCS / "python-api.md").write_text(python_page(), encoding="utf-8")
(DOCS / "metrics.md").write_text(metrics_page(), encoding="utf-8")
(DOCS / "scale.md").write_text(scale_page((DOCS / "scale.md").read_text(encoding="utf-8")), encoding="utf-8")
