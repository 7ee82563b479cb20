#include "checkpoint/state_names.h"

#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"

namespace shardproof::checkpoint {

ModelNames names_of_model(Sharded& sharded) {
  Sharded::Impl& state = sharded.impl();
  ModelNames names;
  names.everywhere = {state.comms->mesh(), replicated()};
  for (const Bucket* bucket : state.schedule.buckets())
    for (const OwnPart& part : bucket->parts())
      names.parameters[part.parameter->name] = {
          bucket->rules().main, part.parameter->whole, bucket->trains(part.member), part.at, {}};
  for (const auto& [name, first] : state.aliases)
    if (name != first) names.parameters.at(first).other_names.push_back(name);
  ModuleBuffers plain = state.plain_tensors();
  names.plain = std::move(plain.state);
  for (const auto& [name, buffer] : plain.transient) names.transient.insert(name);
  for (const auto& [first, shards] : state.kept_along) names.kept_along.push_back(first);
  return names;
}

const Placement& ModelNames::state_placement(const std::string& parameter) const {
  const auto found = parameters.find(parameter);
  if (found != parameters.end()) return found->second.at;
  SHARD_REQUIRE(plain.contains(parameter), "checkpoint", "the model has no parameter and no buffer of state '{}'", parameter);
  return everywhere;
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
