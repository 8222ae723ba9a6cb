"""A custom logger that draws a curve for each metric on an HTML page, which reloads itself in the browser.

Run `legato fit digits.yaml 'loggers={page: {_target_: html_logger.HTMLLogger}}'`.
"""

import html
import json

from legato.loggers import Logger

PAGE = """<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="5"><title>{title}</title>
<style>body {{font: 14px sans-serif; margin: 2em}} figure {{display: inline-block; margin: 1em}}
polyline {{fill: none; stroke: #3366cc; stroke-width: 1.5}}</style><h1>{title}</h1>{charts}"""
CHART = """<figure><figcaption>{name}: <b>{newest:.4g}</b> at step {step}</figcaption>
<svg width="320" height="160"><polyline points="{points}"/></svg></figure>"""


class HTMLLogger(Logger):
    """Writes the page, `curves.html`, and its data, `curves.jsonl`, to the run directory."""

    def open(self, run_dir, resume_step):
        """Keep the points up to `resume_step`, which a resumed run may log again."""
        super().open(run_dir, resume_step)
        self.data, self.page = run_dir / "curves.jsonl", run_dir / "curves.html"
        points = [json.loads(line) for line in self.data.read_text().splitlines()] if self.data.exists() else []
        self.points = [point for point in points if resume_step is not None and point["step"] <= resume_step]
        self.seen = {(point["name"], point["step"]) for point in self.points}
        self.data.write_text("".join(f"{json.dumps(point)}\n" for point in self.points))

    def log_metrics(self, metrics, step):
        """Append the values of a logging point. There may be several calls for the same step."""
        new = [{"name": name, "step": step, "value": value} for name, value in metrics.items()]
        new = [point for point in new if (point["name"], step) not in self.seen]
        self.seen.update((name, step) for name in metrics)
        self.points += new
        with self.data.open("a") as file:
            file.writelines(f"{json.dumps(point)}\n" for point in new)

    def save(self):
        """Draw the page."""
        curves = {}
        for point in self.points:
            curves.setdefault(point["name"], []).append((point["step"], point["value"]))
        charts = "".join(draw(name, curve) for name, curve in sorted(curves.items()))
        self.page.write_text(PAGE.format(title=html.escape(f"{self.name}, version {self.version}"), charts=charts))

    def finalize(self, status):
        """Draw the page for the last time."""
        self.save()


def draw(name, curve):
    """Return a chart of a curve, which is a list of (step, value) pairs in order."""
    steps, values = zip(*curve, strict=True)
    width, height = max(steps[-1] - steps[0], 1), max(values) - min(values) or 1.0
    places = [(320 * (s - steps[0]) / width, 150 - 140 * (v - min(values)) / height) for s, v in curve]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return CHART.format(name=html.escape(name), newest=values[-1], step=steps[-1], points=points)
