// Whole values by name: gathered from the shards of all ranks, and written into them.
#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>

#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"
#include "shardproof/base/nearest.h"
#include "shardproof/comm/agree.h"
#include "shardproof/comm/data_group.h"
#include "shardproof/comm/redistribute.h"
#include "shardproof/sharding/rounded_weight.h"

namespace shardproof {

MeshComm& Sharded::Impl::comms_of(const Mesh& mesh) const {
  const std::vector<Bucket*> buckets = schedule.buckets();
  const auto found = std::find_if(buckets.begin(), buckets.end(), [&](const Bucket* b) { return b->comms()->mesh() == mesh; });
  SHARD_CHECK(found != buckets.end(), "fully_shard", "no unit is on mesh '{}'", mesh.str());
  return *(*found)->comms();
}

std::map<std::string, at::Tensor> Sharded::Impl::gather(const std::vector<Shard>& shards) const {
  std::map<std::string, at::Tensor> whole;
  for (const Shard& shard : shards) {
    const at::Tensor here = shard.data.to(device());  // by the device's communicators
    const at::Tensor all = redistribute(here, shard.shape, shard.at.layout, replicated(), comms_of(shard.at.mesh));
    whole[shard.name] = (all.is_alias_of(shard.data) ? all.clone() : all).view(shard.shape);
  }
  return whole;
}

bool Sharded::Impl::trains(const std::string& first) const {
  const Schedule::Place* place = schedule.find(first);
  return place && schedule.buckets()[place->bucket]->trains(static_cast<int64_t>(place->member));
}

const Shard& Sharded::Impl::shard_of(const char* where, const std::vector<Shard>& shards, const std::string& name) const {
  const auto known = std::find_if(aliases.begin(), aliases.end(), [&](const auto& alias) { return alias.first == name; });
  const auto shard_called = [&](const std::string& first) {
    return std::find_if(shards.begin(), shards.end(), [&](const Shard& shard) { return shard.name == first; });
  };
  if (known != aliases.end())
    if (const auto shard = shard_called(known->second); shard != shards.end()) return *shard;
  std::vector<std::string> names;
  for (const auto& [alias, first] : aliases)
    if (shard_called(first) != shards.end()) names.push_back(alias);
  SHARD_REQUIRE(known == aliases.end() || trains(known->second), "fully_shard",
                "{}: the parameter '{}' is frozen (its requires_grad is false), so it has none. Ask for one that trains", where,
                name);
  throw Error(fmt::format("[fully_shard] {}: {} '{}'.{}", where,
                          known == aliases.end() ? "there is no parameter" : "there is nothing of the parameter", name,
                          did_you_mean(name, names)));
}

void Sharded::Impl::require_own_values(const char* what) const {
  schedule.require_no_backward(what);
  require_no_averages(what);
}

void Sharded::Impl::require_no_averages(const char* what) const {
  SHARD_REQUIRE(averages_in_place.empty(), "fully_shard",
                "{} (rank {}) while the averages '{}' are in the place of the parameters. Put the parameters back first, by "
                "swap_out of the averages, or the end of with_averages (in Python of swapped_in)",
                what, comms->rank(), averages_in_place);
}

namespace {

// Checks one value that a caller gave for a shard.
void require_fits(const char* where, const std::string& name, const at::Tensor& value, const Shard& shard) {
  SHARD_REQUIRE(value.defined() && value.sizes() == at::IntArrayRef(shard.shape), "fully_shard",
                "{}: the whole value of {} must have sizes [{}], got [{}]", where, name, fmt::join(shard.shape, ","),
                value.defined() ? fmt::format("{}", fmt::join(value.sizes(), ",")) : "no tensor");
  SHARD_REQUIRE(value.is_floating_point(), "fully_shard", "{}: the whole value of {} must be of floating point, got {}", where,
                name, c10::toString(value.scalar_type()));
  if (value.scalar_type() != shard.data.scalar_type()) rounded_weight(name, value.detach(), shard.data.scalar_type());
}

// A name that some rank leaves out would be written in part, and a value that only some ranks have read in pieces of both. What
// ranks pass is compared by hashes.
void require_same_values(Comm& world, const char* where, const std::map<std::string, at::Tensor>& values) {
  std::string names, digests;
  for (const auto& [name, value] : values) {
    names += name + '\n';
    digests += fmt::format("{:x} ", digest_of(value));
  }
  const std::hash<std::string> hash;
  const std::vector<std::string> given = gather_texts(
      world, fmt::format("{} names ({:016x}), their values {:016x}", values.size(), hash(names), hash(digests)));
  for (int64_t rank = 1; rank < world.size(); ++rank)
    SHARD_REQUIRE(given[static_cast<size_t>(rank)] == given[0], "fully_shard",
                  "{}: rank 0 passes {}, and rank {} {}. Pass the same names and whole values on every rank", where, given[0],
                  rank, given[static_cast<size_t>(rank)]);
}

}  // namespace

void Sharded::Impl::write(const char* where, const std::vector<Shard>& shards,
                          const std::map<std::string, at::Tensor>& values) {
  std::map<std::string, const at::Tensor*> wanted;  // by the name that a tied parameter is sharded under
  const auto match = [&] {
    for (const auto& [name, value] : values) {
      const Shard& shard = shard_of(where, shards, name);
      require_fits(where, name, value, shard);
      const auto [other, is_first] = wanted.emplace(shard.name, &value);
      SHARD_REQUIRE(is_first || other->second->equal(value), "fully_shard",
                    "{}: {} is tied to {}, and got another value. Give one of them", where, name, shard.name);
    }
  };
  agree(comms->world(), error_of(match));
  require_same_values(comms->world(), where, values);
  finish_reads();
  const at::NoGradGuard no_grad;
  for (const Shard& shard : shards) {
    const auto found = wanted.find(shard.name);
    if (found == wanted.end()) continue;
    const at::Tensor whole = found->second->detach().to(device(), shard.data.scalar_type()).contiguous();
    const at::Tensor own = redistribute(whole, shard.shape, replicated(), shard.at.layout, comms_of(shard.at.mesh));
    at::Tensor(shard.data).copy_(own.view({-1}));
  }
}

at::Tensor Sharded::Impl::gather_one(const char* where, const std::vector<Shard>& shards, const std::string& name) const {
  const Shard* shard = nullptr;
  agree_on(comms->world(), [&] { shard = &shard_of(where, shards, name); });
  const std::vector<std::string> asked = gather_texts(comms->world(), shard->name);
  for (size_t rank = 1; rank < asked.size(); ++rank)
    SHARD_REQUIRE(asked[rank] == asked[0], "fully_shard",
                  "{}: rank 0 asks for {}, and rank {} for {}. Ask for the same name on every rank", where, asked[0], rank,
                  asked[rank]);
  return gather({*shard}).begin()->second;
}

std::vector<std::pair<std::string, at::Tensor>> Sharded::gather_parameters() const {
  impl_->schedule.require_no_backward("gather_parameters");
  std::map<std::string, at::Tensor> whole = impl_->gather(impl_->shards(Impl::Kind::parameter));
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const auto& [name, sharded_as] : impl_->aliases) named.emplace_back(name, whole.at(sharded_as));
  return named;
}

