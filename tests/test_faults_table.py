"""The table of faults in docs/reliability.md is that of the tests: line, exit code and what is kept, row by row."""

from __future__ import annotations

from helpers_faults import table, table_of_the_page


def test_the_page_has_every_fault_that_a_test_proves():
    assert table_of_the_page() == table(), "run: python tests/helpers_faults.py"
