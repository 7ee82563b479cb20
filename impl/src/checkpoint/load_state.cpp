#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "checkpoint/state_names.h"
#include "checkpoint/trainer_values.h"
#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/checksums.h"
#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/comm/agree.h"

namespace shardproof::checkpoint {
namespace {

// What becomes of the optimizer's state of a parameter.
struct Restored {
  std::string parameter;
  int64_t updates = 0;
  std::vector<std::string> state_names;  // none: it has no state in the checkpoint
};

// What is loaded, and what does not fit. The same on every rank.
struct Matched {
  std::vector<std::pair<std::string, std::string>> parameters;  // name, key
  std::vector<std::string> plain;
  std::set<std::string> kept_along;  // keys
  std::vector<Restored> states;
  std::vector<std::string> misfits;
};

class Matcher {
 public:
  Matcher(const Checkpoint& checkpoint, const ModelNames& names) : checkpoint_(checkpoint), names_(names) {}

  Matched match(const std::vector<Optimizer::Group>* groups, const std::function<int64_t(const std::string&)>& updates_of) {
    for (const auto& [name, parameter] : names_.parameters) match_parameter(name, parameter);
    for (const auto& [name, tensor] : names_.plain)
      if (fits(model_key(name), tensor.scalar_type(), tensor.sizes().vec())) result_.plain.push_back(name);
    for (const std::string& first : names_.kept_along)
      for (const auto& [name, parameter] : names_.parameters)
        if (const std::string key = kept_key(first, name); fits(key, parameter.dtype, parameter.sizes))
          result_.kept_along.insert(key);
    if (groups)
      for (const Optimizer::Group& group : *groups)
        for (const std::string& name : group.parameters) match_state(name, group.state_names, updates_of);
    find_extra(groups != nullptr);
    return std::move(result_);
  }

 private:
  bool fits(const std::string& key, Dtype dtype, const Shape& sizes) {
    known_.insert(key);
    const auto found = checkpoint_.tensors.find(key);
    if (found == checkpoint_.tensors.end()) {
      result_.misfits.push_back(message("{} is missing from the checkpoint", key));
      return false;
    }
    const StoredTensor& stored = found->second;
    if (stored.sizes != sizes)
      result_.misfits.push_back(message("{} has shape [{}] in the checkpoint and [{}] here", key, fmt::join(stored.sizes, ", "),
                                        fmt::join(sizes, ", ")));
    else if (stored.dtype != dtype)
      result_.misfits.push_back(
          message("{} is {} in the checkpoint and {} here", key, dtype_info(stored.dtype).name, dtype_info(dtype).name));
    return stored.sizes == sizes && stored.dtype == dtype;
  }

  // A tied parameter is there if it is under any of its names.
  void match_parameter(const std::string& name, const ModelParameter& parameter) {
    std::string chosen = name;
    for (const std::string& other : parameter.other_names) {
      known_.insert(model_key(other));
      if (!checkpoint_.tensors.contains(model_key(chosen)) && checkpoint_.tensors.contains(model_key(other))) chosen = other;
    }
    known_.insert(model_key(name));
    if (fits(model_key(chosen), parameter.dtype, parameter.sizes)) result_.parameters.emplace_back(name, model_key(chosen));
  }

  void match_state(const std::string& name, const std::vector<std::string>& state_names,
                   const std::function<int64_t(const std::string&)>& updates_of) {
    known_.insert(state_key(name, "step"));
    const ModelParameter& parameter = names_.parameters.at(name);
    const bool saved = std::any_of(state_names.begin(), state_names.end(), [&](const std::string& state_name) {
      return checkpoint_.tensors.contains(state_key(name, state_name));
    });
    // Before the first update state is zero, or is not there yet.
    if (!saved && (!parameter.trains || updates_of(name) == 0)) return result_.states.push_back({name, 0, {}});
    bool all = true;
    for (const std::string& state_name : state_names)
      all &= fits(state_key(name, state_name), parameter.dtype, parameter.sizes);
    if (all) result_.states.push_back({name, std::max<int64_t>(0, updates_of(name)), state_names});
  }

