"""The README's section about GPUs is what tests/gpu/table.py draws from the committed results, and draws them truly."""

import json
from pathlib import Path
from typing import Any

import pytest
from gpu import table

ROOT = Path(__file__).parents[1]
RESULT: dict[str, Any] = {
    "card": {"name": "Fake 9000", "driver": "1.2"},
    "torch": "2.11.0+cu130",
    "mdps": "0.1.0",
    "commit": "abcdef",
    "date": "2026-11-28 12:00 UTC",
    "passed": True,
    "stages": {
        "pairs": {
            "ok": True,
            "rows": [
                {
                    "name": "pairs", "ok": None, "N": 10_000, "forward_ms": 0.0412, "backward_ms": 0.1634,
                    "forward_share": 0.777, "backward_share": 0.61, "call_us": 50.0, "both_us": 250.0,
                },
                {"name": "pairs", "ok": None, "N": 300_000, "note": "would take too long"},
            ],
        },
        "operators": {
            "ok": True,
            "rows": [
                {"name": "log_i0", "ok": True, "B": 32, "N": 50, "forward_us": 2.345, "backward_us": 3.456, "call_us": 10.0},
                {"name": "resample, residual", "ok": True, "B": 1, "N": 1_000_000, "forward_us": 123.4, "call_us": 130.0},
            ],
        },
        "torch": {
            "ok": True,
            "rows": [
                {"name": "log_i0", "ok": None, "B": 32, "N": 50, "call_us": 71.0},
                {"name": "mixture_log_prob", "ok": None, "B": 1, "N": 10_000, "call_us": 5000.0, "both_us": 50_000.0},
                {"name": "two_filter_log_prob", "ok": None, "B": 1, "N": 10_000, "call_us": 1.0, "both_us": 1.0},
            ],
        },
        "compiled": {"ok": True, "rows": [{"name": "compiled", "B": 1, "N": 10_000, "call_us": 1050.0, "both_us": 1e4}]},
        "keops": {"ok": True, "rows": [{"name": "keops", "ok": None, "note": "pykeops is not installed"}]},
        "filter": {"ok": True, "rows": [{"name": "filter step", "ok": True, "device_us": 41.26, "call_us": 512.3}]},
        "training": {"ok": True, "rows": [
            {"name": "everything, 1 at once", "ok": True, "device_us": 5432.1, "call_us": 45678.9},
            {"name": "whole training, 1 at once", "ok": True, "minutes": 3.456, "target_minutes": 10.0},
        ]},
    },
}  # fmt: skip


def test_the_readme_has_what_the_results_say():
    readme = (ROOT / "README.md").read_text()
    assert readme == table.replaced(readme, table.section(ROOT / "tests/gpu/results"))


def test_without_a_result_there_is_no_number(tmp_path):
    text = table.section(tmp_path)
    assert text == table.NOTHING and "`bash tests/gpu/check.sh`" in text
    assert (ROOT / "tests/gpu/check.sh").exists()


def test_a_result_is_drawn(tmp_path):
    (tmp_path / "Fake_9000.json").write_text(json.dumps(RESULT))
    text = table.section(tmp_path)
    assert "**Fake 9000**, driver 1.2, torch 2.11.0+cu130, mdps 0.1.0 (abcdef), 2026-11-28: all checks" in text
    assert "| 10,000 | 0.041 | 0.78 | 0.16 | 0.61 | 100 / 200 | 21.0 / 40.0 |  |\n" in text
    assert "300,000" not in text
    assert "| `log_i0` | 2.35 | 3.46 | 7.10 |  |  |  |\n" in text
    assert "| `resample`, residual |  |  |  | 123 |  |  |\n" in text
    assert "| filter step | 41.3 | 512 |\n" in text
    assert "| everything, 1 at once | 5.43 | 45.7 |\n" in text
    assert "\nWhole training, 1 at once: 3.46 minutes of steps in graphs.\n" in text


def test_a_failure_is_said(tmp_path):
    stages = {**RESULT["stages"], "errors": {"ok": False, "rows": [], "error": "stopped after 60 s"}}
    (tmp_path / "Fake_9000.json").write_text(json.dumps({**RESULT, "passed": False, "stages": stages}))
    text = table.section(tmp_path)
    assert "2026-11-28: errors failed or did not end." in text and "passed" not in text


def test_the_readme_is_written(tmp_path, capsys):
    (tmp_path / "README.md").write_text(f"before\n{table.BEGIN}old\n{table.END}after\n")
    (tmp_path / "results").mkdir()
    assert table.main(tmp_path / "results", tmp_path / "README.md") == 0
    assert (tmp_path / "README.md").read_text() == f"before\n{table.BEGIN}{table.NOTHING}{table.END}after\n"
    assert capsys.readouterr().out == table.NOTHING
    with pytest.raises(ValueError, match="README: expected the marks"):
        table.replaced("no marks\n", "")
