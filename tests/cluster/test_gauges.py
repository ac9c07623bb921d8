"""A run's gauges: scraped by a real Prometheus from a Ray cluster, and named in the dashboard for Grafana."""

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from dp_ray.cluster import workers
from dp_ray.cluster.workers import exports_metrics
from dp_ray.engine.clock import PARTS, TimedStep
from dp_ray.engine.world import World
from dp_ray.messages import Report
from dp_ray.monitor.console import Progress
from dp_ray.monitor.gauges import GAUGES, values_of
from dp_ray.telemetry.times import packed_steps
from tests.support.cluster import ROOT, Run, free_port, wait_for_port

PROMETHEUS = shutil.which("prometheus")


def progressed() -> Progress:
    progress = Progress("job", steps=40, rows=400)
    progress.start([World(0), World(1)])
    progress.run(0)
    progress.advance(10, 100)
    progress.last = {"step": 9, "loss": 0.5, "right": float("nan"), "eval_loss": None, "rows": 10}
    for rank, seconds in enumerate((0.1, 0.3)):
        times = packed_steps([TimedStep(9, 5, [seconds] * len(PARTS))])
        progress.take(Report(World(rank), 9, times=times), 5)
    return progress


def test_each_gauge_has_a_value_and_each_value_a_gauge() -> None:
    found = list(values_of(progressed(), 2, True))
    assert {name for name, _, _ in found} == GAUGES.keys()
    for name, tags, _ in found:
        assert set(tags) == set(GAUGES[name][1])
    values = {(name, *tags.values()): value for name, tags, value in found}
    assert values["dp_ray_metric", "loss"] == 0.5 and ("dp_ray_metric", "right") not in values
    assert values["dp_ray_step_part_seconds", "forward"] == pytest.approx(0.2)
    assert (values["dp_ray_progress",], values["dp_ray_interruptions",]) == (0.25, 2)
    ended = {name: value for name, _, value in values_of(progressed(), 2, False)}
    assert (ended["dp_ray_running"], ended["dp_ray_workers"], ended["dp_ray_step"]) == (0, 0, 10)


def test_without_an_agent_gauges_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "MetricsExportPort": -1}])
    monkeypatch.setattr(workers, "Gauge", None)
    with workers.gauged("run", progressed(), lambda: 0):
        pass


def test_each_query_of_the_dashboard_names_a_gauge() -> None:
    text = (ROOT / "docs" / "grafana.json").read_text()
    dashboard = json.loads(text)
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [one["definition"] for one in dashboard["templating"]["list"] if "definition" in one]
    named = [re.findall(r"\bray_(\w+)\b", query) for query in queries]
    assert all(len(names) == 1 for names in named), queries
    assert {name for names in named for name in names} == GAUGES.keys()
    labels = set(re.findall(r"\{\{(\w+)\}\}", text))
    assert labels <= {"run", "metric", "part"}


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.skipif(PROMETHEUS is None, reason="needs Prometheus, Debian's package `prometheus`")
def test_prometheus_scrapes_the_gauges_of_a_run(run_in_session: Run, tmp_path: Path) -> None:
    result = run_in_session("jobs/digits.yaml", name="gauged", workers=2, epochs=1)
    assert exports_metrics()
    nodes = [node for node in ray.nodes() if node["MetricsExportPort"] > 0]
    targets = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes]
    config = {
        "scrape_configs": [{"job_name": "ray", "scrape_interval": "1s", "static_configs": [{"targets": targets}]}]
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    options = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    command = [str(PROMETHEUS), *options, f"--web.listen-address=127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for_port(port, process)
            scraped(port, 'ray_dp_ray_running{run="gauged"} == 0')
            found = {name: scraped(port, f'ray_{name}{{run="gauged"}}') for name in GAUGES}
        finally:
            process.kill()
    assert found["dp_ray_step"] == found["dp_ray_steps"] == {(): result.steps}
    assert found["dp_ray_metric"][("loss",)] == pytest.approx(result.metrics["loss"])
    assert found["dp_ray_running"] == {(): 0}
    assert found["dp_ray_step_part_seconds"][("forward",)] > 0


def scraped(port: int, query: str) -> dict[tuple[str, ...], float]:
    """The values that Prometheus has, by their tags besides the run; waits until there is one."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
        with (
            suppress(urllib.error.HTTPError),
            urllib.request.urlopen(url, timeout=10) as answer,
        ):  # it may be starting
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            if found:
                return {_tags(one["metric"]): float(one["value"][1]) for one in found}
        time.sleep(0.5)
    raise AssertionError(f"Prometheus has no {query}")


def _tags(labels: dict[str, str]) -> tuple[str, ...]:
    return tuple(labels[name] for name in ("metric", "part") if name in labels)
