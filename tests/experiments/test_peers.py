"""The benchmark's peers: the line protocol with a fake one, its faults, and which peers a command
line asks for."""

import sys
from dataclasses import replace

import pytest

from experiments.benchmarks import rounds, suite
from experiments.benchmarks.arguments import Arguments
from experiments.benchmarks.peer import SCRIPTS, Peer, PeerSpec
from experiments.benchmarks.record import contest
from experiments.benchmarks.rounds import Plan, ratio
from fp8rl_jax.errors import UserError

PEER = f"""
import sys, time
sys.path.insert(0, {str(SCRIPTS)!r})
from link import Link

link = Link()
print("noise that a library prints")
link.ready(["pytest"], {{"seen": link.settings}})
for request in link:
    if request["round"] == link.settings.get("dies_in"):
        print("first\\nRuntimeError: out of luck", file=sys.stderr)
        sys.exit(3)
    if request["round"] == link.settings.get("hangs_in"):
        time.sleep(60)
    link.answer({{"seconds": 0.5 + request["round"], "tokens": link.settings.get("tokens", 12)}})
"""


@pytest.fixture
def start(tmp_path):
    """Starts the fake peer with settings; every peer is ended after the test."""
    script, running = tmp_path / "fake.py", []
    script.write_text(PEER)

    def make(timeout=30.0, python=sys.executable, **settings):
        running.append(
            Peer(PeerSpec("fake", "--fake-python", python, str(script)), settings, 1, 12, timeout)
        )
        return running[-1]

    yield make
    for peer in running:
        peer.close()
        assert peer._process.returncode is not None


def test_contest_with_a_peer(start, monkeypatch):
    monkeypatch.setattr(rounds, "SETTLE_SECONDS", 0.0)
    found = contest(
        {"bf16": lambda i: {"seconds": 1.0}}, {"how": "plainly"}, [start(colour="red")], Plan(2, 1)
    )
    assert found.pairs == [("fake", "fp8rl_jax/bf16")]
    assert ratio(found.timed.rounds, *found.pairs[0])["pairs"] == [1.5, 2.5]
    assert found.timed.rounds[0].peak_bytes.keys() == {"fake", "fp8rl_jax/bf16"}
    assert (
        found.about["fake"]["settings"] == {"seen": {"colour": "red"}}
        and "pytest" in found.about["fake"]["versions"]
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"dies_in": 0},
            "--fake-python: the peer fake ended with status 3: RuntimeError: out of luck",
        ),
        (
            {"tokens": 11},
            "--fake-python: the peer fake generated 11 tokens in round 0 instead of 12",
        ),
        ({"hangs_in": 0, "timeout": 2.0}, "--fake-python: the peer fake did not answer within 2 s"),
    ],
)
def test_faulty_peer_is_one_clear_line(start, settings, message):
    peer = start(**settings)
    peer.wait_until_ready()
    with pytest.raises(UserError) as fault:
        peer(0)
    assert str(fault.value) == message


def test_peer_that_cannot_start(start, tmp_path):
    with pytest.raises(UserError, match=r"--fake-python: .*nothing cannot be run"):
        start(python=str(tmp_path / "nothing"))
    with pytest.raises(
        UserError, match=r"ended with status 1: ModuleNotFoundError: No module named 'link'"
    ):
        (tmp_path / "fake.py").write_text("import link")
        start().wait_until_ready()


def test_peers_are_optional_one_by_one():
    python = sys.executable
    arguments = Arguments("o", transformers_python=python, tunix_python=python)
    names = {name: [p.name for p in peers] for name, peers in suite.choose_peers(arguments).items()}
    assert names == {"generation": ["transformers"], "grpo_step": ["tunix"]}
    assert [
        p.name for p in suite.choose_peers(replace(arguments, vllm_python=python))["generation"]
    ] == ["transformers", "vllm"]
    assert suite.choose_peers(Arguments("o", peers="none")) == {}
    assert all((SCRIPTS / script).is_file() for script in suite.SCRIPTS.values())
