"""A lab comes up, is used and goes, and nothing of it is left: after a fault, a signal, SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.lab_toys import kernel_state, lab_path, needs_lab, toy_cluster, toy_lab

from pipefit.errors import LabError
from pipefit.lab import lifecycle, netns, network
from pipefit.lab.lifecycle import Lab

SLEEPER = """
import os, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen(["sleep", "300"], start_new_session=True)  # leaves the session, and would outlive it
Path(sys.argv[1], os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid}")
print("sleeping", flush=True)
time.sleep(300)
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A lab that is down, and is taken down in the end; the kernel must be as it was."""
    made = Lab.open_lab(lab_path(tmp_path, toy_lab()))
    before = kernel_state(made.path)
    yield made
    lifecycle.take_down(made.path)
    assert kernel_state(made.path) == before
    assert not list(lifecycle.state_folder().glob(f"{made.id}*"))


def start_run(lab: Lab, folder: Path) -> tuple[subprocess.Popen[str], list[int], list[int]]:
    """`pipefit lab run` with a sleeping rank on every device: (it, the ranks, what they started in other sessions)."""
    script = folder / "sleeper.py"
    script.write_text(SLEEPER, encoding="utf-8")
    notes = folder / "notes"
    notes.mkdir()
    command = [sys.executable, "-m", "pipefit", "lab", "run", str(lab.path), "--", "python", str(script), str(notes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while len(list(notes.iterdir())) < 4 or any(not note.read_text() for note in notes.iterdir()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    pids = [list(map(int, note.read_text().split())) for note in notes.iterdir()]
    return process, [rank for rank, _ in pids], [child for _, child in pids]


def alive(pids: list[int]) -> list[int]:
    """Those that run (not those that have died and wait to be collected)."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def wait_dead(pids: list[int], seconds: float = 10) -> list[int]:
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive(pids)


@needs_lab
def test_up_makes_what_the_file_says_and_down_leaves_nothing(lab: Lab) -> None:
    before = kernel_state(lab.path)
    lifecycle.bring_up(lab)
    assert netns.standing_namespaces(lab.name_prefix) == [lab.name_prefix + name for name in ("h0", "h1", "hub")]
    assert kernel_state(lab.path)[1] == before[1], "the machine's own links are not touched"
    said = subprocess.run(
        ["ip", "-n", lab.namespace_of(1), "-br", "addr"], capture_output=True, text=True, check=True
    ).stdout
    assert "10.77.1.1/16" in said and "10.77.1.2/32" in said
    assert "n1: " in "\n".join(lifecycle.describe_lab(lab)) and "10.0 MB/s" in lifecycle.describe_lab(lab)[1]
    assert lifecycle.take_down(lab.path) == [lab.name_prefix + name for name in ("h0", "h1", "hub")]
    assert kernel_state(lab.path) == before
    assert lifecycle.take_down(lab.path) == [], "twice is as good as once"


