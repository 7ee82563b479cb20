#include "shardproof/checkpoint/format/torch_file.h"

#include <memory>

#include "checkpoint/format/torch_pickles.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/tensor_entry.h"

namespace shardproof::checkpoint {
namespace {

// The nested dict or list that paths describe, growing.
struct Branch {
  std::map<PathElement, std::unique_ptr<Branch>> children;
  bool is_leaf = false;
  Value leaf;

  Value value(const std::string& where) const {
    if (is_leaf) {
      SHARD_REQUIRE(children.empty(), "checkpoint", "{} is a value and holds others", where);
      return leaf;
    }
    Value::Items items;
    Value::Pairs pairs;
    for (const auto& [element, child] : children) {
      if (const auto* index = std::get_if<int64_t>(&element)) {
        // Behind a gap a list has no place for it, so the indices become keys.
        const Value inner = child->value(fmt::format("{}.{}", where, *index));
        if (*index == static_cast<int64_t>(items.size())) items.push_back(inner);
        pairs.emplace_back(Value::integer(*index), inner);
      } else {
        const std::string& name = std::get<std::string>(element);
        pairs.emplace_back(Value::string(name), child->value(where.empty() ? name : where + "." + name));
      }
    }
    return !items.empty() && items.size() == pairs.size() ? Value::list(std::move(items)) : Value::dict(std::move(pairs));
  }
};

void place(Branch& root, const std::string& name, const std::map<std::string, Path>& paths, Value value) {
  const auto found = paths.find(name);
  Branch* at = &root;
  for (const PathElement& element : found == paths.end() ? Path{name} : found->second) {
    std::unique_ptr<Branch>& child = at->children[element];
    if (!child) child = std::make_unique<Branch>();
    at = child.get();
  }
  SHARD_REQUIRE(!at->is_leaf && at != &root, "checkpoint", "two values are called {}", name);
  at->is_leaf = true;
  at->leaf = std::move(value);
}

}  // namespace

void write_torch_file(FileSystem& files, const std::string& path, const std::map<std::string, SafeTensorSpec>& tensors,
                      const std::map<std::string, Value>& values, const std::map<std::string, Path>& paths,
                      const TensorBytes& data) {
  Branch root;
  size_t key = 0;
  for (const auto& [name, spec] : tensors)
    place(root, name, paths, torch_tensor(spec.dtype, spec.sizes, std::to_string(key++)));
  for (const auto& [name, value] : values) place(root, name, paths, value);
  OutputFile file(files, path);
  ZipWriter zip([&](const void* bytes, size_t count) { file.write(bytes, count); });
  add_torch_records(zip, write_pickle(root.value("")));
  key = 0;
  for (const auto& [name, spec] : tensors) {
    const std::string bytes = data(name);
    SHARD_REQUIRE(bytes.size() == bytes_of(spec.dtype, spec.sizes), "checkpoint", "{} has {} bytes, expected {}", name,
                  bytes.size(), bytes_of(spec.dtype, spec.sizes));
    zip.add(fmt::format("archive/data/{}", key++), bytes);
  }
  add_torch_version(zip);
  zip.finish();
  file.finish();
}

}  // namespace shardproof::checkpoint
