"""Ports for programs that cannot choose one themselves, as they can with port 0."""

import errno
import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import TextIO

# below what Linux gives to whoever asks for any port (/proc/sys/net/ipv4/ip_local_port_range), which could be this very
# one before the program has it; above what Ray gives to its workers and to its clients' servers
_PORTS = range(24_000, 32_000)
_held: list[TextIO] = []


def free_port() -> int:
    """A port of loopback that nobody listens at, and that no other process of tests is given while this one lives."""
    folder = Path(tempfile.gettempdir()) / f"datamask_test_ports_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in _PORTS:
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                # as servers do: a connection that is waiting for its end does not keep the port
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError as error:
            lock.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EADDRINUSE):
                raise
        else:
            # the lock ends with this process
            _held.append(lock)
            return port
    raise RuntimeError(f"no port of {_PORTS.start} to {_PORTS.stop - 1} is free")
