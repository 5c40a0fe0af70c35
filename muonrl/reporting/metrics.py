"""metrics.jsonl: one JSON object per update, durable line by line, readable after a crash."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from muonrl.algorithms.ema import ema, ema_step
from muonrl.errors import MuonrlError
from muonrl.reporting.files import clear_faults, read_text, write_atomic

METRICS = "metrics.jsonl"
Record: TypeAlias = dict[str, Any]


class MetricsWriter:
    """Appends records to a metrics file; each line is on the disk when :meth:`write` returns.

    ``keep_through`` is the last update that stays when a run is taken up again: later records belong to work that will
    be done anew. A line torn by a crash is cut off. Raises MuonrlError where the file cannot be written.
    """

    def __init__(self, path: Path, *, keep_through: int | None = None) -> None:
        self.path = path
        self.records = read_metrics(path) if path.exists() else []
        if keep_through is not None:
            self.records = [r for r in self.records if r.get("update", 0) <= keep_through]
        self._ema: float | None = None
        for record in self.records:
            self._ema = record.get("success_ema", self._ema)
        if path.exists():
            write_atomic(path, "".join(_line(r) for r in self.records))
        with clear_faults(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> Record:
        """Append one record and return it as written: plain JSON types, non-finite numbers as null, the EMA added.

        ``success_ema`` continues the series in the file. A line that the disk took only in part is cut off again.
        """
        row: Record = _plain(record)
        if row.get("success") is not None and row.get("success_ema") is None:
            row["success_ema"] = ema_step(self._ema, row["success"])
        with clear_faults(self.path):
            end = self._file.seek(0, os.SEEK_END)
            try:
                data = _line(row).encode()
                while data:
                    data = data[self._file.write(data) :]
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(end)
                raise
        self.records.append(row)
        self._ema = row.get("success_ema", self._ema)
        return row

    def close(self) -> None:
        """Close the file; further writes are errors."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[Record]:
    """All records of a metrics file, or of the metrics file in a run folder.

    A last line without its end was torn by a crash and is left out. Raises MuonrlError, one line, for a missing file and
    for any other line that is no JSON object.
    """
    path = path / METRICS if path.is_dir() else path
    text = read_text(path)
    whole, _, _torn = text.rpartition("\n")
    records: list[Record] = []
    for number, line in enumerate(whole.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as fault:
            raise MuonrlError(f"{path}:{number}: not a JSON line: {fault.msg}") from fault
        if not isinstance(row, dict):
            raise MuonrlError(f"{path}:{number}: expected a JSON object, found {type(row).__name__}")
        records.append(row)
    return records


def series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """``(updates, values)`` of one quantity, without the records that lack it; ``a.b.c`` looks into nested objects."""
    updates: list[int] = []
    values: list[float] = []
    for position, record in enumerate(records, 1):
        value: Any = record
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, (int, float)) and math.isfinite(value):
            updates.append(int(record.get("update", position)))
            values.append(float(value))
    return updates, values


def collapsed(success: Sequence[float], patience: int = 5) -> bool:
    """Whether the EMA of success ever stayed below half of its peak so far for ``patience`` updates in a row."""
    peak, below = 0.0, 0
    for value in ema(success):
        peak = max(peak, value)
        below = below + 1 if value < peak / 2 else 0
        if below >= patience:
            return True
    return False


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


def _plain(value: Any) -> Any:
    """``value`` in JSON's own types; NaN and infinities, which JSON lacks, become null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
