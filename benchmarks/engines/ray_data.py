"""Ray: make test-engines, or python benchmarks/engines/ray_data.py"""

from people import INPUTS, check, prepare

model = prepare()
# recipe
import pickle

import pandas as pd
import ray

from esvdfair import ESVDFair, summarise


def summary(rows):
    part = summarise(
        model, rows[INPUTS].to_numpy(), rows["lwage"], sensitive_features=rows["sex"], row_id=rows["person"]
    )
    return pd.DataFrame({"summary": [pickle.dumps(part)]})


found = ray.data.read_parquet("people").map_batches(summary, batch_format="pandas", batch_size=1000).take_all()
parts = [pickle.loads(row["summary"]) for row in found]
fair = ESVDFair(model, target_ks=0.1).fit_summary(sum(parts))
# end
check("ray", fair, len(parts))
