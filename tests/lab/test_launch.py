"""Commands on the devices of a lab: environment, output, exit codes, and no rank that outlives another's failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.lab_toys import kernel_state, lab_path, needs_lab, toy_cluster, toy_lab
from typer.testing import CliRunner

from pipefit.cli import build_app
from pipefit.errors import LabError
from pipefit.lab import launch, lifecycle
from pipefit.lab.lifecycle import Lab

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab of 2 x 2 devices that stands for all tests of this file."""
    made = Lab.open_lab(lab_path(tmp_path_factory.mktemp("lab"), toy_lab()))
    lifecycle.bring_up(made)
    yield made
    lifecycle.take_down(made.path)


def run(lab: Lab, *command: str, devices: tuple[int, ...] = (), grace_s: float = 5.0) -> tuple[int, list[str]]:
    lines: list[str] = []
    with lifecycle.hold_lab(lab):
        code = launch.run_command(lab, command, devices=devices, say=lines.append, preload=(), grace_s=grace_s)
    return code, lines


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_ranks_are_numbered_over_the_chosen_devices_host_by_host(tmp_path: Path) -> None:
    lab = Lab.open_lab(lab_path(tmp_path, toy_lab(toy_cluster(3, 2))))
    ranks = launch.ranks_of(lab, [5, 2, 3])
    assert [(rank.rank, rank.device, rank.name) for rank in ranks] == [(0, 2, "n1.0"), (1, 3, "n1.1"), (2, 5, "n2.1")]
    words = [launch.rank_environment(lab, ranks, rank) for rank in ranks]
    keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    assert [[each[key] for key in keys] for each in words] == [
        ["0", "3", "0", "2", "0", "10.77.1.1", "eth0:0"],
        ["1", "3", "1", "2", "0", "10.77.1.1", "eth0:1"],
        ["2", "3", "0", "1", "1", "10.77.1.1", "eth0:1"],
    ]
    assert words[2]["PIPEFIT_HOST"] == "n2" and words[2]["PIPEFIT_LAB"] == str(lab.path)
    with pytest.raises(LabError, match="no such device") as caught:
        launch.ranks_of(lab, [0, 6, 9])
    assert (caught.value.seen, caught.value.allowed) == ("6, 9", "0 to 5")


@needs_lab
def test_every_device_runs_the_command_in_its_namespace(lab: Lab, tmp_path: Path) -> None:
    text = """
import os, socket, sys
names = sorted(name for _, name in socket.if_nameindex())
print(os.environ["RANK"], os.environ["PIPEFIT_LAB_DEVICE"], *names, *sys.argv[1:], __name__)
print("an error", file=sys.stderr)
"""
    code, lines = run(lab, "python", script(tmp_path, text), "--word", devices=(0, 3))
    assert code == 0
    assert sorted(line for line in lines if "error" not in line) == [
        "[n0.0] 0 0 eth0 lo --word __main__",
        "[n1.1] 1 3 eth0 lo --word __main__",
    ]
    assert sorted(line for line in lines if "error" in line) == ["[n0.0] an error", "[n1.1] an error"]


@needs_lab
def test_modules_the_command_line_and_other_programs_run_as_well(lab: Lab) -> None:
    assert run(lab, "python", "-m", "json.tool", "--help")[1][0].startswith("[n")
    assert "pipefit" in run(lab, "pipefit", "--version", devices=(1,))[1][0]
    assert run(lab, "echo", "a", "b", devices=(2,)) == (0, ["[n1.0] a b"])
    assert run(lab, sys.executable, "-c", "print(5)", devices=(2,)) == (0, ["[n1.0] 5"])
    code, lines = run(lab, "no-such-program", devices=(2,))
    assert code == 127 and lines == ["[n1.0] pipefit lab: no-such-program: No such file or directory"]


@needs_lab
def test_ranks_of_torch_meet_over_the_shaped_links(lab: Lab, tmp_path: Path) -> None:
    text = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((2,), float(dist.get_rank() + 1))
