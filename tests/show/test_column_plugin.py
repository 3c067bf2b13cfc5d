"""A report column of another package, from the how-to page: in the table, in the JSON and in the HTML report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.plugin_package import installed, package_environment, page_examples, write_package
from tests.support.show_toys import toy_model, toy_plan, write_toy_run

from pipefit.errors import PipefitError
from pipefit.plugins import load_plugins
from pipefit.show.compare import as_data, compare_entries, compare_table
from pipefit.show.figures import COLUMNS, FigurePair, ReportColumn, register_report_column
from pipefit.show.page import render_report
from pipefit.show.record import read_run
from pipefit.show.subject import make_subject

__all__ = ["installed"]


def test_a_column_of_a_package_stands_in_text_and_html(tmp_path: Path, installed, pipefit) -> None:
    plan, cluster = toy_plan(stages=2, microbatches=4, replicas=(1, 1))
    write_toy_run(tmp_path / "run", plan, cluster, stretch=1.25)
    before = pipefit("compare", str(tmp_path / "run"))[1]
    assert "price" not in before
    installed(write_package(tmp_path / "site", page_examples("add-a-report-column.md"), "toy_price"), COLUMNS)

    code, out, err = pipefit("compare", str(tmp_path / "run"))
    assert code == 0, err
    predicted = plan.prediction.step_s * 4 * 3.0 / 3600
    rows = [line.rstrip() for line in out.splitlines()]
    head = next(row for row in rows if row.endswith("price"))
    assert head.split()[-3:] == ["of", "limit", "price"]
    assert any("predicted" in row and row.endswith(f"{100 * predicted:.3g} cents") for row in rows)
    assert any("measured" in row and row.endswith(f"{125 * predicted:.3g} cents") for row in rows)
    assert any("error" in row and row.endswith("-20.0%") for row in rows)

    (entry,) = json.loads(pipefit("compare", str(tmp_path / "run"), "--json")[1])
    assert entry["price_dollars"] == {
        "predicted": pytest.approx(predicted),
        "measured": pytest.approx(1.25 * predicted),
    }

    html = render_report(make_subject(plan, toy_model(9), cluster, read_run(tmp_path / "run")))
    tile = re.search(r'<dt>Price of a step</dt><dd class="big">([^<]*)</dd><dd class="small">(.*?)</dd>', html)
    assert tile is not None and tile[1] == f"{125 * predicted:.3g} cents"
    assert tile[2] == f"predicted <b>{100 * predicted:.3g} cents</b> (−20.0 %)"
    titles = re.findall(r"<dt>([^<]*)</dt><dd class=\"big\">", html)
    assert titles[:5] == ["Step time", "Tokens per second", "Peak memory of a device", "Price of a step", "Idle share"]


def test_a_run_without_steps_has_no_measured_value(tmp_path: Path, installed, pipefit) -> None:
    plan, cluster = toy_plan(stages=2, microbatches=4, replicas=(1, 1))
    write_toy_run(tmp_path / "run", plan, cluster)
    (tmp_path / "run" / "metrics.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "run" / "trace.json").unlink()
    installed(write_package(tmp_path / "site", page_examples("add-a-report-column.md"), "toy_price"), COLUMNS)
    code, out, err = pipefit("compare", str(tmp_path / "run"))
    assert code == 0 and "nan" not in out, err
    (entry,) = json.loads(pipefit("compare", str(tmp_path / "run"), "--json")[1])
    assert entry["price_dollars"]["measured"] is None and entry["price_dollars"]["predicted"] > 0


@pytest.mark.parametrize(
    ("figure", "format_value", "fault"),
    [
        (lambda plan, record: {}["price"], str, "KeyError: 'price'"),
        (lambda plan, record: 3.0, str, "allowed: FigurePair"),
        (lambda plan, record: FigurePair(predicted=1.0), lambda value: value, "allowed: str"),
        (lambda plan, record: FigurePair(predicted=1.0), lambda: "", "TypeError"),
    ],
)
def test_a_column_that_fails_is_left_out_with_a_warning(tmp_path: Path, installed, figure, format_value, fault) -> None:
    plan, cluster = toy_plan(stages=2, microbatches=4, replicas=(1, 1))
    write_toy_run(tmp_path / "run", plan, cluster)
    record = read_run(tmp_path / "run")
    before = compare_table(compare_entries([(tmp_path, plan, record)]))
    installed(tmp_path, COLUMNS)
    load_plugins()
    register_report_column(
        ReportColumn(name="price", heading="price", title="Price", figure=figure, format_value=format_value)
    )
    with pytest.warns(UserWarning, match=f"(?s)a column is left out. The report column 'price' .*{fault}"):
        entries = compare_entries([(tmp_path, plan, record)])
    assert compare_table(entries) == before and "price" not in as_data(entries[0])
    with pytest.warns(UserWarning, match="a column is left out"):
        assert "Price" not in render_report(make_subject(plan, toy_model(9), cluster, record))


def test_the_command_prints_the_warning_without_code(tmp_path: Path) -> None:
    """A warning of another package keeps Python's form."""
    plan, cluster = toy_plan(stages=2, microbatches=4, replicas=(1, 1))
    write_toy_run(tmp_path / "run", plan, cluster)
    column = page_examples("add-a-report-column.md")["toy_price.py"].replace("plan.used_devices", "plan.devices_used")
    files = {"toy_price.py": column + "\nimport warnings\nwarnings.warn('a price of 2026')\n"}
    result = subprocess.run(
        [sys.executable, "-m", "pipefit", "compare", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=60,
        env=package_environment(write_package(tmp_path / "site", files, "toy_price")),
    )  # fmt: skip
    assert result.returncode == 0 and "price" not in result.stdout
    foreign, own = result.stderr.split("pipefit: warning: ")
    assert own.startswith("a column is left out. The report column 'price_dollars' of toy failed.")
    assert "AttributeError" in own and "COLUMNS" not in own and "UserWarning" not in own
    assert "toy_price.py" in foreign and "UserWarning: a price of 2026" in foreign


def test_text_of_a_column_is_escaped(tmp_path: Path, installed) -> None:
    installed(tmp_path, COLUMNS)
    load_plugins()
    register_report_column(
        ReportColumn(
            name="odd",
            heading="odd",
            title="<i>Odd</i>",
            figure=lambda plan, record: FigurePair(predicted=1.0),
            format_value=lambda value: "<script>",
        )
    )
    plan, cluster = toy_plan()
    html = render_report(make_subject(plan, toy_model(9), cluster))
    assert "<dt>&lt;i&gt;Odd&lt;/i&gt;</dt>" in html and '<dd class="big">&lt;script&gt;</dd>' in html


def test_a_second_column_of_a_name_is_refused() -> None:
    with pytest.raises(PipefitError, match="Two report columns have one name"):
        register_report_column(
            ReportColumn(name="step_s", heading="", figure=lambda plan, record: FigurePair(), format_value=str)
        )
