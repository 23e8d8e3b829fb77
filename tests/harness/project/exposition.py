"""Rules for a page of metrics: the text format to the letter, and Prometheus' practice for names, units and labels.

`complaints` is stricter than any scraper. https://prometheus.io/docs/practices/naming/ has the practice.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

from tests.harness.project.repository import ROOT
from tools.metrics_page import families

_HELP = re.compile(r"# HELP ([a-z][a-z0-9_]*) (.*)")
_TYPE = re.compile(r"# TYPE ([a-z][a-z0-9_]*) (\w+)")
_SAMPLE = re.compile(
    r"""([a-z][a-z0-9_]*)(?:\{((?:[a-z_][a-z0-9_]*="(?:[^"\\\n]|\\["\\n])*",?)+)\})? (NaN|[+-]Inf|-?\d[\d.e+-]*)"""
)
_LABEL = re.compile(r'([a-z_][a-z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')
#: Parts of a name that are no base units, and suffixes that other types own.
_NOT_BASE = {"ms", "milliseconds", "us", "minutes", "hours", "kb", "kib", "mb", "mib", "kilobytes", "bits", "percent"}
_RESERVED = ("_count", "_sum", "_bucket")
#: A node id or its short form, or an address: a series per peer.
_OF_A_PEER = re.compile(r"[0-9a-f]{8,40}|\d+\.\d+\.\d+\.\d+(:\d+)?|\[?[0-9a-f:]*::[0-9a-f:]*\]?(:\d+)?")
_PEER_LABELS = {"peer", "id", "node", "node_id", "address", "host", "member"}
#: A daemon's page: hundreds of nodes are scraped by one server.
MOST_SERIES = 400


def complaints(page: str) -> list[str]:
    """What is wrong with a page, as sentences; empty if nothing is."""
    found = [] if page.endswith("\n") else ["the last line has no end"]
    seen: dict[str, str] = {}
    series: set[str] = set()
    label_names: dict[str, set[str]] = {}
    helped = current = ""
    for line in page.splitlines():
        if (match := _HELP.fullmatch(line)) is not None:
            helped = match[1]
            if not match[2].endswith((".", "?")):
                found.append(f"the help of {helped} is no sentence: {match[2]!r}")
        elif (match := _TYPE.fullmatch(line)) is not None:
            current = match[1]
            if current != helped:
                found.append(f"{current} has no help before its type")
            if current in seen:
                found.append(f"{current} comes twice")
            seen[current] = match[2]
            found += _about_name(current, match[2])
        elif (match := _SAMPLE.fullmatch(line)) is not None:
            name, inside = match[1], match[2] or ""
            if name != current:
                found.append(f"a sample of {name} stands below {current or 'nothing'}")
            key = f"{name}{{{','.join(sorted(f'{label}={value}' for label, value in _LABEL.findall(inside)))}}}"
            if key in series:
                found.append(f"{key} comes twice")
            series.add(key)
            labels = {label for label, _ in _LABEL.findall(inside)}
            if label_names.setdefault(name, labels) != labels:
                found.append(f"samples of {name} have different labels")
            found += _about_labels(name, _LABEL.findall(inside))
        else:
            found.append(f"not a line of the format: {line!r}")
    if len(series) > MOST_SERIES:
        found.append(f"{len(series)} series")
    if not found:
        parsed = sum(len(family.samples) for family in text_string_to_metric_families(page))
        if parsed != len(series):
            found.append(f"Prometheus' parser finds {parsed} samples in {len(series)} series")
    return found


def _about_name(name: str, kind: str) -> Iterator[str]:
    if kind not in ("counter", "gauge"):
        yield f"{name} is of type {kind}"
    if (kind == "counter") != name.endswith("_total"):
        yield f"{name} is a {kind}: counters, and they alone, end in _total"
    if wrong := _NOT_BASE & set(name.split("_")):
        yield f"{name} has no base unit: {', '.join(wrong)}"
    if name.endswith(_RESERVED):
        yield f"{name} ends as a part of a histogram"
    if not name.startswith(("p2pnode_", "process_")):
        yield f"{name} has no prefix"


def _about_labels(name: str, labels: list[tuple[str, str]]) -> Iterator[str]:
    for label, value in labels:
        if label in _PEER_LABELS or _OF_A_PEER.fullmatch(value):
            yield f"{name} has a series per peer: {label}={value}"
        if label in ("le", "quantile", "job", "instance") or label.startswith("__"):
            yield f"{name} has the label {label}, which is reserved"


@functools.cache
def known_families() -> dict[str, str]:
    """Every metric family that the daemon's code can write: its name, and its type."""
    return {one.name: one.kind for one in families(ROOT)}
