// Gradients of weights that are made later than the backward comes by: those products that nothing in the backward waits for
// fill the time in which the rank waits for a gather (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", who fill pipelines).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <unordered_map>

#include "sharding/bucket.h"

namespace shardproof {

class DelayedGradients {
 public:
  using Make = std::function<void(const at::Tensor& dy, const at::Tensor& x)>;

  DelayedGradients(int64_t bytes_max, std::shared_ptr<MemoryLedger> memory)
      : bytes_max_(bytes_max), memory_(std::move(memory)) {}

  // Keeps what the gradient of a bucket's member is made of, and returns true. Returns false where it must be made at once:
  // where this would be too many bytes, and where the library frees the memory itself, as that of gathered parameters.
  bool keep(const Bucket& bucket, int64_t member, const at::Tensor& dy, const at::Tensor& x, Make make);
  // Makes that of one member, if it is kept.
  void make(const Bucket& bucket, int64_t member);
  // Makes all of them, in the order in which they were kept.
  void make_all();
  // Forgets them.
  void drop();

 private:
  // A tensor as it was, without its graph.
  struct Kept {
    explicit Kept(const at::Tensor& tensor) : value(tensor.detach()), version(tensor._version()) {}
    at::Tensor value;
    int64_t version;
  };
  struct Product {
    const Bucket* bucket;
    int64_t member;
    Kept dy, x;
    Make make;
    c10::Stream stream;  // which they were made on
  };
  // Products may share one, as those of three projections of one input.
  struct Held {
    int64_t bytes = 0, uses = 0;
    std::shared_ptr<void> counted = nullptr;
  };

  void make(std::list<Product>::iterator product);
  int64_t bytes_to_hold(const at::Tensor& tensor) const;  // 0 where it is held already
  void hold(const at::Tensor& tensor);
  void release(const Product& product);

  const int64_t bytes_max_;
  const std::shared_ptr<MemoryLedger> memory_;
  std::list<Product> products_;
  std::unordered_map<const c10::StorageImpl*, Held> storages_;
  int64_t bytes_ = 0;  // of them
};

}  // namespace shardproof
