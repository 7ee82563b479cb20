"""The pool of host memory is for a whole process, so each test has one of its own."""

import subprocess
import sys
import textwrap


def run(script):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


TRAINS = """
import hashlib, torch, shardproof
{first}
torch.manual_seed(0)
start = torch.nn.Linear(256, 512).state_dict()
found = []
def body(comm):
    model = torch.nn.Linear(256, 512)
    model.load_state_dict(start)
    sharded = shardproof.fully_shard(model, comm, strategy="zero3")
    optimizer = shardproof.adamw(sharded, lr=1e-2)
    for step in range(3):
        model(torch.full((8, 256), 1.0 + comm.rank)).square().mean().backward()
        optimizer.step()
    whole = sharded.state_dict()
    if comm.rank == 0:
        found.extend(hashlib.sha256(whole[name].numpy().tobytes()).hexdigest() for name in sorted(whole))
shardproof.run_threads(2, body)
print(found)
"""


def test_training_has_the_same_bits_with_the_pool():
    without = run(TRAINS.format(first=""))
    with_pool = TRAINS.format(first="shardproof.use_host_pool()") + "assert shardproof.host_pool_bytes()['used_max'] > 1 << 18"
    assert run(with_pool) == without


def test_tensors_of_pytorch_lie_in_it_and_their_memory_is_kept_until_it_is_trimmed():
    run(
        """
        import gc, torch, shardproof
        resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
        small = torch.ones(10)
        shardproof.use_host_pool()
        shardproof.use_host_pool()
        assert shardproof.host_pool_bytes() == {"used": 0, "used_max": 0, "kept": 0}
        before = resident()
        tensor = torch.zeros(32 << 20, dtype=torch.uint8)
        assert shardproof.host_pool_bytes() == {"used": 32 << 20, "used_max": 32 << 20, "kept": 0}
        del tensor, small
        gc.collect()
        assert shardproof.host_pool_bytes() == {"used": 0, "used_max": 32 << 20, "kept": 32 << 20}
        assert resident() - before > 30 << 20
        shardproof.trim_host_pool()
        assert resident() - before < 4 << 20
        assert torch.ones(1 << 20).sum().item() == 1 << 20
        """
    )
