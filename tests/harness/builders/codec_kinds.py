"""One codec of each arithmetic, for tests that are about no single one."""

from __future__ import annotations

from p2pnode.training.encoding.table import CODECS, CodecName

_BY_NUMBER = sorted(CODECS.values(), key=lambda codec: codec.number)
#: The first of each, most exact first.
KINDS: list[CodecName] = list({codec.arithmetic: codec.name for codec in reversed(_BY_NUMBER)}.values())[::-1]
#: Those that are not exact.
LOSSY = [name for name in KINDS if name != "float32"]
#: Those that encode changes of values.
OF_CHANGES = [name for name in KINDS if not CODECS[name].is_whole]
