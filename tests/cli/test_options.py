"""Commands made from dataclasses: names, defaults, help texts and values of their options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner, Result

from pipefit.cli import build_app
from pipefit.cli._options import field_texts, flag_names, takes_options
from pipefit.run.config import TrainConfig
from pipefit.run.update.optimizer import OptimizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerOptions:
    """Options of a part."""

    rate: float = 0.5
    "Rate of the part."
    steps: int = 0
    "Steps of the part."


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptions:
    """Options of the command."""

    path: str
    "A path."
    steps: int
    """Steps of
    the run."""
    part: InnerOptions = field(default_factory=InnerOptions)
    names: tuple[str, ...] = ("stdlib",)
    "Names, repeatable."
    kind: Literal["plain", "quick"] = "plain"
    "plain or quick."
    keep: bool | None = None
    "Keep it."
    as_json: bool = False
    "Print JSON."
    wait_s: float = 60.0
    "Seconds to wait."
    secret: int = 7


def call_command(*words: str) -> tuple[Result, list[Any]]:
    """Run a command with these words; return typer's result and the options that the command received."""
    received: list[Any] = []

    @takes_options(OuterOptions, arguments=("path",), flags={"path": (), "names": ("--name",)}, hidden=("secret",))
    def command(options: OuterOptions) -> None:
        """Do it."""
        received.append(options)

    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"}), received


def test_absent_options_are_the_defaults_of_the_dataclass() -> None:
    result, received = call_command("here", "--steps", "3")
    assert result.exit_code == 0, result.output
    assert received == [OuterOptions(path="here", steps=3, part=InnerOptions(steps=3))]


def test_given_options_reach_their_dataclass() -> None:
    words = "here --steps 3 --rate 2 --name a --name b --kind other --no-keep --json --wait 1"
    result, received = call_command(*words.split())
    assert result.exit_code == 0, result.output
    expected = OuterOptions(
        path="here",
        steps=3,
        part=InnerOptions(rate=2.0, steps=3),
        names=("a", "b"),
        kind="other",  # type: ignore[arg-type]  # the component that owns the field refuses it, with its own words
        keep=False,
        as_json=True,
        wait_s=1.0,
    )
    assert received == [expected]


def test_help_is_the_string_below_a_field() -> None:
    result, _ = call_command("--help")
    for words in ("Do it.", "Steps of the run.", "Rate of the part.", "--keep", "--no-keep", "[default: stdlib]"):
        assert words in result.output
    assert "Steps of the part." not in result.output and "secret" not in result.output


@pytest.mark.parametrize("words", [["here"], ["--steps", "3"]])
def test_a_required_option_is_required(words: list[str]) -> None:
    assert call_command(*words)[0].exit_code == 2


def test_an_option_without_a_text_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"OuterOptions\.secret has no string below it"):
        takes_options(OuterOptions)(lambda options: None)


def test_a_direct_call_with_an_unknown_option_is_refused() -> None:
    command = takes_options(OuterOptions, hidden=("secret",))(lambda options: None)
    with pytest.raises(AssertionError, match="has no option stepps"):
        command(path="here", stepps=3)


def test_flags_follow_from_the_names_of_fields() -> None:
    assert flag_names("save_every", int) == ("--save-every",)
    assert flag_names("as_json", bool) == ("--json",)
    assert flag_names("timeout_s", float) == ("--timeout",)
    assert flag_names("start_token", bool | None) == ("--start-token/--no-start-token",)


def test_earlier_names_of_options_are_accepted() -> None:
    commands = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]
    flags = {name: [parameter.opts for parameter in commands[name].params] for name in ("plan", "explain", "train")}
    memory = [["--memory-correction", "--memory"], ["--max-oom-probability", "--risk"]]
    train = [
        ["--worker-backend", "--prepare"],
        ["--keep-checkpoints", "--keep"],
        ["--trace-step", "--trace"],
        ["--heartbeat-timeout", "--timeout"],
        ["--nproc-per-node", "--per-host"],
    ]
    for name, pairs in {"plan": memory, "explain": memory, "train": train}.items():
        assert all(pair in flags[name] for pair in pairs), name


def test_the_options_of_train_are_the_fields_of_its_configuration() -> None:
    command = typer.main.get_command(build_app()).commands["train"]  # type: ignore[attr-defined]
    texts = {parameter.name: parameter.help for parameter in command.params}
    hidden = {"optimizer", "transfer_timeout_s", "options"}
    expected = field_texts(OptimizerConfig) | field_texts(TrainConfig)
    assert len(expected) > 30
    for name in expected.keys() - hidden:
        assert texts[name] == expected[name]
