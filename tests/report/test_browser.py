"""The page in a browser: no errors, no network, and the figures that the tool prints."""

import json
import os
import re

import pytest

from tests.helpers.browser import Page, find_chromium
from tests.report.runs import make_learner, make_run
from tools.expert_load import main

CHROMIUM = find_chromium()
# CI installs the browser and says so; elsewhere there may be none.
REQUIRED = os.environ.get("MOE_ASYNC_BROWSER") == "required"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None and not REQUIRED, reason="no Chromium here; install one (Debian: apt-get install chromium)"
    ),
]
IMAGE = "document.getElementById('{}').toDataURL()"
CELLS = "[...document.querySelectorAll('#{} tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
MOVE = "(() => {{ const it = document.getElementById('{}'); it.value = {}; it.dispatchEvent(new Event('{}')); }})()"


@pytest.fixture(scope="module")
def page():
    assert CHROMIUM is not None, "MOE_ASYNC_BROWSER=required, but there is no Chromium"
    made = Page(CHROMIUM)
    yield made
    made.close()


@pytest.fixture
def opened(page, tmp_path, capsys):
    """Opens the report of a run, and sees at the end that nothing went wrong in it."""
    page.problems.clear()
    page.requests.clear()

    def open_report(run):
        assert main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 0
        capsys.readouterr()
        page.open((tmp_path / "report.html").as_uri())
        return page

    yield open_report
    assert page.problems == []
    assert {address.partition(":")[0] for address in page.requests} <= {"file", "data"}


def printed_rows(run, capsys):
    """The table of ``summary``, as rows of cells."""
    main(["summary", str(run)])
    lines = capsys.readouterr().out.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("layer "))
    end = lines.index("", start)
    return [re.split(r"\s{2,}", line.strip()) for line in lines[start:end]]


def test_figures_are_those_of_the_summary(opened, tmp_path, capsys):
    make_learner(tmp_path / "run")
    page = opened(tmp_path / "run")
    shown = page.value(CELLS.format("summary"))
    printed = printed_rows(tmp_path / "run", capsys)
    assert shown == printed and len(shown) == 4
    verdicts = page.value("[...document.querySelectorAll('#verdicts li')].map((one) => one.textContent)")
    main(["summary", str(tmp_path / "run")])
    text = capsys.readouterr().out
    assert verdicts and all(line in text for line in verdicts)


def test_the_slider_moves_the_picture(opened, tmp_path):
    make_learner(tmp_path / "run")
    page = opened(tmp_path / "run")
    pictures = {}
    for piece in (29, 3, 12, 3):
        page.value(MOVE.format("piece", piece, "input"))
        assert page.value("document.getElementById('piece-steps').textContent") == str(piece + 1)
        picture = page.value(IMAGE.format("layers")), page.value("document.getElementById('structure').innerHTML")
        assert pictures.setdefault(piece, picture) == picture
    assert len(set(pictures.values())) == 3


def test_a_layer_is_chosen(opened, tmp_path):
    make_learner(tmp_path / "run")
    page = opened(tmp_path / "run")
    ids = ("over-time", "domains", "pairs", "ranks")
    before = [page.value(IMAGE.format(canvas)) for canvas in ids]
    page.value(MOVE.format("layer", 2, "change"))
    after = [page.value(IMAGE.format(canvas)) for canvas in ids]
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_learners_and_their_staleness(opened, tmp_path):
    make_run(tmp_path / "run")
    page = opened(tmp_path / "run")
    first = page.value(CELLS.format("summary"))
    page.value(MOVE.format("learner", 1, "change"))
    assert page.value(CELLS.format("summary")) != first
    table = page.value(CELLS.format("staleness"))
    assert table[0][:4] == ["learner", "updates", "clock gap, mean", "clock gap, most"]
    assert table[1] == ["learner 0", "6", "1.00", "2", "0.00", "0", "5.00", "5"]
    assert page.value("document.querySelectorAll('#staleness-charts svg').length") == 3
    assert page.value("document.querySelectorAll('#losses svg').length") == 4


def test_light_and_dark(opened, page, tmp_path):
    make_learner(tmp_path / "run")
    seen = {}
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        opened(tmp_path / "run")
        assert page.value("document.documentElement.dataset.theme") == scheme
        seen[scheme] = page.value("getComputedStyle(document.body).backgroundColor"), page.value(IMAGE.format("layers"))
    page.value("document.getElementById('theme').click()")
    back = page.value("getComputedStyle(document.body).backgroundColor"), page.value(IMAGE.format("layers"))
    assert back == seen["light"] and seen["light"][1] != seen["dark"][1]


@pytest.mark.parametrize(
    "options",
    [{"domains": ("(none)",)}, {"ranks": 0}, {"steps": 1}, {"experts": 80}, {"layers": 1}, {"zeros": 3}],
)
def test_what_is_not_known_is_left_out(opened, tmp_path, options):
    make_learner(tmp_path / "run", **options)
    for path in ("recipe.yaml", "metrics.jsonl"):
        (tmp_path / "run" / path).unlink()
    page = opened(tmp_path / "run")
    hidden = {"domains": "domains", "ranks": "ranks", "experts": "pairs"}
    for option, canvas in hidden.items():
        display = page.value(f"document.getElementById('{canvas}').style.display")
        assert (display == "none") == (option in options), canvas
    assert "not known" in page.value("document.getElementById('rank-cost').textContent")


def test_ticks_tell_values_apart(opened, tmp_path):
    make_learner(tmp_path / "run")
    lines = [{"step": 10_000 + 7 * number, "lm_loss": 3.0 + number / 1e4} for number in range(20)]
    text = "".join(json.dumps(line | {"tokens_per_second": 20_010.0 + line["step"] % 5}) + "\n" for line in lines)
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    page = opened(tmp_path / "run")
    charts = page.value(
        "[...document.querySelectorAll('#losses svg')].map((one) => [...one.querySelectorAll('text.faint')]"
        ".map((text) => text.textContent))"
    )
    assert len(charts) == 2
    for labels in charts:
        numbers = [label for label in labels if label != "step"]
        assert len(set(numbers)) == len(numbers) >= 6, labels


def test_more_experts_than_the_screen_has_points(opened, tmp_path):
    make_learner(tmp_path / "run", layers=1, experts=2048, steps=3)
    page = opened(tmp_path / "run")
    hover = (
        "(() => {{ const one = document.getElementById('layers'), box = one.getBoundingClientRect(); one.dispatchEvent("
        "new MouseEvent('mousemove', {{ clientX: box.left + box.width - {}, clientY: box.top + 8 }}));"
        "return document.getElementById('tip').textContent; }})()"
    )
    told = [page.value(hover.format(back)) for back in range(2, 300, 2)]
    seen = [int(re.search(r"expert (\d+)", text)[1]) for text in told if text]
    assert max(seen) >= 2040 and "the busiest of" in next(text for text in told if text)
