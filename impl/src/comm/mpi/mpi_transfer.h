// Point to point: a send is announced, and moves when the receive was called.
#pragma once

#include "comm/mpi/mpi_operation.h"
#include "comm/mpi/mpi_read.h"

namespace shardproof::mpi {

class Send final : public Operation {
 public:
  Send(std::shared_ptr<Group> group, Call call);
  bool advance() override;
  std::vector<int64_t> missing() const override;

 private:
  bool accepted_ = false;
  bool is_sent_ = false;  // by MPI, once the receive was called
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
  bool owes_accept_ = false;  // once it has read what lies in the sender's memory
  Flow flow_;
  Read read_;
  std::vector<std::byte> discarded_;  // what a mismatched send carries
};

}  // namespace shardproof::mpi
