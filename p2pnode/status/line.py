"""What `/status` says of this node's line: its rates, the codec in use, and whether it carries a step. Pure."""

from __future__ import annotations

from overlay.line_rate import MeasuredLine
from p2pnode.status.schema import Finding, LineStatus
from training.exchange.codec_choice import CodecChoice, LineFacts


def line_status(line: MeasuredLine, choice: CodecChoice | None, facts: LineFacts | None) -> LineStatus:
    """The line, and beside it what a step sends in the present codec; without an exchange the line alone."""
    upload, bound, download = line.upload_bytes_per_s, line.upload.bytes_per_s, line.download.bytes_per_s
    needed = carried = None
    if choice is not None and facts is not None and facts.shape.nodes > 1.0:
        needed = round(choice.needed_bytes(facts))
        if upload is not None and facts.step_s:
            carried = round(upload * facts.step_s)
    return LineStatus(
        upload_bytes_per_s=None if upload is None else round(upload),
        upload_at_least_bytes_per_s=None if bound is None else round(bound),
        download_bytes_per_s=None if download is None else round(download),
        capacity=line.capacity,
        capacity_source=line.capacity_source,
        codec="" if choice is None else choice.codec,
        codec_reason="" if choice is None else choice.reason,
        needed_bytes_per_step=needed,
        carried_bytes_per_step=carried,
    )


def line_findings(status: LineStatus, choice: CodecChoice | None) -> list[Finding]:
    """That the line carries less than a step sends, and what to do; nothing where it carries all."""
    needed, carried = status.needed_bytes_per_step, status.carried_bytes_per_step
    if choice is None or needed is None or carried is None or carried >= needed:
        return []
    what = f"this node's line carries {_megabytes(carried)} of {_megabytes(needed)} MB per step"
    advice = ["raise training.local_steps on all nodes"]
    if not choice.is_automatic and choice.codec != "sparse":
        advice.insert(0, 'set exchange.codec = "sparse"')
    elif choice.codec == "sparse":
        advice.append("lower exchange.sparse_values")
    return [Finding(level="warning", what=what, do="; or ".join(advice))]


def _megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.1f}" if size_bytes >= 50_000 else f"{size_bytes / 1e6:.3f}"
