"""Compiled code is kept, checked before it is loaded, and loaded from nowhere that others may write."""

from __future__ import annotations

import logging
import shutil
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from lbpar.engine.native import build, cache
from lbpar.errors import EngineError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(build.CACHE, str(tmp_path / "new"))
    monkeypatch.setattr(build, "_SOURCES", ("threads.c",))  # the others take seconds to compile
    build._library.cache_clear()
    yield tmp_path / "new"
    build._library.cache_clear()


def compiled() -> Path:
    build._library.cache_clear()
    made = build.library()
    if made is None:
        pytest.skip("no C compiler")
    return made


def test_compiled_code_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled()
    assert list(folder.iterdir()) == [first]
    assert folder.stat().st_mode & 0o777 == first.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert compiled() == first


def test_parsed_declarations_are_kept_and_mean_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "typedef struct { int a; double b; } pair_t; double ldexp(double x, int e);"
    first = build.types(text)
    (path,) = folder.iterdir()
    assert path.suffix == ".py"
    monkeypatch.setattr(build, "_parsed", lambda _: pytest.fail("parsed again"))
    second = build.types(text)
    for ffi in (first, second):
        assert ffi.sizeof("pair_t") == 16 and ffi.dlopen(None).ldexp(1.5, 2) == 6.0
    with pytest.raises(pytest.fail.Exception):
        build.types(text + " ")


@pytest.mark.parametrize("damage", ["cut short", "a bit", "link", "others may write"])
def test_a_damaged_library_is_compiled_again_with_a_word(
    damage: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = compiled()
    content = path.read_bytes()
    elsewhere = path.parent.parent / "elsewhere.so"
    if damage == "link":
        shutil.copy(path, elsewhere)
    path.rename(path.with_suffix(".old"))  # the loaded one stays as it is
    if damage == "cut short":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "a bit":
        path.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    elif damage == "link":
        path.symlink_to(elsewhere)
    else:
        path.write_bytes(content)
        path.chmod(0o722)
    path.with_suffix(".old").unlink()
    with caplog.at_level(logging.WARNING):
        again = compiled()
    assert "damaged or not this user's alone" in caplog.text
    assert again.name == cache._named(again.name.rpartition("-")[0], again.read_bytes(), ".so")
    assert not again.is_symlink()
    assert list(folder.iterdir()) == [again]


def test_a_folder_that_others_may_write_is_not_trusted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir()
    for spoilt in (folder, folder.parent):
        spoilt.chmod(0o770)
        with pytest.raises(EngineError, match=f"{spoilt} belongs to user .* has mode 770.*chmod go-w"):
            cache.private(folder)
        build._library.cache_clear()
        assert build.library() is None
        spoilt.chmod(0o700)
    assert "no code is loaded from" in caplog.text
    assert not list(folder.iterdir())


def test_a_link_is_as_good_as_what_it_leads_to(folder: Path) -> None:
    real = folder.parent / "real"
    real.mkdir(mode=0o777)
    real.chmod(0o777)
    folder.symlink_to(real)
    with pytest.raises(EngineError, match=f"{real} belongs"):
        cache.private(folder)
    real.chmod(0o700)
    assert cache.private(folder) == real.resolve()


def test_a_folder_of_ones_own_under_one_that_all_may_write(folder: Path) -> None:
    folder.parent.chmod(0o1777)  # as /tmp
    assert cache.private(folder) == folder.resolve()


def _make_slowly(folder: str, name: str) -> None:
    """One of many processes that start at once, and want the same file."""

    def make() -> Path:
        with cache.temporary(Path(folder)) as part:
            made = Path(part, "made.so")
            made.write_text("code")
            time.sleep(0.2)
            with Path(folder, "times").open("a") as times:
                times.write("x")
            return cache.keep(Path(folder), name, made)

    assert cache.find_or_make(Path(folder), name, make).read_text() == "code"


def test_one_of_many_processes_makes_a_file(folder: Path) -> None:
    private = cache.private(folder)
    processes = [get_context("fork").Process(target=_make_slowly, args=(str(private), "passes-1")) for _ in range(6)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(60)
    assert [p.exitcode for p in processes] == [0] * 6
    assert (private / "times").read_text() == "x"


def test_a_file_system_without_locks_makes_a_file_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(cache.fcntl, "flock", flock)
    _make_slowly(str(cache.private(folder)), "passes-1")
