#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string_view>

#include "internal/base/disk_work.h"
#include "checkpoint/format/cause.h"
#include "checkpoint/format/row_walk.h"
#include "checkpoint/host_copy.h"
#include "checkpoint/save_plan.h"
#include "checkpoint/state_names.h"
#include "checkpoint/trainer_values.h"
#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/checksums.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/comm/agree.h"
#include "internal/base/stream_copy.h"
#include "internal/device/streams.h"

namespace shardproof::checkpoint {
namespace {

Value value_of(const EntryFile::Written& written) {
  return Value::tuple({Value::string(written.extent.file), Value::integer(static_cast<int64_t>(written.extent.offset)),
                       Value::integer(static_cast<int64_t>(written.extent.length)), Value::integer(written.crc)});
}
EntryFile::Written written_of(const Value& value) {
  const Value::Items& fields = value.as_list("entry");
  return {{fields[0].as_string("file"), static_cast<uint64_t>(fields[1].as_int("offset")),
           static_cast<uint64_t>(fields[2].as_int("length"))},
          static_cast<uint32_t>(fields[3].as_int("crc"))};
}

// `written` throws when another run has taken the folder, which says more than what came of that.
void unless_taken(const std::function<void()>& written, const std::function<void()>& body) {
  const std::string error = error_of(body);
  if (error.empty()) return;
  if (written) written();
  throw Error(error);
}

constexpr const char* kBroken = "[checkpoint] an invariant is broken; see what that rank says";

// What a rank tells of the entries of its boxes: where they begin and end in its file, and their checksums. Their lengths are
// known from the plan.
struct WrittenBoxes {
  uint64_t begin = 0, end = 0;
  std::vector<uint32_t> crcs;

  void add(const EntryFile::Written& written) {
    if (crcs.empty()) begin = written.extent.offset;
    end = written.extent.offset + written.extent.length;
    crcs.push_back(written.crc);
  }
  std::string text() const {
    std::string text(sizeof begin + sizeof end + crcs.size() * sizeof(uint32_t), '\0');
    std::memcpy(text.data(), &begin, sizeof begin);
    std::memcpy(text.data() + sizeof begin, &end, sizeof end);
    if (!crcs.empty()) std::memcpy(text.data() + sizeof begin + sizeof end, crcs.data(), crcs.size() * sizeof(uint32_t));
    return text;
  }
  // Takes them, of so many boxes, off the text.
  static WrittenBoxes take(std::string_view& text, size_t boxes) {
    WrittenBoxes written;
    const size_t bytes = sizeof begin + sizeof end + boxes * sizeof(uint32_t);
    SHARD_CHECK(text.size() >= bytes, "checkpoint", "{} bytes tell of {} boxes", text.size(), boxes);
    written.crcs.resize(boxes);
    std::memcpy(&written.begin, text.data(), sizeof begin);
    std::memcpy(&written.end, text.data() + sizeof begin, sizeof end);
    if (boxes > 0) std::memcpy(written.crcs.data(), text.data() + sizeof begin + sizeof end, boxes * sizeof(uint32_t));
    text.remove_prefix(bytes);
    return written;
  }
};

Value value_of(const Path& path) {
  Value::Items items;
  for (const PathElement& element : path)
    items.push_back(std::holds_alternative<int64_t>(element) ? Value::integer(std::get<int64_t>(element))
                                                             : Value::string(std::get<std::string>(element)));
  return Value::tuple(std::move(items));
}
Path path_of(const Value& value) {
  Path path;
  for (const Value& item : value.as_list("path")) {
    if (item.kind() == Value::Kind::kInt)
      path.emplace_back(item.as_int("path"));
    else
      path.emplace_back(item.as_string("path"));
  }
  return path;
}

}  // namespace

struct SaveJob::Parts {
  std::string directory;
  std::shared_ptr<Comm> world;  // `commit` needs it, and the model may be gone by then
  FileSystem* files = nullptr;
  std::unique_ptr<StagedFolder> staged;  // rank 0
  std::string folder;                    // of the staged files
  std::map<std::string, SavedTensor> tensors;  // until the plan has them
  std::map<std::string, Path> paths;
  std::map<std::string, std::string> same_as;  // key of another name of a tied parameter -> key of its first
  std::shared_ptr<const SavePlan> plan;
  std::vector<NamedValue> values;              // of this rank
  std::map<std::string, at::Tensor> held;      // what this rank holds of each tensor, 1-D, in storage order
  std::set<std::string> lasting;               // those of them that change only where Impl::finish_reads comes first
  std::vector<at::Tensor> sources;             // of this rank's boxes: parts of `held`
  c10::Stream stream{c10::Stream::DEFAULT, c10::Device(at::kCPU)};  // on which the values were made
  bool is_copied = false;  // to `snapshot`, where `write` finds the values
  char* snapshot = nullptr;
  at::Tensor staged_values;  // of a device: the snapshot. LibTorch keeps freed page-locked memory for the next save
  std::vector<size_t> offsets;  // in the snapshot, of this rank's boxes
  std::vector<size_t> later;    // the boxes that `copy` copies
  std::vector<int64_t> versions;  // of their sources, as autograd counts changes
  std::string error;
  std::function<void()> written, after;
  WrittenBoxes written_boxes;
  Value::Items written_values;

