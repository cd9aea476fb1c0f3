"""A CSV or Parquet file of any size -> the rows that a repair needs: inputs, label, groups.

``TableBatches`` streams a file; ``read_rows`` reads a small one.
"""

from esvdfair.tables.batches import TableBatches, read_rows
from esvdfair.tables.opening import open_table
from esvdfair.tables.roles import Roles
from esvdfair.tables.rows import Rows
from esvdfair.tables.scan import Progress, Scan

__all__ = ["Progress", "Roles", "Rows", "Scan", "TableBatches", "open_table", "read_rows"]
