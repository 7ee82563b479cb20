#include "harness/commands/checkpoint_command.h"

#include <fmt/ranges.h>

#include <cstring>
#include <set>

#include "harness/commands/checkpoint_source.h"
#include "harness/commands/json_lines.h"
#include "harness/commands/progress.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/checksums.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/format/torch_file.h"

namespace harness {

using namespace shardproof::checkpoint;
using shardproof::dtype_info;
using nlohmann::json;
using shardproof::Box;
using shardproof::escaped;
using shardproof::Mesh;
using shardproof::Shape;

namespace {

std::string box_text(const Box& box) {
  std::vector<std::string> intervals;
  for (const auto& interval : box) intervals.push_back(fmt::format("{}:{}", interval.begin, interval.end));
  return fmt::format("[{}]", fmt::join(intervals, ", "));
}

// Asked for tensors one after the other, it shows how far that is.
class Shown {
 public:
  Shown(CheckpointSource& source, std::string verb) : source_(source), verb_(std::move(verb)), all_(source.bytes()) {}
  ~Shown() { progress_.clear(); }
  std::string read(const std::string& name, const Box& box) { return show(name, source_.read(name, box)); }
  std::string read(const std::string& name) { return show(name, source_.read(name)); }

 private:
  std::string show(const std::string& name, std::string bytes) {
    done_ += bytes.size();
    progress_.show(all_ == 0 ? 1.0 : static_cast<double>(done_) / static_cast<double>(all_), verb_ + " " + escaped(name));
    return bytes;
  }
  CheckpointSource& source_;
  std::string verb_;
  Progress progress_;
  uint64_t all_, done_ = 0;
};

// Where in contiguous bytes of this shape element `index` is: "[1, 2]".
std::string position(const Shape& sizes, uint64_t index) {
  Shape at(sizes.size());
  for (size_t d = sizes.size(); d-- > 0; index /= static_cast<uint64_t>(sizes[d]))
    at[d] = static_cast<int64_t>(index % static_cast<uint64_t>(sizes[d]));
  return fmt::format("[{}]", fmt::join(at, ", "));
}

std::string hex(const char* bytes, size_t count) {
  std::string text = "0x";
  for (size_t i = count; i-- > 0;) text += fmt::format("{:02x}", static_cast<unsigned char>(bytes[i]));
  return text;
}

// "" when the tensors are equal, bit by bit.
std::string tensor_difference(CheckpointSource& one, Shown& two, const std::string& name, const SafeTensorSpec& a,
                              const SafeTensorSpec& b) {
  if (a.dtype != b.dtype) return fmt::format("{} against {}", dtype_info(a.dtype).name, dtype_info(b.dtype).name);
  if (a.sizes != b.sizes) return fmt::format("sizes [{}] against [{}]", fmt::join(a.sizes, ", "), fmt::join(b.sizes, ", "));
  const std::string x = one.read(name), y = two.read(name);
  if (x == y) return "";
  const auto item = static_cast<size_t>(dtype_info(a.dtype).bytes);
  size_t count = 0, first = x.size();
  for (size_t at = 0; at < x.size(); at += item)
    if (std::memcmp(x.data() + at, y.data() + at, item) != 0 && count++ == 0) first = at;
  return fmt::format("{} of {} elements differ, first at {}: {} against {}", count, x.size() / item,
                     position(a.sizes, first / item), hex(x.data() + first, item), hex(y.data() + first, item));
}

using OtherNameOf = std::optional<OtherName> (*)(const std::string& family, const std::string& name);

CheckpointSource::Rename renaming(const CheckpointArguments& arguments, OtherNameOf other) {
  if (arguments.family.empty()) return {};
  return [family = arguments.family, other](const std::string& name) { return other(family, name); };
}

// One rank's file, opened when something is written to it.
class Files {
 public:
  explicit Files(const std::string& folder) : folder_(folder) {}
  EntryFile& of(int64_t rank) {
    std::unique_ptr<EntryFile>& file = files_[rank];
    if (!file) file = std::make_unique<EntryFile>(system_files(), folder_, entry_file_name(rank));
    return *file;
  }
  void finish() {
    for (auto& [rank, file] : files_) file->finish();
  }

