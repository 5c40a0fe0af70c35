"""The bubblewrap command line: what of the host a sandbox sees, and as whom it runs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from muonrl.errors import SandboxUnavailable
from muonrl.sandbox.protocol import WORKDIR, Limits

SITE = "/opt/site"
GUEST = "/opt/muonrl"
_PYTHON_ELSEWHERE = "/opt/python"
_CAP_SYS_ADMIN = 21
_PACKAGES = (
    "pytest",
    "_pytest",
    "py",
    "pluggy",
    "iniconfig",
    "packaging",
    "pygments",
    "exceptiongroup",
    "tomli",
)
_PRELOAD = ("pytest", "tempfile", "subprocess")


@dataclass(frozen=True)
class Identity:
    """As whom a sandbox runs.

    ``namespace``: in a user namespace of bubblewrap's own (the only way for an ordinary user). ``map_uid``: the id seen in
    that namespace. ``switch_uid``: the id that the guest changes to by itself when started as a privileged root: then
    the kernel counts and limits its processes, which it does not for root.
    """

    namespace: bool
    map_uid: int | None = None
    switch_uid: int | None = None


def find_bwrap() -> str:
    """The bubblewrap executable, or SandboxUnavailable naming the package."""
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxUnavailable(
            "bubblewrap is missing: install the package `bubblewrap` (it provides `bwrap`)"
        )
    return path


def identity(index: int = 0) -> Identity:
    """How this process can run sandboxes; privileged root gets an own user id for each ``index``."""
    if os.geteuid() != 0:
        return Identity(namespace=True)
    if _effective_capabilities() >> _CAP_SYS_ADMIN & 1:
        return Identity(namespace=False, switch_uid=50_000 + index % 10_000)
    return Identity(namespace=True, map_uid=1000)


def guest_python() -> tuple[str, str, str]:
    """(prefix on the host, prefix in the sandbox, executable in the sandbox) of the base interpreter."""
    prefix = os.path.realpath(sys.base_prefix)
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    if not Path(executable).is_relative_to(prefix):
        executable = os.path.join(prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    hidden = any(Path(prefix).is_relative_to(top) for top in (WORKDIR, "/tmp", "/proc", "/dev"))
    inside = _PYTHON_ELSEWHERE if hidden else prefix
    return prefix, inside, os.path.join(inside, os.path.relpath(executable, prefix))


def guest_environment() -> dict[str, str]:
    """The whole environment of a command in the sandbox."""
    binaries = os.path.dirname(guest_python()[2])
    return {
        "PATH": f"{binaries}:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONPATH": SITE,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def build(scripts: Mapping[str, Path], limits: Limits, who: Identity, *, single: bool) -> list[str]:
    """The full argv that starts guest.py; its descriptor 0 must be the socket."""
    inside = {name: f"{GUEST}/scripts/{name}.py" for name in scripts}
    config = {
        "mode": "single" if single else "server",
        "uid": who.switch_uid,
        "own": [WORKDIR, "/tmp", "/dev/shm"] if single else [],
        "work": WORKDIR,
        "sites": [SITE],
        "preload": list(_PRELOAD),
        "scripts": inside,
        "env": guest_environment(),
        "limits": asdict(limits),
    }
    argv = [find_bwrap(), *_namespaces(who), *_system(), *_python(), *_devices()]
    for source in sorted(Path(__file__).parent.glob("guest*.py")):
        argv += ["--ro-bind", str(source), f"{GUEST}/{source.name}"]
    for name, path in scripts.items():
        argv += ["--ro-bind", str(Path(path).resolve()), inside[name]]
    argv += _scratch(limits, single)
    argv += ["--remount-ro", "/", "--chdir", "/"]
    return [*argv, guest_python()[2], "-I", "-S", f"{GUEST}/guest.py", json.dumps(config)]


def _namespaces(who: Identity) -> list[str]:
    argv = ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
    argv += [f"--unshare-{kind}" for kind in ("ipc", "pid", "net", "uts", "cgroup-try")]
    if who.namespace:
        argv += ["--unshare-user"]
        if who.map_uid is not None:
            argv += ["--uid", str(who.map_uid), "--gid", str(who.map_uid)]
    if who.switch_uid is not None:
        argv += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return argv


def _system() -> list[str]:
    argv = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            argv += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    argv += _directories("/etc/x")
    for path in (Path("/etc/ld.so.cache"), Path("/etc/alternatives")):
        argv += ["--ro-bind-try", str(path), str(path)]
    return argv


def _directories(path: str) -> list[str]:
    """Make the parents of ``path`` enterable for everybody: bubblewrap would copy the host's mode, 0700 for /root."""
    parents = [str(p) for p in reversed(Path(path).parents) if str(p) != "/"]
    return [word for parent in parents for word in ("--perms", "0755", "--dir", parent)]


def _python() -> list[str]:
    prefix, inside, _ = guest_python()
    argv: list[str] = []
    if not Path(prefix).is_relative_to("/usr"):
        argv += [*_directories(inside), "--ro-bind", prefix, inside]
        # Packages of the base interpreter are the host's own business.
        site = sysconfig.get_path("purelib", vars={"base": prefix})
        if Path(site).is_relative_to(prefix) and Path(site).is_dir():
            argv += ["--perms", "0755", "--tmpfs", os.path.join(inside, os.path.relpath(site, prefix))]
    argv += [*_directories(f"{SITE}/x"), *_directories(f"{GUEST}/scripts/x")]
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            if name == "pytest":
                raise SandboxUnavailable(
                    "pytest is missing: install the package `pytest`, the grader runs it"
                )
            continue
        origin = Path(spec.origin)
        source = origin.parent if origin.name == "__init__.py" else origin
        argv += ["--ro-bind", str(source.resolve()), f"{SITE}/{source.name}"]
    return argv


def _devices() -> list[str]:
    argv = _directories("/dev/x")
    for name in ("null", "zero", "full", "random", "urandom"):
        argv += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    return argv


def _scratch(limits: Limits, single: bool) -> list[str]:
    sizes = {WORKDIR: limits.work_mb, "/tmp": limits.tmp_mb, "/dev/shm": limits.tmp_mb}
    # The server needs /proc to set up namespaces; a sandbox has none, it says too much about the host.
    argv = _directories("/proc/x") + ([] if single else ["--proc", "/proc"])
    for path, mb in sizes.items():
        if single:
            argv += ["--perms", "0755", "--size", str(mb << 20), "--tmpfs", path]
        else:
            argv += ["--perms", "0755", "--dir", path]
    return argv


def _effective_capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
