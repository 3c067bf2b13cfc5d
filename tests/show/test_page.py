"""The report as a file: nothing from elsewhere, small enough, well formed, safe, and the plan's own numbers in it."""

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tests.support.show_toys import toy_model, toy_plan, toy_subject, write_toy_run

from pipefit.cluster import save_cluster_file
from pipefit.errors import FormatError, StalePlanError
from pipefit.show.page import SCRIPTS, read_asset, render_report
from pipefit.show.record import read_run
from pipefit.show.subject import find_cluster, find_model, make_subject
from pipefit.units import format_bytes, format_count, format_seconds

VOID = {"meta", "link", "img", "br", "input", "hr"}


class Page(HTMLParser):
    """The elements of a page, with every tag matched and every address seen."""

    def __init__(self, source):
        super().__init__()
        self.open, self.elements, self.addresses, self.text = [], [], [], []
        self.feed(source)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        facts = dict(attributes)
        assert len(facts) == len(attributes), f"an attribute twice in {tag}"
        self.elements.append((tag, facts, list(self.open)))
        self.addresses += [
            facts[name] for name in ("src", "href", "action", "data", "poster", "srcset") if name in facts
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text.append(data)

    @property
    def words(self):
        return re.sub(r"\s+", " ", " ".join(self.text))

    def data(self, source):
        start = source.index('id="data">') + len('id="data">')
        return json.loads(source[start : source.index("</script>", start)])


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    plan, cluster = toy_plan()
    directory = write_toy_run(tmp_path_factory.mktemp("run"), plan, cluster)
    subject = make_subject(plan, toy_model(9), cluster, read_run(directory))
    return subject, render_report(subject)


def test_nothing_is_fetched_from_anywhere(ran):
    _, source = ran
    page = Page(source)
    assert page.addresses and all(address.startswith("#") for address in page.addresses)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", source)
    policies = [facts["content"] for tag, facts, _ in page.elements if facts.get("http-equiv")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"]
    assert not any(tag in ("iframe", "object", "embed", "link", "base") for tag, _, _ in page.elements)


def test_the_page_is_well_formed_and_named_throughout(ran):
    page = Page(ran[1])
    ids = [facts["id"] for _, facts, _ in page.elements if "id" in facts]
    assert len(ids) == len(set(ids))
    assert all(address[1:] in ids for address in page.addresses)
    for name in ("aria-labelledby", "aria-describedby"):
        assert all(facts[name] in ids for _, facts, _ in page.elements if name in facts)
    tags = [tag for tag, _, _ in page.elements]
    assert tags.count("h1") == 1 and tags.count("table") == tags.count("caption") >= 4
    assert {"lang": "en"} in [facts for tag, facts, _ in page.elements if tag == "html"]
    radios = [above for tag, facts, above in page.elements if facts.get("type") == "radio"]
    assert radios and all("fieldset" in above and above[-1] == "label" for above in radios)


def test_every_predicted_number_is_the_plans(ran):
    subject, source = ran
    words, prediction = Page(source).words, subject.plan.prediction
    assert f"predicted {format_seconds(prediction.step_s)}" in words
    assert f"predicted {format_count(prediction.tokens_per_s)}" in words
    peak = max(lane.peak_bytes for lane in prediction.lanes)
    assert f"predicted {format_bytes(peak)}" in words
    assert format_seconds(prediction.lower_bound_s) in words and prediction.binds in words
    for number, lane in enumerate(prediction.lanes):
        assert f"Lane {number} peak {format_bytes(lane.peak_bytes)}" in words
        assert all(format_bytes(part) in words for part in lane.parts.values())
    for note in prediction.assumptions:
        assert note in words
    data = Page(source).data(source)
    assert data["training"]["predicted_s"] == prediction.step_s
    assert [lane["peak"] for lane in data["memory"]["lanes"]] == [lane.peak_bytes for lane in prediction.lanes]
    assert "simulated now" not in words


def test_every_measured_number_is_the_runs(ran):
    subject, source = ran
    words = Page(source).words
    assert subject.record.step_s == pytest.approx(1.1 * subject.prediction.step_s)
    assert f"Step time {format_seconds(subject.record.step_s)}" in words and "(−9.1 %)" in words
    for lane in range(4):
        assert f"measured {format_bytes(subject.record.peak_bytes[lane])}" in words
    data = Page(source).data(source)
    assert data["training"]["loss"] == [step.loss for step in subject.record.steps]
    assert {row["trace"] for row in data["timeline"]["rows"]} == {"predicted", "measured"}


def test_decisions_and_why_the_others_lost_are_told(ran):
    subject, source = ran
    words = Page(source).words
    for name, value in subject.plan.decisions.items():
        assert f"{name} {value}" in words
    for other in subject.plan.alternatives:
        assert other.reason in words
    assert f"at least {format_seconds(0.5)}" in words, "the one that does not fit has a bound, not a time"


def test_the_plans_memory_is_that_of_the_lane_with_least_room():
    plan, cluster = toy_plan()
    first, second, *others = plan.prediction.lanes
    large = replace(first, peak_bytes=2e10, limit_bytes=4e10)
    small = replace(second, peak_bytes=1.2e10, limit_bytes=1.6e10)
    plan = replace(plan, prediction=replace(plan.prediction, lanes=(large, small, *others)))
    words = Page(render_report(make_subject(plan, toy_model(9), cluster))).words
    row = words[words.rindex("this plan") : words.rindex("chosen")]
    assert row.endswith(f"{format_seconds(plan.prediction.step_s)} {format_bytes(1.2e10)} 75 % "), row


def test_who_holds_which_layers_is_told():
    plan, cluster = toy_plan(stages=2, shards=(2, 1), sharding="megatron", microbatches=4)
    words = Page(render_report(make_subject(plan, toy_model(9), cluster))).words
    for index, stage in enumerate(plan.stages):
        start, stop = stage.layers
        devices = plan.groups[stage.group].devices
        row = f"language {start} to {stop - 1} {index} {devices[0]}-{devices[-1]} 2 shards (2:1) megatron none"
        assert row in words, words[words.index("Layers of each stage") :][:400]
    assert "program" not in Page(render_report(toy_subject())).words


def test_slices_are_told_with_why():
    plan, cluster = toy_plan(slices=(40, 24))
    noted = replace(plan.prediction, assumptions=("slices: 2 of every sequence, as fixed", "links: measured"))
    words = Page(render_report(make_subject(replace(plan, prediction=noted), toy_model(9), cluster))).words
    assert "Microbatches 8 Slices 2" in words and "slices 40,24" in words
    decisions = words[words.rindex("Decisions") :]
    assert "Slices: 2 of every sequence, as fixed." in decisions and "Links: measured." not in words
    whole, cluster = toy_plan()
    assert "Microbatches 8 Schedule" in Page(render_report(make_subject(whole, toy_model(9), cluster))).words


def test_what_files_say_cannot_become_markup(tmp_path):
    plan, cluster = toy_plan()
    evil = "</script><img src=x onerror=alert(1)><!--\u2028"
    plan = replace(plan, model=replace(plan.model, name=evil), decisions={**plan.decisions, "note": evil})
    cluster = replace(cluster, name=evil, hosts=(replace(cluster.hosts[0], name=evil),))
    directory = write_toy_run(tmp_path / "run", plan, cluster)
    (directory / "environment.json").write_text(json.dumps({"host": evil, evil: "x"}))
    source = render_report(make_subject(plan, toy_model(9), cluster, read_run(directory)))
    page = Page(source)
    assert "<img" not in source and not any(tag == "img" for tag, _, _ in page.elements)
    assert html.escape(evil, quote=True) in source
    assert page.data(source)["links"]["hosts"] == [evil]


def test_losses_that_are_not_numbers_are_embedded_as_null(tmp_path):
    plan, cluster = toy_plan()
    directory = write_toy_run(tmp_path / "run", plan, cluster)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "loss": Infinity, "step_s": 1.0}\n{"step": 22, "loss": NaN, "step_s": 1.0}\n')
    source = render_report(make_subject(plan, toy_model(9), cluster, read_run(directory)))
    assert Page(source).data(source)["training"]["loss"][-2:] == [None, None]


def test_a_plan_that_has_not_run_is_reported_alone():
    source = render_report(toy_subject())
    page = Page(source)
    assert "The plan has not run" in page.words and "measured" not in page.words
    assert "training" not in page.data(source) and 'id="training"' not in source


def test_a_run_without_trace_has_no_measured_timeline(tmp_path):
    plan, cluster = toy_plan()
    directory = write_toy_run(tmp_path / "run", plan, cluster, traced=False)
    source = render_report(make_subject(plan, toy_model(9), cluster, read_run(directory)))
    assert "The run left no trace" in Page(source).words and 'id="training"' in source


def test_one_device_has_no_links():
    source = render_report(toy_subject(stages=1, microbatches=1))
    assert "no link carries anything" in Page(source).words and "links" not in Page(source).data(source)


def test_a_prediction_that_no_longer_holds_is_said_so():
    plan, cluster = toy_plan()
    old = replace(plan, prediction=replace(plan.prediction, step_s=plan.prediction.step_s * 2))
    words = Page(render_report(make_subject(old, toy_model(9), cluster))).words
    assert f"The plan predicts {format_seconds(old.prediction.step_s)}" in words


def test_a_plan_written_by_hand_gets_its_prediction_here():
    plan, cluster = toy_plan()
    bare = replace(plan, prediction=None, alternatives=())
    subject = make_subject(bare, toy_model(9), cluster)
    assert subject.prediction.step_s == plan.prediction.step_s
    words = Page(render_report(subject)).words
    assert bare.content_hash in words and "no lower bound" in words and "records no alternatives" in words


def biggest(tmp_path, **shape):
    plan, cluster = toy_plan(blocks=61, hosts=8, devices=8, batch=1024, **shape)
    directory = write_toy_run(tmp_path / "run", plan, cluster, blocks=61, steps=2000)
    return render_report(make_subject(plan, toy_model(61), cluster, read_run(directory)))


def test_64_devices_of_16_lanes_stay_under_two_megabytes(tmp_path):
    source = biggest(tmp_path, stages=16, replicas=(1,) * 4, microbatches=64)
    assert len(Page(source).data(source)["timeline"]["rows"]) == 16 + 64
    assert len(source.encode()) < 700_000


def test_of_very_many_devices_the_bars_show_each_lanes_extremes(tmp_path):
    plan, cluster = toy_plan(stages=2, microbatches=2, replicas=(1,) * 68, hosts=17, devices=8, batch=136)
    directory = write_toy_run(tmp_path / "run", plan, cluster)
    source = render_report(make_subject(plan, toy_model(9), cluster, read_run(directory)))
    assert "132 devices are left out" in Page(source).words and source.count('class="device"') == 4


@pytest.mark.slow
def test_64_lanes_of_256_microbatches_stay_under_two_megabytes(tmp_path):
    source = biggest(tmp_path, stages=64, microbatches=256)
    assert len(Page(source).data(source)["timeline"]["rows"]) == 128
    assert len(source.encode()) < 2_000_000


def test_the_cluster_is_the_one_named_the_runs_own_or_the_plans(tmp_path):
    plan, cluster = toy_plan()
    directory, name = write_toy_run(tmp_path / "run", plan, cluster), str(tmp_path / "cluster.json")
    save_cluster_file(cluster, name)
    assert find_cluster(plan, directory, "") == cluster == find_cluster(plan, tmp_path / "plan.json", name)
    assert find_cluster(replace(plan, cluster=name), tmp_path / "plan.json", "") == cluster
    with pytest.raises(FormatError, match=r"does not say which cluster[\s\S]*--cluster"):
        find_cluster(plan, tmp_path / "plan.json", "")
    with pytest.raises(StalePlanError, match="the cluster changed"):
        find_cluster(plan, tmp_path / "plan.json", "4xH100")


def test_a_plan_for_another_model_is_stale(tmp_path):
    from pipefit.model.registry import save_model

    plan, _ = toy_plan()
    save_model(toy_model(9), tmp_path / "right.json")
    save_model(toy_model(8), tmp_path / "wrong.json")
    assert find_model(plan, str(tmp_path / "right.json")) == toy_model(9)
    with pytest.raises(StalePlanError, match="the model changed"):
        find_model(plan, str(tmp_path / "wrong.json"))


def test_the_assets_ship_with_the_package():
    for name in (*SCRIPTS, "report.css", "template.html"):
        assert len(read_asset(name)) > 300, name
