#include "harness/run/step_bytes.h"

#include <ATen/ATen.h>

#include <cstring>
#include <type_traits>

#include "shardproof/base/check.h"

namespace harness {
namespace {

using shardproof::Piece;

// Writes, or reads what was written: one description of a step serves both ways.
class Writer {
 public:
  std::string bytes;

  void raw(const void* data, size_t size) {
    if (size > 0) bytes.append(static_cast<const char*>(data), size);
  }
};

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  void raw(void* data, size_t size) {
    SHARD_CHECK(at_ + size <= bytes_.size(), "harness", "{} bytes of steps end at {}", bytes_.size(), at_ + size);
    if (size > 0) std::memcpy(data, bytes_.data() + at_, size);
    at_ += size;
  }

 private:
  const std::string& bytes_;
  size_t at_ = 0;
};

template <class Bytes, class... Plain>
void plain(Bytes& bytes, Plain&... values) {
  (bytes.raw(&values, sizeof values), ...);
}

template <class Bytes, class Items, class Walk>
void each(Bytes& bytes, Items& items, const Walk& walk) {
  size_t count = items.size();
  plain(bytes, count);
  items.resize(count);
  for (auto& item : items) walk(item);
}

// Text as well.
template <class Bytes, class Numbers>
void numbers(Bytes& bytes, Numbers& values) {
  size_t count = values.size();
  plain(bytes, count);
  values.resize(count);
  bytes.raw(values.data(), count * sizeof values[0]);
}

// Of a tensor that is read no memory is there yet.
template <class Bytes>
void tensor(Bytes& bytes, at::Tensor& value) {
  SHARD_CHECK((value.defined() || std::is_same_v<Bytes, Reader>), "harness", "a rank has a tensor of a step that nobody set");
  at::ScalarType dtype = value.defined() ? value.scalar_type() : at::kFloat;
  int64_t numel = value.defined() ? value.numel() : 0;
  plain(bytes, dtype, numel);
  value = value.defined() ? value.contiguous() : at::empty({numel}, dtype);
  bytes.raw(value.data_ptr(), value.nbytes());
}

template <class Bytes>
void walk(Bytes& bytes, std::vector<Piece>& pieces) {
  each(bytes, pieces, [&](Piece& piece) {
    numbers(bytes, piece.name);
    numbers(bytes, piece.shape);
    plain(bytes, piece.run);
    tensor(bytes, piece.data);
  });
}

template <class Bytes>
void walk(Bytes& bytes, RankStep& step) {
  for (auto* values : {&step.losses, &step.evaluated, &step.validation_losses}) numbers(bytes, *values);
  plain(bytes, step.gradient_norm, step.seconds, step.compute_seconds, step.loss_scale, step.parameter_norm);
  plain(bytes, step.zero_gradients, step.held_bytes, step.skipped, step.stopped);
  for (auto* pieces : {&step.gradients, &step.parameters, &step.compute_parameters}) walk(bytes, *pieces);
  each(bytes, step.state, [&](auto& state) {
    numbers(bytes, state.first);
    walk(bytes, state.second);
  });
  each(bytes, step.buffers, [&](auto& buffer) {
    numbers(bytes, buffer.first);
    tensor(bytes, buffer.second);
  });
  each(bytes, step.complaints, [&](PropertyComplaint& complaint) {
    numbers(bytes, complaint.property);
    numbers(bytes, complaint.what);
  });
}

}  // namespace

std::string to_bytes(const std::vector<RankStep>& steps) {
  std::vector<RankStep> copies = steps;  // which share their tensors' memory
  Writer to;
  each(to, copies, [&](RankStep& step) { walk(to, step); });
  return std::move(to.bytes);
}

std::vector<RankStep> steps_from(const std::string& bytes) {
  std::vector<RankStep> steps;
  Reader from(bytes);
  each(from, steps, [&](RankStep& step) { walk(from, step); });
  return steps;
}

}  // namespace harness
