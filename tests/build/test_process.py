import platform

import pytest
import torch

from leadout.build import process


def test_threads_are_set_unless_zero_is_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    process.prepare_process(2)
    process.prepare_process(0)
    assert asked == [2]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_the_allocator_takes_the_settings():
    assert process.keep_freed_memory()


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not process.keep_freed_memory()
