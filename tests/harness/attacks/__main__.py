"""`python -m tests.harness.attacks` plays every attack of one member, and prints their table."""

from __future__ import annotations

from tests.harness.attacks.member_attacks import main

if __name__ == "__main__":
    main()
