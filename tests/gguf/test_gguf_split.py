"""Split models: any part opens all of them; parts that do not belong together are refused."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from .writer import F32, Gguf


def part(no: int, count: int, names: list[str], total: int | None = None, fill: int | None = None) -> Gguf:
    g = Gguf()
    if no == 0:
        g.add("general.architecture", "string", "qwen3")
    g.add("split.no", "u16", no).add("split.count", "u16", count)
    if total is not None:
        g.add("split.tensors.count", "i32", total)
    for name in names:
        g.tensor(name, [8], F32, bytes([no if fill is None else fill]) * 32)
    return g


def path_of(folder: Path, no: int, count: int) -> Path:
    return folder / f"m-{no + 1:05d}-of-{count:05d}.gguf"


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Three parts, the first without tensors, as gguf-split can write it."""
    paths = [path_of(tmp_path, i, 3) for i in range(3)]
    for i, names in enumerate([[], ["a", "b"], ["c"]]):
        paths[i].write_bytes(part(i, 3, names, total=3).bytes())
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_part_opens_all(testing, three, given):
    file = testing.gguf_open(str(three[given]))
    assert file.paths == [str(p) for p in three]
    assert [(t["name"], t["part"], t["data"][0]) for t in file.tensors()] == [
        ("a", 1, 1),
        ("b", 1, 1),
        ("c", 2, 2),
    ]
    assert all(t["found"] for t in file.tensors())
    assert file.total_bytes == sum(p.stat().st_size for p in three)
    assert len(set(file.fds)) == 3
    # Metadata is the first part's, whichever was given.
    assert file.require_string("general.architecture") == b"qwen3"
    assert file.require_uint("split.no") == 0


