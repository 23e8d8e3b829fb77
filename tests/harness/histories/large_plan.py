"""How large a history of `tests.harness.histories.large_history` is, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pnode.training.settings import ExchangeSettings


@dataclass(frozen=True)
class LargePlan:
    """The size of a history. All nodes share one memory, so that each keeps less than by default: `log_bytes` of
    payloads for the repair of a split, of which there is none here."""

    nodes: int = 300
    steps: int = 50
    shards: int = 256
    values_per_shard: int = 4096
    crash: float = 0.1
    loss: float = 0.02
    log_bytes: int = 4 << 20

    @property
    def settings(self) -> ExchangeSettings:
        """The defaults, but for weights, rate and momentum with which sums are exact in any order."""
        return ExchangeSettings(
            codec="bfloat16",
            shards=self.shards,
            weight="sum",
            outer_lr=1.0,
            outer_momentum=0.0,
            log_bytes=self.log_bytes,
        )


@dataclass
class LargeTally:
    """What a history counted. Times of `processor` are seconds of this process."""

    seed: int
    nodes: int
    steps: int = 0
    crashed: int = 0
    again: int = 0
    #: Kills that had to wait for a backup.
    postponed: int = 0
    acknowledged: int = 0
    carried: int = 0
    refused: int = 0
    taken_over: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    spread_s: float = 0.0
    trained_s: float = 0.0
    quiet_s: float = 0.0
    #: Longest wait for an acknowledgement or a fresh value: of all, and of those that one fault at most had struck.
    longest_s: float = 0.0
    longest_of_one_s: float = 0.0
    #: The most that a clock of the latter kind may have shown.
    limit_s: float = 0.0
    processor_spread_s: float = 0.0
    processor_trained_s: float = 0.0
    processor_checked_s: float = 0.0
    peak_bytes: int = 0

    @property
    def processor_ms_per_step(self) -> float:
        """Of one node and step."""
        return 1000 * self.processor_trained_s / max(1, self.steps)

    @property
    def requests_per_step(self) -> float:
        return sum(self.requests.values()) / max(1, self.steps)
