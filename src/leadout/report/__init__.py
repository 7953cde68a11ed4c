"""One HTML file per run or comparison of runs, readable offline."""

from leadout.report.page import write_report

__all__ = ["write_report"]
