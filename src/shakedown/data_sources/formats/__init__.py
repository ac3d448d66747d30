"""Known data sets by name. A new one is one file here and one row in `FORMATS`."""

from shakedown.data_sources.formats.clevr_count import CLEVR_COUNT
from shakedown.data_sources.formats.geometry3k import GEOMETRY3K
from shakedown.data_sources.formats.gsm8k import GSM8K
from shakedown.data_sources.formats.row_format import RowFormat

__all__ = ["FORMATS", "RowFormat"]

FORMATS: dict[str, RowFormat] = {
    "gsm8k": GSM8K,
    "geometry3k": GEOMETRY3K,
    "clevr_count": CLEVR_COUNT,
}
