"""Dask, on a LocalCluster of two processes: python benchmarks/engines/dask_cluster.py"""

from people import INPUTS, check, prepare

if __name__ == "__main__":
    model = prepare()
    # recipe
    import dask.dataframe as dd
    from dask.distributed import Client, LocalCluster

    from esvdfair import ESVDFair, summarise

    def summary(rows):
        return summarise(
            model, rows[INPUTS].to_numpy(), rows["lwage"], sensitive_features=rows["sex"], row_id=rows["person"]
        )

    client = Client(LocalCluster(n_workers=2, threads_per_worker=1))
    people = dd.read_parquet("people")
    parts = client.gather(client.map(summary, client.compute(people.to_delayed())))
    fair = ESVDFair(model, target_ks=0.1).fit_summary(sum(parts))
    # end
    check("dask", fair, len(parts))
    client.cluster.close()
    client.close()
