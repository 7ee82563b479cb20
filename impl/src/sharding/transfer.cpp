#include "shardproof/sharding/transfer.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "sharding/model_record.h"
#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"
#include "shardproof/base/nearest.h"
#include "shardproof/comm/agree.h"
#include "shardproof/comm/redistribute.h"

namespace shardproof {
namespace {

// A model on its ranks of the world, as every rank of the world knows it.
struct Side {
  const char* name;                      // for messages
  const Sharded::Impl* model = nullptr;  // null on a rank that has no part of it
  std::vector<int64_t> ranks = {};       // of the world, by rank of the model's mesh
  ModelRecord record = {};
};

// What each rank of the world says of itself.
at::Tensor told(Comm& world, std::vector<int64_t> mine) {
  at::Tensor all = at::empty({world.size() * std::ssize(mine)}, at::kLong);
  world.all_gather(all, at::tensor(mine, at::kLong)).wait();
  return all;
}

// Who is on this side: every rank says its number there.
void find_ranks(Comm& world, Side& side) {
  const MeshComm* comms = side.model ? side.model->comms.get() : nullptr;
  const at::Tensor all = told(world, {comms ? comms->rank() : -1, comms ? comms->mesh().size() : -1});
  const auto* numbers = all.const_data_ptr<int64_t>();
  int64_t size = 0;
  for (int64_t rank = 0; rank < world.size(); ++rank) size = std::max(size, numbers[2 * rank + 1]);
  SHARD_REQUIRE(size > 0, "transfer", "no rank of '{}' has a model to transfer {}", world.name(), side.name);
  side.ranks.assign(static_cast<size_t>(size), -1);
  for (int64_t rank = 0; rank < world.size(); ++rank) {
    const int64_t number = numbers[2 * rank];
    if (number < 0) continue;
    SHARD_REQUIRE(numbers[2 * rank + 1] == size && side.ranks[static_cast<size_t>(number)] < 0, "transfer",
                  "the ranks of '{}' with a model to transfer {} are not those of one mesh: rank {} is number {} of {}",
                  world.name(), side.name, rank, number, numbers[2 * rank + 1]);
    side.ranks[static_cast<size_t>(number)] = rank;
  }
  const auto missing = std::find(side.ranks.begin(), side.ranks.end(), int64_t{-1}) - side.ranks.begin();
  SHARD_REQUIRE(missing == size, "transfer", "rank {} of the {} that have the model to transfer {} is not in '{}'", missing,
                size, side.name, world.name());
}

void make_known(Comm& world, Side& side) {
  find_ranks(world, side);
  const std::string own = side.model && side.model->comms->rank() == 0 ? serialized(record_of(*side.model)) : "";
  side.record = model_record(broadcast_text(world, own, side.ranks.front()));
}

struct Pair {
  const TensorRecord *from, *to;
};

// What is copied where. The same, or the same Error, on every rank.
std::vector<Pair> pairs_of(const ModelRecord& from, const ModelRecord& to) {
  std::vector<std::string> names;
  for (const auto& [name, first] : from.aliases) names.push_back(name);
  std::vector<Pair> pairs;
  std::set<std::string> used;
  for (const TensorRecord& wanted : to.parameters) {
    const auto alias =
        std::find_if(from.aliases.begin(), from.aliases.end(), [&](const auto& known) { return known.first == wanted.name; });
    SHARD_REQUIRE(alias != from.aliases.end(), "transfer", "the model to transfer from has no parameter '{}'.{}", wanted.name,
                  did_you_mean(wanted.name, names));
    const auto source = std::find_if(from.parameters.begin(), from.parameters.end(),
                                     [&](const TensorRecord& parameter) { return parameter.name == alias->second; });
    SHARD_REQUIRE(source->shape == wanted.shape, "transfer",
                  "{} has shape [{}] in the model to transfer from and [{}] in the other", wanted.name,
                  fmt::join(source->shape, ","), fmt::join(wanted.shape, ","));
    pairs.push_back({&*source, &wanted});
    used.insert(source->name);
  }
  for (const TensorRecord& given : from.parameters)
    SHARD_REQUIRE(used.contains(given.name), "transfer", "the model to transfer to has no parameter '{}'", given.name);
  return pairs;
}

// Throws unless `there` has the name of each of `given`.
template <class Items, class Name>
void require_all(const Items& given, const Items& there, Name name, const char* what, const char* where) {
  std::vector<std::string> names;
  for (const auto& each : there) names.push_back(each.*name);
  for (const auto& each : given)
    SHARD_REQUIRE(std::ranges::find(names, each.*name) != names.end(), "transfer", "the model to transfer {} has no {} '{}'.{}",
                  where, what, each.*name, did_you_mean(each.*name, names));
}

// Both models have the same buffers and parameters that are not sharded, in the order of their names, and extra state.
void require_same_plain(const ModelRecord& from, const ModelRecord& to) {
  using Extra = std::pair<std::string, std::string>;
  constexpr const char* kPlain = "buffer or plain parameter";
  require_all(from.plain, to.plain, &TensorRecord::name, kPlain, "to");
  require_all(to.plain, from.plain, &TensorRecord::name, kPlain, "from");
  require_all(from.extra, to.extra, &Extra::first, "extra state", "to");
  require_all(to.extra, from.extra, &Extra::first, "extra state", "from");
  for (size_t i = 0; i < to.plain.size(); ++i)
    SHARD_REQUIRE(from.plain[i].shape == to.plain[i].shape, "transfer",
                  "{} {} has shape [{}] in the model to transfer from and [{}] in the other", kPlain, to.plain[i].name,
                  fmt::join(from.plain[i].shape, ","), fmt::join(to.plain[i].shape, ","));
}

using Tensors = std::map<std::string, at::Tensor>;

Tensors main_shards(const Sharded::Impl* model) {
  Tensors shards;
  if (model)
    for (const Shard& shard : model->shards(Sharded::Impl::Kind::main)) shards[shard.name] = shard.data;
  return shards;
}

// By which everything travels: memory of whichever model this rank has, or of neither. Every rank sends from one type of
// device, since a process group has a backend for each: the models', or the CPU where they differ.
struct Way {
  const Sharded::Impl* any;  // null: the rank has neither model
  c10::Device device;

