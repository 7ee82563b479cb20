#include "sharding/model_record.h"

#include <cstring>

#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"

namespace shardproof {
namespace {

// Writes, or reads what was written: one description of each struct serves both ways.
class Writer {
 public:
  std::string bytes;
  void operator()(int64_t& value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void operator()(std::string& text) {
    auto size = static_cast<int64_t>(text.size());
    (*this)(size);
    bytes += text;
  }
};

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}
  void operator()(int64_t& value) { std::memcpy(&value, take(sizeof value), sizeof value); }
  void operator()(std::string& text) {
    int64_t size = 0;
    (*this)(size);
    text.assign(take(static_cast<size_t>(size)), static_cast<size_t>(size));
  }

 private:
  const char* take(size_t size) {
    SHARD_CHECK(size <= bytes_.size() - next_, "transfer", "a record of {} bytes ends at {}", bytes_.size(), next_);
    next_ += size;
    return bytes_.data() + (next_ - size);
  }
  const std::string& bytes_;
  size_t next_ = 0;
};

template <class Visit, class Item>
void each(Visit& visit, std::vector<Item>& items);

template <class Visit, class Number>
void number(Visit& visit, Number& value) {
  auto whole = static_cast<int64_t>(value);
  visit(whole);
  value = static_cast<Number>(whole);
}
template <class Visit>
void walk(Visit& visit, int64_t& value) {
  visit(value);
}
template <class Visit>
void walk(Visit& visit, std::string& text) {
  visit(text);
}
template <class Visit>
void walk(Visit& visit, std::pair<std::string, std::string>& names) {
  visit(names.first);
  visit(names.second);
}
template <class Visit>
void walk(Visit& visit, CutSegment& segment) {
  visit(segment.length);
  visit(segment.granule);
  number(visit, segment.copied);
}
template <class Visit>
void walk(Visit& visit, Split& split) {
  visit(split.axis);
  each(visit, split.bounds);
  each(visit, split.segments);
  number(visit, split.balanced);
}
template <class Visit>
void walk(Visit& visit, std::vector<Split>& splits) {
  each(visit, splits);
}
template <class Visit>
void walk(Visit& visit, Axis& axis) {
  visit(axis.name);
  visit(axis.size);
}
template <class Visit>
void walk(Visit& visit, Placement& at) {
  std::vector<Axis> axes = at.mesh.axes();
  each(visit, axes);
  at.mesh = Mesh(axes);
  each(visit, at.layout.dims);
  each(visit, at.layout.flat);
  each(visit, at.layout.partial);
  visit(at.layout.bucket.offset);
  visit(at.layout.bucket.length);
}
template <class Visit>
void walk(Visit& visit, TensorRecord& tensor) {
  visit(tensor.name);
  each(visit, tensor.shape);
  number(visit, tensor.dtype);
  walk(visit, tensor.at);
}
template <class Visit>
void walk(Visit& visit, ModelRecord& record) {
  each(visit, record.parameters);
  each(visit, record.plain);
  each(visit, record.aliases);
  each(visit, record.extra);
}

template <class Visit, class Item>
void each(Visit& visit, std::vector<Item>& items) {
  auto count = static_cast<int64_t>(items.size());
  visit(count);
  items.resize(static_cast<size_t>(count));
  for (Item& item : items) walk(visit, item);
}

}  // namespace

ModelRecord record_of(const Sharded::Impl& sharded) {
  ModelRecord record{{}, {}, sharded.aliases, {}};
  for (const Bucket* bucket : sharded.schedule.buckets())
    for (const OwnPart& part : bucket->parts())
      record.parameters.push_back({part.parameter->name, part.parameter->whole, bucket->rules().main, part.at});
  for (const auto& [name, tensor] : sharded.plain_tensors().state)
    record.plain.push_back({name, tensor.sizes().vec(), tensor.scalar_type()});
  for (const auto& extra : extra_state_of(*sharded.module)) record.extra.emplace_back(extra);
  return record;
}

std::string serialized(const ModelRecord& record) {
  ModelRecord copy = record;
  Writer writer;
  walk(writer, copy);
  return std::move(writer.bytes);
}

ModelRecord model_record(const std::string& bytes) {
  ModelRecord record;
  Reader reader(bytes);
  walk(reader, record);
  return record;
}

}  // namespace shardproof
