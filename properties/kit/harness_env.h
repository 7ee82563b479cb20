// Bits depend on the number of LibTorch's threads; everything in the harness runs with one.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

namespace harness_env {

class OneThread : public testing::Environment {
 public:
  void SetUp() override { at::set_num_threads(1); }
};
inline testing::Environment* const one_thread = testing::AddGlobalTestEnvironment(new OneThread);

// A folder of its own for the running test, empty and gone afterwards.
class Folder {
 public:
  Folder() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    path_ = std::filesystem::path(testing::TempDir()) /
            (std::string("shardproof_") + test->test_suite_name() + "_" + test->name());
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string path() const { return path_.string(); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace harness_env
