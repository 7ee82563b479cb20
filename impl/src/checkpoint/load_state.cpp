#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "checkpoint/format/cause.h"
#include "checkpoint/format/row_walk.h"
#include "checkpoint/host_copy.h"
#include "checkpoint/joined_sums.h"
#include "checkpoint/match_state.h"
#include "checkpoint/state_names.h"
#include "checkpoint/trainer_values.h"
#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/checksums.h"
#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/comm/agree.h"
#include "internal/base/stream_copy.h"
#include "internal/checkpoint/format/crc32.h"

namespace shardproof::checkpoint {
namespace {

// One load, on one rank.
class Loader {
 public:
  Loader(const std::string& directory, Sharded& sharded, OptimizerState* optimizer, const LoadOptions& options)
      : directory_(directory), sharded_(sharded), optimizer_(optimizer), options_(options) {}

  // Reads what describes the checkpoint. Rank 0 looks at all files, for all.
  void open() {
    const bool looks = sharded_.rank() == 0;
    CheckedCheckpoint opened =
        open_checked(*options_.files, directory_, {.sums = looks && options_.check_before, .files = looks});
    checkpoint_ = std::move(opened.checkpoint);
    sums_ = std::move(opened.sums);
    metadata_crc_ = opened.metadata_crc;
  }

  // Once all have opened it. Throws, on all of them, when it is not the same one. Collective.
  void share(Comm& world) {
    const std::vector<std::string> seen = gather_texts(world, fmt::format("{:08x} on {}", metadata_crc_, host_name()));
    for (size_t rank = 1; rank < seen.size(); ++rank)
      SHARD_REQUIRE(
          seen[rank].substr(0, 8) == seen[0].substr(0, 8), "checkpoint",
          "ranks see different checkpoints in {}, and nothing was loaded: the CRC-32 of its {} is {} for rank 0 and {} "
          "for rank {}. All ranks must see one disk under this path",
          directory_, kMetadataFile, seen[0], seen[rank], rank);
    const std::string sums = broadcast_text(world, sums_ ? write_checksums(*sums_) : "", 0);
    if (world.rank() != 0 && !sums.empty()) sums_ = read_checksums(sums, directory_ + "/" + kSidecarFile);
    ReadOptions read = options_.read;
    if (options_.check_before) {
      read.check = read.check_around = true;
      read.check_parts = false;  // all ranks together do
    }
    reader_.emplace(*options_.files, directory_, checkpoint_, read, sums_ ? &*sums_ : nullptr);
  }

  // Throws when it does not fit.
  void match() {
    names_ = names_of_model(sharded_);
    for (const auto& [name, entry] : extra_state_of(*sharded_.impl().module)) names_.extra.insert(name);
    std::map<std::string, int64_t> updates;
    if (checkpoint_.values.contains(kUpdates)) {
      const Value saved = value(kUpdates);
      for (const auto& [name, count] : saved.as_dict(kUpdates)) updates[name.as_string(kUpdates)] = count.as_int(kUpdates);
    }
    const auto updates_of = [&](const std::string& name) -> int64_t {
      const std::string step = state_key(name, "step");
      if (const auto found = updates.find(name); found != updates.end()) return found->second;
      if (checkpoint_.tensors.contains(step)) return static_cast<int64_t>(reader_->read(step).item<double>());
      return -1;
    };
    std::vector<OptimizerState::Group> groups;
    if (optimizer_) groups = optimizer_->groups();
    matched_ = match_state(checkpoint_, names_, optimizer_ ? &groups : nullptr, updates_of);
    if (optimizer_ && optimizer_->takes_settings()) match_settings(groups);
    for (const Restored& state : matched_.states)
      for (const std::string& scalar : state.scalar_names)
        scalars_.push_back({state.parameter, scalar, number(state_key(state.parameter, scalar))});
    loaded_.trainer = trainer_of(checkpoint_, sharded_.rank(), [&](const std::string& name) { return value(name); });
    if (checkpoint_.values.contains(kMergedAdapters)) {
      const Value saved = value(kMergedAdapters);
      for (const Value& print : saved.as_list(kMergedAdapters)) merged_adapters_.push_back(print.as_string(kMergedAdapters));
    }
    auto& misfits = matched_.misfits;
    if (options_.needs_scaler && !loaded_.trainer.scaler)
      misfits.push_back("trainer.scaler is missing from the checkpoint, so a loss scaler would go on as it is");
    SHARD_REQUIRE(options_.partial || misfits.empty(), "checkpoint",
                  "{} does not fit this model, and nothing was loaded: {}{}. A program can load what fits, by `partial`",
                  directory_, fmt::join(misfits.begin(), misfits.begin() + std::min<int64_t>(8, std::ssize(misfits)), "; "),
                  misfits.size() > 8 ? fmt::format("; and {} more", misfits.size() - 8) : "");
    loaded_.skipped = misfits;
    std::map<std::string, std::string> extra;
    for (const std::string& name : matched_.extra) extra[name] = entry_of(model_key(name));
    put_extra_ = reads_extra_state(*sharded_.impl().module, extra);
    list_wanted();
  }

