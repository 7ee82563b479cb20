"""What modules keep beside parameters and buffers is saved and loaded, by the code of the modules themselves."""

import fractions

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shardproof
from models import assert_same_bits


class Extra(nn.Linear):
    """A layer with an extra state, as those of quantizing libraries have."""

    extra = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


class Packed(nn.Linear):
    """A layer that writes its own entries into a state dict, and knows which version wrote them."""

    _version = 3
    packed = ()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed.values"] = torch.tensor(self.packed)
        destination[prefix + "alias"] = self.bias.detach()

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
        if prefix + "packed.values" in state:
            assert metadata["version"] == 3
            self.packed = tuple(state.pop(prefix + "packed.values").tolist())
        state.pop(prefix + "alias", None)
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)


def make(extra=None, packed=()):
    torch.manual_seed(0)
    model = nn.Sequential(Extra(2, 2), nn.Sequential(Packed(2, 2)))
    model[0].extra, model[1][0].packed = extra, packed
    return model


KINDS = {
    "a dict": {"scale": 3.0, "names": ["a", ("b", 2)], "none": None},
    "a tensor": torch.arange(6.0).view(2, 3),
    "a dict of tensors": {"amax": torch.ones(3, dtype=torch.bfloat16), "steps": torch.tensor(4)},
    "bytes": b"\x00\x01",
    "a number": 7,
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("kind", KINDS)
def test_extra_state_is_saved_and_loaded_on_another_number_of_ranks(tmp_path, kind):
    saved, loaded = [make(KINDS[kind], (1.0, 2.0)) for _ in range(2)], [make(1, (0.0,)) for _ in range(3)]

    def save(comm):
        shardproof.save(str(tmp_path / "saved"), shardproof.fully_shard(saved[comm.rank], comm, units=[nn.Linear]))

    def load(comm):
        shardproof.load(str(tmp_path / "saved"), shardproof.fully_shard(loaded[comm.rank], comm, strategy="zero1"))

    shardproof.run_threads(2, save)
    shardproof.run_threads(3, load)
    for model in loaded:
        assert same(model[0].extra, KINDS[kind]) and model[1][0].packed == (1.0, 2.0)


def test_rank_0_gives_the_extra_state_to_a_manager_and_to_a_transfer(tmp_path):
    models, others = [make({"rank": rank}, (float(rank),)) for rank in range(2)], [make(1) for _ in range(2)]

    def body(comm):
        sharded, other = (shardproof.fully_shard(each[comm.rank], comm) for each in (models, others))
        manager = shardproof.Manager(str(tmp_path), in_background=True)
        manager.save(sharded, None, 1)
        sharded.module[0].extra = "later"
        manager.wait()
        manager.load_latest(other)
        first = other.module[0].extra, other.module[1][0].packed
        shardproof.transfer(sharded, other)
        return first, other.module[0].extra

    assert shardproof.run_threads(2, body) == [(({"rank": 0}, (0.0,)), "later")] * 2


def test_extra_state_travels_to_and_from_checkpoints_of_torch(tmp_path):
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    for kind, value in KINDS.items():
        if isinstance(value, dict):  # PyTorch makes a name of each of its keys
            continue
        folder = f"{theirs} {kind}"
        dcp.save({"model": make(value, (5.0,)).state_dict()}, checkpoint_id=folder, no_dist=True)

        def body(comm):
            model = make(1, (0.0,))
            sharded = shardproof.fully_shard(model, comm)
            shardproof.load(folder, sharded, partial=True)  # "alias" is another name of a parameter
            assert same(model[0].extra, value) and model[1][0].packed == (5.0,)
            shardproof.save(f"{ours} {kind}", sharded)

        shardproof.run_threads(1, body)
        state = {"model": {name: entry for name, entry in make(value, (0.0,)).state_dict().items() if "alias" not in name}}
        dcp.load(state, checkpoint_id=f"{ours} {kind}", no_dist=True)
        assert same(state["model"]["0._extra_state"], value)
        assert state["model"]["1.0.packed.values"].tolist() == [5.0]


def test_a_checkpoint_without_the_extra_state_is_refused_or_loaded_in_part(tmp_path):
    saved = str(tmp_path / "saved")
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    shardproof.run_threads(1, lambda comm: shardproof.save(saved, shardproof.fully_shard(plain, comm)))
    models = [make("mine", (1.0,)) for _ in range(2)]

    def body(comm):
        sharded = shardproof.fully_shard(models[comm.rank], comm)
        with pytest.raises(shardproof.Error, match="model.0._extra_state is missing from the checkpoint"):
            shardproof.load(saved, sharded)
        skipped = shardproof.load(saved, sharded, partial=True)["skipped"]
        return len([line for line in skipped if "_extra_state" in line or "packed" in line]), sharded.module[0].extra

    assert shardproof.run_threads(2, body) == [(2, "mine")] * 2


def test_objects_of_other_classes_are_made_from_a_checkpoint_when_the_program_names_them(tmp_path):
    saved = str(tmp_path / "saved")
    value = fractions.Fraction(1, 3)
    models, loaded = [make(value, (1.0,)) for _ in range(2)], [make(1, (1.0,)) for _ in range(4)]
    shardproof.run_threads(2, lambda comm: shardproof.save(saved, shardproof.fully_shard(models[comm.rank], comm)))

    def load(comm):
        sharded = shardproof.fully_shard(loaded[comm.rank], comm)
        before = sharded.gather()
        with pytest.raises(shardproof.Error, match=r"extra state '0._extra_state'.*add_safe_globals"):
            shardproof.load(saved, sharded)
        assert_same_bits(sharded.gather(), before)
        comm.barrier()
        with torch.serialization.safe_globals([fractions.Fraction]):
            comm.barrier()
            shardproof.load(saved, sharded)
            comm.barrier()
        return sharded.module[0].extra

    assert shardproof.run_threads(1, load) == [value]


def test_a_damaged_extra_state_is_not_loaded(tmp_path):
    saved = tmp_path / "saved"
    text = "a text that is easy to find"
    shardproof.run_threads(1, lambda comm: shardproof.save(str(saved), shardproof.fully_shard(make(text), comm)))
    file = next(saved.glob("*.distcp"))
    file.write_bytes(file.read_bytes().replace(text.encode(), text.upper().encode()))

    def load(comm):
        shardproof.load(str(saved), shardproof.fully_shard(make(), comm))

    with pytest.raises(shardproof.Error, match="model.0._extra_state is damaged"):
        shardproof.run_threads(2, load)


class Renamed(nn.Module):
    """A module whose hooks rename what it saves and loads, and that reads files of an older version."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.shared = nn.Linear(2, 2)
        self.again = self.shared
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.shared.weight
        self.register_buffer("one", torch.ones(2))
        self.tied.register_buffer("same", self.one)
        self.register_state_dict_post_hook(lambda module, state, prefix, _: state.update(extra=state.pop("layer.weight")))
        self.register_load_state_dict_pre_hook(self.take)

    def take(self, module, state, *args):
        state["layer.weight"] = state.pop("extra")


def renamed(seed):
    torch.manual_seed(seed)
    return Renamed()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_state_dict_is_what_the_plain_models_own_code_saves_and_loads(strategy):
    models, source = [renamed(0) for _ in range(2)], renamed(1)
    source.norm.running_mean += 2
    state = source.state_dict()

    def body(comm):
        sharded = shardproof.fully_shard(models[comm.rank], comm, strategy=strategy, units=[nn.Linear])
        first = sharded.state_dict()
        keys = sharded.load_state_dict(dict(state))
        return first, first._metadata, keys, sharded.state_dict()

    for first, metadata, keys, second in shardproof.run_threads(2, body):
        plain = renamed(0).state_dict()
        assert_same_bits(first, plain)
        assert list(first) == list(plain) and metadata == plain._metadata
        assert len({first[f"{name}.weight"].data_ptr() for name in ("shared", "again", "tied")}) == 1
        assert first["one"].data_ptr() == first["tied.same"].data_ptr()
        assert not keys.missing_keys and not keys.unexpected_keys
        assert_same_bits(second, state)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_state_dict_that_does_not_fit_changes_nothing_unless_it_is_told_to(strategy):
    models = [make("own", (1.0,)) for _ in range(2)]
    other = make("other", (2.0,)).state_dict()
    other["0.weight"] = torch.zeros(2, 2)
    other["stranger"] = other.pop("1.0.bias")

    def body(comm):
        sharded = shardproof.fully_shard(models[comm.rank], comm, strategy=strategy)
        before = sharded.gather_main_parameters()
        with pytest.raises(shardproof.Error, match=r"(?s)\[load_state_dict\].*Missing key.*1.0.bias.*stranger"):
            sharded.load_state_dict(other)
        assert_same_bits(sharded.gather_main_parameters(), before)
        keys = sharded.load_state_dict(other, strict=False)
        assert keys.missing_keys == ["1.0.bias"] and keys.unexpected_keys == ["stranger"]
        return sharded.state_dict()

    for state in shardproof.run_threads(2, body):
        plain = make("own", (1.0,))
        plain.load_state_dict(other, strict=False)
        for name, value in plain.state_dict().items():
            assert same(state[name], value), name


def test_a_state_dict_keeps_main_parameters_exact_under_another_compute_dtype():
    models, source = [make("", (1.0,)) for _ in range(2)], make("", (1.0,))
    with torch.no_grad():
        source[0].weight.copy_(torch.tensor([[1.0001, 2.0003], [-3.00007, 0.1]]))

    def body(comm):
        precision = shardproof.Precision(compute=torch.bfloat16)
        sharded = shardproof.fully_shard(models[comm.rank], comm, precision=precision)
        sharded.load_state_dict(source.state_dict())
        return sharded.gather_main_parameters()["0.weight"], sharded.state_dict()["0.weight"]

    for main, compute in shardproof.run_threads(2, body):
        assert torch.equal(main, source[0].weight) and torch.equal(compute, source[0].weight.bfloat16())
