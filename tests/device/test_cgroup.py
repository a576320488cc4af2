"""Limits of control groups, read from made-up file systems; and those of a process itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.device import cpu
from headrace.device.cgroup import CgroupLimits, cgroup_limits

MB = 1 << 20
V1 = """\
24 20 0:20 / /sys rw - sysfs sysfs rw
30 29 0:26 {top} /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct
31 29 0:27 {top} /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory
32 29 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
V2 = "30 29 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def tree(root: Path, mounts: str, groups: str, files: dict[str, str | int]) -> Path:
    """A file system with the process's groups and mounts, and `files` under sys/fs/cgroup."""
    own = root / "proc/self"
    own.mkdir(parents=True)
    (own / "mountinfo").write_text(mounts)
    (own / "cgroup").write_text(groups)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


def test_version_2_at_the_top(tmp_path: Path) -> None:
    files = {"cpu.max": "150000 100000", "memory.max": 512 * MB, "memory.current": 100 * MB}
    root = tree(tmp_path, V2.format(top="/"), "0::/\n", files)
    assert cgroup_limits(root) == CgroupLimits(1.5, ((512 * MB, 100 * MB),))


def test_version_2_counts_every_group_above(tmp_path: Path) -> None:
    files = {
        "a.slice/cpu.max": "200000 100000",
        "a.slice/memory.max": 512 * MB,
        "a.slice/memory.current": 300 * MB,
        "a.slice/b.scope/cpu.max": "max 100000",
        "a.slice/b.scope/memory.max": "max",
        "a.slice/b.scope/memory.current": 10 * MB,
        "a.slice/other/cpu.max": "1000 100000",
    }
    root = tree(tmp_path, V2.format(top="/"), "0::/a.slice/b.scope\n", files)
    assert cgroup_limits(root) == CgroupLimits(2.0, ((512 * MB, 300 * MB),))


def test_pages_of_files_are_not_taken(tmp_path: Path) -> None:
    """A model's file that was read through the page cache fills a group without leaving less to use."""
    stat = f"anon 5\ninactive_file {60 * MB}\nactive_file {30 * MB}\nfile {95 * MB}"
    files = {"g/memory.max": 200 * MB, "g/memory.current": 100 * MB, "g/memory.stat": stat}
    root = tree(tmp_path, V2.format(top="/"), "0::/g\n", files)
    assert cgroup_limits(root).memory == ((200 * MB, 10 * MB),)


def test_version_1_below_its_own_path(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": -1,
        "cpu,cpuacct/cpu.cfs_period_us": 100000,
        "cpu,cpuacct/docker/c1/cpu.cfs_quota_us": 300000,
        "cpu,cpuacct/docker/c1/cpu.cfs_period_us": 100000,
        "memory/memory.limit_in_bytes": 9223372036854771712,
        "memory/docker/c1/memory.limit_in_bytes": 256 * MB,
        "memory/docker/c1/memory.usage_in_bytes": 120 * MB,
        "memory/docker/c1/memory.stat": f"inactive_file 1\ntotal_inactive_file {20 * MB}\ntotal_active_file 0",
    }
    groups = "5:cpu,cpuacct:/docker/c1\n4:memory:/docker/c1\n1:name=systemd:/docker/c1\n0::/docker/c1\n"
    root = tree(tmp_path, V1.format(top="/"), groups, files)
    assert cgroup_limits(root) == CgroupLimits(3.0, ((256 * MB, 100 * MB),))


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_own_group_as_the_top(tmp_path: Path, version: int) -> None:
    """Without a namespace of its own the path is the host's, and only the container's part is mounted."""
    if version == 1:
        files = {
            "cpu,cpuacct/job/cpu.cfs_quota_us": 50000,
            "cpu,cpuacct/job/cpu.cfs_period_us": 100000,
            "memory/memory.limit_in_bytes": 256 * MB,
            "memory/memory.usage_in_bytes": MB,
        }
        groups = "5:cpu,cpuacct:/docker/c1/job\n4:memory:/docker/c1/job\n"
    else:
        files = {"job/cpu.max": "50000 100000", "memory.max": 256 * MB, "memory.current": MB}
        groups = "0::/docker/c1/job\n"
    root = tree(tmp_path, (V1 if version == 1 else V2).format(top="/docker/c1"), groups, files)
    assert cgroup_limits(root) == CgroupLimits(0.5, ((256 * MB, MB),))


def test_a_group_outside_of_the_namespace(tmp_path: Path) -> None:
    root = tree(tmp_path, V2.format(top="/"), "0::/../../other\n", {"cpu.max": "100000 100000"})
    assert cgroup_limits(root) == CgroupLimits(1.0, ())


@pytest.mark.parametrize(
    ("mounts", "groups", "files"),
    [
        ("", "", {}),
        (V2.format(top="/"), "0::/gone\n", {}),
        ("nonsense\n1 2 3 - cgroup2\n", "0\n::\n", {}),
        (V2.format(top="/"), "0::/\n", {"cpu.max": "", "memory.max": "lots", "memory.current": ""}),
        (V2.format(top="/"), "0::/\n", {"cpu.max": "5 0"}),
    ],
)
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, mounts: str, groups: str, files: dict[str, str | int]) -> None:
    assert cgroup_limits(tree(tmp_path, mounts, groups, files)) == CgroupLimits(None, ())
    assert cgroup_limits(tmp_path / "nothing") == CgroupLimits(None, ())


def test_mounts_with_blanks_in_their_names(tmp_path: Path) -> None:
    mounts = V2.format(top="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/my\\040groups")
    root = tree(tmp_path, mounts, "0::/\n", {"my groups/memory.max": MB})
    assert cgroup_limits(root).memory == ((MB, 0),)


def test_facts_keep_to_the_tightest_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"cpu.max": "10000 100000", "memory.max": 512 * MB, "memory.current": 100 * MB}
    root = tree(tmp_path, V2.format(top="/"), "0::/\n", files)
    (root / "proc/meminfo").write_text(f"MemTotal: {8 << 20} kB\nMemAvailable: {4 << 20} kB\n")
    monkeypatch.setattr(cpu, "_ROOT", root)
    monkeypatch.setattr(cpu, "_process_limits", lambda: [])
    facts = cpu.cpu_facts()
    assert (facts.num_threads, facts.available_memory, facts.total_memory) == (1, 412 * MB, 512 * MB)
    (root / "proc/meminfo").write_text(f"MemTotal: {8 << 20} kB\nMemAvailable: {300 << 10} kB\n")
    assert cpu.cpu_facts().available_memory == 300 * MB
    monkeypatch.setattr(cpu, "_process_limits", lambda: [(200 * MB, 50 * MB)])
    assert cpu.cpu_facts() == cpu.CpuFacts(1, 150 * MB, 200 * MB)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("kind", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_limits_of_the_process_itself(kind: str) -> None:
    script = f"""
import resource
from headrace.device.cpu import cpu_facts
resource.setrlimit(resource.{kind}, ({800 * MB}, {800 * MB}))
facts = cpu_facts()
assert facts.total_memory == {800 * MB}, facts
assert 0 < facts.available_memory < {800 * MB}, facts
"""
    subprocess.run([sys.executable, "-c", script], check=True)