  const std::vector<PlannedBox>& own() const { return plan->boxes[static_cast<size_t>(world->rank())]; }
  void collect(Sharded& sharded, const OptimizerState* optimizer);
  void include(std::string key, Path path, SavedTensor tensor, at::Tensor data);
  void include(std::string key, Path path, Shard&& shard, const ModelNames& names);
  void make_plan(KeptPlan* kept);
  void find_sources();
  void fill(Snapshot& memory, Copies copies);
  void end_fill();
  void write_entries();
  void write_metadata(const std::vector<std::string>& records);
};

void SaveJob::Parts::include(std::string key, Path path, SavedTensor tensor, at::Tensor data) {
  tensors[key] = std::move(tensor);
  paths[key] = std::move(path);
  held[std::move(key)] = std::move(data);
}
void SaveJob::Parts::include(std::string key, Path path, Shard&& shard, const ModelNames& names) {
  const Layout& there = names.state_placement(shard.name).layout;
  SHARD_REQUIRE(shard.at.layout == there, "checkpoint",
                "rank {}: {} lies as {}, and its parameter as {}, where a load will look for it. Keep what belongs to a "
                "parameter as `state` of Sharded::placements says",
                world->rank(), key, shard.at.layout.str(), there.str());
  const Dtype dtype = shard.data.scalar_type();
  lasting.insert(key);
  include(std::move(key), std::move(path),
          {dtype, std::move(shard.shape), std::move(shard.at), names.plain.contains(shard.name)}, std::move(shard.data));
}

// Every tensor that there is, the same names on every rank, and what this rank has of it. Nobody keeps buffers, parameters that
// are not sharded, and the optimizer's state of these the same on the ranks, so they are all rank 0's, as those of a transfer.
void SaveJob::Parts::collect(Sharded& sharded, const OptimizerState* optimizer) {
  const ModelNames names = names_of_model(sharded);
  for (const auto& [name, parameter] : names.parameters)
    for (const std::string& other : parameter.other_names) {
      same_as[model_key(other)] = model_key(name);
      paths[model_key(other)] = model_path(other);
    }
  for (Shard& shard : sharded.impl().shards(Sharded::Impl::Kind::main))
    include(model_key(shard.name), model_path(shard.name), std::move(shard), names);
  for (const auto& [name, tensor] : names.plain)
    include(model_key(name), model_path(name),
            {tensor.scalar_type(), tensor.sizes().vec(), names.everywhere, /*of_rank_0=*/true},
            tensor.detach().contiguous().view({-1}));
  for (const auto& [first, shards_of] : sharded.impl().kept_along)
    for (Shard& shard : shards_of())
      include(kept_key(first, shard.name), kept_path(first, shard.name), std::move(shard), names);
  if (!optimizer) return;
  for (const std::string& state_name : optimizer->state_names())
    for (Shard& shard : optimizer->state_shards(state_name))
      include(state_key(shard.name, state_name), state_path(shard.name, state_name), std::move(shard), names);
  for (const OptimizerState::Scalar& scalar : optimizer->scalars())
    include(state_key(scalar.parameter, scalar.name), state_path(scalar.parameter, scalar.name),
            {scalar.value.scalar_type(), {}, names.everywhere, names.plain.contains(scalar.parameter)}, scalar.value.view({1}));
}

// The plan depends on nothing but the tensors' descriptions and the ranks, so one that was made for the same is this one.
void SaveJob::Parts::make_plan(KeptPlan* kept) {
  KeptPlan none;
  KeptPlan& known = kept ? *kept : none;
  const bool is_this = known.last && known.last->ranks == world->size() && known.last->rank == world->rank() &&
                       known.last->tensors == tensors;
  if (!is_this) {
    known.last = make_save_plan(std::move(tensors), world->size(), world->rank());
    ++known.made;
  }
  plan = known.last;
  tensors.clear();
}

void SaveJob::Parts::find_sources() {
  for (size_t i = 0; i < own().size(); ++i) {
    const at::Tensor& all = held.at(own()[i].name);
    const int64_t count = numel(own()[i].box);
    sources.push_back(count == all.numel() ? all : all.narrow(0, plan->begins[i], count));
  }
}

void SaveJob::Parts::fill(Snapshot& memory, Copies copies) {
  size_t bytes = 0;
  for (const at::Tensor& source : sources) {
    offsets.push_back(bytes);
    bytes += source.nbytes();
  }
  if (stream.device().is_cpu()) {
    if (memory.bytes.size() < bytes) {
      memory.bytes.clear();
      memory.bytes.reserve(bytes);
      prefer_large_pages(memory.bytes.data(), bytes);
      memory.bytes.resize(bytes);
    }
    snapshot = memory.bytes.data();
  } else {
    staged_values = staging(bytes, stream.device());
    snapshot = static_cast<char*>(staged_values.mutable_data_ptr());
  }
  for (size_t i = 0; i < sources.size(); ++i) {
    if (copies == Copies::later && stream.device().is_cpu() && lasting.contains(own()[i].name)) {
      later.push_back(i);
      versions.push_back(sources[i]._version());
    } else {
      start_host_copy(snapshot + offsets[i], sources[i]);
    }
  }
  finish_host_copies(stream.device());
  if (later.empty()) end_fill();
}

void SaveJob::Parts::end_fill() {
  is_copied = true;
  later.clear();
  sources.clear();
  held.clear();
}

void SaveJob::Parts::write_entries() {
  if (own().empty() && values.empty()) return;
  SHARD_CHECK(later.empty(), "checkpoint", "{} boxes are written before they are copied", later.size());
  const c10::StreamGuard on_stream(stream);
  EntryFile file(*files, folder, entry_file_name(world->rank()));
  for (const NamedValue& value : values) {
    const auto written = value.entry.empty() ? file.add_value(value.value) : file.add_entry(value.entry);
    written_values.push_back(Value::tuple({Value::string(value.name), value_of(value.path), value_of(written)}));
  }
  at::Tensor copied;
  for (size_t i = 0; i < own().size(); ++i) {
    const PlannedBox& box = own()[i];
    const char* data = nullptr;
    if (is_copied) {
      data = snapshot + offsets[i];
    } else if (sources[i].device().is_cpu()) {
      data = static_cast<const char*>(sources[i].const_data_ptr());
    } else {
      if (!copied.defined() || copied.nbytes() < sources[i].nbytes()) copied = staging(sources[i].nbytes(), stream.device());
      auto* target = static_cast<char*>(copied.mutable_data_ptr());
      start_host_copy(target, sources[i]);
      finish_host_copies(stream.device());
      data = target;
    }
    written_boxes.add(file.add_tensor(plan->tensors.at(box.name).dtype, sizes_of(box.box), data));
  }
  file.finish();
}

void SaveJob::Parts::write_metadata(const std::vector<std::string>& records) {
  Checkpoint checkpoint;
  Checksums checksums;
  for (const auto& [key, tensor] : plan->tensors) checkpoint.tensors[key] = {tensor.dtype, tensor.shape, {}};
  checkpoint.paths = paths;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    std::string_view record = records[rank];
    const std::vector<PlannedBox>& boxes = plan->boxes[rank];
    const WrittenBoxes written_boxes = WrittenBoxes::take(record, boxes.size());
    uint64_t offset = written_boxes.begin;
    for (size_t i = 0; i < boxes.size(); ++i) {
      const EntryFile::Written written{{entry_file_name(static_cast<int64_t>(rank)), offset, plan->lengths[rank][i]},
                                       written_boxes.crcs[i]};
      offset += written.extent.length;
      add(checksums, written);
      Chunk chunk{{}, sizes_of(boxes[i].box), written.extent};
      for (const Interval& interval : boxes[i].box) chunk.offsets.push_back(interval.begin);
      checkpoint.tensors.at(boxes[i].name).chunks.push_back(std::move(chunk));
    }
    SHARD_CHECK(offset == written_boxes.end, "checkpoint",
                "the entries of rank {} end at {} of its file, and by the plan at {}", rank, written_boxes.end, offset);
    const Value values_told = read_pickle(record, {}, "what a rank wrote");
    for (const Value& value : values_told.as_list("values")) {
      const Value::Items& fields = value.as_list("value");
      const EntryFile::Written written = written_of(fields[2]);
      add(checksums, written);
      checkpoint.values[fields[0].as_string("name")] = written.extent;
      checkpoint.paths[fields[0].as_string("name")] = path_of(fields[1]);
    }
  }
  for (const auto& [file, bytes] : checksums.file_bytes) require_written(*files, folder + "/" + file, bytes);
  for (const auto& [key, first] : same_as) checkpoint.tensors[key] = checkpoint.tensors.at(first);
  write_metadata_files(*files, folder, checkpoint, checksums);
}

