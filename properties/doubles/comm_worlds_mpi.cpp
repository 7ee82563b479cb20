// Worlds of processes: every process of an MPI job runs the same tests, in the same order, and each test's worlds are its first
// processes. A failure on any rank fails the program on all, and is printed with its rank.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <random>

#include "properties/doubles/comm_worlds.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/mpi/mpi.h"

namespace worlds {
namespace {

shardproof::MpiWorld* job = nullptr;

at::Tensor as_tensor(std::string& text) {
  return at::from_blob(text.data(), {static_cast<int64_t>(text.size())}, at::TensorOptions(at::kByte));
}

}  // namespace

int64_t ranks_max() {
  return job->size();
}

bool one_host() {
  constexpr size_t kNameMax = 256;
  std::string mine(kNameMax, '\0'), all(kNameMax * static_cast<size_t>(job->size()), '\0');
  ::gethostname(mine.data(), kNameMax - 1);
  job->run([&](std::shared_ptr<Comm> comm) { comm->all_gather(as_tensor(all), as_tensor(mine)).wait(); });
  for (size_t at = 0; at < all.size(); at += kNameMax)
    if (all.compare(at, kNameMax, mine) != 0) return false;
  return true;
}

bool finishes_sums(const shardproof::ThreadsOptions&) {
  return true;
}

// Schedule and completion are the processes' own affair.
std::vector<shardproof::ThreadsOptions> all_options() {
  return {{}};
}

void run(int64_t world, const Body& body, const shardproof::ThreadsOptions&) {
  job->run(body, world);
}

std::string agree(const std::string& found) {
  constexpr size_t kTextMax = 2000;
  std::string mine = found.substr(0, kTextMax), all(kTextMax * static_cast<size_t>(job->size()), '\0');
  mine.resize(kTextMax);
  job->run([&](std::shared_ptr<Comm> comm) { comm->all_gather(as_tensor(all), as_tensor(mine)).wait(); });
  for (size_t rank = 0; rank < static_cast<size_t>(job->size()); ++rank)
    if (const char* text = all.data() + rank * kTextMax; *text) return {text, ::strnlen(text, kTextMax)};
  return "";
}

std::string error_of(int64_t world, const Body& body, const shardproof::ThreadsOptions&) {
  try {
    job->run(body, world);
  } catch (const shardproof::Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "the world ended well";
  return "";
}

namespace {

// Of the ranks that do not print everything.
class FailurePrinter final : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed())
      fmt::print("rank {}: {}:{}: {}\n", job->rank(), result.file_name() ? result.file_name() : "?", result.line_number(),
                 result.message());
  }
};

// The same draws on every rank.
void share_seed() {
  const char* given = std::getenv("RC_PARAMS");
  std::string text = given ? given : "";
  if (text.find("seed=") == std::string::npos) text += fmt::format(" seed={}", std::random_device()());
  text.resize(200);
  job->run([&](std::shared_ptr<Comm> comm) { comm->broadcast(as_tensor(text), 0).wait(); });
  ::setenv("RC_PARAMS", text.c_str(), 1);
}

int run_tests() {
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  if (job->rank() != 0) delete listeners.Release(listeners.default_result_printer());
  if (job->rank() != 0) listeners.Append(new FailurePrinter);
  share_seed();
  const int failed = RUN_ALL_TESTS();
  return agree(failed ? "failed" : "").empty() ? 0 : 1;
}

}  // namespace
}  // namespace worlds

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  shardproof::MpiWorld world({.timeout_seconds = 120});
  worlds::job = &world;
  return worlds::run_tests();
}