@needs_lab
def test_up_removes_what_an_earlier_lab_left(lab: Lab) -> None:
    lifecycle.bring_up(lab)
    stray = subprocess.Popen([*netns.exec_words(lab.namespace_of(0)), "sleep", "300"])
    deadline = time.monotonic() + 20
    while stray.pid not in netns.list_processes(lab.namespace_of(0)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lifecycle.bring_up(lab)
    assert stray.wait(10) == -signal.SIGKILL
    assert netns.list_processes(lab.namespace_of(0)) == []


@needs_lab
def test_a_fault_while_it_comes_up_leaves_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernel_state(lab.path)
    monkeypatch.setattr(network, "hub_shaping", lambda file: ["qdisc add dev nothing root handle 1: htb"])
    with pytest.raises(LabError, match="A command of iproute2 failed") as caught:
        lifecycle.bring_up(lab)
    assert "nothing" in str(caught.value.seen) and "sch_htb" in str(caught.value.next_step)
    assert kernel_state(lab.path) == before


@needs_lab
def test_a_lab_of_another_version_of_the_file_is_not_used(lab: Lab, tmp_path: Path) -> None:
    lifecycle.bring_up(lab)
    assert lifecycle.is_standing(lab)
    changed = Lab.open_lab(lab_path(tmp_path, toy_lab(toy_cluster(rate=lambda a, b: 2e7))))
    with pytest.raises(LabError, match="Another version of this lab file") as caught, lifecycle.hold_lab(changed):
        pass
    assert str(caught.value.next_step).startswith("pipefit lab up ")


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all_at_once(lab: Lab, tmp_path: Path, number: signal.Signals) -> None:
    before = kernel_state(lab.path)
    process, ranks, children = start_run(lab, tmp_path)
    with pytest.raises(LabError, match="The lab is in use") as caught:
        lifecycle.take_down(lab.path)
    assert str(process.pid) in str(caught.value.seen)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not wait_dead(ranks + children)
    assert kernel_state(lab.path) == before


@needs_lab
def test_after_sigkill_the_ranks_are_dead_and_down_removes_the_rest(lab: Lab, tmp_path: Path) -> None:
    before = kernel_state(lab.path)
    process, ranks, children = start_run(lab, tmp_path)
    process.kill()
    process.communicate(timeout=60)
    assert not wait_dead(ranks), "the kernel ends the ranks"
    assert alive(children) == children, "the test must leave something behind"
    assert list(lifecycle.state_folder().glob(f"{lab.id}-*")), "and a folder"
    assert lifecycle.take_down(lab.path) == [lab.name_prefix + name for name in ("h0", "h1", "hub")]
    assert not wait_dead(children)
    assert kernel_state(lab.path) == before


@needs_lab
def test_the_next_lab_removes_one_whose_command_was_killed(lab: Lab, tmp_path: Path) -> None:
    before = kernel_state(lab.path)
    process, _, _ = start_run(lab, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    with lifecycle.hold_lab(Lab.open_lab(lab_path(other, toy_lab()))):
        assert lifecycle.is_standing(lab) is False and netns.standing_namespaces(lab.name_prefix), (
            "what is in use stays"
        )
    process.kill()
    process.communicate(timeout=60)
    assert netns.standing_namespaces(lab.name_prefix)
    with lifecycle.hold_lab(Lab.open_lab(lab_path(other, toy_lab()))):
        assert not netns.standing_namespaces(lab.name_prefix)
    assert kernel_state(lab.path) == before
    lifecycle.bring_up(lab)
    with lifecycle.hold_lab(Lab.open_lab(lab_path(other, toy_lab()))):
        assert lifecycle.is_standing(lab), "a lab that was brought up waits for its commands"


@needs_lab
def test_run_in_a_lab_that_stands_leaves_it_standing(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    from pipefit.lab.launch import run_command

    lifecycle.bring_up(lab)
    with lifecycle.hold_lab(lab):
        assert run_command(lab, ["true"]) == 0
    assert lifecycle.is_standing(lab)


def test_without_root_or_iproute2_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = lab_path(tmp_path, toy_lab())
    monkeypatch.setattr(netns.shutil, "which", lambda tool: None)
    for call in (lambda: lifecycle.bring_up(Lab.open_lab(path)), lambda: lifecycle.take_down(path)):
        with pytest.raises(LabError, match="needs root and iproute2") as caught:
            call()
        assert caught.value.seen == "ip and tc of iproute2 not found"
        assert "install the package iproute2" in str(caught.value.next_step)
    monkeypatch.setattr(netns.shutil, "which", lambda tool: f"/usr/sbin/{tool}")
    monkeypatch.setattr(netns.os, "geteuid", lambda: 1000)
    assert netns.unavailable_reason() == "not root"


@needs_lab
def test_a_kernel_that_lacks_something_is_found_before_a_lab_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    add = netns.run_batch

    def without_htb(command: list[str], lines: list[str]) -> None:
        add(command, [line.replace("htb", "no-such-qdisc") for line in lines])

    monkeypatch.setattr(netns, "run_batch", without_htb)
    assert "qdisc kind is unknown" in netns.unavailable_reason()
    assert f"{netns.PREFIX}try-{os.getpid()}" not in netns.standing_namespaces(netns.PREFIX)


def test_more_hosts_than_the_memory_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from pipefit.lab import launch

    lab = Lab.open_lab(lab_path(tmp_path, toy_lab()))
    monkeypatch.setattr(launch, "available_bytes", lambda: 900 << 20)
    with pytest.raises(LabError, match="4 ranks do not fit into the memory of this machine") as caught:
        launch.run_command(lab, ["true"])
    assert caught.value.allowed == "3 ranks" and "--devices" in str(caught.value.next_step)


@needs_lab
def test_settings_are_those_of_the_namespace_alone(lab: Lab) -> None:
    def of(*before: str) -> str:
        place = "/proc/sys/net/ipv4/tcp_congestion_control"
        return subprocess.run([*before, "cat", place], capture_output=True, text=True, check=True).stdout.strip()

    ours = of()
    lifecycle.bring_up(lab)
    assert of(*netns.exec_words(lab.namespace_of(0))) == "reno" and of() == ours


def test_the_same_file_has_one_name_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lab_path(tmp_path, toy_lab())
    monkeypatch.chdir(tmp_path)
    assert (
        lifecycle.lab_id("toy.lab.json")
        == lifecycle.lab_id(path)
        == lifecycle.lab_id(f"../{tmp_path.name}/{path.name}")
    )
    assert Lab.open_lab("toy.lab.json").name_prefix == f"pflab-{lifecycle.lab_id(path)}-"
    assert os.path.isabs(Lab.open_lab("toy.lab.json").path)
    assert replace(Lab.open_lab(path), path=tmp_path / "other.json").id != Lab.open_lab(path).id
