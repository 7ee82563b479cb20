#include "harness/run/comm_texts.h"

#include <ATen/ATen.h>

namespace harness {
namespace {

at::Tensor as_tensor(std::string& text) {
  return at::from_blob(text.data(), {static_cast<int64_t>(text.size())}, at::TensorOptions(at::kByte));
}

}  // namespace

std::vector<std::string> collect_bytes(shardproof::Comm& comm, const std::string& mine) {
  at::Tensor length = at::full({1}, static_cast<int64_t>(mine.size()), at::kLong),
             lengths = at::empty({comm.size()}, at::kLong);
  comm.all_gather(lengths, length).wait();
  std::string own = mine;
  if (comm.rank() != 0) {
    comm.send(as_tensor(own), 0).wait();
    return {};
  }
  std::vector<std::string> all(static_cast<size_t>(comm.size()));
  all[0] = std::move(own);
  for (int64_t rank = 1; rank < comm.size(); ++rank) {
    std::string& bytes = all[static_cast<size_t>(rank)];
    bytes.resize(static_cast<size_t>(lengths.const_data_ptr<int64_t>()[rank]));
    comm.recv(as_tensor(bytes), rank).wait();
  }
  return all;
}

}  // namespace harness