  // Gives what this rank is to hold memory beside the model, as far as there may be some. On the CPU an optimizer's state gets
  // tensors that can take its place.
  void give_room() {
    const bool on_cpu = sharded_.impl().device().is_cpu();  // beside a device, the host's memory may be page-locked
    uint64_t staged = 0, shared = 0;
    for (auto& [key, wanted] : wanted_) {
      const uint64_t begin = (shared + kAlignment - 1) / kAlignment * kAlignment, padding = begin - shared;
      const uint64_t room = options_.staging_bytes_max - staged;
      if (wanted.bytes > room || (wanted.of_state && on_cpu ? 0 : padding) > room - wanted.bytes) continue;
      if (wanted.of_state && on_cpu) {
        wanted.own = at::empty({wanted.elements()}, checkpoint_.tensors.at(key).dtype);
        staged += wanted.bytes;
      } else {
        wanted.staged_at = begin;
        shared = begin + wanted.bytes;
        staged += padding + wanted.bytes;
      }
    }
    loaded_.counts.staged_bytes = staged;
    staging_ = staging(shared, sharded_.impl().state_device());
    if (sharded_.impl().state_device().is_cpu())
      prefer_large_pages(staging_.data_ptr(), shared);
  }

  // Reads what has room beside the model. An entry of which this rank reads everything is compared with its checksum.
  void stage() {
    give_room();
    auto* const memory = static_cast<char*>(staging_.data_ptr());
    for (const auto& [key, wanted] : wanted_) {
      reader_->check_without_elements(key);
      if (wanted.own.defined()) read(key, wanted, static_cast<char*>(wanted.own.data_ptr()));
      if (wanted.staged_at) read(key, wanted, memory + *wanted.staged_at);
    }
  }

  // What the others are to know of entries of which this rank read a part, or nothing yet.
  std::string told() const {
    std::vector<PartlyRead> parts = reader_->partly_read();
    for (const auto& [key, wanted] : wanted_)
      if (!wanted.is_staged())
        for (const Chunk& chunk : checkpoint_.tensors.at(key).chunks) parts.push_back({chunk.extent, kUnread, {}});
    return text_of(parts);
  }

  // Of the entries that no rank has read completely: their parts together, or else all of the entry, which one rank reads.
  void check_together(const std::vector<std::string>& told) {
    std::set<EntryPlace> left = compare_joined(told, *reader_);
    if (left.empty()) return;
    const VerifiedPart part{[&](const Extent& entry) { return left.erase({entry.file, entry.offset}) > 0; }, sharded_.rank(),
                            sharded_.impl().comms->world().size()};
    const Verified verified = verify_checkpoint(*options_.files, directory_, {}, part);
    SHARD_REQUIRE(verified.problems.empty(), "checkpoint",
                  "{}/{}. Nothing was loaded; load an older checkpoint, or see `checkpoint verify`", directory_,
                  verified.problems.front().str());
    loaded_.bytes_only_checked = verified.bytes;
  }

  // Into the model.
  void fill() {
    at::NoGradGuard no_grad;
    std::map<std::string, std::string> keys(matched_.parameters.begin(), matched_.parameters.end());
    for (const Shard& shard : mains_)
      if (const auto key = keys.find(shard.name); key != keys.end()) put(key->second, shard.data);
    for (const std::string& name : matched_.plain) put(model_key(name), names_.plain.at(name));
    put_extra_();
    fill_kept_along();
    std::set<std::string> restored;
    for (const Restored& state : matched_.states) {
      optimizer_->restore(state.parameter, state.updates, !state.state_names.empty());
      for (const std::string& state_name : state.state_names)
        if (!replace(state.parameter, state_name)) restored.insert(state_key(state.parameter, state_name));
    }
    for (const auto& [parameter, name, value] : scalars_) optimizer_->restore_scalar(parameter, name, value);
    for (const auto& [index, settings] : settings_) optimizer_->restore_settings(index, settings);
    if (optimizer_)
      for (const std::string& state_name : optimizer_->state_names())
        for (const Shard& shard : optimizer_->state_shards(state_name))
          if (const std::string key = state_key(shard.name, state_name); restored.contains(key)) put(key, shard.data);
    sharded_.impl().merged_adapters = merged_adapters_;
  }