  void find_extra(bool with_optimizer) {
    const auto check = [&](const std::string& key) {
      const bool ours = key.starts_with("model.") || (with_optimizer && key.starts_with("optim.state."));
      if (ours && !known_.contains(key))
        result_.misfits.push_back(message("{} is in the checkpoint and nothing here has that name", key));
    };
    for (const auto& [key, tensor] : checkpoint_.tensors) check(key);
    for (const auto& [key, extent] : checkpoint_.values) check(key);
  }

  const Checkpoint& checkpoint_;
  const ModelNames& names_;
  std::set<std::string> known_;
  Matched result_;
};

// One load, on one rank.
class Loader {
 public:
  Loader(const std::string& directory, Sharded& sharded, Optimizer* optimizer, const LoadOptions& options)
      : directory_(directory), sharded_(sharded), optimizer_(optimizer), options_(options) {}

  // Reads what describes the checkpoint. Throws when it does not fit.
  void match() {
    checkpoint_ = open_checkpoint(*options_.files, directory_);
    names_ = names_of_model(sharded_);
    std::map<std::string, int64_t> updates;
    if (checkpoint_.values.contains(kUpdates)) {
      const Value saved = value(kUpdates);
      for (const auto& [name, count] : saved.as_dict(kUpdates)) updates[name.as_string(kUpdates)] = count.as_int(kUpdates);
    }
    BoxReader reader(*options_.files, directory_, checkpoint_, options_.read);
    const auto updates_of = [&](const std::string& name) -> int64_t {
      const std::string step = state_key(name, "step");
      if (const auto found = updates.find(name); found != updates.end()) return found->second;
      if (checkpoint_.tensors.contains(step)) return static_cast<int64_t>(reader.read(step).item<double>());
      return -1;
    };
    std::vector<Optimizer::Group> groups;
    if (optimizer_) groups = optimizer_->groups();
    matched_ = Matcher(checkpoint_, names_).match(optimizer_ ? &groups : nullptr, updates_of);
    loaded_.trainer = trainer_of(checkpoint_, sharded_.rank(), [&](const std::string& name) { return value(name); });
    const auto& misfits = matched_.misfits;
    SHARD_REQUIRE(options_.partial || misfits.empty(), "checkpoint",
                  "{} does not fit this model, and nothing was loaded: {}{}. LoadOptions::partial loads what fits", directory_,
                  fmt::join(misfits.begin(), misfits.begin() + std::min<int64_t>(8, std::ssize(misfits)), "; "),
                  misfits.size() > 8 ? fmt::format("; and {} more", misfits.size() - 8) : "");
    loaded_.skipped = misfits;
  }

  // Every byte that any rank will read, against its checksum; each by one rank, whichever parts of it are wanted where.
  void check() {
    std::set<std::string> keys = matched_.kept_along;
    for (const auto& [name, key] : matched_.parameters) keys.insert(key);
    for (const Restored& state : matched_.states)
      for (const std::string& state_name : state.state_names) keys.insert(state_key(state.parameter, state_name));
    for (const std::string& name : matched_.plain) keys.insert(model_key(name));
    const VerifiedPart part{[&](const std::string& key) { return keys.contains(key); }, sharded_.rank(),
                            sharded_.impl().comms->world().size()};
    const Verified verified = verify_checkpoint(*options_.files, directory_, {}, part);
    SHARD_REQUIRE(verified.problems.empty(), "checkpoint",
                  "{}/{}. Nothing was loaded; load an older checkpoint, or see `checkpoint verify`", directory_,
                  verified.problems.front().str());
    checked_ = true;
  }

