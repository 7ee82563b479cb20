// Reads of a checkpoint's tensors, one after the other, that show how far they are.
#pragma once

#include <string>

#include "harness/commands/checkpoint_source.h"
#include "harness/commands/progress.h"
#include "shardproof/base/escape.h"

namespace harness {

class ShownReads {
 public:
  ShownReads(CheckpointSource& source, std::string verb) : source_(source), verb_(std::move(verb)), all_(source.bytes()) {}
  ~ShownReads() { progress_.clear(); }
  std::string read(const std::string& name, const shardproof::Box& box) { return show(name, source_.read(name, box)); }
  std::string read(const std::string& name) { return show(name, source_.read(name)); }

 private:
  std::string show(const std::string& name, std::string bytes) {
    done_ += bytes.size();
    progress_.show(all_ == 0 ? 1.0 : static_cast<double>(done_) / static_cast<double>(all_),
                   verb_ + " " + shardproof::escaped(name));
    return bytes;
  }
  CheckpointSource& source_;
  std::string verb_;
  Progress progress_;
  uint64_t all_, done_ = 0;
};

}  // namespace harness
