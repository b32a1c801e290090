"""``python -m rrd``."""

from rrd.cli import main

if __name__ == "__main__":
    main()
