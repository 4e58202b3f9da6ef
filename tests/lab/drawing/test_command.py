"""The command: a page without a network, a picture, a file for Perfetto, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.machines import MACHINES
from lightning_dsgd.cli import main
from lightning_dsgd.lab.drawing import browser, command, picture
from lightning_dsgd.lab.simulate import model
from lightning_dsgd.lab.timeline.recorder import file_of
from tests.lab.timeline.support import record
from tests.support.browser import chromium


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in ("allreduce", "wagma"):
        model.run(name, 4, MACHINES["emulated-1gbit"], 12, trace=folder / f"{name}-4")
    return folder


def test_a_page_holds_both_runs_and_fetches_nothing(runs: Path, tmp_path: Path) -> None:
    output = tmp_path / "timeline.html"
    main(["timeline", str(runs / "allreduce-4"), str(runs / "wagma-4"), "--output", str(output)])
    text = output.read_text()
    assert "<title>allreduce, 4 ranks, simulated | wagma, 4 ranks, simulated</title>" in text
    assert re.findall(r"\b(?:src|href)=|https?://|@import|url\(", text) == []
    (data,) = re.findall(r"^const DATA = (.*)$", text, re.MULTILINE)
    parsed = json.loads(data)
    assert [run["name"] for run in parsed["runs"]][1] == "wagma, 4 ranks, simulated"
    # A name cannot end the script.
    run = picture.load(runs / "wagma-4")
    text = browser.html([picture.Run("</script><b>", run.tracks)])
    assert text.count("</script>") == 1
    assert "<title>&lt;/script&gt;&lt;b&gt;</title>" in text


def test_a_name_stays_text_in_the_page(runs: Path) -> None:
    """It takes neither the place of the data or the title, nor begins a comment in the script."""
    name = "TITLE <!--<script> /*DATA*/null"
    text = browser.html([picture.Run(name, picture.load(runs / "wagma-4").tracks)])
    assert "<title>TITLE &lt;!--&lt;script&gt; /*DATA*/null</title>" in text
    (data,) = re.findall(r"^const DATA = (.*)$", text, re.MULTILINE)
    assert "<" not in data
    assert json.loads(data)["runs"][0]["name"] == name
    assert "innerHTML = describe" not in text


def test_runs_that_are_alike_are_told_apart_by_their_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("before/run", "after/run", "third"):
        record(tmp_path / name, [[[(0.5, 0.9, 1)], []], [[], []]])
    folders = [str(tmp_path / name) for name in ("before/run", "after/run", "third")]
    main(["timeline", *folders, "--output", str(tmp_path / "page.html")])
    said = capsys.readouterr().out.splitlines()
    begins = ["before/run: made, 2 ranks: a rank", "after/run: made, 2 ranks: a rank"]
    for line, begin in zip(said, [*begins, "third: made, 2 ranks: a rank"], strict=False):
        assert line.startswith(begin)
    main(["timeline", folders[0], "--output", str(tmp_path / "page.html")])
    assert capsys.readouterr().out.startswith("made, 2 ranks: a rank")


def test_a_trace_that_is_broken_is_an_error_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, [[[(0.5, 0.9, 1)], []]])
    path = file_of(tmp_path, 0)
    path.write_text(path.read_text().replace("900000,1", '900000,"<img>"'))
    with pytest.raises(SystemExit):
        main(["timeline", str(tmp_path), "--output", str(tmp_path / "page.html")])
    assert "a span of 'wait' must be 3 numbers, got" in capsys.readouterr().err


def test_a_picture_is_xml_and_cut_to_the_seconds(runs: Path, tmp_path: Path) -> None:
    output = tmp_path / "timeline.svg"
    arguments = [str(runs / "wagma-4"), "--seconds", "1:2.5", "--output", str(output)]
    command.main(arguments)
    root = ElementTree.parse(output).getroot()
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "rank 3" in texts
    assert "1.4 s" in texts
    assert "2 s" not in texts


USED = """
const said = [], box = main.getBoundingClientRect()
for (let x = 100; x < 900; x += 10) {
  const at = { clientX: x + box.left, clientY: AXIS + HEAD + 10 + box.top, bubbles: true }
  main.dispatchEvent(new PointerEvent("pointermove", at))
  said.push(tip.textContent)
}
main.dispatchEvent(new WheelEvent("wheel", { deltaY: -900, clientX: 500, clientY: 100 }))
const near = until - from
main.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }))
main.dispatchEvent(new MouseEvent("dblclick"))
const shown = { said, zoomed: near < whole, all: until - from === whole }
document.body.insertAdjacentHTML("beforeend", `<pre id="used">${JSON.stringify(shown)}</pre>`)
</script>
"""


def test_a_browser_draws_the_page_and_answers(runs: Path, tmp_path: Path) -> None:
    """Whatever stands below the script, it has drawn before: an error leaves the tables empty."""
    output = tmp_path / "timeline.html"
    command.main([str(runs / "allreduce-4"), "--output", str(output)])
    output.write_text(output.read_text().replace("</script>\n", USED))
    document = chromium(tmp_path / "profile", "--dump-dom", output.as_uri()).stdout
    assert document.count("<tr>") == 5
    assert "waits for a late rank</span>" in document
    used = re.search(r'<pre id="used">({.*})</pre>', document)
    assert used is not None
    shown = json.loads(used[1])
    assert (shown["zoomed"], shown["all"]) == (True, True)
    assert any(
        re.search(r"rank 0, step \d+waits for rank \d, which is late", s) for s in shown["said"]
    )
