#include "checkpoint/trainer_values.h"

#include <optional>

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
    Value operator()(const std::string& value) const { return Value::string(value); }
    Value operator()(const std::vector<double>& values) const {
      Value::Items items;
      for (const double value : values) items.push_back(Value::real(value));
      return Value::tuple(std::move(items));
    }
  };
  return std::visit(Visitor{}, setting.second);
}

std::optional<Setting> setting_of(const std::string& name, const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kNone:
      return Setting{name, std::monostate()};
    case Value::Kind::kBool:
      return Setting{name, value.as_bool(name)};
    case Value::Kind::kInt:
      return Setting{name, value.as_int(name)};
    case Value::Kind::kFloat:
      return Setting{name, value.as_float(name)};
    case Value::Kind::kString:
      return Setting{name, value.as_string(name)};
    case Value::Kind::kTuple:
    case Value::Kind::kList: {
      std::vector<double> numbers;
      for (const Value& item : value.as_list(name)) {
        if (item.kind() != Value::Kind::kInt && item.kind() != Value::Kind::kFloat) return {};
        numbers.push_back(item.as_float(name));
      }
      return Setting{name, std::move(numbers)};
    }
    default:
      return {};
  }
}

std::string group_prefix(size_t index) {
  return fmt::format("optim.param_groups.{}.", index);
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

std::vector<NamedValue> optimizer_values(const OptimizerState& optimizer) {
  std::vector<NamedValue> result;
  Value::Pairs updates;
  int64_t index = 0;
  for (const OptimizerState::Group& group : optimizer.groups()) {
    const std::string prefix = group_prefix(static_cast<size_t>(index));
    for (const Setting& setting : group.settings)
      result.push_back({prefix + setting.first, {"optim", "param_groups", index, setting.first}, value_of(setting)});
    Value::Items names;
    for (const std::string& name : group.parameters) {
      names.push_back(Value::string(name));
      if (const int64_t count = optimizer.updates(name); count >= 0)
        updates.emplace_back(Value::string(name), Value::integer(count));
    }
    result.push_back({prefix + "params", {"optim", "param_groups", index, "params"}, Value::list(std::move(names))});
    ++index;
  }
  result.push_back({kUpdates, {"shardproof", "updates"}, Value::dict(std::move(updates))});
  return result;
}

void add_merged_adapters(const std::vector<std::string>& fingerprints, std::vector<NamedValue>& values) {
  if (fingerprints.empty()) return;
  Value::Items items;
  for (const std::string& print : fingerprints) items.push_back(Value::string(print));
  values.push_back({kMergedAdapters, {"shardproof", "merged_adapters"}, Value::list(std::move(items))});
}

std::vector<OptimizerState::Group> groups_of(const Checkpoint& checkpoint,
                                             const std::function<Value(const std::string&)>& read) {
  std::vector<OptimizerState::Group> groups;
  while (true) {
    const std::string prefix = group_prefix(groups.size()), parameters = prefix + "params";
    if (!checkpoint.values.contains(parameters)) return groups;
    OptimizerState::Group& group = groups.emplace_back();
    const Value names = read(parameters);
    for (const Value& name : names.as_list(parameters)) group.parameters.push_back(name.as_string(parameters));
    for (auto found = checkpoint.values.lower_bound(prefix);
         found != checkpoint.values.end() && found->first.starts_with(prefix); ++found)
      if (found->first != parameters)
        if (auto setting = setting_of(found->first.substr(prefix.size()), read(found->first)))
          group.settings.push_back(std::move(*setting));
  }
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
