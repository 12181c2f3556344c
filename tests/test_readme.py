"""The README's example runs as it stands, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert int(capsys.readouterr().out.split()[0]) < 32 * 3 * 32 * 32


@pytest.mark.parametrize("page", [README, *sorted((README.parent / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