SaveJob::SaveJob(const std::string& directory, Sharded& sharded, const OptimizerState* optimizer, const TrainerState& trainer,
                 const SaveOptions& options, Snapshot* snapshot, Copies copies)
    : parts_(std::make_unique<Parts>()) {
  const DiskWork saving;
  sharded.impl().require_no_averages("checkpoint::save");
  Parts& parts = *parts_;
  parts.directory = directory;
  parts.world = sharded.impl().comms->world().shared();
  parts.files = options.files;
  // What this thread has queued is what copies come after, on whichever thread they are started.
  parts.stream = current_stream(sharded.impl().device());
  parts.written = options.written;
  parts.after = options.after;
  parts.folder = from_rank_0(*parts.world, [&] {
    unless_taken(options.written, [&] {
      if (options.before) options.before();
      parts.staged = std::make_unique<StagedFolder>(*options.files, directory, options.overwrite);
    });
    return parts.staged->path();
  });
  parts.error = error_of([&] {  // which `commit` tells the others
    parts.values = trainer_values(trainer, parts.world->rank());
    if (parts.world->rank() == 0) add_merged_adapters(sharded.impl().merged_adapters, parts.values);
    if (parts.world->rank() == 0)
      for (auto& [name, entry] : extra_state_of(*sharded.impl().module))
        parts.values.push_back({model_key(name), model_path(name), {}, std::move(entry)});
    if (optimizer && parts.world->rank() == 0)
      for (NamedValue& value : optimizer_values(*optimizer)) parts.values.push_back(std::move(value));
    parts.collect(sharded, optimizer);
    parts.make_plan(options.plan);
    parts.find_sources();
    if (snapshot) parts.fill(*snapshot, copies);
  });
}

