"""Entering fresh Linux namespaces from a running interpreter. Runs inside the sandbox; standard library only."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import socket
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, value: int = 0) -> None:
    """prctl(2) with one argument; OSError if refused."""
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def become(uid: int) -> None:
    """Leave root for ``uid`` for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # A change of user makes /proc/self root's own, and the id maps below are written there.
    prctl(PR_SET_DUMPABLE, 1)


def unshare_all() -> None:
    """Fresh user, mount, pid (for children), ipc, uts and network namespaces; the caller keeps its own ids."""
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET
    _check(_libc.unshare(flags), "unshare")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")


def mount_tmpfs(path: str, size_kb: int, *, read_only: bool = False) -> None:
    """A fresh tmpfs over ``path``, at most ``size_kb`` KiB and 16384 inodes."""
    flags = MS_NOSUID | MS_NODEV | (MS_RDONLY if read_only else 0)
    options = f"size={size_kb}k,nr_inodes=16384,mode=0755".encode()
    _check(_libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options), f"mount {path}")


def loopback_up() -> None:
    """Bring up ``lo`` of the new network namespace: programs may talk to themselves, and to nobody else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def drop_capabilities() -> None:
    """Empty the bounding, effective, permitted and inheritable sets, and forbid gaining any by exec."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # past the last capability that this kernel knows
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    empty = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, empty), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def limit_resources(limits: dict[str, int], cpu_seconds: int) -> None:
    """rlimits of one command, inherited by all it starts; a limit is never raised."""
    mib = 1 << 20
    wanted = {
        resource.RLIMIT_AS: limits["memory_mb"] * mib,
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_FSIZE: limits["file_mb"] * mib,
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_CORE: 0,
    }
    for what, value in wanted.items():
        hard = resource.getrlimit(what)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(what, (value, value))


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
