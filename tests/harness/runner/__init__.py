"""Running the tests: workers that are forked after collection, what they take at once, and what each test costs.

`pytest_plugins` of `tests/conftest.py` loads them.
"""