  // Into the model.
  void fill() {
    at::NoGradGuard no_grad;
    ReadOptions read = options_.read;
    read.check &= !checked_;
    BoxReader reader(*options_.files, directory_, checkpoint_, read);
    std::map<std::string, std::string> keys(matched_.parameters.begin(), matched_.parameters.end());
    for (const Shard& shard : sharded_.impl().shards(Sharded::Impl::Kind::main))
      if (const auto key = keys.find(shard.name); key != keys.end()) read_shard(reader, key->second, shard);
    for (const std::string& name : matched_.plain) {
      const at::Tensor& tensor = names_.plain.at(name);
      if (tensor.numel() > 0) tensor.copy_(reader.read(model_key(name)));
    }
    fill_kept_along(reader);
    std::set<std::string> restored;
    for (const Restored& state : matched_.states) {
      optimizer_->restore(state.parameter, state.updates, !state.state_names.empty());
      for (const std::string& state_name : state.state_names) restored.insert(state_key(state.parameter, state_name));
    }
    if (optimizer_)
      for (const std::string& state_name : optimizer_->state_names())
        for (const Shard& shard : optimizer_->state_shards(state_name))
          if (const std::string key = state_key(shard.name, state_name); restored.contains(key)) read_shard(reader, key, shard);
    loaded_.counts = reader.counts();
  }

  Loaded take() { return std::move(loaded_); }

 private:
  Value value(const std::string& name) { return read_value(*options_.files, directory_, name, checkpoint_.values.at(name)); }

  // What the checkpoint lacks begins as the parameters that were loaded, as new averages do.
  void fill_kept_along(BoxReader& reader) {
    for (const auto& [first, shards_of] : sharded_.impl().kept_along) {
      const std::vector<Shard> shards = shards_of(), parameters = sharded_.impl().shards(Sharded::Impl::Kind::main);
      for (size_t i = 0; i < shards.size(); ++i)
        if (const std::string key = kept_key(first, shards[i].name); matched_.kept_along.contains(key))
          read_shard(reader, key, shards[i]);
        else
          at::Tensor(shards[i].data).copy_(parameters[i].data);
    }
  }

  static void read_box(BoxReader& reader, const std::string& key, const Box& box, char* to) {
    Shape strides(box.size());
    int64_t stride = 1;
    for (size_t d = box.size(); d-- > 0; stride *= box[d].size()) strides[d] = stride;
    reader.read(key, box, to, strides);
  }

  // Each box that this rank is to hold, whatever boxes the ranks that saved it held.
  void read_shard(BoxReader& reader, const std::string& key, const Shard& shard) {
    const bool elsewhere = !shard.data.device().is_cpu();
    const at::Tensor here = elsewhere ? at::empty(shard.data.sizes(), shard.data.options().device(at::kCPU)) : shard.data;
    auto* to = static_cast<char*>(here.data_ptr());
    for (const Box& box : owned(shard.shape, shard.at.mesh, shard.at.layout, sharded_.rank())) {
      read_box(reader, key, box, to);
      to += numel(box) * static_cast<int64_t>(shard.data.element_size());
    }
    if (elsewhere) shard.data.copy_(here);
  }

  const std::string& directory_;
  Sharded& sharded_;
  Optimizer* optimizer_;
  const LoadOptions& options_;
  Checkpoint checkpoint_;
  ModelNames names_;
  Matched matched_;
  Loaded loaded_;
  bool checked_ = false;
};

}  // namespace

Loaded load(const std::string& directory, Sharded& sharded, Optimizer* optimizer, const LoadOptions& options) {
  Sharded::Impl& state = sharded.impl();
  state.require_no_averages("checkpoint::load");
  Comm& world = state.comms->world();
  Loader loader(directory, sharded, optimizer, options);
  agree_on(world, [&] { loader.match(); });
  if (options.check_before) agree_on(world, [&] { loader.check(); });
  sharded.zero_gradients();
  for (Bucket* bucket : state.schedule.buckets()) bucket->parameters.begin_update();
  const std::string error = error_of([&] { loader.fill(); });
  agree(world,
        error.empty() ? "" : error + " This was found while loading: the model now has some of the checkpoint's values.");
  sharded.main_parameters_changed();
  Loaded loaded = loader.take();
  state.schedule.set_step(loaded.trainer.step);
  return loaded;
}

}  // namespace shardproof::checkpoint
