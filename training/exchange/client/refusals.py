"""Which refusals of an owner a node need not believe. Pure.

A refusal is final: what was refused is lost. A member that lies can refuse every delta of its shards. Some reasons a
node can check itself, because owner and origin compute them from the same announced steps. Where such a reason is far
from true here, the values are not lost: they travel with the next delta, and come to whoever owns the shard then.
Nobody is blamed for it. A node that slept knows old steps: it believes all until it has heard of others again.

Reasons that only the owner's state explains (`out_of_range`, `before_era`) are believed, and those that an honest owner
of another version may have for ever (`malformed`): all that is trained meanwhile would be added at once later.
"""

from __future__ import annotations


def is_explained(
    reason: str, step: int, base_step: int, *, median_step: int | None, furthest_step: int, stale_limit: int | None
) -> bool:
    """Whether the delta of a step with this base may be refused for the reason, as far as this node can tell.

    `median_step`: of the workers that were heard a moment ago, None for too few; `furthest_step`: see `SwarmView`;
    `stale_limit`: see `ExchangeContext`. Two nodes do not see the same steps at one moment, so that half of a bound is
    enough.
    """
    if median_step is None:
        return True
    match reason:
        case "late":
            return stale_limit is None or 2 * (median_step - base_step) > stale_limit
        case "ahead":
            return 2 * step > furthest_step
        case _:
            return True