std::map<std::string, at::Tensor> Sharded::gather_gradients() const {
  impl_->schedule.require_final("gather_gradients");
  impl_->checks->read(&impl_->comms->world());
  return impl_->gather(impl_->shards(Impl::Kind::gradient));
}

std::map<std::string, at::Tensor> Sharded::gather_main_parameters() const {
  impl_->schedule.require_no_backward("gather_main_parameters");
  return impl_->gather(impl_->shards(Impl::Kind::main));
}

at::Tensor Sharded::gather_main_parameter(const std::string& name) const {
  impl_->schedule.require_no_backward("gather_main_parameter");
  return impl_->gather_one("gather_main_parameter", impl_->shards(Impl::Kind::main), name);
}

at::Tensor Sharded::gather_gradient(const std::string& name) const {
  impl_->schedule.require_final("gather_gradient");
  impl_->checks->read(&impl_->comms->world());
  return impl_->gather_one("gather_gradient", impl_->shards(Impl::Kind::gradient), name);
}

void Sharded::main_parameters_will_change(const char* who) {
  impl_->require_no_averages(who);
  impl_->begin_update();
}

void Sharded::main_parameters_changed() {
  for (Bucket* bucket : impl_->schedule.buckets()) bucket->parameters.all_gather_updated();
  for (Bucket* bucket : impl_->schedule.buckets()) bucket->parameters.end_update();
  for (const auto& unit : impl_->schedule.units()) unit->drop();
}

void Sharded::write_parameters(const std::map<std::string, at::Tensor>& values) {
  impl_->require_own_values("write_parameters");
  impl_->begin_update();
  impl_->write("write_parameters", impl_->shards(Impl::Kind::main), values);
  main_parameters_changed();
}

void Sharded::write_gradients(const std::map<std::string, at::Tensor>& values) {
  impl_->schedule.require_final("write_gradients");
  impl_->write("write_gradients", impl_->shards(Impl::Kind::gradient), values);
}

}  // namespace shardproof
