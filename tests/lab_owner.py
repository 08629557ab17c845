"""A process with a lab, and something at work on its hosts; for tests that end it."""

from __future__ import annotations

import subprocess
import sys
import time

from gradsieve.lab.layout import Layout, parse_rate
from gradsieve.lab.network import Network


def main() -> None:
    with Network(Layout(2, parse_rate("1gbit"))) as lab:
        for host in range(2):
            # in a session of its own, as torchrun's workers are
            subprocess.Popen(
                lab.inside(["setsid", "sleep", "600"], host), env=lab.environment(), start_new_session=True
            )
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        time.sleep(600)


if __name__ == "__main__":
    main()
