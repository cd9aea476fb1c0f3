"""torch.distributed: torchrun --nproc-per-node 2 benchmarks/engines/torch_ranks.py"""

from people import INPUTS, check, prepare, table

model, people = prepare(), table()[:-2]  # an odd number of rows
x, y, a = people[INPUTS].to_numpy(), people["lwage"].to_numpy(), people["sex"].to_numpy()
# recipe
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from esvdfair import ESVDFair, summarise

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
# The sampler repeats rows at its end, so that all ranks get equally many.
index = list(DistributedSampler(x, shuffle=False))[: len(range(rank, len(x), ranks))]
own = summarise(model, x[index], y[index], sensitive_features=a[index], row_id=index)
parts = [None] * ranks if rank == 0 else None
dist.gather_object(own, parts)
found = [ESVDFair(model, target_ks=0.1).fit_summary(sum(parts)) if rank == 0 else None]
dist.broadcast_object_list(found)
fair = found[0]
# end
if rank == 1:  # which has not solved
    check("torch.distributed, gloo", fair, ranks, people)
dist.destroy_process_group()
