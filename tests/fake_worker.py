"""A worker that does what its script says: ``fake_worker.py FD SCRIPT``. No rrd, no torch: it is up in no time."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def hear(sock: socket.socket) -> None:
    """Wait for one frame, whatever it says; the end of the socket ends us as it ends a worker."""
    head = sock.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        sys.exit(0)
    sock.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)


def main() -> None:
    sock, script = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    for act, *args in script:
        if act == "say":
            sock.sendall(bytes.fromhex(args[0]))
        elif act == "hear":
            hear(sock)
        elif act == "close":
            sock.close()
        elif act == "ignore":
            signal.signal(getattr(signal, args[0]), signal.SIG_IGN)
        elif act == "kill":
            os.kill(os.getpid(), args[0])
        elif act == "exit":
            sys.exit(args[0])
        elif act == "hang":
            while True:
                signal.pause()
        else:
            raise ValueError(act)


if __name__ == "__main__":
    main()