 private:
  const std::string& folder_;
  std::map<int64_t, std::unique_ptr<EntryFile>> files_;
};

// The number of tensors and values that had no other name.
size_t write_dcp(const CheckpointArguments& arguments, int64_t parts) {
  CheckpointSource source(arguments.one, renaming(arguments, from_hugging_face));
  Shown shown(source, "writing");
  StagedFolder staged(system_files(), arguments.two, arguments.overwrite);
  Files files(staged.path());
  Checkpoint written;
  written.paths = source.checkpoint().paths;
  Checksums checksums;
  for (const auto& [name, extent] : source.checkpoint().values) {
    const auto entry = files.of(0).add_value(source.value(name));
    written.values[name] = entry.extent;
    add(checksums, entry);
  }
  const shardproof::Split split{"dp_shard", {}};
  for (const auto& [name, tensor] : source.tensors()) {
    StoredTensor& stored = written.tensors[name];
    stored = {tensor.dtype, tensor.sizes, {}};
    for (int64_t part = 0; part < (tensor.sizes.empty() ? 1 : parts); ++part) {
      Chunk chunk{Shape(tensor.sizes.size(), 0), tensor.sizes, {}};
      if (!tensor.sizes.empty()) {
        const auto interval = piece(split, tensor.sizes[0], parts, part);
        chunk.offsets[0] = interval.begin;
        chunk.sizes[0] = interval.size();
        if (interval.size() == 0 && part > 0) continue;
      }
      const std::string bytes = shown.read(name, chunk.box());
      const auto entry = files.of(part).add_tensor(tensor.dtype, chunk.sizes, bytes.data());
      chunk.extent = entry.extent;
      add(checksums, entry);
      stored.chunks.push_back(std::move(chunk));
    }
  }
  files.finish();
  write_metadata_files(system_files(), staged.path(), written, checksums);
  staged.commit();
  return source.left_out();
}

void write_torch(const CheckpointArguments& arguments) {
  CheckpointSource source(arguments.one);
  Shown shown(source, "writing");
  std::map<std::string, Value> values;
  for (const auto& [name, extent] : source.checkpoint().values) values[name] = source.value(name);
  write_staged_file(system_files(), arguments.two, [&](const std::string& path) {
    write_torch_file(system_files(), path, source.tensors(), values, source.checkpoint().paths,
                     [&](const std::string& name) { return shown.read(name); });
  });
}

// The number of plain values that the format has no place for, and of what has no name in the family.
size_t write_safe(const CheckpointArguments& arguments) {
  CheckpointSource source(arguments.one, renaming(arguments, to_hugging_face));
  Shown shown(source, "writing");
  StagedFolder staged(system_files(), arguments.two, arguments.overwrite);
  write_safetensors(
      system_files(), staged.path(), source.tensors(), [&](const std::string& name) { return shown.read(name); },
      arguments.file_bytes_max);
  staged.commit();
  return source.checkpoint().values.size() + source.left_out();
}

}  // namespace

int checkpoint_inspect(const CheckpointArguments& arguments) {
  CheckpointSource source(arguments.one);
  JsonLines out(arguments.json);
  for (const auto& [name, tensor] : source.checkpoint().tensors) {
    const uint64_t bytes = bytes_of(tensor.dtype, tensor.sizes);
    fmt::print("{:<48} {:<9} [{}]  {} bytes in {} boxes\n", escaped(name), dtype_info(tensor.dtype).name,
               fmt::join(tensor.sizes, ", "), bytes, tensor.chunks.size());
    json boxes = json::array();
    for (const Chunk& chunk : tensor.chunks) {
      if (arguments.boxes)
        fmt::print("  {:<28} {} at {}, {} bytes\n", box_text(chunk.box()), escaped(chunk.extent.file),
                   chunk.extent.offset, chunk.extent.length);
      boxes.push_back({{"offsets", chunk.offsets},
                       {"sizes", chunk.sizes},
                       {"file", chunk.extent.file},
                       {"offset", chunk.extent.offset},
                       {"length", chunk.extent.length}});
    }
    out.write({{"type", "tensor"},
               {"name", name},
               {"dtype", dtype_info(tensor.dtype).name},
               {"sizes", tensor.sizes},
               {"bytes", bytes},
               {"boxes", boxes}});
  }
  for (const auto& [name, extent] : source.checkpoint().values) {
    const std::string text = source.value(name).str();
    fmt::print("{:<48} {}\n", escaped(name), text);
    out.write({{"type", "value"}, {"name", name}, {"value", text}, {"file", extent.file}});
  }
  fmt::print("{} tensors, {} bytes; {} values; {}\n", source.tensors().size(), source.bytes(),
             source.checkpoint().values.size(), source.checkpoint().has_checksums ? "with checksums" : "without checksums");
  return 0;
}

int checkpoint_verify(const CheckpointArguments& arguments) {
  Progress progress;
  const Verified verified =
      verify_checkpoint(system_files(), arguments.one, [&](double fraction) { progress.show(fraction, "verifying"); });
  progress.clear();
  JsonLines out(arguments.json);
  for (const Problem& problem : verified.problems) {
    fmt::print("{}\n", problem.str());
    out.write({{"type", "problem"},
               {"file", problem.file},
               {"tensor", problem.tensor},
               {"box", problem.box},
               {"what", problem.what}});
  }
  fmt::print("{} entries, {} bytes, {}: {} problems\n", verified.entries, verified.bytes,
             verified.sidecar ? "against the sidecar's checksums" : "against the CRCs of the entries (no sidecar)",
             verified.problems.size());
  out.write({{"type", "verified"},
             {"entries", verified.entries},
             {"bytes", verified.bytes},
             {"sidecar", verified.sidecar},
             {"problems", verified.problems.size()}});
  return verified.problems.empty() ? 0 : 1;
}

int checkpoint_diff(const CheckpointArguments& arguments) {
  CheckpointSource one(arguments.one), two(arguments.two);
  JsonLines out(arguments.json);
  Shown shown(two, "comparing");
  size_t differences = 0;
  const auto report = [&](const std::string& name, const std::string& what) {
    if (what.empty()) return;
    ++differences;
    fmt::print("{}: {}\n", escaped(name), what);
    out.write({{"type", "difference"}, {"name", name}, {"what", what}});
  };
  std::set<std::string> names;
  for (const auto* source : {&one, &two}) {
    for (const auto& entry : source->tensors()) names.insert(entry.first);
    for (const auto& entry : source->checkpoint().values) names.insert(entry.first);
  }
  for (const std::string& name : names) {
    const auto a = one.tensors().find(name), b = two.tensors().find(name);
    const bool tensor_a = a != one.tensors().end(), tensor_b = b != two.tensors().end();
    const bool value_a = one.checkpoint().values.contains(name), value_b = two.checkpoint().values.contains(name);
    if (tensor_a && tensor_b)
      report(name, tensor_difference(one, shown, name, a->second, b->second));
    else if (value_a && value_b)
      report(name, one.value(name) == two.value(name)
                       ? ""
                       : fmt::format("{} against {}", one.value(name).str(), two.value(name).str()));
    else
      report(name, !tensor_a && !value_a   ? "only in the second"
                   : !tensor_b && !value_b ? "only in the first"
                                           : "of other kinds");
  }
  fmt::print("{} names, {} differ\n", names.size(), differences);
  out.write({{"type", "diff"}, {"names", names.size()}, {"differences", differences}});
  return differences == 0 ? 0 : 1;
}

int checkpoint_convert(const CheckpointArguments& arguments) {
  SHARD_REQUIRE(arguments.to == "dcp" || arguments.to == "safetensors" || arguments.to == "torch", "checkpoint",
                "--to takes dcp, safetensors or torch, got '{}'", arguments.to);
  SHARD_REQUIRE(arguments.family.empty() || arguments.to != "torch", "checkpoint",
                "--family goes with --to dcp, from safetensors, and with --to safetensors");
  JsonLines out(arguments.json);
  size_t left_out = 0;
  if (arguments.to == "dcp") left_out = write_dcp(arguments, 1);
  if (arguments.to == "torch") write_torch(arguments);
  if (arguments.to == "safetensors") left_out = write_safe(arguments);
  if (left_out > 0)
    fmt::print("{} {} and were left out\n", left_out,
               arguments.family.empty() ? "values that are no tensors have no place in safetensors"
                                        : "tensors and values have no name in that family");
  out.write({{"type", "convert"}, {"to", arguments.to}, {"path", arguments.two}, {"left_out", left_out}});
  return 0;
}

int checkpoint_reshard(const CheckpointArguments& arguments) {
  const Mesh mesh = Mesh::parse(arguments.mesh);
  int64_t parts = 1;
  for (const auto& axis : mesh.axes()) {
    SHARD_REQUIRE(axis.name == "dp_shard" || axis.name == "dp_replicate", "checkpoint",
                  "--mesh takes dp_shard and dp_replicate, got {}; how tensors are cut along other axes is the model's matter",
                  axis.name);
    if (axis.name == "dp_shard") parts = axis.size;
  }
  JsonLines out(arguments.json);
  write_dcp(arguments, parts);
  out.write({{"type", "reshard"}, {"mesh", mesh.str()}, {"path", arguments.two}});
  return 0;
}

}  // namespace harness
