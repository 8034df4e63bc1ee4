"""Digests of files are those of their bytes, all of them."""

from shardwright.train.checkpoint.digests import (
    digest_at,
    digest_of_bytes,
    digest_of_file,
    digest_of_text,
)


def test_every_byte_of_a_file_counts(tmp_path):
    data = bytes(range(200))
    (tmp_path / "file").write_bytes(data)
    found = digest_of_file(tmp_path / "file")
    assert found == digest_of_bytes(data) == digest_at(tmp_path, ("file", 0, 200))
    for at in (0, 100, 199):
        (tmp_path / "file").write_bytes(data[:at] + b"\xff" + data[at + 1 :])
        assert digest_of_file(tmp_path / "file") != found
    assert digest_of_text("äx") == digest_of_bytes("äx".encode())


def test_a_part_of_a_file_ends_where_it_says_or_with_the_file(tmp_path):
    (tmp_path / "file").write_bytes(b"abcdef")
    assert digest_at(tmp_path, ("file", 2, 3)) == digest_of_bytes(b"cde")
    assert digest_at(tmp_path, ("file", 2, 30)) == digest_of_bytes(b"cdef")