SaveJob::~SaveJob() = default;

bool SaveJob::copies_later() const {
  return !parts_->later.empty();
}

void SaveJob::copy() {
  Parts& parts = *parts_;
  if (!parts.error.empty()) return;
  parts.error = kBroken;  // unless it is known to hold
  parts.error = error_of([&parts] {
    for (const size_t i : parts.later) start_host_copy(parts.snapshot + parts.offsets[i], parts.sources[i]);
  });
}

void SaveJob::end_copy() {
  Parts& parts = *parts_;
  if (parts.later.empty()) return;
  for (size_t n = 0; n < parts.later.size() && parts.error.empty(); ++n)
    if (parts.sources[parts.later[n]]._version() != parts.versions[n])
      parts.error = message(
          "[checkpoint] {}, or what lies in one buffer with it, was written to on rank {} while a save was copying it. Call "
          "Sharded::main_parameters_will_change before you write to it, or let the save copy at once (copy_in_background = "
          "false)",
          parts.own()[parts.later[n]].name, parts.world->rank());
  parts.end_fill();
}

void SaveJob::write() {
  if (!parts_->error.empty()) return;
  parts_->error = kBroken;
  parts_->error = error_of([this] { parts_->write_entries(); });
}

const std::string& SaveJob::error() const { return parts_->error; }

void SaveJob::commit() {
  const DiskWork saving;
  Parts& parts = *parts_;
  const std::string told = parts.error.empty() ? "w" + parts.written_boxes.text() +
                                                     write_pickle(Value::list(std::move(parts.written_values)), 4)
                                               : "e" + parts.error;
  std::vector<std::string> records = gather_texts(*parts.world, told), errors;
  for (std::string& text : records) {
    errors.push_back(text.starts_with('e') ? text.substr(1) : "");
    text.erase(0, 1);
  }
  if (std::any_of(errors.begin(), errors.end(), [](const std::string& error) { return !error.empty(); }))
    from_rank_0(*parts.world, [&] {
      if (parts.written) parts.written();
      return std::string();
    });
  throw_first(errors);
  from_rank_0(*parts.world, [&] {
    unless_taken(parts.written, [&] {
      parts.write_metadata(records);
      if (parts.written) parts.written();
      parts.staged->commit();
    });
    if (parts.after) parts.after();
    return std::string();
  });
}

void save(const std::string& directory, Sharded& sharded, const OptimizerState* optimizer, const TrainerState& trainer,
          const SaveOptions& options) {
  const DiskWork saving;
  SaveJob job(directory, sharded, optimizer, trainer, options, nullptr);
  job.write();
  job.commit();
}

}  // namespace shardproof::checkpoint
