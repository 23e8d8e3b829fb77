"""The first estimate of a node's upload rate: a short probe as it joins, or what an earlier start has stored.

Until it has one a joiner owns nothing. What it sends later shows more, and corrects it (`overlay.line_rate`). May
import the flat modules of `overlay`.
"""
