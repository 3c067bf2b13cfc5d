"""A rank's process ends at once, whatever its threads wait for, and nothing that it said is lost."""

import os
import subprocess
import sys

SCRIPT = """
import atexit, sys, threading, time
import typer
import torch
import pipefit.cli
from pipefit.errors import RunError

def command():
    atexit.register(lambda: print("at the exit"))
    threading.Thread(target=time.sleep, args=(300,)).start()
    print("said", end="")
    if sys.argv[1] == "fails":
        raise RunError("It failed.", where="here")
    sys.exit(int(sys.argv[1]))

pipefit.cli.build_app = lambda: command
pipefit.cli.main()
"""


def end(how: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2"}
    words = [sys.executable, "-c", SCRIPT, how]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_rank_leaves_with_its_code_though_a_thread_goes_on():
    for code in (0, 3):
        done = end(str(code))
        assert (done.returncode, done.stdout) == (code, "saidat the exit\n"), done.stderr


def test_a_rank_that_failed_says_so_and_leaves():
    done = end("fails")
    assert done.returncode == 2 and done.stderr == "pipefit: It failed.\n  where: here\n", done.stderr
