#include "harness/run/step_bytes.h"

#include <ATen/ATen.h>

#include <cstring>

#include "shardproof/base/check.h"

namespace harness {
namespace {

using shardproof::Piece;

class Writer {
 public:
  std::string bytes;

  template <typename T>
  void plain(const T& value) {
    raw(&value, sizeof value);
  }
  void text(const std::string& value) {
    plain(value.size());
    raw(value.data(), value.size());
  }
  template <typename T>
  void numbers(const std::vector<T>& values) {
    plain(values.size());
    raw(values.data(), values.size() * sizeof(T));
  }
  void tensor(const at::Tensor& value) {
    plain(value.scalar_type());
    plain(value.numel());
    raw(value.const_data_ptr(), value.nbytes());
  }

 private:
  void raw(const void* data, size_t size) {
    if (size > 0) bytes.append(static_cast<const char*>(data), size);
  }
};

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  template <typename T>
  T plain() {
    T value;
    raw(&value, sizeof value);
    return value;
  }
  std::string text() {
    std::string value(plain<size_t>(), '\0');
    raw(value.data(), value.size());
    return value;
  }
  template <typename T>
  std::vector<T> numbers() {
    std::vector<T> values(plain<size_t>());
    raw(values.data(), values.size() * sizeof(T));
    return values;
  }
  at::Tensor tensor() {
    const auto dtype = plain<at::ScalarType>();
    at::Tensor value = at::empty({plain<int64_t>()}, dtype);
    raw(value.mutable_data_ptr(), value.nbytes());
    return value;
  }

 private:
  void raw(void* data, size_t size) {
    SHARD_CHECK(at_ + size <= bytes_.size(), "harness", "{} bytes of steps end at {}", bytes_.size(), at_ + size);
    if (size > 0) std::memcpy(data, bytes_.data() + at_, size);
    at_ += size;
  }

  const std::string& bytes_;
  size_t at_ = 0;
};

void put(Writer& to, const std::vector<Piece>& pieces) {
  to.plain(pieces.size());
  for (const Piece& piece : pieces) {
    to.text(piece.name);
    to.numbers(piece.shape);
    to.plain(piece.run);
    to.tensor(piece.data.contiguous());
  }
}

std::vector<Piece> take_pieces(Reader& from) {
  std::vector<Piece> pieces(from.plain<size_t>());
  for (Piece& piece : pieces) {
    piece.name = from.text();
    piece.shape = from.numbers<int64_t>();
    piece.run = from.plain<shardproof::Interval>();
    piece.data = from.tensor();
  }
  return pieces;
}

}  // namespace

std::string to_bytes(const std::vector<RankStep>& steps) {
  Writer to;
  to.plain(steps.size());
  for (const RankStep& step : steps) {
    to.numbers(step.losses);
    to.numbers(step.evaluated);
    for (const double value : {step.gradient_norm, step.seconds, step.compute_seconds, step.loss_scale, step.parameter_norm})
      to.plain(value);
    for (const int64_t value : {step.zero_gradients, step.held_bytes}) to.plain(value);
    for (const bool value : {step.skipped, step.stopped}) to.plain(value);
    to.numbers(step.validation_losses);
    for (const auto* pieces : {&step.gradients, &step.parameters, &step.compute_parameters}) put(to, *pieces);
    to.plain(step.state.size());
    for (const auto& [state_name, pieces] : step.state) {
      to.text(state_name);
      put(to, pieces);
    }
    to.plain(step.buffers.size());
    for (const auto& [name, buffer] : step.buffers) {
      to.text(name);
      to.tensor(buffer);
    }
    to.plain(step.complaints.size());
    for (const PropertyComplaint& complaint : step.complaints) {
      to.text(complaint.property);
      to.text(complaint.what);
    }
  }
  return std::move(to.bytes);
}

std::vector<RankStep> steps_from(const std::string& bytes) {
  Reader from(bytes);
  std::vector<RankStep> steps(from.plain<size_t>());
  for (RankStep& step : steps) {
    step.losses = from.numbers<double>();
    step.evaluated = from.numbers<double>();
    for (double* value : {&step.gradient_norm, &step.seconds, &step.compute_seconds, &step.loss_scale, &step.parameter_norm})
      *value = from.plain<double>();
    for (int64_t* value : {&step.zero_gradients, &step.held_bytes}) *value = from.plain<int64_t>();
    for (bool* value : {&step.skipped, &step.stopped}) *value = from.plain<bool>();
    step.validation_losses = from.numbers<double>();
    for (auto* pieces : {&step.gradients, &step.parameters, &step.compute_parameters}) *pieces = take_pieces(from);
    step.state.resize(from.plain<size_t>());
    for (auto& [state_name, pieces] : step.state) {
      state_name = from.text();
      pieces = take_pieces(from);
    }
    step.buffers.resize(from.plain<size_t>());
    for (auto& [name, buffer] : step.buffers) {
      name = from.text();
      buffer = from.tensor();
    }
    step.complaints.resize(from.plain<size_t>());
    for (PropertyComplaint& complaint : step.complaints) {
      complaint.property = from.text();
      complaint.what = from.text();
    }
  }
  return steps;
}

}  // namespace harness