  Loaded take() {
    const uint64_t staged = loaded_.counts.staged_bytes;
    loaded_.counts = reader_->counts();
    loaded_.counts.staged_bytes = staged;
    return std::move(loaded_);
  }

 private:
  static constexpr uint64_t kAlignment = 64;
  static constexpr uint64_t kExtraBytesMax = uint64_t{1} << 31;

  // What this rank is to hold of a tensor of the checkpoint, whatever boxes the ranks that saved it held.
  struct Wanted {
    std::vector<Box> boxes;
    uint64_t bytes = 0;
    bool of_state = false;              // of the optimizer
    std::optional<uint64_t> staged_at;  // in the staging memory
    at::Tensor own;                     // or in a tensor of its own

    bool is_staged() const { return staged_at || own.defined(); }
    int64_t elements() const {
      int64_t elements = 0;
      for (const Box& box : boxes) elements += numel(box);
      return elements;
    }
  };

  // The settings of a group here are those of the group in the checkpoint that has the same parameters.
  void match_settings(const std::vector<OptimizerState::Group>& groups) {
    std::map<std::set<std::string>, std::vector<Setting>> saved;
    for (OptimizerState::Group& group : groups_of(checkpoint_, [&](const std::string& name) { return value(name); }))
      saved[{group.parameters.begin(), group.parameters.end()}] = std::move(group.settings);
    for (size_t i = 0; i < groups.size(); ++i)
      if (const auto found = saved.find({groups[i].parameters.begin(), groups[i].parameters.end()}); found != saved.end())
        settings_.emplace_back(i, found->second);
      else
        matched_.misfits.push_back(
            message("optim.param_groups: no group in the checkpoint has just the {} parameters of group {} here, which begin "
                    "with {}",
                    groups[i].parameters.size(), i, groups[i].parameters.empty() ? "none" : groups[i].parameters.front()));
  }

  at::Tensor number(const std::string& key) {
    if (checkpoint_.tensors.contains(key)) return reader_->read(key).view(at::IntArrayRef());
    const Value saved = value(key);
    return saved.kind() == Value::Kind::kInt ? at::scalar_tensor(saved.as_int(key), at::kLong)
                                             : at::scalar_tensor(saved.as_float(key), at::kDouble);
  }

  Value value(const std::string& name) {
    const Extent& at = checkpoint_.values.at(name);
    return read_value(reader_->source(at.file), name, at);
  }

  // The bytes of an entry as they are in the file.
  std::string entry_of(const std::string& key) {
    const auto found = checkpoint_.values.find(key);
    const Extent& at = found == checkpoint_.values.end() ? checkpoint_.tensors.at(key).chunks[0].extent : found->second;
    const FileSource& file = reader_->source(at.file);
    std::string bytes = file.read_string(at.offset, at.length, kExtraBytesMax);
    if (sums_ && sums_->entries.contains({at.file, at.offset}))
      SHARD_REQUIRE(sums_->entries.at({at.file, at.offset}) == crc32(0, bytes.data(), bytes.size()), "checkpoint",
                    "{}: the entry of {} is damaged, its checksum does not agree. Load an older checkpoint", file.name(), key);
    return bytes;
  }

  // What belongs to a parameter, or is a buffer.
  Wanted& want(const std::string& key, const std::string& parameter) {
    Wanted& wanted = wanted_[key];
    const StoredTensor& stored = checkpoint_.tensors.at(key);
    const Placement& at = names_.state_placement(parameter);
    wanted.boxes = owned(stored.sizes, at.mesh, at.layout, sharded_.rank());
    wanted.bytes = static_cast<uint64_t>(wanted.elements() * dtype_info(stored.dtype).bytes);
    return wanted;
  }

  void list_wanted() {
    mains_ = sharded_.impl().shards(Sharded::Impl::Kind::main);
    for (const auto& [name, key] : matched_.parameters) want(key, name);
    for (const Restored& state : matched_.states)
      for (const std::string& state_name : state.state_names)
        want(state_key(state.parameter, state_name), state.parameter).of_state = true;
    for (const auto& [first, shards_of] : sharded_.impl().kept_along)
      for (const Shard& shard : mains_)
        if (const std::string key = kept_key(first, shard.name); matched_.kept_along.contains(key)) want(key, shard.name);
    for (const std::string& name : matched_.plain) want(model_key(name), name);
  }

  // What the checkpoint lacks begins as the parameters that were loaded, as new averages do.
  void fill_kept_along() {
    for (const auto& [first, shards_of] : sharded_.impl().kept_along) {
      const std::vector<Shard> shards = shards_of();
      for (size_t i = 0; i < shards.size(); ++i)
        if (const std::string key = kept_key(first, shards[i].name); matched_.kept_along.contains(key))
          put(key, shards[i].data);
        else
          at::Tensor(shards[i].data).copy_(mains_[i].data);
    }
  }

