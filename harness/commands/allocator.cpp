#include "harness/commands/allocator.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>
#include <vector>

namespace harness {
namespace {

constexpr const char* kLibrary = "libjemalloc.so.2";
// Tells the second process that LD_PRELOAD was set by the first.
constexpr const char* kMark = "SHARDPROOF_STARTED_AGAIN";

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// It may exist and not be loaded, because a library that comes late finds no room for variables of threads.
bool is_installed() {
  if (void* library = dlopen(kLibrary, RTLD_LAZY | RTLD_LOCAL)) return dlclose(library) == 0;
  const char* why = dlerror();
  return why && std::string_view(why).find("cannot open shared object file") == std::string_view::npos;
}

// The strings of this process' command line, as the system has them.
std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

std::string allocator_name() {
  return dlsym(RTLD_DEFAULT, "mallctl") ? "jemalloc" : "libc";
}

void start_again_on_jemalloc() {
  if (std::getenv(kMark)) {
    unsetenv(kMark);
    unsetenv("LD_PRELOAD");
    return;
  }
  if (kSanitized || std::getenv("LD_PRELOAD") || allocator_name() == "jemalloc" || !is_installed()) return;
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  std::string text = command_line();
  if (error || text.empty()) return;
  std::vector<char*> arguments;
  for (size_t i = 0; i < text.size(); i = text.find('\0', i) + 1) arguments.push_back(text.data() + i);
  arguments.push_back(nullptr);
  setenv("LD_PRELOAD", kLibrary, 1);
  // Each thread of LibTorch keeps oneDNN's primitives of the last 1,024 shapes. Each case has other shapes, so a campaign would
  // hold gigabytes that nobody asks for. The variable is ideep's (include/ideep/lru_cache.hpp), read when LibTorch is loaded.
  setenv("LRU_CACHE_CAPACITY", "16", /*overwrite=*/0);
  setenv(kMark, "1", 1);
  execv(program.c_str(), arguments.data());
  unsetenv("LD_PRELOAD");  // it could not be started, and this process does the work
  unsetenv(kMark);
}

}  // namespace harness
