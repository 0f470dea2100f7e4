"""The page itself: gradio's components and which answer fills which of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from selectivit.demo import figures
from selectivit.demo.answers import MIDDLE, Answers, place_of
from selectivit.demo.attending import Attend
from selectivit.demo.cores import num_cores
from selectivit.demo.photo import open_photo
from selectivit.demo.words import default_labels
from selectivit.openvocab.presets import PRESETS
from selectivit.ops.normalizers import NORMALIZERS

STATIC = Path(__file__).parent / "static"
SIZES = [224, 336, 448, 672]
SCORES = ["qk", "qq", "kk", "vv", "qq+kk", "qq+kk+vv", "v"]
OWN, ALPHA, AUTO = "the preset's own", "entmax, α below", "entmax, α by photo and head"
WAITS: dict[str, Any] = {
    "concurrency_id": "model",
    "concurrency_limit": 1,
    "api_visibility": "private",
    "show_progress": "minimal",
}
"""Answers are computed one after the other: two at once would be no faster on the same cores, and out of order."""

LEAD = """<div class="sv-lead"><h1>selectivit</h1><p>Dense features of Vision Transformers: sparse attention in place of
softmax, segmentation by words, and a budget of cores. Photos stay on the machine that serves this page.</p></div>"""


@dataclass(frozen=True)
class Start:
    """What the page begins with.

    Args:
        model: named model or folder whose attention is swapped.
        clip: of the tab Segment; empty where there is none.
        veca: of the tab Budget.
        size: of the photo's shorter side in the tabs Features and Budget, pixels.
        layers_size: the same in the tab Compare layers.
    """

    model: str = "dinov2-small"
    clip: str = ""
    veca: str = "veca-tiny"
    size: int = 336
    layers_size: int = 224


@dataclass(frozen=True)
class Tab:
    """A tab: what it is asked with, and what its answer fills."""

    name: str
    answer: Callable[..., Any]
    inputs: Sequence[Any]
    outputs: Sequence[Any]


def build(answers: Answers, start: Start) -> gr.Blocks:
    """Lay the page out.

    Args:
        answers: to what is asked.
        start: what it begins with.

    Returns:
        The page, to be launched.
    """
    first, largest = answers.offered_photo(0), num_cores(answers.shelf, start.veca)
    with gr.Blocks(title="selectivit", analytics_enabled=False, delete_cache=(600, 1800)) as page:
        photo, place = gr.State(first, time_to_live=7200), gr.State(MIDDLE, time_to_live=7200)
        active = gr.State("Features")
        gr.HTML(LEAD)
        with gr.Row():
            upload = gr.File(
                label=f"Your photo, {answers.limits.megabytes:g} MB at most",
                file_types=["image"],
                height=140,
                scale=1,
                elem_id="sv-upload",
            )
            with gr.Column(scale=1):
                offered = gr.Dropdown(
                    [(name, i) for i, name in enumerate(answers.offered())], value=0, label="Or one of these"
                )
                said = gr.HTML(figures.about_photo(first), elem_id="sv-said")
        with gr.Tabs():
            tabs = [
                _features(answers, start, photo, place),
                _segment(answers, start, photo),
                _budget(answers, start, photo, largest),
                _layers(answers, start, photo),
            ]
        everything = [active, *(i for tab, _ in tabs for i in tab.inputs)]
        pictures = [output for tab, _ in tabs for output in tab.outputs]

        def answer(name: str, *values: Any) -> list[Any]:
            found: list[Any] = []
            for tab, _ in tabs:
                mine, values = values[: len(tab.inputs)], values[len(tab.inputs) :]
                if tab.name != name:
                    found += [gr.skip()] * len(tab.outputs)
                    continue
                got = tab.answer(*mine)
                found += [got] if len(tab.outputs) == 1 else got
            return found

        takes: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        chosen = [
            upload.upload(
                lambda p, file: (*answers.take(p, lambda: open_photo(file, answers.limits)), None),
                [photo, upload],
                [photo, said, upload],  # emptied, so that the next photo can be dropped there
                **takes,
            ),
            offered.input(
                lambda p, i: answers.take(p, lambda: answers.offered_photo(i)), [photo, offered], [photo, said], **takes
            ),
        ]
        for event in chosen:
            event.then(answer, everything, pictures, **WAITS)
        for tab, item in tabs:
            item.select(lambda name=tab.name: name, None, active, api_visibility="private").then(
                answer, everything, pictures, **WAITS
            )
        page.load(answer, everything, pictures, **WAITS)
    return page


def _features(answers: Answers, start: Start, photo: Any, place: Any) -> tuple[Tab, gr.Tab]:
    with gr.Tab("Features") as item, gr.Row():
        with gr.Column(scale=1, min_width=260):
            model, size = _model(answers, start.model, "Model: a name or a folder"), _size(start.size)
            rule = _attend()
        with gr.Column(scale=3, min_width=320):
            maps = gr.HTML(elem_id="sv-maps", js_on_load=_script("wipe"), apply_default_css=False)
            with gr.Row():
                with gr.Column(scale=1, min_width=240):
                    pick = gr.HTML(elem_id="sv-picker", js_on_load=_script("pick"), apply_default_css=False)
                with gr.Column(scale=2, min_width=300):
                    seen = gr.HTML(elem_id="sv-attention", apply_default_css=False)

    def ask(photo: Any, place: Any, model: str, size: int, *rule: Any) -> Any:
        return answers.features(photo, place, model, size, Attend(*rule))

    def picked(event: gr.EventData, photo: Any, model: str, size: int, *rule: Any) -> Any:
        there = place_of(*(event._data.get(key) for key in ("row", "column", "rows", "columns")))
        return there, answers.attention(photo, there, model, size, Attend(*rule))

    inputs, outputs = [photo, place, model, size, *rule], [maps, pick, seen]
    _on_change([model, size, *rule], ask, inputs, outputs)
    pick.pick(picked, [photo, model, size, *rule], [place, seen], trigger_mode="always_last", **WAITS)
    return Tab("Features", ask, inputs, outputs), item


def _segment(answers: Answers, start: Start, photo: Any) -> tuple[Tab, gr.Tab]:
    with gr.Tab("Segment") as item, gr.Row():
        with gr.Column(scale=1, min_width=260):
            clip = _model(answers, start.clip, "CLIP: a name or a folder")
            labels = gr.Textbox(
                default_labels(start.clip),
                label="Labels, commas between; synonyms with |",
                lines=3,
                max_lines=6,
                elem_id="sv-labels",
            )
            go = gr.Button("Segment", variant="primary")
            preset = gr.Dropdown(list(PRESETS), value="selectivit", label="Preset: how the CLIP is read")
            source = gr.Radio([OWN, ALPHA, AUTO], value=OWN, label="Attention")
            alpha = gr.Slider(1, 2, value=1.2, step=0.05, label="α of entmax")
        with gr.Column(scale=3, min_width=320):
            shown = gr.HTML(elem_id="sv-segments", js_on_load=_script("hover"), apply_default_css=False)

    def ask(photo: Any, clip: str, labels: str, preset: str, source: str, alpha: float) -> Any:
        return answers.segmentation(photo, clip or "", labels, preset, {ALPHA: alpha, AUTO: "auto"}.get(source))

    inputs = [photo, clip, labels, preset, source, alpha]
    _on_change([clip, preset, source, alpha], ask, inputs, [shown])
    gr.on([go.click, labels.submit], ask, inputs, [shown], **WAITS)
    return Tab("Segment", ask, inputs, [shown]), item


def _budget(answers: Answers, start: Start, photo: Any, largest: int) -> tuple[Tab, gr.Tab]:
    with gr.Tab("Budget") as item, gr.Row():
        with gr.Column(scale=1, min_width=260):
            model, size = (
                _model(answers, start.veca, "Core-periphery model (VECA): a name or a folder"),
                _size(start.size),
            )
            cores = gr.Slider(1, largest, value=min(8, largest), step=1, label="Cores in use")
        with gr.Column(scale=3, min_width=320):
            shown = gr.HTML(elem_id="sv-budget", apply_default_css=False)

    def ask(photo: Any, model: str, size: int, cores: float) -> Any:
        return answers.budget(photo, model, size, int(cores))

    def refit(name: str, cores: float) -> Any:
        try:
            there = num_cores(answers.shelf, name)
        except (ValueError, OSError, ImportError):  # the answer says what is wrong with the name
            return gr.skip()
        return gr.Slider(maximum=there, value=min(cores, there))

    inputs = [photo, model, size, cores]
    _on_change([model, size, cores], ask, inputs, [shown])
    model.change(refit, [model, cores], cores, **WAITS)
    return Tab("Budget", ask, inputs, [shown]), item


def _layers(answers: Answers, start: Start, photo: Any) -> tuple[Tab, gr.Tab]:
    with gr.Tab("Compare layers") as item, gr.Row():
        with gr.Column(scale=1, min_width=260):
            model, size = _model(answers, start.model, "Model: a name or a folder"), _size(start.layers_size)
            rule = _attend()
        with gr.Column(scale=3, min_width=320):
            shown = gr.HTML(elem_id="sv-layers", apply_default_css=False)

    def ask(photo: Any, model: str, size: int, *rule: Any) -> Any:
        return answers.layers(photo, model, size, Attend(*rule))

    inputs = [photo, model, size, *rule]
    _on_change([model, size, *rule], ask, inputs, [shown])
    return Tab("Compare layers", ask, inputs, [shown]), item


def _on_change(controls: Sequence[Any], ask: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Ask anew when a control is moved; while an answer is awaited only the last move counts."""
    gr.on([control.input for control in controls], ask, inputs, outputs, trigger_mode="always_last", **WAITS)


def _model(answers: Answers, value: str, label: str) -> gr.Dropdown:
    choices: list[Any] = list(dict.fromkeys([*answers.shelf.offered, *([value] if value else [])]))
    return gr.Dropdown(choices, value=value or None, label=label, allow_custom_value=answers.shelf.any_name)


def _size(value: int) -> gr.Dropdown:
    return gr.Dropdown(sorted({*SIZES, value}), value=value, label="Photo's shorter side, pixels")


def _attend() -> list[Any]:
    default = Attend()
    return [
        gr.Dropdown(list(NORMALIZERS), value=default.normalizer, label="Normalizer in softmax's place"),
        gr.Slider(1, 2, value=default.alpha, step=0.05, label="α of entmax"),
        gr.Dropdown(SCORES, value=default.scores, label="Scores: what is compared"),
        gr.Slider(1, 12, value=default.last, step=1, label="How many of the last layers"),
    ]


def _script(name: str) -> str:
    return (STATIC / f"{name}.js").read_text(encoding="utf-8")
