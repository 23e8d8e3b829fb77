"""The published figures of PSP (docs/psp.md), made again: `python -m tools.psp all --out figures --data-dir mnist`."""
