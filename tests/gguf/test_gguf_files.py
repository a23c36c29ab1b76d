"""Files on disk: what cannot be opened, what a mapping costs, and what happens to it later."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path

import pytest

from .writer import F32, Gguf, sample


@pytest.fixture
def path(tmp_path: Path) -> Path:
    p = tmp_path / "model.gguf"
    p.write_bytes(sample().bytes())
    return p


def mapped(path: Path) -> dict[str, int]:
    """KiB of this process's mapping of path, by smaps' names."""
    found: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and (m := re.match(r"(\w+): +(\d+) kB", line)):
            found[m[1]] = found.get(m[1], 0) + int(m[2])
    return found


def test_missing_file(testing, refused, tmp_path):
    refused(lambda: testing.gguf_open(str(tmp_path / "no.gguf")), "io", "no.gguf", "No such file")


def test_directory(testing, refused, tmp_path):
    refused(lambda: testing.gguf_open(str(tmp_path)), "io", str(tmp_path), "a directory")


def test_fifo_does_not_hang(testing, refused, tmp_path):
    p = tmp_path / "fifo.gguf"
    os.mkfifo(p)
    refused(lambda: testing.gguf_open(str(p)), "io", "fifo.gguf", "a FIFO")


def test_socket(testing, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # socket paths are short
    with socket.socket(socket.AF_UNIX) as s:
        s.bind("s.gguf")
        refused(lambda: testing.gguf_open("s.gguf"), "io", "s.gguf")


def test_character_device(testing, refused):
    refused(lambda: testing.gguf_open("/dev/zero"), "io", "/dev/zero", "a character device")


def test_empty_path_and_nul_in_a_path(testing, refused, path):
    refused(lambda: testing.gguf_open(""), "io")
    refused(lambda: testing.gguf_open(f"{path}\0.txt"), "io", "NUL")


def test_no_permission(testing, refused, path):
    path.chmod(0)
    if os.geteuid() != 0:
        refused(lambda: testing.gguf_open(str(path)), "io", "model.gguf", "Permission denied")
        return
    # Root may read anything, so be somebody else for a moment.
    for parent in path.parents:
        if parent.stat().st_uid == 0 and parent.name.startswith("pytest"):
            parent.chmod(0o755)
    path.parent.chmod(0o755)
    os.seteuid(65534)
    try:
        refused(lambda: testing.gguf_open(str(path)), "io", "model.gguf", "Permission denied")
    finally:
        os.seteuid(0)


def test_symbolic_link_loop(testing, refused, tmp_path):
    p = tmp_path / "loop.gguf"
    p.symlink_to(p)
    refused(lambda: testing.gguf_open(str(p)), "io", "loop.gguf")


def test_symbolic_link_is_followed(testing, path, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(path)
    assert testing.gguf_open(str(link)).require_string("general.architecture") == b"qwen3"


def test_a_failed_open_leaves_no_descriptor_and_no_mapping(testing, refused, path):
    path.write_bytes(sample().bytes()[:-13])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        refused(lambda: testing.gguf_open(str(path)), "gguf")
        refused(lambda: testing.gguf_open(str(path.parent)), "io")
    assert len(os.listdir("/proc/self/fd")) == before
    assert not mapped(path)


def test_descriptor_stays_open_and_is_not_inherited(testing, path):
    file = testing.gguf_open(str(path))
    (fd,) = file.fds
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK
    assert os.pread(fd, 4, 0) == b"GGUF"
    del file
    with pytest.raises(OSError):
        os.fstat(fd)


def test_views_outlive_the_name(testing, path):
    file = testing.gguf_open(str(path))
    path.unlink()
    assert file.tensors()[0]["data"] == bytes(range(32))
    file.check_size()


def test_parsing_touches_no_tensor_data(testing, tmp_path):
    p = tmp_path / "large.gguf"
    n = 64 << 20
    g = Gguf()
    for i in range(8):
        g.entry(f"blk.{i}.w", [n // 8 // 4], F32, i * n // 8)
    head = g.bytes()
    with p.open("wb") as f:
        f.write(head)
        f.truncate(len(head) + n)
    file = testing.gguf_open(str(p))
    assert file.total_bytes == len(head) + n
    memory = mapped(p)
    assert memory["Size"] >= n >> 10
    # Page faults bring their neighbours (fault-around, 64 KiB), nothing more.
    assert memory["Rss"] <= 256


def test_a_file_truncated_while_open_is_noticed_before_its_tensors_are_read(testing, refused, path):
    """Touching the lost pages would end the process with SIGBUS."""
    file = testing.gguf_open(str(path))
    file.check_size()
    size = path.stat().st_size
    os.truncate(path, 100)
    refused(file.check_size, "io", "model.gguf", "truncated", f"expected {size} bytes, found 100")


def test_a_file_that_grows_is_no_error(testing, path):
    file = testing.gguf_open(str(path))
    with path.open("ab") as f:
        f.write(bytes(100))
    file.check_size()
