"""Write docs/benchmarks.md from the JSON files of benchmarks/results: one section a question, no number by hand.

python benchmarks/write_page.py            # writes the page; a test holds that it is what the results say

A new result appears by itself, with the numbers of its rows; an entry in SECTIONS adds the command and chooses columns.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
Row = dict[str, Any]

HEAD = """# Benchmarks

All of this was measured here, none of it is a paper's. The page is written by `python benchmarks/write_page.py` from
`benchmarks/results/*.json`, which hold more than the tables: every setting, quartiles, rounds, heads and seeds. Ratios
are of medians of interleaved rounds. Where a time is over softmax's, below 1 means faster; losses stand beside gains.

No table here was measured on a GPU unless its machine says so.
"""


@dataclass(frozen=True)
class Section:
    """How one result is shown.

    Args:
        command: what makes the JSON again.
        rows: the JSON's rows -> the table's; by default every number and word of a row.
        note: a sentence under the table.
    """

    command: str
    rows: Callable[[dict[str, Any]], Iterable[Row]] | None = None
    note: str = ""


def plain(value: dict[str, Any], prefix: str = "") -> Row:
    """Numbers and words of nested dictionaries under joined names; lists, seconds and counts of rounds are left out."""
    found: Row = {}
    for key, item in value.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(item, dict) and key not in ("seconds", "times", "max_error"):
            found |= plain(item, f"{name}, ")
        elif isinstance(item, (int, float, str)):
            found[name] = item
    return found


def by_layer(result: dict[str, Any]) -> Iterable[Row]:
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in result["rows"]:
        groups.setdefault((row["size"], row["scores"]), []).append(row)
    for (size, scores), rows in groups.items():
        of = {key: [row[key] for row in rows] for key in ("support", "forward_over_softmax", "backward_over_softmax")}
        yield {
            "image, px": size,
            "scores": scores,
            "support, median": statistics.median(of["support"]),
            **{f"{p}, median": statistics.median(of[f"{p}_over_softmax"]) for p in ("forward", "backward")},
            **{f"{p}, worst layer": max(of[f"{p}_over_softmax"]) for p in ("forward", "backward")},
        }


def real_layer(result: dict[str, Any]) -> Iterable[Row]:
    for row in result["rows"]:
        real = row["scores"].startswith("DINOv2") and "over_softmax" in row
        if real and row.get("alpha") == 1.5 and row["pass"] in ("forward", "both"):
            names = {"n": "tokens", "pass": "pass", "alpha": "α", "factor": "scores ×", "support": "support"}
            ratios = row["over_softmax"]
            of = ratios if isinstance(ratios, dict) else {"AVX-512": ratios}
            yield {"dtype": row.get("dtype", "float32")} | {t: row.get(k, "–") for k, t in names.items()} | of


def last_layer(result: dict[str, Any]) -> Iterable[Row]:
    for rule in result["rules"]:
        mean = rule["layers"][-1]["mean"]
        alpha = f" {rule['alpha']}" if rule["alpha"] else ""
        names = ("same_class", "other_classes", "itself", "prefix", "support_share", "effective_tokens")
        yield {"scores": rule["scores"], "normalizer": rule["normalizer"] + alpha} | {
            name.replace("_", " "): mean[name] for name in names
        }


def probe(result: dict[str, Any]) -> Iterable[Row]:
    for row in result["rows"]:
        spread = statistics.stdev(row["miou_per_seed"])
        yield {"attention": row["attention"], "support": row["support"], "mIoU": row["miou"], "spread": spread}


def whole(result: dict[str, Any]) -> Iterable[Row]:
    return ({"image, px": row["size"], "tokens": row["tokens"]} | row["over_softmax"] for row in result["rows"])


def rows_of_scores(result: dict[str, Any]) -> Iterable[Row]:
    return ({"scores": r["scores"], "support": r["support"]} | r["times_ours"] for r in result["rows"])


def small(result: dict[str, Any]) -> Iterable[Row]:
    return (plain(row) for row in result["rows"] if row["size"] == "small")


def dropped(result: dict[str, Any]) -> Iterable[Row]:
    for name, found in result["sources"].items():
        source, _, block = name.partition(", residual and FFN ")
        if block == "dropped":
            yield {"scores": source} | {way: miou["all"] for way, miou in found.items()}


SMALL = "Shown: the small size; the base size is in the JSON."
VECA = "python benchmarks/veca_speed.py"
SECTIONS = {
    "attention_speed_cpu": Section(
        "python benchmarks/attention_speed.py --record examples/astronaut.jpg --qkv … --rounds 0.3 --out …",
        real_layer,
        "A column a kernel, its time over softmax's. Shown: q, k, v of a real layer, α = 1.5; the rest is in the JSON.",
    ),
    "attention_layers_cpu": Section(
        "python benchmarks/attention_layers.py PHOTO… --rounds 0.5 --out …",
        by_layer,
        "Time over softmax's, over all layers and photos.",
    ),
    "whole_model_cpu": Section("python benchmarks/whole_model.py PHOTO… --out …", whole, "Time over softmax's."),
    "attention_memory": Section("python benchmarks/attention_memory.py --out …"),
    "entmax_rows": Section("python benchmarks/entmax_rows.py examples/astronaut.jpg --out …", rows_of_scores),
    "calibrated_probe": Section("python benchmarks/calibrated_probe.py CAMVID --bounds 0.24 --out …", probe),
    "sparse_student": Section(
        "python benchmarks/sparse_student.py PHOTOS --out run, then "
        "python benchmarks/calibrated_probe.py camvid --adapted run --out …",
        probe,
    ),
    "diffuseness_camvid": Section(
        "selectivit analyse diffuseness camvid --model dinov2-small --photos 24 --size 364",
        last_layer,
        "The last layer, mean over heads; all layers and heads are in the JSON.",
    ),
    "veca_distilled": Section(
        "python benchmarks/veca_distilled.py --veca … --dense … --photos coco256/images/val --camvid camvid --out …"
    ),
    "veca_speed": Section(f"{VECA} --batches 1 --rounds 0.5 --out …", small, SMALL),
    "veca_speed_plain": Section(f"{VECA} --batches 1 --dtypes float32 --onednn off --rounds 0.3 --out …", small, SMALL),
    "veca_speed_batch8": Section(f"{VECA} --pixels 256 512 --batches 8 --rounds 0.2 --out …", small, SMALL),
    "veca_training": Section("python benchmarks/veca_training.py --rounds 5 --out …"),
    "scenes_segmentation": Section(
        "python benchmarks/scenes_segmentation.py --scenes 30",
        dropped,
        "Shown: the last block's residual and FFN dropped; kept, and every preset, are in the JSON.",
    ),
}


def page() -> str:
    """The whole page; results without an entry in SECTIONS come last, in the order of their names."""
    known = [name for name in SECTIONS if (RESULTS / f"{name}.json").is_file()]
    others = sorted(path.stem for path in RESULTS.glob("*.json") if path.stem not in SECTIONS)
    return HEAD + "".join(section(name) for name in [*known, *others])


def section(name: str) -> str:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    how = SECTIONS.get(name, Section(result.get("command", "")))
    rows = list(how.rows(result)) if how.rows else [plain(row) for row in found_rows(result)]
    title = name.replace("_", " ").capitalize().replace("cpu", "CPU").replace("Veca", "VECA")
    parts = [f"## {title}", question(result), conditions(result)]
    parts += [f"`{how.command}`"] if how.command else []
    parts += [table(rows)] if rows else []
    parts += [how.note] if how.note else []
    parts.append(f"[{name}.json](../benchmarks/results/{name}.json)")
    return "\n" + "\n\n".join(part for part in parts if part) + "\n"


def found_rows(result: dict[str, Any]) -> list[Row]:
    """The first list of dictionaries of a result."""
    lists = (value for value in result.values() if isinstance(value, list))
    return next((value for value in lists if value and isinstance(value[0], dict)), [])


def question(result: dict[str, Any]) -> str:
    asked = result.get("question", "")
    first = asked[:1] if asked[1:2].isupper() else asked[:1].upper()  # mIoU stays mIoU
    return first + asked[1:] + "." * (not asked.endswith((".", "?"))) if asked else ""


def conditions(result: dict[str, Any]) -> str:
    """The machine and the settings that hold for all rows, in one line."""
    machine = result.get("machine", {})
    named = {k: v for k, v in result.items() if k not in ("question", "command", "kind")}
    settings = {k: v for k, v in (result.get("settings", {}) | named).items() if isinstance(v, (str, int, float))}
    parts = []
    if machine:
        card = machine.get("gpu") or machine.get("device")
        cores = f"{machine.get('threads', '?')} threads on {machine.get('cores', '?')} cores"
        where = [card, machine.get("processor"), cores, machine.get("cpu_capability")]
        where += [f"torch {machine.get('torch', '?')}", machine.get("date")]
        parts.append("Machine: " + ", ".join(str(part) for part in where if part) + ".")
    if settings:
        parts.append("Settings: " + ", ".join(f"{k.replace('_', ' ')} {cell(v)}" for k, v in settings.items()) + ".")
    return " ".join(parts)


def cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return re.sub(r"\.0$", "", f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}")
    return str(value).replace("|", "\\|")


def table(rows: list[Row]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    columns = [c for c in columns if any(row.get(c, "") != "" for row in rows)]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(c, "–")) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
