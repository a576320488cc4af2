"""Limits that control groups set for this process, of both versions of the interface.

A process is in one group of each hierarchy, and every group above that one counts too. /proc/self/cgroup names the
group, seen from the top of the hierarchy; /proc/self/mountinfo says which part of the hierarchy is mounted where: in a
container often the container's own group, whose name then leads the process's path.

Sources: the Linux kernel's Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst, cgroups(7).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NONE = 1 << 60  # version 1 has no word for "no limit", only a number that no machine has
_MEMORY_FILES = (  # limit, use, and what precedes the names of memory.stat that include the groups below
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


@dataclass(frozen=True)
class CgroupLimits:
    """What the groups of a process allow."""

    processors: float | None  # of time, as a number of processors; None: no quota
    memory: tuple[tuple[int, int], ...]  # of each group with a limit: (bytes allowed, bytes taken)


def cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Limits of the calling process. `root`: of a file system that holds `proc` and the mounts. What cannot be read is
    no limit."""
    quotas: list[float] = []
    memory: list[tuple[int, int]] = []
    for group in _groups(root, "cpu"):
        words = _words(group / "cpu.max")  # of version 2, else of version 1
        words = words or [*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):  # "max" and -1 are no quota
            quotas.append(int(words[0]) / int(words[1]))
    for group in _groups(root, "memory"):
        for limit_file, used_file, prefix in _MEMORY_FILES:
            limit = _int(group / limit_file)
            if limit is not None and limit < _NONE:
                used = _int(group / used_file) or 0
                memory.append((limit, max(0, used - _file_pages(group / "memory.stat", prefix))))
    return CgroupLimits(min(quotas, default=None), tuple(memory))


def _groups(root: Path, controller: str) -> list[Path]:
    """The folders of this process's group and of those above it, as far as they are mounted, for `controller`."""
    found = []
    paths = {}  # of the hierarchies: by a controller of version 1, and "" for version 2
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        for name in controllers.split(","):
            paths[name] = path
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            path = paths.get("", "")
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            path = paths.get(controller, "")
        else:
            continue
        if not path:
            continue
        top, mount = PurePosixPath(_unescaped(fields[3])), _unescaped(fields[4])
        inside = _below(PurePosixPath(path), top)
        folder = root / mount.lstrip("/")
        found.append(folder)
        for part in inside.parts:
            folder = folder / part
            found.append(folder)
    return found


def _below(path: PurePosixPath, top: PurePosixPath) -> PurePosixPath:
    """`path` as seen from `top`, the part of the hierarchy that is mounted; itself if it is not below it."""
    try:
        return path.relative_to(top)
    except ValueError:
        pass
    if ".." in path.parts:  # a group outside of the namespace: only the mounted top is ours to see
        return PurePosixPath()
    return path.relative_to("/") if path.is_absolute() else path


def _unescaped(text: str) -> str:
    """mountinfo writes blanks as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    lines = _lines(path)
    return lines[0].split() if lines else []


def _int(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if len(words) == 1 and words[0].isdigit() else None


def _file_pages(path: Path, prefix: str) -> int:
    """Bytes of files' pages that a group is charged for: the kernel takes them back when memory runs short."""
    wanted = {f"{prefix}inactive_file", f"{prefix}active_file"}
    total = 0
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name in wanted and value.strip().isdigit():
            total += int(value)
    return total
