"""PySpark: make test-engines, or python benchmarks/engines/spark.py (needs Java)"""

from people import INPUTS, check, prepare

model = prepare()
# recipe
import pickle

import pandas as pd
from pyspark.sql import SparkSession

from esvdfair import ESVDFair, summarise


def summaries(frames):
    for rows in frames:
        part = summarise(
            model, rows[INPUTS].to_numpy(), rows["lwage"], sensitive_features=rows["sex"], row_id=rows["person"],
            group_rows=totals,
        )  # fmt: skip
        yield pd.DataFrame({"summary": [pickle.dumps(part)]})


people = SparkSession.builder.master("local[2]").getOrCreate().read.parquet("people")
totals = {row["sex"]: row["count"] for row in people.groupBy("sex").count().collect()}
parts = [pickle.loads(row.summary) for row in people.mapInPandas(summaries, "summary binary").collect()]
fair = ESVDFair(model, target_ks=0.1).fit_summary(sum(parts))
# end
check("spark", fair, len(parts))
