"""A nursery that forks nothing: ``fake_nursery.py MOOD FD``. It answers like the real one, or as badly as told."""

from __future__ import annotations

import json
import os
import socket
import sys


def main() -> None:
    mood, control = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    if mood == "dead":
        sys.exit(1)
    while True:
        packet, fds, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not packet:
            sys.exit(0)
        request = json.loads(packet)
        pid = 1_000_000 + request["id"]
        if mood == "dies":
            sys.exit(1)
        elif mood == "garbage":
            control.send(b"what?")
        elif mood == "born":  # and ended, with a status that tells which it was
            control.send(json.dumps({"pid": pid, "id": request["id"]}).encode())
            control.send(json.dumps({"pid": pid, "status": request["id"]}).encode())
        elif mood == "lives":
            control.send(json.dumps({"pid": pid, "id": request["id"]}).encode())
        elif mood == "silent":
            continue
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    main()
