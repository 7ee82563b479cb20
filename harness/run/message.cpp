#include "harness/run/message.h"

#include <c10/util/Exception.h>

#include <new>

namespace harness {

std::string message_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error)) return "out of memory; use a smaller model, mesh or batch";
  if (const auto* torch_error = dynamic_cast<const c10::Error*>(&error)) return torch_error->what_without_backtrace();
  return error.what();
}

}  // namespace harness
