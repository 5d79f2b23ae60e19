from __future__ import annotations

from bitcheck.cli import main

main()
