#include "harness/commands/checkpoint_command.h"

#include <fmt/ranges.h>

#include <cstring>
#include <set>

#include "harness/commands/checkpoint_source.h"
#include "harness/commands/json_lines.h"
#include "harness/commands/shown_reads.h"
#include "harness/plan/timeline.h"
#include "harness/train/train_progress.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/checksums.h"

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

std::string text_of_size(uint64_t bytes) { return size_text(static_cast<int64_t>(bytes)); }

template <class Count>
std::string counted(Count count, const char* one, const char* many) {
  return fmt::format("{} {}", grouped(static_cast<int64_t>(count)), count == 1 ? one : many);
}

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
std::string tensor_difference(CheckpointSource& one, ShownReads& two, const std::string& name, const SafeTensorSpec& a,
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

}  // namespace

int checkpoint_inspect(const CheckpointArguments& arguments) {
  CheckpointSource source(arguments.one);
  JsonLines out(arguments.json);
  for (const auto& [name, tensor] : source.checkpoint().tensors) {
    const uint64_t bytes = shardproof::checkpoint::bytes_of(tensor.dtype, tensor.sizes);
    fmt::print("{:<48} {:<9} [{}]  {} in {}\n", escaped(name), dtype_info(tensor.dtype).name, fmt::join(tensor.sizes, ", "),
               text_of_size(bytes), counted(tensor.chunks.size(), "box", "boxes"));
    json boxes = json::array();
    for (const Chunk& chunk : tensor.chunks) {
      if (arguments.boxes)
        fmt::print("  {:<28} {} from byte {} on, {}\n", box_text(chunk.box()), escaped(chunk.extent.file),
                   chunk.extent.offset, text_of_size(chunk.extent.length));
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
  fmt::print("{}, {}; {}; {}\n", counted(source.tensors().size(), "tensor", "tensors"), text_of_size(source.bytes()),
             counted(source.checkpoint().values.size(), "value", "values"),
             source.checkpoint().has_checksums ? "with checksums" : "without checksums");
  return 0;
}

int checkpoint_verify(const CheckpointArguments& arguments) {
  require_no_run(arguments.one);
  Progress progress;
  const Verified verified =
      verify_checkpoint(system_files(), arguments.one, [&](double fraction) { progress.show(fraction, "verifying"); });
  const double seconds = progress.seconds();
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
  fmt::print("{}, {} in {}, {}: {}\n", counted(verified.entries, "entry", "entries"), text_of_size(verified.bytes),
             seconds_text(seconds),
             verified.sidecar ? "against the sidecar's checksums" : "against the CRCs of the entries (no sidecar)",
             counted(verified.problems.size(), "problem", "problems"));
  out.write({{"type", "verified"},
             {"entries", verified.entries},
             {"bytes", verified.bytes},
             {"seconds", seconds},
             {"sidecar", verified.sidecar},
             {"problems", verified.problems.size()}});
  return verified.problems.empty() ? 0 : 1;
}

int checkpoint_diff(const CheckpointArguments& arguments) {
  CheckpointSource one(arguments.one), two(arguments.two);
  JsonLines out(arguments.json);
  ShownReads shown(two, "comparing");
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

}  // namespace harness
