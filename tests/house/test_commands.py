"""Commands in README and docs: ours are parsed, scripts exist and know their options, the five-minute start runs."""

from __future__ import annotations

import pytest
from documents import PAGES, ROOT, commands

from selectivit.cli.main import COMMANDS, _parser, main
from selectivit.models.names import EMBEDDED

OFFLINE = {"doctor", "models", "scenes"}


def of(program: str) -> list[tuple[str, list[str]]]:
    return [(path.name, words) for path in PAGES for words in commands(path.read_text()) if words[0] == program]


def page_name(value: object) -> str:
    return value if isinstance(value, str) else ""


def launched() -> list[tuple[str, list[str]]]:
    """What torchrun starts, from the program's name on."""
    pairs = [(name, words) for name, words in of("torchrun") if "selectivit" in words]
    return [(name, words[words.index("selectivit") :]) for name, words in pairs]


@pytest.mark.parametrize(("page", "words"), of("selectivit") + launched(), ids=page_name)
def test_the_command_line_takes_what_the_pages_show(page, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    try:
        options = _parser().parse_args(words[1:])
    except SystemExit as stop:
        assert not stop.code, f"{page}: `{' '.join(words)}` is refused"
    else:
        assert options.command in COMMANDS


def test_a_wrong_option_would_be_seen():
    with pytest.raises(SystemExit) as stop:
        _parser().parse_args(["features", "photos/", "--sise", "448"])
    assert stop.value.code


@pytest.mark.parametrize(("page", "words"), of("python"), ids=page_name)
def test_scripts_exist_and_know_the_options(page, words):
    if words[1].startswith("-"):
        return
    script = ROOT / words[1]
    assert script.is_file(), f"{page}: `{' '.join(words)}` starts what is not there"
    code = script.read_text()
    for option in (word for word in words if word.startswith("--")):
        declared = option in code or option[2:].replace("-", "_") in code
        assert declared, f"{page}: {script.name} has no {option}"


def test_the_start_runs_offline(monkeypatch, tmp_path, capsys):
    """README and the first page: each command that names an embedded model, or needs none, does its work."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shown = [words for path in ("README.md", "docs/index.md") for words in commands((ROOT / path).read_text())]
    chosen = [words for words in shown if words[0] == "selectivit"]
    chosen = [words for words in chosen if words[1] in OFFLINE or EMBEDDED.keys() & set(words)]
    assert {words[1] for words in chosen} >= {"doctor", "features", "scenes", "segment"}
    for words in chosen:
        assert main(words[1:]) == 0, f"`{' '.join(words)}`: {capsys.readouterr().err}"
        if "--out" in words:
            assert any((tmp_path / words[words.index("--out") + 1]).iterdir())
