"""A CSV or Parquet file of any size -> the rows that a repair needs: inputs, label, groups.

``TableBatches`` streams a file; ``read_rows`` reads a small one.
"""

from esvdfair.tables.files import open_table
from esvdfair.tables.scan import Progress, Roles, Scan
from esvdfair.tables.table import TableBatches, TableRows, read_rows

__all__ = ["Progress", "Roles", "Scan", "TableBatches", "TableRows", "open_table", "read_rows"]