dist.all_reduce(x)
print(x.tolist())
dist.destroy_process_group()
"""
    code, lines = run(lab, "python", script(tmp_path, text))
    assert code == 0 and [line.split("] ", 1)[1] for line in lines] == ["[10.0, 10.0]"] * 4


@needs_lab
def test_ranks_of_emulated_devices_go_before_other_work(lab: Lab, tmp_path: Path) -> None:
    """Where this user may ask for that at all; with their threads. A lab without paced devices asks for nothing."""
    probe = "from pipefit.lab.nursery import raise_priority; print(int(raise_priority()))"
    allowed = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.strip()
    text = "import os, threading\nthreading.Thread(target=lambda: print(os.sched_getscheduler(0))).start()"
    code, lines = run(lab, "python", script(tmp_path, text))
    assert code == 0 and len(lines) == 4
    assert {int(line.split()[-1]) for line in lines} == {os.SCHED_RR if allowed == "1" else os.SCHED_OTHER}
    plain = Lab.open_lab(lab_path(tmp_path, toy_lab(devices={})))
    code, lines = run(plain, "python", script(tmp_path, text))
    assert code == 0 and {int(line.split()[-1]) for line in lines} == {os.SCHED_OTHER}


@needs_lab
def test_a_rank_that_fails_ends_all(lab: Lab, tmp_path: Path) -> None:
    text = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(100)
"""
    before, begin = kernel_state(lab.path), time.monotonic()
    assert run(lab, "python", script(tmp_path, text), grace_s=0.5) == (7, [])
    assert time.monotonic() - begin < 30
    assert kernel_state(lab.path) == before


@needs_lab
def test_a_rank_that_does_not_hear_sigterm_is_killed(lab: Lab, tmp_path: Path) -> None:
    text = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(100)
"""
    begin = time.monotonic()
    assert run(lab, "python", script(tmp_path, text), grace_s=0.5)[0] == 128 + 9
    assert time.monotonic() - begin < 30


@needs_lab
def test_a_run_that_could_not_keep_its_pace_is_invalid(lab: Lab, tmp_path: Path) -> None:
    text = """
import time
from pipefit.lab.pace import emulated_device
emulated = emulated_device()
for seconds in (0.001, 0.5):
    began = emulated.begin_action()
    time.sleep(0.02)
    emulated.finish_action(began + seconds, seconds, 0.0, warm=False)
"""
    with lifecycle.hold_lab(lab):
        result = launch.run_judged(lab, ["python", script(tmp_path, text)], devices=[0, 1], preload=())
    assert (result.code, result.valid) == (2, False)
    assert result.pace.startswith("4 paced actions, 2 (50.00%) with more real work")


def test_a_command_is_needed(tmp_path: Path) -> None:
    lab = Lab.open_lab(lab_path(tmp_path, toy_lab()))
    with pytest.raises(LabError, match="no command to run"):
        launch.run_command(lab, [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sideways", "FILE"], "The lab command has no such action."),
        (["up", "FILE", "--", "true"], "Only `run` takes a command and devices."),
        (["run", "FILE", "--devices", "a-b", "--", "true"], "The list of devices is invalid."),
        (["up", "none.json"], "The file cannot be read."),
    ],
)
def test_mistakes_on_the_command_line(words: list[str], message: str, tmp_path: Path) -> None:
    path = str(lab_path(tmp_path, toy_lab()))
    answer = CliRunner().invoke(build_app(), ["lab", *(path if word == "FILE" else word for word in words)])
    assert message in str(answer.exception)


@needs_lab
def test_the_command_line_makes_checks_and_removes_a_lab(tmp_path: Path) -> None:
    path = str(lab_path(tmp_path, toy_lab(toy_cluster(2, 1))))
    before = kernel_state(Path(path))
    app, runner = build_app(), CliRunner()
    said = runner.invoke(app, ["lab", "up", path])
    assert said.exit_code == 0 and "lab toy (pflab-" in said.output and "10.77.1.1" in said.output
    said = runner.invoke(app, ["lab", "check", path, "--json"])
    found = json.loads(said.stdout)
    assert found["hosts"] == 2 and len(found["pairs"]) == 2 and said.exit_code == (0 if found["good"] else 1)
    said = runner.invoke(app, ["lab", "run", path, "--devices", "1", "--", "sh", "-c", "exit 3"])
    assert said.exit_code == 3
    assert runner.invoke(app, ["lab", "down", path]).output == "removed 3 namespaces\n"
    assert runner.invoke(app, ["lab", "down", path]).output == "no lab was up\n"
    assert kernel_state(Path(path)) == before
