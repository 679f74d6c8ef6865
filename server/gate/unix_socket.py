"""The Unix socket of `--uds`. Its mode says which users of the machine may connect, from the moment it exists."""

import os
import socket
import stat


def bound(path: str, mode: int) -> socket.socket:
    """Return a socket that is bound to a path with this mode. A socket that was left there is replaced.

    Raises OSError if the path cannot be bound, or has a file of another kind.
    """
    if os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode):
        os.unlink(path)
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(one.fileno(), mode)  # Linux makes the file with this mode, less the umask
        one.bind(path)
        os.chmod(path, mode)
    except OSError:
        one.close()
        raise
    return one
