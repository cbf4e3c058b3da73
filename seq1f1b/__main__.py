"""Runs the command line: ``python -m seq1f1b``."""

from __future__ import annotations

import sys

from seq1f1b.cli import main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    sys.exit(main())
