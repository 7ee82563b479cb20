#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstring>

#include "checkpoint/format/stream_copy.h"
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

namespace shardproof::checkpoint {
namespace {

// A run in this rank's memory, or in that of its device.
struct LocalRun {
  Interval run;
  at::Tensor data;  // 1-D, contiguous
};
using LocalRuns = std::map<std::string, std::vector<LocalRun>>;  // ascending

void add_run(LocalRuns& runs, const std::string& key, Interval run, const at::Tensor& data) {
  runs[key].push_back({run, data});
}

// The runs that all ranks hold of what this rank knows. Collective.
void exchange_runs(Comm& world, const LocalRuns& runs, std::map<std::string, HeldTensor>& tensors) {
  Value::Items items;
  for (const auto& [key, held] : runs) {
    const HeldTensor& tensor = tensors.at(key);
    Value::Items sizes, points;
    for (const int64_t size : tensor.sizes) sizes.push_back(Value::integer(size));
    for (const LocalRun& run : held)
      points.insert(points.end(), {Value::integer(run.run.begin), Value::integer(run.run.end)});
    items.push_back(Value::tuple({Value::string(key), Value::string(std::string(dtype_info(tensor.dtype).name)),
                                  Value::tuple(std::move(sizes)), Value::tuple(std::move(points))}));
  }
  const std::vector<std::string> texts = gather_texts(world, write_pickle(Value::list(std::move(items)), 4));
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const Value all = read_pickle(texts[rank], {}, "what a rank holds");
    for (const Value& item : all.as_list("runs")) {
      const Value::Items& fields = item.as_list("runs");
      HeldTensor& tensor = tensors[fields[0].as_string("name")];
      tensor.dtype = find_dtype(fields[1].as_string("dtype"))->dtype;
      tensor.sizes.clear();
      for (const Value& size : fields[2].as_list("sizes")) tensor.sizes.push_back(size.as_int("size"));
      const Value::Items& points = fields[3].as_list("points");
      for (size_t i = 0; i + 1 < points.size(); i += 2)
        tensor.held.push_back({static_cast<int64_t>(rank), {points[i].as_int("begin"), points[i + 1].as_int("end")}});
    }
  }
}

// What was written, in the order of the plan.
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
  Comm* world = nullptr;
  FileSystem* files = nullptr;
  std::unique_ptr<StagedFolder> staged;  // rank 0
  std::string folder;                    // of the staged files
  std::map<std::string, HeldTensor> tensors;
  std::map<std::string, Path> paths;
  std::map<std::string, std::string> same_as;  // key of another name of a tied parameter -> key of its first
  std::vector<std::vector<PlannedBox>> plan;   // by rank
  std::vector<NamedValue> values;              // of this rank
  LocalRuns runs;
  c10::Stream stream{c10::Stream::DEFAULT, c10::Device(at::kCPU)};  // on which the values were made
  const Snapshot* snapshot = nullptr;
  std::vector<size_t> offsets;  // in the snapshot, of this rank's boxes
  std::string error;
  Value::Items written_tensors, written_values;

  const std::vector<PlannedBox>& own() const { return plan[static_cast<size_t>(world->rank())]; }
  void collect(Sharded& sharded, const Optimizer* optimizer);
  const char* data_of(const PlannedBox& box, const Interval& run) const;
  size_t bytes_of_box(const PlannedBox& box) const;
  void start_copy(const PlannedBox& box, char* to) const;
  void fill(Snapshot& memory);
  void write_entries();
  void write_metadata(const std::vector<std::string>& records);
};

