"""A folder of Parquet files, one file at a time: python benchmarks/engines/arrow.py"""

from people import INPUTS, check, prepare

model = prepare()
# recipe
import pyarrow.dataset as ds

from esvdfair import ESVDFair, summarise


def summary(rows):
    return summarise(
        model, rows[INPUTS].to_numpy(), rows["lwage"], sensitive_features=rows["sex"], row_id=rows["person"]
    )


people = ds.dataset("people", partitioning="hive")
parts = [summary(file.to_table(schema=people.schema).to_pandas()) for file in people.get_fragments()]
fair = ESVDFair(model, target_ks=0.1).fit_summary(sum(parts))
# end
check("pyarrow", fair, len(parts))