def test_reads_what_the_gguf_package_splits(testing, tmp_path):
    w = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3", split_max_tensors=2)
    for i in range(5):
        w.add_tensor(f"blk.{i}.w", np.full(8, i, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    for no in range(3):
        file = testing.gguf_open(str(path_of(tmp_path, no, 3)))
        assert {t["name"]: np.frombuffer(t["data"], np.float32)[0] for t in file.tensors()} == {
            f"blk.{i}.w": i for i in range(5)
        }
        assert file.require_string("general.architecture") == b"qwen3"


def test_relative_paths_and_links(testing, three, tmp_path, monkeypatch):
    """A cache of links into a store of blobs is followed by the links' names."""
    links = tmp_path / "links"
    links.mkdir()
    for i, p in enumerate(three):
        blob = tmp_path / f"blob{i}"
        p.rename(blob)
        (links / p.name).symlink_to(blob)
    monkeypatch.chdir(links)
    assert len(testing.gguf_open(three[1].name).paths) == 3


@pytest.mark.parametrize("count", [0, 1])
def test_a_count_of_0_or_1_is_no_split(testing, tmp_path, count):
    """Merged files keep split.count = 0."""
    p = tmp_path / "merged.gguf"
    p.write_bytes(Gguf().add("split.count", "u16", count).tensor("a", [8], F32, bytes(32)).bytes())
    assert testing.gguf_open(str(p)).paths == [str(p)]


def test_missing_parts_are_all_named(testing, refused, three):
    three[0].unlink()
    three[2].unlink()
    refused(lambda: testing.gguf_open(str(three[1])), "io", "2 of the 3 parts", three[0].name, three[2].name)


def test_thousands_of_missing_parts_are_counted_not_listed(testing, refused, tmp_path):
    p = path_of(tmp_path, 0, 9999)
    p.write_bytes(part(0, 9999, []).bytes())
    message = refused(lambda: testing.gguf_open(str(p)), "io", "9998 of the 9999 parts", "...")
    assert len(message) < 4096


def test_a_part_that_cannot_be_opened(testing, refused, three):
    three[2].unlink()
    os.mkfifo(three[2])
    refused(lambda: testing.gguf_open(str(three[0])), "io", three[2].name, "a FIFO")


def test_a_broken_part_is_named(testing, refused, three):
    three[2].write_bytes(three[2].read_bytes()[:-1])
    refused(lambda: testing.gguf_open(str(three[0])), "gguf", three[2].name, "tensor 'c'")


def test_renamed_part(testing, refused, three, tmp_path):
    other = tmp_path / "model.gguf"
    three[1].rename(other)
    refused(
        lambda: testing.gguf_open(str(other)),
        "gguf",
        "part 2 of a model split into 3",
        "-00002-of-00003.gguf",
    )


def test_name_says_another_number(testing, refused, three):
    three[1].rename(three[2])
    refused(lambda: testing.gguf_open(str(three[2])), "gguf", "part 2 of a model split into 3")


def test_name_says_another_count(testing, refused, three, tmp_path):
    p = path_of(tmp_path, 1, 4)
    three[1].rename(p)
    refused(lambda: testing.gguf_open(str(p)), "gguf", "split into 3", "-00002-of-00003.gguf")


def test_parts_swapped(testing, refused, three):
    a, b = three[1].read_bytes(), three[2].read_bytes()
    three[1].write_bytes(b)
    three[2].write_bytes(a)
    refused(
        lambda: testing.gguf_open(str(three[0])), "gguf", three[1].name, "expected part 2 of 3", "part 3 of 3"
    )


def test_a_part_of_a_model_with_another_count(testing, refused, three):
    three[2].write_bytes(part(2, 4, ["c"]).bytes())
    refused(lambda: testing.gguf_open(str(three[0])), "gguf", three[2].name, "part 3 of 4")


def test_a_part_that_is_no_part(testing, refused, three):
    three[1].write_bytes(Gguf().tensor("a", [8], F32, bytes(32)).bytes())
    refused(lambda: testing.gguf_open(str(three[0])), "gguf", three[1].name, "expected part 2 of 3")


def test_tensor_count_of_all_parts(testing, refused, three):
    for i, names in enumerate([[], ["a", "b"], ["c"]]):
        three[i].write_bytes(part(i, 3, names, total=4).bytes())
    refused(
        lambda: testing.gguf_open(str(three[0])),
        "gguf",
        "split.tensors.count",
        "expected 4 tensors",
        "found 3",
    )


def test_tensor_counts_that_disagree(testing, refused, three):
    three[2].write_bytes(part(2, 3, ["c"], total=7).bytes())
    refused(lambda: testing.gguf_open(str(three[0])), "gguf", three[2].name, "split.tensors.count", "found 7")


def test_tensor_count_may_be_absent(testing, three):
    for i, names in enumerate([[], ["a", "b"], ["c"]]):
        three[i].write_bytes(part(i, 3, names).bytes())
    assert len(testing.gguf_open(str(three[0])).tensors()) == 3


def test_duplicate_tensor_across_parts(testing, refused, three):
    three[2].write_bytes(part(2, 3, ["a"], total=3).bytes())
    refused(
        lambda: testing.gguf_open(str(three[0])),
        "gguf",
        "tensor 'a'",
        "duplicate",
        three[1].name,
        three[2].name,
    )


@pytest.mark.parametrize(
    "keys, words",
    [
        ([("split.count", "u16", 3)], ("'split.no' is absent",)),
        ([("split.count", "u16", 3), ("split.no", "u16", 3)], ("'split.no'", "found 3")),
        ([("split.count", "u64", 2**63), ("split.no", "u16", 0)], ("'split.count'", "at most 9999")),
        ([("split.count", "string", "3")], ("'split.count'", "found string '3'")),
        ([("split.count", "i32", -3)], ("'split.count'", "found i32 -3")),
        ([("split.count", "u16", 3), ("split.no", "f32", 0.0)], ("'split.no'", "found f32 0")),
    ],
)
def test_hostile_split_keys(testing, refused, tmp_path, keys, words):
    p = path_of(tmp_path, 0, 3)
    g = Gguf()
    for key in keys:
        g.add(*key)
    p.write_bytes(g.bytes())
    refused(lambda: testing.gguf_open(str(p)), "gguf", p.name, *words)


def test_a_split_part_in_memory_is_only_itself(testing):
    assert testing.gguf_parse(part(1, 3, ["a"]).bytes()).paths == ["memory.gguf"]