// Every tensor that there is goes into `tensors` and `paths`; what this rank has of it into `runs`.
void SaveJob::Parts::collect(Sharded& sharded, const Optimizer* optimizer) {
  const ModelNames names = names_of_model(sharded);
  for (const auto& [name, parameter] : names.parameters) {
    tensors[model_key(name)] = {parameter.dtype, parameter.sizes, {}};
    paths[model_key(name)] = model_path(name);
    for (const std::string& other : parameter.other_names) {
      same_as[model_key(other)] = model_key(name);
      paths[model_key(other)] = model_path(other);
    }
  }
  for (const Piece& piece : sharded.main_parameters()) add_run(runs, model_key(piece.name), piece.run, piece.data);
  for (const auto& [name, tensor] : names.plain) {
    tensors[model_key(name)] = {tensor.scalar_type(), tensor.sizes().vec(), {}};
    paths[model_key(name)] = model_path(name);
    if (tensor.numel() > 0)
      add_run(runs, model_key(name), {0, tensor.numel()}, tensor.detach().contiguous().view({-1}));
  }
  if (!optimizer) return;
  for (const Optimizer::Group& group : optimizer->groups())
    for (const std::string& name : group.parameters) {
      const ModelParameter& parameter = names.parameters.at(name);
      std::vector<std::string> slots = group.slots;
      for (const std::string& slot : slots) paths[state_key(name, slot)] = state_path(name, slot);
      const bool exists = parameter.trains || optimizer->updates(name) > 0;
      if (exists && numel(parameter.sizes) == 0)  // nobody has a piece of it
        for (const std::string& slot : slots) tensors[state_key(name, slot)] = {parameter.dtype, parameter.sizes, {}};
      if (!exists || std::find(slots.begin(), slots.end(), "exp_avg") == slots.end()) continue;
      const std::string step = state_key(name, "step");
      tensors[step] = {Dtype::Float, {}, {}};
      paths[step] = state_path(name, "step");
      add_run(runs, step, {0, 1}, at::full({1}, static_cast<float>(optimizer->updates(name))));
    }
  for (const std::string& slot : optimizer->slots())
    for (const Piece& piece : optimizer->state(slot)) {
      const std::string key = state_key(piece.name, slot);
      if (!tensors.contains(key)) tensors[key] = {piece.data.scalar_type(), piece.shape, {}};
      add_run(runs, key, piece.run, piece.data);
    }
}

// `run` lies within what this rank holds.
const char* SaveJob::Parts::data_of(const PlannedBox& box, const Interval& run) const {
  const auto& held = runs.at(box.name);
  for (const LocalRun& local : held)
    if (local.run.begin <= run.begin && run.end <= local.run.end && local.data.device().is_cpu())
      return static_cast<const char*>(local.data.const_data_ptr()) + (run.begin - local.run.begin) * local.data.element_size();
  return nullptr;  // it goes over the end of one, or lies elsewhere
}

size_t SaveJob::Parts::bytes_of_box(const PlannedBox& box) const {
  return static_cast<size_t>(numel(box.box) * dtype_info(tensors.at(box.name).dtype).bytes);
}

// There when the stream has been waited for.
void SaveJob::Parts::start_copy(const PlannedBox& box, char* to) const {
  const int64_t item = dtype_info(tensors.at(box.name).dtype).bytes;
  for (const Interval& wanted : box.runs)
    for (int64_t at = wanted.begin; at < wanted.end;) {
      const auto& held = runs.at(box.name);
      const auto local =
          std::find_if(held.begin(), held.end(), [&](const LocalRun& l) { return l.run.begin <= at && at < l.run.end; });
      SHARD_CHECK(local != held.end(), "checkpoint", "element {} of {} is not here", at, box.name);
      const int64_t end = std::min(wanted.end, local->run.end);
      start_host_copy(to, local->data.narrow(0, at - local->run.begin, end - at));
      to += (end - at) * item;
      at = end;
    }
}

void SaveJob::Parts::fill(Snapshot& memory) {
  size_t bytes = 0;
  for (const PlannedBox& box : own()) {
    offsets.push_back(bytes);
    bytes += bytes_of_box(box);
  }
  if (memory.bytes.size() < bytes) {
    memory.bytes.clear();
    memory.bytes.reserve(bytes);
    prefer_large_pages(memory.bytes.data(), bytes);
    memory.bytes.resize(bytes);
  }
  for (size_t i = 0; i < own().size(); ++i) start_copy(own()[i], memory.bytes.data() + offsets[i]);
  finish_host_copies(stream.device());
  snapshot = &memory;
  runs.clear();
}

void SaveJob::Parts::write_entries() {
  if (own().empty() && values.empty()) return;
  const c10::StreamGuard on_stream(stream);
  EntryFile file(*files, folder, entry_file_name(world->rank()));
  for (const NamedValue& value : values)
    written_values.push_back(
        Value::tuple({Value::string(value.name), value_of(value.path), value_of(file.add_value(value.value))}));
  std::vector<char> copied;
  for (size_t i = 0; i < own().size(); ++i) {
    const PlannedBox& box = own()[i];
    Shape sizes;
    for (const Interval& interval : box.box) sizes.push_back(interval.size());
    const char* data = nullptr;
    if (snapshot) data = snapshot->bytes.data() + offsets[i];
    else if (box.runs.size() == 1) data = data_of(box, box.runs.front());
    if (!data) {
      copied.resize(bytes_of_box(box));
      start_copy(box, copied.data());
      finish_host_copies(stream.device());
      data = copied.data();
    }
    written_tensors.push_back(value_of(file.add_tensor(tensors.at(box.name).dtype, sizes, data)));
  }
  file.finish();
}

