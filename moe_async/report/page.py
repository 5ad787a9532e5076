"""A report as one HTML file that needs no network."""

from __future__ import annotations

import html
import re
from importlib.resources import files
from typing import Any

from moe_async.tables import json_text


def report_page(document: dict[str, Any]) -> str:
    """The page of a document that `moe_async.report.document.report_document` made."""
    parts = {
        "TITLE": html.escape(str(document["name"])),
        "STYLE": _asset("page.css").rstrip(),
        "SCRIPT": _asset("page.js").rstrip(),
        # No text in the data may end the element that holds them.
        "DATA": json_text(document, indent=None).replace("<", "\\u003c"),
    }
    # In one pass, so that nothing that was filled in is taken for a mark.
    return re.sub(r"\b(TITLE|STYLE|SCRIPT|DATA)\b", lambda mark: parts[mark[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