  void read(const std::string& key, const Wanted& wanted, char* to) {
    const int64_t item = dtype_info(checkpoint_.tensors.at(key).dtype).bytes;
    for (const Box& box : wanted.boxes) {
      reader_->read(key, box, to, contiguous_strides(sizes_of(box)));
      to += numel(box) * item;
    }
  }

  // Whether the tensor that was read has become the optimizer's state, so that nothing is left to be put there.
  bool replace(const std::string& parameter, const std::string& state_name) {
    Wanted& wanted = wanted_.at(state_key(parameter, state_name));
    if (wanted.bytes == 0 || !wanted.own.defined()) return false;
    if (!optimizer_->replace_state(parameter, state_name, wanted.own)) return false;
    wanted.own.reset();
    return true;
  }

  // Into its place in the model: from the staging memory, or from the file when it found no room there.
  void put(const std::string& key, const at::Tensor& place) {
    const Wanted& wanted = wanted_.at(key);
    SHARD_CHECK(wanted.bytes == place.nbytes(), "checkpoint", "{} bytes were planned for {}, which has {}", wanted.bytes, key,
                place.nbytes());
    if (wanted.bytes == 0) return;
    if (wanted.own.defined()) return start_copy_from_host(place, wanted.own.view(place.sizes()));
    if (wanted.staged_at) {
      const at::Tensor from = staging_.narrow(0, static_cast<int64_t>(*wanted.staged_at), static_cast<int64_t>(wanted.bytes));
      return start_copy_from_host(place, from.view(place.scalar_type()).view(place.sizes()));
    }
    const bool elsewhere = !place.device().is_cpu() || !place.is_contiguous();
    const at::Tensor here = elsewhere ? at::empty(place.sizes(), place.scalar_type()) : place;
    read(key, wanted, static_cast<char*>(here.data_ptr()));
    if (elsewhere) place.copy_(here);
  }

  const std::string& directory_;
  Sharded& sharded_;
  OptimizerState* optimizer_;
  const LoadOptions& options_;
  Checkpoint checkpoint_;
  std::optional<Checksums> sums_;
  uint32_t metadata_crc_ = 0;
  std::optional<BoxReader> reader_;
  ModelNames names_;
  Matched matched_;
  std::vector<OptimizerState::Scalar> scalars_;
  std::vector<std::pair<size_t, std::vector<Setting>>> settings_;  // of groups here
  std::vector<std::string> merged_adapters_;
  std::function<void()> put_extra_;
  std::vector<Shard> mains_;
  std::map<std::string, Wanted> wanted_;  // by key
  at::Tensor staging_;
  Loaded loaded_;
};

// Before anything is changed. What one rank finds is an error on all.
void check_before(Comm& world, Loader& loader) {
  std::string told;
  const std::string error = error_of([&] {
    loader.stage();
    told = loader.told();
  });
  if (!error.empty()) told = "e" + error;
  else if (!told.empty()) told = "r" + told;
  std::vector<std::string> all = gather_texts(world, told), errors;
  for (std::string& text : all) {
    errors.push_back(text.starts_with('e') ? text.substr(1) : "");
    if (!text.empty()) text.erase(0, 1);
  }
  throw_first(errors);
  agree_on(world, [&] { loader.check_together(all); });
}

}  // namespace

Loaded load(const std::string& directory, Sharded& sharded, OptimizerState* optimizer, const LoadOptions& options) {
  Sharded::Impl& state = sharded.impl();
  state.require_no_averages("checkpoint::load");
  Comm& world = state.comms->world();
  Loader loader(directory, sharded, optimizer, options);
  agree_on(world, [&] { loader.open(); });
  loader.share(world);
  agree_on(world, [&] { loader.match(); });
  if (options.check_before) check_before(world, loader);
  sharded.zero_gradients();
  state.begin_update();
  std::string error = error_of([&] { loader.fill(); });
  // Of buffers too, which are on the device where the state is offloaded; and before what was read is freed, whatever failed.
  const std::string of_copies = error_of([&] { finish_host_copies(state.device()); });
  if (error.empty()) error = of_copies;
  if (!error.empty())
    error +=
        " This was found while loading: the model now has some of the checkpoint's values, and some of its own. Load it "
        "again, or another checkpoint, before you use it.";
  agree(world, error);
  sharded.main_parameters_changed();
  Loaded loaded = loader.take();
  state.schedule.set_step(loaded.trainer.step);
  state.schedule.set_last_microbatch(true);  // as at the start: this process may have been in the midst of a step
  return loaded;
}

}  // namespace shardproof::checkpoint
