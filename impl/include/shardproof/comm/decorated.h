// A base class of communicators that wrap another one and do something of their own in each call, as `traced` and `checked` do.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof {

// Passes every function of Comm on to `inner`, whose rules and errors are its own. A decorator overrides `decorate`, usually
// `start`, and what it changes. If it takes sums itself, its `premultiplies` and `finishes_sums` are false. A decorated
// communicator cannot be captured (capturable.h), and hides a timeline that is inside (timeline.h).
class DecoratedComm : public Comm {
 public:
  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  // The groups that `inner` makes, decorated. Null where the rank is in none.
  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override;
  std::shared_ptr<Comm> split_ranks(const std::vector<int64_t>& ranks, std::string name) override;
  at::Tensor shared_memory(int64_t bytes) override { return inner_->shared_memory(bytes); }
  c10::DataPtr allocate(Op op, int64_t bytes, c10::Device device) override { return inner_->allocate(op, bytes, device); }
  bool premultiplies() const override { return inner_->premultiplies(); }
  bool finishes_sums() const override { return inner_->finishes_sums(); }

 protected:
  friend bool compares_purposes(const Comm& comm);
  explicit DecoratedComm(std::shared_ptr<Comm> inner);  // throws Error where it is null
  Comm& inner() const { return *inner_; }
  // A decorator of the same kind for a group that was split from `inner`. Not null.
  virtual std::shared_ptr<Comm> decorate(std::shared_ptr<Comm> group) = 0;

 private:
  Work start(Call call) override { return inner_->issue(std::move(call)); }

  std::shared_ptr<Comm> inner_;
};

}  // namespace shardproof