void SaveJob::Parts::write_metadata(const std::vector<std::string>& records) {
  Checkpoint checkpoint;
  Checksums checksums;
  for (const auto& [key, tensor] : tensors) checkpoint.tensors[key] = {tensor.dtype, tensor.sizes, {}};
  checkpoint.paths = paths;
  std::erase_if(checkpoint.paths,
                [&](const auto& item) { return !tensors.contains(item.first) && !same_as.contains(item.first); });
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const Value record = read_pickle(records[rank], {}, "what a rank wrote");
    const Value::Items& parts = record.as_list("record");
    const Value::Items& entries = parts[0].as_list("tensors");
    SHARD_CHECK(entries.size() == plan[rank].size(), "checkpoint", "rank {} wrote {} boxes of {}", rank, entries.size(),
                plan[rank].size());
    for (size_t i = 0; i < entries.size(); ++i) {
      const EntryFile::Written written = written_of(entries[i]);
      add(checksums, written);
      Chunk chunk{{}, {}, written.extent};
      for (const Interval& interval : plan[rank][i].box) {
        chunk.offsets.push_back(interval.begin);
        chunk.sizes.push_back(interval.size());
      }
      checkpoint.tensors.at(plan[rank][i].name).chunks.push_back(std::move(chunk));
    }
    for (const Value& value : parts[1].as_list("values")) {
      const Value::Items& fields = value.as_list("value");
      const EntryFile::Written written = written_of(fields[2]);
      add(checksums, written);
      checkpoint.values[fields[0].as_string("name")] = written.extent;
      checkpoint.paths[fields[0].as_string("name")] = path_of(fields[1]);
    }
  }
  for (const auto& [key, first] : same_as) checkpoint.tensors[key] = checkpoint.tensors.at(first);
  write_metadata_files(*files, folder, checkpoint, checksums);
}

SaveJob::SaveJob(const std::string& directory, Sharded& sharded, const Optimizer* optimizer, const TrainerState& trainer,
                 const SaveOptions& options, Snapshot* snapshot)
    : parts_(std::make_unique<Parts>()) {
  Parts& parts = *parts_;
  parts.directory = directory;
  parts.world = &sharded.impl().comms->world();
  parts.files = options.files;
  parts.stream = current_stream_of(sharded.impl().device());
  Comm& world = *parts.world;
  agree_on(world, [&] {
    if (world.rank() == 0) {
      parts.staged = std::make_unique<StagedFolder>(*options.files, directory, options.overwrite);
      parts.folder = parts.staged->path();
    }
    parts.values = trainer_values(trainer, world.rank());
    if (!optimizer || world.rank() != 0) return;
    for (NamedValue& value : optimizer_values(*optimizer)) parts.values.push_back(std::move(value));
  });
  parts.folder = gather_texts(world, parts.folder).front();
  parts.collect(sharded, optimizer);
  exchange_runs(world, parts.runs, parts.tensors);
  agree_on(world, [&] {
    parts.plan = plan_save(parts.tensors, world.size());
    if (snapshot) parts.fill(*snapshot);
  });
}

SaveJob::~SaveJob() = default;

void SaveJob::write() {
  parts_->error = error_of([this] { parts_->write_entries(); });
}

const std::string& SaveJob::error() const { return parts_->error; }

void SaveJob::commit() {
  Parts& parts = *parts_;
  agree(*parts.world, parts.error);
  const Value record =
      Value::tuple({Value::list(std::move(parts.written_tensors)), Value::list(std::move(parts.written_values))});
  const std::vector<std::string> records = gather_texts(*parts.world, write_pickle(record, 4));
  agree_on(*parts.world, [&] {
    if (parts.world->rank() != 0) return;
    parts.write_metadata(records);
    parts.staged->commit();
  });
}

void save(const std::string& directory, Sharded& sharded, const Optimizer* optimizer, const TrainerState& trainer,
          const SaveOptions& options) {
  SaveJob job(directory, sharded, optimizer, trainer, options, nullptr);
  job.write();
  job.commit();
}

}  // namespace shardproof::checkpoint
