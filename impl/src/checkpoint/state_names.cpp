#include "checkpoint/state_names.h"

#include "sharding/sharded_impl.h"
#include "shardproof/nn/state_buffers.h"

namespace shardproof::checkpoint {

ModelNames names_of_model(Sharded& sharded) {
  Sharded::Impl& state = sharded.impl();
  ModelNames names;
  for (const Bucket* bucket : state.schedule.buckets())
    for (size_t i = 0; i < bucket->layout().members().size(); ++i) {
      const BucketParameter& member = bucket->layout().members()[i];
      names.parameters[member.name] = {bucket->rules().main, member.whole, bucket->trains(static_cast<int64_t>(i)), {}};
    }
  std::set<std::string> sharded_names;
  for (const auto& [name, first] : state.aliases) {
    sharded_names.insert(name);
    if (name != first) names.parameters.at(first).other_names.push_back(name);
  }
  for (const auto& item : state.module->named_parameters())
    if (item.value().defined() && !sharded_names.contains(item.key())) names.plain[item.key()] = item.value();
  ModuleBuffers buffers = buffers_of(*state.module);
  names.plain.merge(buffers.state);
  for (const auto& [name, buffer] : buffers.transient) names.transient.insert(name);
  for (const auto& [first, shards] : state.kept_along) names.kept_along.push_back(first);
  return names;
}

std::string model_key(const std::string& name) { return "model." + name; }
std::string state_key(const std::string& parameter, const std::string& state_name) {
  return "optim.state." + parameter + "." + state_name;
}
std::string kept_key(const std::string& first, const std::string& parameter) { return first + "." + parameter; }
Path model_path(const std::string& name) { return {"model", name}; }
Path state_path(const std::string& parameter, const std::string& state_name) {
  return {"optim", "state", parameter, state_name};
}
Path kept_path(const std::string& first, const std::string& parameter) { return {first, parameter}; }

}  // namespace shardproof::checkpoint
