#include "shardproof/comm/agree.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "shardproof/base/check.h"

namespace shardproof {

std::vector<std::string> gather_texts(Comm& comm, const std::string& mine) {
  at::Tensor length = at::full({1}, static_cast<int64_t>(mine.size()), at::kLong);
  at::Tensor lengths = at::zeros({comm.size()}, at::kLong);
  comm.all_gather(lengths, length).wait();
  const int64_t longest = lengths.max().item<int64_t>();
  std::vector<std::string> texts(static_cast<size_t>(comm.size()));
  if (longest == 0) return texts;
  at::Tensor text = at::zeros({longest}, at::kByte), all = at::zeros({comm.size() * longest}, at::kByte);
  std::memcpy(text.mutable_data_ptr(), mine.data(), mine.size());
  comm.all_gather(all, text).wait();
  for (int64_t rank = 0; rank < comm.size(); ++rank)
    texts[static_cast<size_t>(rank)].assign(static_cast<const char*>(all.const_data_ptr()) + rank * longest,
                                            static_cast<size_t>(lengths.const_data_ptr<int64_t>()[rank]));
  return texts;
}

std::string broadcast_text(Comm& comm, std::string text, int64_t root) {
  at::Tensor length = at::full({1}, static_cast<int64_t>(text.size()), at::kLong);
  comm.broadcast(length, root).wait();
  if (length.item<int64_t>() == 0) return "";
  const at::Tensor bytes = at::empty({length.item<int64_t>()}, at::kByte);
  if (comm.rank() == root) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  comm.broadcast(bytes, root).wait();
  if (comm.rank() != root) text.assign(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  return text;
}

void agree(Comm& comm, const std::string& error) {
  at::Tensor failed = at::full({1}, static_cast<int64_t>(!error.empty()), at::kLong);
  comm.all_reduce(failed, Reduce::max).wait();
  if (failed.item<int64_t>() == 0) return;
  throw_first(gather_texts(comm, error));
}

void throw_first(const std::vector<std::string>& errors) {
  const auto first = std::find_if(errors.begin(), errors.end(), [](const std::string& e) { return !e.empty(); });
  if (first == errors.end()) return;
  throw Error(errors.size() == 1 ? *first : fmt::format("{} (rank {})", *first, first - errors.begin()));
}

std::string from_rank_0(Comm& comm, const std::function<std::string()>& body) {
  constexpr size_t kTextMax = 8191;
  at::Tensor told = at::zeros({static_cast<int64_t>(kTextMax + 1)}, at::kByte);
  auto* const bytes = static_cast<char*>(told.mutable_data_ptr());  // the first one says whether the others are an error
  std::string text;
  if (comm.rank() == 0) {
    const std::string error = error_of([&] {
      text = body();
      SHARD_REQUIRE(text.size() <= kTextMax, "comm", "a text of {} bytes is told; the most is {}", text.size(), kTextMax);
    });
    if (!error.empty()) text = error.substr(0, kTextMax);
    bytes[0] = error.empty() ? 0 : 1;
    std::memcpy(bytes + 1, text.data(), text.size());
  }
  comm.broadcast(told, 0).wait();
  text.assign(bytes + 1, strnlen(bytes + 1, kTextMax));
  if (bytes[0] == 0) return text;
  throw Error(comm.size() == 1 ? text : text + " (rank 0)");
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const BrokenInvariant&) {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what()[0] == '\0' ? "[comm] an error without a message" : error.what();
  }
  return "";
}

}  // namespace shardproof