  at::Tensor allocate(int64_t elements, at::ScalarType dtype) const {
    return any && any->device() == device ? any->memory->allocate(MemoryKind::communication, elements, dtype)
                                          : at::empty({elements}, at::TensorOptions(dtype).device(device));
  }
};

Way way_between(Comm& world, const Sharded::Impl* from, const Sharded::Impl* to) {
  const Sharded::Impl* any = to ? to : from;
  const auto type_of = [](const Sharded::Impl* model) { return model ? static_cast<int64_t>(model->device().type()) : -1; };
  const at::Tensor all = told(world, {type_of(from), type_of(to)}), types = all.masked_select(all.ge(0));
  const auto type = static_cast<c10::DeviceType>(types.min().item<int64_t>());
  if (type == at::kCPU || !types.eq(types[0]).all().item<bool>()) return {any, at::kCPU};
  c10::Device device = at::kCPU;
  agree_on(world, [&] { device = any ? any->device() : c10::impl::VirtualGuardImpl(type).getDevice(); });
  return {any, device};
}

// Moves the parameters, one after the other.
void move_all(Comm& world, const Side& from, const Side& to, const Way& way, int64_t bytes_at_once) {
  const Tensors sources = main_shards(from.model), targets = main_shards(to.model);
  for (const Pair& pair : pairs_of(from.record, to.record)) {
    const auto allocate = [&](int64_t elements) { return way.allocate(elements, pair.from->dtype); };
    const auto here = [&](const Tensors& shards, const std::string& name) {
      return shards.contains(name) ? shards.at(name).to(way.device) : at::Tensor();
    };
    const at::Tensor source = here(sources, pair.from->name), target = here(targets, pair.to->name);
    const auto bytes = static_cast<int64_t>(c10::elementSize(pair.from->dtype));
    move_between({pair.to->shape, pair.from->at, pair.to->at, from.ranks, to.ranks}, source, target, world,
                 std::max<int64_t>(1, bytes_at_once / bytes), allocate);
    if (target.defined() && !target.is_alias_of(targets.at(pair.to->name))) at::Tensor(targets.at(pair.to->name)).copy_(target);
  }
}

// Rank 0 of `from` gives what is not sharded to every rank of `to`. It travels as bytes, since a buffer may have any dtype.
void move_plain(Comm& world, const Side& from, const Side& to, const Way& way, int64_t bytes_at_once) {
  const auto tensors = [](const Side& side) { return side.model ? side.model->plain_tensors().state : Tensors(); };
  const Tensors sources = tensors(from), targets = tensors(to);
  const bool gives = from.ranks.front() == world.rank();
  const at::TensorOptions bytes = at::TensorOptions(at::kByte).device(way.device);
  const Placement one{Mesh({{"one", 1}}), replicated()}, every{Mesh({{"every", std::ssize(to.ranks)}}), replicated()};
  for (const TensorRecord& tensor : from.record.plain) {
    const int64_t size = numel(tensor.shape) * static_cast<int64_t>(c10::elementSize(tensor.dtype));
    at::Tensor source, target;
    if (gives) source = sources.at(tensor.name).to(bytes.device()).contiguous().view({-1}).view(at::kByte);
    if (to.model) target = at::empty({size}, bytes);
    const auto allocate = [&](int64_t elements) { return way.allocate(elements, at::kByte); };
    move_between({{size}, one, every, {from.ranks.front()}, to.ranks}, source, target, world, bytes_at_once, allocate);
    if (target.defined()) at::Tensor(targets.at(tensor.name)).copy_(target.view(tensor.dtype).view(tensor.shape));
  }
}

}  // namespace

void transfer(Comm& world, const Sharded* from, Sharded* to, const TransferOptions& options) {
  const at::NoGradGuard no_grad;
  Side source{"from", from ? &from->impl() : nullptr}, target{"to", to ? &to->impl() : nullptr};
  agree_on(world, [&] {
    SHARD_REQUIRE(options.bytes_at_once > 0, "transfer", "bytes_at_once must be above 0, got {}", options.bytes_at_once);
    if (source.model) source.model->schedule.require_no_backward("transfer");
    if (target.model) target.model->require_own_values("transfer");
  });
  make_known(world, source);
  make_known(world, target);
  const Way way = way_between(world, source.model, target.model);
  pairs_of(source.record, target.record);
  require_same_plain(source.record, target.record);
  std::function<void()> put_extra = [] {};
  agree_on(world, [&] {
    if (to) put_extra = reads_extra_state(*to->impl().module, {source.record.extra.begin(), source.record.extra.end()});
  });
  if (to) to->impl().begin_update();
  move_all(world, source, target, way, options.bytes_at_once);
  move_plain(world, source, target, way, options.bytes_at_once);
  agree_on(world, put_extra);
  if (to) to->main_parameters_changed();
}

}  // namespace shardproof
