#include "checkpoint/trainer_values.h"

#include "shardproof/base/check.h"

namespace shardproof::checkpoint {
namespace {

std::string rank_prefix(int64_t rank) { return fmt::format("trainer.rank{}.", rank); }

Value value_of(const Setting& setting) {
  struct Visitor {
    Value operator()(std::monostate) const { return {}; }
    Value operator()(bool value) const { return Value::boolean(value); }
    Value operator()(double value) const { return Value::real(value); }
    Value operator()(int64_t value) const { return Value::integer(value); }
    Value operator()(const std::vector<double>& values) const {
      Value::Items items;
      for (const double value : values) items.push_back(Value::real(value));
      return Value::tuple(std::move(items));
    }
  };
  return std::visit(Visitor{}, setting.second);
}

}  // namespace

bool TrainerState::operator==(const TrainerState& other) const {
  const auto same_stream = [](const std::optional<RandomStream>& a, const std::optional<RandomStream>& b) {
    return a.has_value() == b.has_value() && (!a || (a->seed == b->seed && a->sites == b->sites));
  };
  return step == other.step && schedule_step == other.schedule_step && data_position == other.data_position &&
         scaler == other.scaler && values == other.values && of_rank == other.of_rank && same_stream(random, other.random);
}

std::vector<NamedValue> trainer_values(const TrainerState& trainer, int64_t rank) {
  std::vector<NamedValue> result;
  const auto add = [&](const std::string& name, Value value) {
    result.push_back({"trainer." + name, {"trainer", name}, std::move(value)});
  };
  if (rank == 0) {
    add("step", Value::integer(trainer.step));
    add("schedule_step", Value::integer(trainer.schedule_step));
    add("data_position", Value::integer(trainer.data_position));
    if (trainer.scaler)
      add("scaler", Value::tuple({Value::real(trainer.scaler->scale), Value::integer(trainer.scaler->good_steps)}));
    for (const auto& [name, value] : trainer.values) add("values." + name, value);
  }
  const std::string prefix = fmt::format("rank{}.", rank);
  if (trainer.random)
    add(prefix + "random", Value::tuple({Value::integer(static_cast<int64_t>(trainer.random->seed)),
                                         Value::integer(static_cast<int64_t>(trainer.random->sites))}));
  for (const auto& [name, value] : trainer.of_rank) add(prefix + "values." + name, value);
  return result;
}

std::vector<NamedValue> optimizer_values(const Optimizer& optimizer) {
  std::vector<NamedValue> result;
  Value::Pairs updates;
  int64_t index = 0;
  for (const Optimizer::Group& group : optimizer.groups()) {
    const std::string prefix = fmt::format("optim.param_groups.{}.", index);
    for (const Setting& setting : group.settings)
      result.push_back({prefix + setting.first, {"optim", "param_groups", index, setting.first}, value_of(setting)});
    Value::Items names;
    for (const std::string& name : group.parameters) {
      names.push_back(Value::string(name));
      updates.emplace_back(Value::string(name), Value::integer(optimizer.updates(name)));
    }
    result.push_back({prefix + "params", {"optim", "param_groups", index, "params"}, Value::list(std::move(names))});
    ++index;
  }
  result.push_back({kUpdates, {"shardproof", "updates"}, Value::dict(std::move(updates))});
  return result;
}

TrainerState trainer_of(const Checkpoint& checkpoint, int64_t rank, const std::function<Value(const std::string&)>& read) {
  TrainerState trainer;
  const auto integer = [&](const std::string& name, int64_t& value) {
    if (checkpoint.values.contains(name)) value = read(name).as_int(name);
  };
  const auto pair = [&](const std::string& name) {
    const Value value = read(name);
    const Value::Items& items = value.as_list(name);
    SHARD_REQUIRE(items.size() == 2, "checkpoint", "{} should have two numbers, and has {}", name, items.size());
    return std::pair(items[0], items[1]);
  };
  integer("trainer.step", trainer.step);
  integer("trainer.schedule_step", trainer.schedule_step);
  integer("trainer.data_position", trainer.data_position);
  if (checkpoint.values.contains("trainer.scaler")) {
    const auto [scale, steps] = pair("trainer.scaler");
    trainer.scaler = LossScaler::State{scale.as_float("trainer.scaler"), steps.as_int("trainer.scaler")};
  }
  const std::string stream = rank_prefix(rank) + "random";
  if (checkpoint.values.contains(stream)) {
    const auto [seed, sites] = pair(stream);
    trainer.random =
        RandomStream{static_cast<uint64_t>(seed.as_int(stream)), static_cast<uint64_t>(sites.as_int(stream))};
  }
  const auto all = [&](const std::string& prefix, std::map<std::string, Value>& values) {
    for (const auto& [name, extent] : checkpoint.values)
      if (name.starts_with(prefix)) values[name.substr(prefix.size())] = read(name);
  };
  all("trainer.values.", trainer.values);
  all(rank_prefix(rank) + "values.", trainer.of_rank);
  return trainer;
}

}  // namespace shardproof::checkpoint
