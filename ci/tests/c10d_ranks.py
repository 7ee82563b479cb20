"""A program that PyTorch started, with the library inside its process group; see c10d_test.py.

    python c10d_ranks.py collectives|made_groups|train|dead_peer [MESH STRATEGY]
"""
import datetime
import os
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, os.environ["SHARDPROOF_BUILD"])
import c10d_driver  # noqa: E402, after torch: it shares its Python types
from peer_ranks import join, leave  # noqa: E402


class Groups:
    """Makes groups as a caller may whose backend cannot split them."""
    def __init__(self, store):
        self.store, self.made = store, []

    def __call__(self, ranks):
        part = dist.PrefixStore(f"made {len(self.made)} {ranks}", self.store)
        group = dist.ProcessGroup(part, ranks.index(dist.get_rank()), len(ranks))
        backend = dist.ProcessGroupGloo(part, group.rank(), group.size(), datetime.timedelta(seconds=60))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.made.append(group)
        return group


class Sorted(Groups):
    """As torch.distributed.new_group, whose groups keep the order that ranks have in the job."""
    def __call__(self, ranks):
        return super().__call__(sorted(ranks))


def main():
    torch.set_num_threads(1)
    store = join()
    group = dist.group.WORLD
    action = sys.argv[1]
    if action == "collectives":
        c10d_driver.check_collectives(group)
        total = torch.ones(2)
        dist.all_reduce(total)  # the program's own go on
        assert total.tolist() == [dist.get_world_size()] * 2
    elif action == "made_groups":
        c10d_driver.check_collectives(group, Groups(store))
        ordered = Sorted(dist.PrefixStore("sorted", store))  # lives on: a neighbour may still be connecting to its groups
        try:
            c10d_driver.check_collectives(group, ordered)
        except RuntimeError as error:
            assert "in this order" in str(error), error
        else:
            raise AssertionError("a group with its ranks in another order was taken")
    elif action == "train":
        distance = c10d_driver.train(group, sys.argv[2], sys.argv[3], False)
        assert distance == 0, distance
        native = c10d_driver.train(group, sys.argv[2], sys.argv[3], True)
        assert native < 1e-5, native
    elif action == "dead_peer":
        dist.barrier()
        if dist.get_rank() == 1:
            os._exit(0)
        print(c10d_driver.wait_alone(group), flush=True)
        os._exit(0)
    leave(store)


if __name__ == "__main__":
    main()
