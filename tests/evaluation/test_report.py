"""The report: escaped, self-contained, complete."""

import html.parser
import io
import json
import re

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from rich.console import Console

from trl_ext.evaluation.generate_eval import Scored, compare_all
from trl_ext.evaluation.report import comparison_table, curves_png, html_report, write_report

EVIL = "<script>alert('x')</script><img src=https://evil.example/x.png>"
METRICS = [
    {"step": 1, "rewards/tone/mean": 0.2, "rewards/answer/mean": None, "kl": 0.0},
    {"step": 2, "rewards/tone/mean": 0.4, "rewards/answer/mean": 0.5, "kl": 0.1},
    {"step": 2, "train_runtime": 3.0},
]


def scored(value, text="fine"):
    return Scored([f"prompt {EVIL}", "q"], [[text], ["ok"]], {"tone": np.array([[value], [value + 0.1]])})


@pytest.fixture
def parts():
    before, after = scored(0.1), scored(0.5, EVIL)
    return compare_all(before, after, {"tone": (-1.0, 1.0)}), before, after


class Tags(html.parser.HTMLParser):
    """Collects start tags and their attributes."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]


def test_text_from_outside_is_escaped_and_nothing_is_fetched(parts):
    page = html_report(f"Title {EVIL}", *parts, curves_png(METRICS), {"evil": EVIL})
    parser = Tags()
    parser.feed(page)
    assert "script" not in parser.tags and "link" not in parser.tags
    assert [(tag, value[:22]) for tag, name, value in parser.attributes if name in ("src", "href")] == [
        ("img", "data:image/png;base64,")
    ]
    assert not re.search(r"url\(|@import", page)
    assert page.count("&lt;script&gt;") >= 4  # title, prompt, completion, config


def test_curves_are_a_png_even_without_metrics():
    for metrics in (METRICS, []):
        assert curves_png(metrics).startswith(b"\x89PNG")


def test_table_shows_means_spread_and_interval(parts):
    console = Console(width=120, file=io.StringIO())
    console.print(comparison_table(parts[0]))
    text = console.file.getvalue()
    assert "0.15 ± 0.07" in text and "0.55 ± 0.07" in text and "+0.40 .. +0.40" in text and "overall" in text


def test_write_report_leaves_a_complete_folder(tmp_path, parts):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
    report = write_report(tmp_path, "T", *parts, {"seed": 1})
    assert report == tmp_path / "report.html"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "curves.png", "heldout.jsonl", "metrics.jsonl", "report.html", "results.json"
    ]  # fmt: skip
    assert json.loads((tmp_path / "results.json").read_text())["tone"]["difference"] == pytest.approx(0.4)
    lines = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    assert [(line["when"], line["completion"]) for line in lines] == [
        ("before", "fine"), ("before", "ok"), ("after", EVIL), ("after", "ok")
    ]  # fmt: skip
