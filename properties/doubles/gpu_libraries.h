// A double of libnccl.so.2 and of the CUDA runtime, which is a library with NCCL's file name: the dynamic loader gives it to
// the library in the place of both. It notes each call with its arguments, and answers as the test says.
#pragma once

#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <type_traits>
#include <vector>

namespace gpu_libraries {

struct EntryCall {
  std::string function;
  std::vector<int64_t> arguments;  // in the order of the function's declaration; of a pointer it is the address
  std::string content;             // the bytes of what a function reads through a pointer, or takes as a struct

  bool operator==(const EntryCall&) const = default;
};

inline std::ostream& operator<<(std::ostream& out, const EntryCall& call) {
  out << call.function << "(";
  for (const int64_t argument : call.arguments) out << argument << " ";
  return out << call.content << ")";
}

template <typename T>
int64_t as_number(T value) {
  if constexpr (std::is_pointer_v<T>)
    return reinterpret_cast<int64_t>(value);
  else if constexpr (std::is_same_v<T, std::nullptr_t>)
    return 0;
  else
    return static_cast<int64_t>(value);
}

// A call with these arguments.
template <typename... Arguments>
EntryCall entry_call(const std::string& function, Arguments... arguments) {
  return {function, {as_number(arguments)...}, {}};
}

struct Answers {
  std::map<std::string, int> results;  // of functions, as a number of ncclResult_t or cudaError_t; of others it is success
  std::vector<int> async_errors;       // what ncclCommGetAsyncError reports, one call after the other; then success
  std::string last_error;
  int version = 22809;
  int devices = 1, driver = 13000, compute_capability = 9;
};

// What was called since `forget`, and what calls are answered with.
std::vector<EntryCall>& calls();
Answers& answers();
void forget();

}  // namespace gpu_libraries
