// Point to point: a send is announced, and moves when the receive was called.
#pragma once

#include "comm/mpi/mpi_operation.h"

namespace shardproof::mpi {

class Send final : public Operation {
 public:
  Send(std::shared_ptr<Group> group, Call call);
  bool advance() override;
  std::vector<int64_t> missing() const override;

 private:
  bool accepted_ = false;
  bool travels_ = false;  // with its header
  Flow flow_;
};

class Recv final : public Operation {
 public:
  Recv(std::shared_ptr<Group> group, Call call);
  bool advance() override;
  std::vector<int64_t> missing() const override;

 private:
  void match_header(const Message& sent);

  bool matched_ = false;
  Flow flow_;
  std::vector<std::byte> discarded_;  // what a mismatched send carries
};

}  // namespace shardproof::mpi
