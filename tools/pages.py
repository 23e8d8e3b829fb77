"""`python -m tools.pages` writes node.toml, the pages of settings, HTTP and metrics, and the tables of docs/scale.md.

A test keeps each equal to the code.
"""

from __future__ import annotations

from pathlib import Path

from p2pnode.config.toml import template
from tools.config_page import config_page
from tools.http_page import http_page
from tools.metrics_page import metrics_page
from tools.scale_page import scale_page

DOCS = Path(__file__).resolve().parent.parent / "docs"

(DOCS.parent / "node.toml").write_text(template(), encoding="utf-8")
(DOCS / "config.md").write_text(config_page(), encoding="utf-8")
(DOCS / "http-api.md").write_text(http_page(), encoding="utf-8")
(DOCS / "metrics.md").write_text(metrics_page(), encoding="utf-8")
(DOCS / "scale.md").write_text(scale_page((DOCS / "scale.md").read_text(encoding="utf-8")), encoding="utf-8")
